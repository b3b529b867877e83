"""Requests to a process group's key-value store: short ones with a timeout, and waits that block in the store.

If a connection dies silently (a pulled cable, a frozen host), the store's client waits forever and holds a lock. So a
separate thread makes the requests, and they have a timeout.

A wait blocks its connection until the store responds, and torch logs every wait that times out. So each wait has its
own connection and no torch timeout. The waiting thread decides how long to wait; to end a wait early, its key is set.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, final

from ..torch_private.distributed import KEYS_PER_REQUEST, get_keys, second_connection, set_keys

if TYPE_CHECKING:
    from ..torch_private.distributed import Store

Response = TypeVar("Response")

#: The longest timeout of a torch wait: its milliseconds have to fit into 32 bits.
_WITHOUT_LIMIT: Final = timedelta(days=20)
#: How many ranks connect to the store per second, in rank order: its host's queue holds as many.
_CONNECTIONS_PER_SECOND: Final = 4096
_GIVE_UP_SECONDS: Final = 2.0
#: How often to check, while connecting to a store, whether it still responds.
_CONNECTION_CHECK_SECONDS: Final = 1.0
_NO_KEY: Final = "nothing"
_NO_VALUE: Final = "\0"  # no key has it
_SHORTEST_SLEEP_SECONDS: Final = 5e-5
_LONGEST_SLEEP_SECONDS: Final = 0.02


class StoreTimeout(RuntimeError):
    """The store didn't respond in time; later requests fail too."""


@final
class PendingRequest(Generic[Response]):
    """A request for a `RequestThread`."""

    def __init__(self, call: Callable[[], Response]) -> None:
        self._call = call
        self._done = threading.Event()
        self._responses: list[Response] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        """Make the request, in the calling thread."""
        try:
            self._responses.append(self._call())
        except BaseException as error:  # raised again by `response`
            self._error = error
        self._done.set()

    def is_done(self, seconds: float) -> bool:
        """Wait up to `seconds` for the request, and return whether it is done."""
        return self._done.wait(seconds)

    def response(self) -> Response:
        """Return what the request returned, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._responses[0]


@final
class RequestThread:
    """A thread that makes requests to a store in order, each with a timeout; it starts with the first request.

    Args:
        lock: held during a request; threads that share a connection share it.
    """

    def __init__(self, name: str, lock: threading.Lock | None = None) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kept_alive: list[object] = []
        self._lock = lock or threading.Lock()
        self.has_timed_out: bool = False  # a request got no response: later ones fail at once

    def start(self, call: Callable[[], Response]) -> PendingRequest[Response]:
        """Start `call()` in the thread and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        pending = PendingRequest(call)
        self._queue.put(pending.make)
        return pending

    def run(self, call: Callable[[], Response], seconds: float) -> Response:
        """Run `call()` in the thread and return its result, or raise its error.

        Raises:
            StoreTimeout: it did neither within `seconds`, or an earlier call didn't.
        """
        if self.has_timed_out:
            raise StoreTimeout("no answer")
        pending = self.start(call)
        if not pending.is_done(seconds):
            self.has_timed_out = True
            raise StoreTimeout(f"no answer within {seconds:.0f} s")
        return pending.response()

    def run_here(self, call: Callable[[], object], seconds: float) -> None:
        """Run `call()`, which gets no response, in the calling thread as soon as no other request runs.

        Raises:
            StoreTimeout: another request runs for longer than `seconds`.
        """
        if self.has_timed_out or not self._lock.acquire(timeout=seconds):
            self.has_timed_out = True
            raise StoreTimeout("no answer")
        try:
            call()
        finally:
            self._lock.release()

    def keep_alive(self, *objects: object) -> None:
        """Keep `objects` alive until the process ends, if a request has timed out.

        Freeing the C++ objects of the pending call would wait for the response too.
        """
        if self.has_timed_out:
            self._kept_alive += objects  # the thread, which never ends, refers to this object until the process ends

    def stop(self) -> None:
        """Tell the thread to end, unless a request has timed out in it; don't wait for its end."""
        if self._thread is not None and not self.has_timed_out:
            self._queue.put(None)
        self._thread = None

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            with self._lock:
                request()
            del request  # it refers to a connection, which is closed with the last reference


# -- waits -------------------------------------------------------------------------------------------------


@final
class Wait(Generic[Response]):
    """A request that responds as soon as its keys are set, without a time limit."""

    def __init__(
        self, pending: PendingRequest[Response], ready: Callable[[], bool] | None, finish: Callable[[bool], None]
    ) -> None:
        self._pending = pending
        self._ready = ready  # if the wait can't block in the store, it begins when this is true
        self._finish = finish

    def is_over(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether the wait has ended."""
        if self._ready is not None and not _poll(self._ready, seconds):
            return False
        self._ready = None
        return self._pending.is_done(seconds)

    def response(self) -> Response:
        """Return the values of the keys.

        Raises:
            RuntimeError: the process that serves the store has ended.
        """
        return self._pending.response()

    def __enter__(self) -> Wait[Response]:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish(self._ready is None and self._pending.is_done(0.0))


def _poll(ready: Callable[[], bool], seconds: float) -> bool:
    until, sleep_seconds = time.monotonic() + seconds, _SHORTEST_SLEEP_SECONDS
    while not ready():
        if time.monotonic() >= until:
            return False
        time.sleep(sleep_seconds)
        sleep_seconds = min(_LONGEST_SLEEP_SECONDS, sleep_seconds * 1.5)
    return True


@final
class WaitingConnections:
    """Connections to a store for waits: one per wait, reused after the wait has ended.

    Args:
        store: the store to open more connections to.
        request: makes a call to `store` over its first connection; without a second one, it makes all calls.
        delay_seconds: how long to wait before each connection, so that not all ranks connect at once.
    """

    def __init__(self, store: Store, request: Request | None = None, delay_seconds: float = 0.0) -> None:
        self._store = store
        self._request = request or _request_here
        self._delay_seconds = delay_seconds
        self._idle: list[tuple[Store, RequestThread]] = []
        self._lock = threading.Lock()
        self._has_clones = True

    def start(self, *keys: str, given_up: str = "", after: Callable[[Store], object] | None = None) -> Wait[list[str]]:
        """Start waiting for keys; the response is their values. Use it in a `with` statement.

        If the statement is left before, the keys that aren't set get the value `given_up`. This ends the wait, because
        a thread that still waits at interpreter exit would abort the process.

        Args:
            after: requests to make first, over the same connection; their order relative to the first connection's is
                undefined.
        """
        names = list(keys)
        store, thread = self._take()

        def read() -> list[str]:
            return get_keys(store, names)

        def act_and_read() -> list[str]:
            if after is not None:
                after(store)
            return read()

        def finish(is_over: bool) -> None:
            if not is_over:
                with contextlib.suppress(Exception):  # the store doesn't respond, or has ended
                    self._request(lambda: set_missing(self._store, names, given_up))
                    is_over = self._has_clones and pending.is_done(_GIVE_UP_SECONDS)
            if is_over or not self._has_clones:
                with self._lock:
                    self._idle.append((store, thread))
                return
            thread.has_timed_out = True
            thread.keep_alive(self._store)

        if self._has_clones:
            pending = thread.start(act_and_read)
            return Wait(pending, None, finish)
        if after is not None:
            self._request(lambda: after(store))
        pending = PendingRequest(read)
        return Wait(pending, lambda: self._request(lambda: store.check(names)) and (pending.make() or True), finish)

    def close(self) -> None:
        """Close the connections, except those that still wait."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, thread in idle:
            thread.stop()

    def _take(self) -> tuple[Store, RequestThread]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._has_clones:
            # Connecting to a store that doesn't respond would wait forever; this request has a timeout.
            self._request(lambda: self._store.check([_NO_KEY]))
            time.sleep(self._delay_seconds)
            thread = RequestThread("accelerate store waits")
            if (store := self._connect(thread)) is not None:
                return store, thread
            self._has_clones = False
            thread.stop()
        return self._store, RequestThread("accelerate store waits")

    def _connect(self, thread: RequestThread) -> Store | None:
        """Open another connection in `thread`, as long as the first one works; None if the store can't.

        torch would retry a store that has ended for the process group's whole timeout.
        """

        def connect() -> Store | None:
            try:
                store = second_connection(self._store)
                store.set_timeout(_WITHOUT_LIMIT)
            except (AttributeError, NotImplementedError):  # this torch, or this store, can't
                return None
            return store

        connecting = thread.start(connect)
        try:
            while not connecting.is_done(_CONNECTION_CHECK_SECONDS):
                self._request(lambda: self._store.check([_NO_KEY]))
            return self._request(connecting.response)
        except BaseException:  # raised again
            thread.has_timed_out = True
            raise


def set_missing(store: Store, keys: list[str], value: str) -> None:
    """Set the `keys` that have no value to `value`."""
    if len(keys) == 1:
        store.compare_set(keys[0], "", value)
        return
    found = read_present(store, keys)
    set_keys(store, {key: value for key in keys if key not in found})


def delete_keys(store: Store, *keys: str) -> None:
    """Delete `keys`, if the store can delete."""
    for key in keys:
        try:
            store.delete_key(key)
        except (RuntimeError, NotImplementedError):
            return  # such as a file


def connection_delay(rank: int, size: int) -> float:
    """Return the seconds that `rank` waits before it connects to the store: ranks of a large world take turns.

    The process that serves the store accepts connections one by one, and looks up the name of each host.
    """
    return rank / _CONNECTIONS_PER_SECOND if size > _CONNECTIONS_PER_SECOND else 0.0


class Request(Protocol):
    """A function that makes a call to a store, and returns its result."""

    def __call__(self, call: Callable[[], Response], /) -> Response:
        """Return what `call()` returns."""
        ...


def _request_here(call: Callable[[], Response]) -> Response:
    return call()


def read_if_set(store: Store, key: str) -> str | None:
    """Return the value of `key`, or None if it isn't set, in one request.

    For keys that another rank deletes: if it does so after a `check`, `get` would wait, or return an empty value.
    """
    value = store.compare_set(key, _NO_VALUE, _NO_VALUE).decode()  # sets nothing if the key isn't set
    return None if value == _NO_VALUE else value


def read_present(store: Store, keys: Sequence[str], request: Request = _request_here) -> dict[str, str]:
    """Return the values of the `keys` that are set.

    If all are set, this takes 2 requests per 1,024 keys; each missing key takes a few more.
    """
    names = list(keys)
    if 0 < len(names) <= KEYS_PER_REQUEST and request(lambda: store.check(names)):
        values = request(lambda: get_keys(store, names))
        return dict(zip(names, values, strict=True))
    if len(names) < 2:
        return {}
    half = len(names) // 2
    return {**read_present(store, names[:half], request), **read_present(store, names[half:], request)}
