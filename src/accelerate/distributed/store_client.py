"""The store-based coordinator of a world: barriers, published values, and verdicts about operations that can't end.

The client of a store waits without limit for a response on a connection that has died silently (a pulled cable, a
frozen host), and holds a lock meanwhile. So requests are made by a thread of their own, and have a timeout.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from ..callers import call_site
from ..errors import CollectiveError
from .call_rendezvous import CallRendezvous

if TYPE_CHECKING:
    from ..torch_private.distributed import Store

Response = TypeVar("Response")


class StoreTimeout(RuntimeError):
    """The store didn't respond in time, and never will."""


@final
class RequestThread:
    """A thread that makes requests to a store in order, each with a timeout; it starts with the first request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kept_alive: list[Any] = []
        self.has_timed_out: bool = False  # a request got no response: later ones fail at once

    def run(self, call: Callable[[], Response], seconds: float) -> Response:
        """Run `call()` in the thread and return its result, or raise its error.

        Raises:
            StoreTimeout: it did neither within `seconds`, or an earlier call didn't.
        """
        if self.has_timed_out:
            raise StoreTimeout("no answer")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done = threading.Event()
        response: list[Any] = []
        errors: list[BaseException] = []

        def request() -> None:
            try:
                response.append(call())
            except BaseException as error:  # raised again in the caller's thread
                errors.append(error)
            done.set()

        self._queue.put(request)
        if not done.wait(seconds):
            self.has_timed_out = True
            raise StoreTimeout(f"no answer within {seconds:.0f} s")
        if errors:
            raise errors[0]
        return response[0]

    def keep_alive(self, *objects: object) -> None:
        """Keep `objects` alive until the process ends, where a request has timed out.

        Freeing what the pending call holds in C++ would wait for the response too.
        """
        if self.has_timed_out:
            self._kept_alive += objects  # the thread, which never ends, refers to this object until the process ends

    def stop(self) -> None:
        """End the thread, unless a request has timed out in it."""
        if self._thread is not None and not self.has_timed_out:
            self._queue.put(None)
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            request()


# -- the coordinator ---------------------------------------------------------------------------------------
#
# Ranks publish their state in the key-value store of the process group, never through a collective, so that it gets
# through when the ranks disagree about which collective comes next. Every operation that needs all ranks has a number;
# ranks that are in different operations of one number would wait for ever, and get an error instead.

#: How long an operation may take before the states of the other ranks are checked.
CHECK_SECONDS: Final = 2.0
#: How long the process that serves the store may take to respond before it counts as unreachable.
_STORE_TIMEOUT_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 2.0
#: How long a rank that serves the store to all others stays for them when its own program has ended.
_READERS_SECONDS: Final = 10.0
#: Up to this many ranks, each publishes every operation that it begins; beyond, only those in which it has to wait.
_NUM_PUBLISHING: Final = 128
_SHORTEST_SLEEP_SECONDS: Final = 5e-5
_LONGEST_SLEEP_SECONDS: Final = 0.02
_SEPARATOR: Final = "|"
_COUNT_BITS: Final = 20
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1
#: Operations that no rank leaves before all have entered.
_NEEDS_ALL: Final = (
    *("wait_for_everyone", "gather", "gather_object", "reduce"),
    *("save_state", "save_model", "get_state_dict", "export_model"),  # where the state is sharded over the ranks
)


@final
class Coordinator:
    """One rank's access to the store-based coordination of its world.

    Args:
        store: shared by the ranks of this world only.
        timeout: how long to wait for the others in one operation.
        keeps_store: the store is served by this process, and ends with it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, keeps_store: bool = False) -> None:
        self.store = store
        self.keeps_store = keeps_store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.number: int = 0
        self.operation: str = ""
        self.site: str = ""
        self.watch: Any = None  # the `HangWatch` of this world, if there is one
        #: `messages.MessageLengths` by process group; here, because they end with the world.
        self.lengths: dict[Any, Any] = {}
        self.calls: CallRendezvous = CallRendezvous(self)
        self._num_agreements: dict[str, int] = {}  # by the ranks among which they were
        self._published_number = 0  # of the operation that this rank has published last
        self._requests = RequestThread("accelerate store requests")

    # -- operations ----------------------------------------------------------------------------------------

    def begin(self, operation: str, *, with_site: bool = False, publish: bool = True) -> int:
        """Begin `operation`, the next one that needs all ranks, and return its number.

        Unless `publish`, the other ranks can see it only once this rank has to wait, or the operation fails.
        """
        self.number += 1
        self.operation = operation
        self.site = call_site() if with_site else ""
        if publish and self.size <= _NUM_PUBLISHING:
            self._publish_operation()
        return self.number

    def wait_for_everyone(self, operation: str = "wait_for_everyone", *, checks_torch: bool = False) -> None:
        """Wait until every rank makes this call: a barrier.

        Args:
            checks_torch: also find out whether all missing ranks wait in collectives of torch's; they are ended then.

        Raises:
            CollectiveError: a rank never will, or doesn't within the timeout.
        """
        number = self.begin(operation)

        def arrive() -> bool:
            is_last = self.store.add(f"{number}/{operation}/arrived", 1) == self.size
            if is_last:
                self.store.set(f"{number}/{operation}/open", "1")
                self._delete_keys(number - 1, operation)
            return is_last

        key = f"{number}/{operation}/open"
        if not self.request(arrive):
            self._wait_until(lambda: self.store.check([key]), checks_torch=checks_torch)

    def require_all(self, operation: str) -> None:
        """Raise CollectiveError on every rank unless all of them make this call."""
        if self.size > 1:
            self.wait_for_everyone(operation, checks_torch=True)

    def publish(self, key: str, text: str) -> None:
        """Publish ``text`` under ``key`` to all ranks."""
        self.request(lambda: self.store.set(key, text))

    def published(self, key: str) -> str | None:
        """Return what a rank has published under ``key``; None where none has."""
        return self.request(lambda: self.store.get(key).decode() if self.store.check([key]) else None)

    def set_key(self, key: str) -> None:
        """Set `key`, so that ranks that wait for it go on."""
        self.request(lambda: self.store.set(key, "1"))

    def wait_for_key(self, key: str, setter: int | None = None) -> None:
        """Wait until rank `setter` has set `key`.

        Raises:
            CollectiveError: it never will, or doesn't within the timeout.
        """
        self._wait_until(lambda: self.store.check([key]), setter)

    def explain(self, error: Exception) -> str:
        """Return why the running operation failed with `error`, as far as the other ranks' states show."""
        return self._verdict_of_all() or self._broken(error)

    def wait_for_work(self, work: Any) -> None:
        """Wait for a collective that was started asynchronously.

        Raises:
            CollectiveError: it never completes, or doesn't within the timeout.
        """
        interval = min(timedelta(seconds=CHECK_SECONDS), self.timeout)
        num_waits = 0
        while True:
            try:
                work.wait(interval)
                return
            except RuntimeError as error:
                # torch says "Operation timed out!" and keeps the operation going; anything else is its end.
                is_late = "timed out" in str(error).lower() and not work.is_completed()
                if not is_late:
                    raise CollectiveError(self.explain(error)) from error
                verdict = self._verdict()
                if verdict is not None:
                    raise CollectiveError(verdict) from error
                num_waits += 1
                if num_waits * interval >= self.timeout:
                    raise CollectiveError(self._too_late()) from error

    def agree(self, checksum: int, ranks: Sequence[int]) -> bool:
        """Return whether all of `ranks`, each of which makes this call, gave the same `checksum`.

        Raises:
            CollectiveError: one of them never will make it, or doesn't within the timeout.
        """
        scope = "" if len(ranks) == self.size else "-".join(map(str, ranks))
        number = self._num_agreements[scope] = self._num_agreements.get(scope, 0) + 1
        total = 0  # how many ranks have arrived, and above _COUNT_BITS how many of them differ from the first

        def have_arrived(amount: int = 0) -> bool:
            nonlocal total
            total = self.store.add(f"{scope}/{number}/agreeing", amount)
            return total & _COUNT_MASK == len(ranks)

        def arrive() -> bool:
            first = self.store.compare_set(f"{scope}/{number}/first", "", str(checksum))
            differs = int(first) != checksum
            is_last = have_arrived(1 + (differs << _COUNT_BITS))
            if is_last and number > 1:  # all have left the one before
                self._delete(f"{scope}/{number - 1}/agreeing", f"{scope}/{number - 1}/first")
            return is_last

        if not self.request(arrive):
            self._wait_until(have_arrived, longest_sleep=_LONGEST_SLEEP_SECONDS / 20)
        return total == len(ranks)

    def leave(self, *groups: object) -> None:
        """Publish that this rank makes no more calls.

        Where the store doesn't respond, `groups`, which use it too, are never freed: that would wait for its response.
        """

        def announce_departure() -> None:
            self.store.set(f"left/{self.rank}", str(self.number))
            self.store.set("left", "1")
            self.store.add("num_left", 1)  # waits for a response: what was sent before has arrived

        # The process that serves the store may have ended already: then no rank is left to read it.
        with contextlib.suppress(RuntimeError):
            self._requests.run(announce_departure, _LEAVE_SECONDS)
        self._requests.keep_alive(self.store, *groups)
        if not self.keeps_store:
            self._requests.stop()

    def wait_for_readers(self) -> None:
        """Serve the store until all other ranks have left too, or for 10 s: they may still read from it.

        Slower ranks would otherwise lose the value that they are waiting for. Called after `leave`, when the process
        group is destroyed, which wakes a rank that waits in it.
        """
        if not self.keeps_store:
            return
        until = time.monotonic() + _READERS_SECONDS
        with contextlib.suppress(RuntimeError):
            while self._requests.run(self._num_left, _LEAVE_SECONDS) < self.size and time.monotonic() < until:
                time.sleep(_LONGEST_SLEEP_SECONDS / 4)
        self._requests.stop()

    def _num_left(self) -> int:
        return self.store.add("num_left", 0)

    def request(self, call: Callable[[], Response]) -> Response:
        """Make a request to the store and return its response.

        Raises:
            CollectiveError: the process that serves the store has ended, or doesn't respond.
        """
        try:
            return self._requests.run(call, self._store_timeout_seconds())
        except StoreTimeout as error:
            raise CollectiveError(self._store_timed_out()) from error
        except RuntimeError as error:
            raise CollectiveError(self._store_ended()) from error

    def _store_timeout_seconds(self) -> float:
        return min(_STORE_TIMEOUT_SECONDS, max(1.0, self.timeout.total_seconds()))

    # -- waiting -------------------------------------------------------------------------------------------

    def _wait_until(
        self,
        ready: Callable[[], bool],
        setter: int | None = None,
        *,
        checks_torch: bool = False,
        longest_sleep: float = _LONGEST_SLEEP_SECONDS,
    ) -> None:
        start = time.monotonic()
        next_check = start + CHECK_SECONDS
        while not self.request(lambda: self._poll(ready, longest_sleep)):
            now = time.monotonic()
            if now - start > self.timeout.total_seconds():
                raise CollectiveError(self._too_late())
            if now >= next_check:
                verdict = self._verdict(setter)
                if verdict is None and checks_torch:
                    verdict = self._stuck_in_torch()
                if verdict is not None and not self.request(ready):
                    raise CollectiveError(verdict)
                next_check = now + min(30.0, max(CHECK_SECONDS, (now - start) / 4))

    def _poll(self, ready: Callable[[], bool], longest_sleep: float) -> bool:
        # Polled: a blocking wait would hold the store's connection, and torch logs every wait that times out.
        until = time.monotonic() + min(CHECK_SECONDS, self.timeout.total_seconds()) / 2
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        longest = min(1.0, longest_sleep * max(1.0, self.size / 8))
        while not ready():
            if time.monotonic() > until:
                return False
            time.sleep(sleep_seconds)
            sleep_seconds = min(longest, sleep_seconds * 1.5)
        return True

    def _publish_operation(self) -> None:
        if self._requests.has_timed_out:
            raise CollectiveError(self._store_timed_out())
        self._published_number = self.number
        try:
            self.store.set(f"at/{self.rank}", _SEPARATOR.join((str(self.number), self.operation, self.site)))
        except RuntimeError as error:
            raise CollectiveError(self._store_ended()) from error

    def _delete_keys(self, number: int, operation: str) -> None:
        """Delete the keys of an operation that every rank has left."""
        self._delete(f"{number}/{operation}/arrived", f"{number}/{operation}/open")

    def _delete(self, *keys: str) -> None:
        for key in keys:
            try:
                self.store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                return  # a store that can't delete, such as a file

    def wait_for(self, ready: Callable[[], bool], reason_to_stop: Callable[[], str | None] = lambda: None) -> None:
        """Wait until ``ready()``, independently of the numbered operations; from any thread.

        Raises:
            CollectiveError: ``reason_to_stop()`` returned why it never will be, or it wasn't within the timeout.
        """
        start = time.monotonic()
        next_check, sleep_seconds = start, _SHORTEST_SLEEP_SECONDS
        while not self.request(ready):
            now = time.monotonic()
            if now >= next_check:
                reason = reason_to_stop()
                if reason is not None and not self.request(ready):
                    raise CollectiveError(reason)
                next_check = now + CHECK_SECONDS / 4
            if now - start > self.timeout.total_seconds():
                raise CollectiveError(self._too_late())
            time.sleep(sleep_seconds)
            sleep_seconds = min(_LONGEST_SLEEP_SECONDS, sleep_seconds * 1.5)

    def absence_reason(self, rank: int) -> str | None:
        """Return why ``rank`` can't make this rank's call: it has ended, or is in a later one that needs all ranks."""
        where = self.request(lambda: self._operation_of(rank))
        if where is not None and where[0] > self.number and where[1] in _NEEDS_ALL:
            return f"is in `{where[1]}`{_at(where[2])}, which needs all ranks"
        if self.request(lambda: self._left_after(rank)) is not None:
            return "has ended (or left the world)"
        return None

    def stuck_in_torch(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return those of ``ranks`` that are known to wait in collectives of torch's, and where."""
        return self.watch.ask_for_stuck(ranks) if self.watch is not None and ranks else {}

    # -- verdicts ------------------------------------------------------------------------------------------

    def _verdict(self, setter: int | None = None) -> str | None:
        """Return why this operation can't end, or None when it still may."""
        try:
            if self._published_number != self.number:
                self.request(self._publish_operation)
            return self.request(lambda: self._find_conflict(setter))
        except CollectiveError as error:
            return str(error)

    def _stuck_in_torch(self) -> str | None:
        """Return why this operation can't end, where all missing ranks wait in collectives of torch's."""
        absent = self._absent()
        stuck = self.stuck_in_torch(absent)
        if not absent or len(stuck) < len(absent):
            return None
        where = "; ".join(f"rank {rank} waits in a collective of torch's at {at}" for rank, at in stuck.items())
        verdict = (
            f"{self._me()}, which every rank has to call, because the state lies over all ranks; but {where}, and "
            f"won't come. Call `{self.operation}` on every rank, outside of `if accelerator.is_main_process:`."
        )
        self.watch.end_stuck(absent, verdict)
        return verdict

    def _absent(self) -> list[int]:
        return self.request(
            lambda: [rank for rank in range(self.size) if rank != self.rank and not self._has_entered(rank)]
        )

    def _verdict_of_all(self) -> str | None:
        """Return :meth:`_verdict` once every rank that still runs has had the time to publish its operation."""
        until = time.monotonic() + min(CHECK_SECONDS, self.timeout.total_seconds()) * 1.5
        while (verdict := self._verdict()) is None and time.monotonic() < until:
            if self.request(lambda: all(rank == self.rank or self._has_entered(rank) for rank in range(self.size))):
                break
            time.sleep(_LONGEST_SLEEP_SECONDS)
        return verdict

    def _find_conflict(self, setter: int | None) -> str | None:
        for rank in range(self.size):
            if rank == self.rank:
                continue
            where = self._operation_of(rank)
            if where is not None and where[0] == self.number and where[1] != self.operation:
                return self._different(rank, where)
            if where is not None and rank == setter and where[0] > self.number and where[1] in _NEEDS_ALL:
                return self._inside(rank, where)
            left_after = self._left_after(rank)
            if left_after is not None and left_after < self.number:
                return self._left(rank)
        return None

    def _operation_of(self, rank: int) -> tuple[int, str, str] | None:
        key = f"at/{rank}"
        if not self.store.check([key]):
            return None
        number, operation, site = self.store.get(key).decode().split(_SEPARATOR, 2)
        return int(number), operation, site

    def _left_after(self, rank: int) -> int | None:
        key = f"left/{rank}"
        return int(self.store.get(key)) if self.store.check(["left"]) and self.store.check([key]) else None

    def _me(self) -> str:
        return f"Rank {self.rank} is in `{self.operation}`{_at(self.site)}"

    def _different(self, rank: int, where: tuple[int, str, str]) -> str:
        return (
            f"{self._me()}, but rank {rank} is in `{where[1]}`{_at(where[2])} instead: they wait for each other and "
            f"would never meet (operation {self.number} of this world). Every rank has to make the same calls in the "
            "same order; look for a call under `if accelerator.is_main_process:` that the other branch doesn't make. "
            "To let the main process go first, use `with accelerator.main_process_first():`."
        )

    def _inside(self, rank: int, where: tuple[int, str, str]) -> str:
        return (
            f"{self._me()}, waiting for rank {rank} to finish its block, but inside it rank {rank} is in "
            f"`{where[1]}`{_at(where[2])}, which needs all ranks. Move that call out of the block."
        )

    def _left(self, rank: int) -> str:
        return (
            f"{self._me()}, but rank {rank} has ended (or left the world) without making that call, so it would wait "
            "for ever. Every rank has to make the same calls in the same order; look for a call under "
            "`if accelerator.is_main_process:` that the other branch doesn't make, or for an error on that rank."
        )

    def _broken(self, error: Exception) -> str:
        return (
            f"{self._me()}, and the operation broke off: {error}. Usually another rank has died or made a different "
            "call; its own error says more. ACCELERATE_DEBUG_MODE=true names the ranks that disagree."
        )

    def _too_late(self) -> str:
        absent = self._absent()
        who = f"Not there: rank {', '.join(map(str, absent))}. " if absent else ""
        return (
            f"{self._me()} and has waited {self.timeout.total_seconds():.0f} s for the others. {who}Where a rank "
            "legitimately takes longer, give a longer time: Accelerator(kwargs_handlers=[InitProcessGroupKwargs("
            "timeout=timedelta(hours=2))])."
        )

    def _has_entered(self, rank: int) -> bool:
        where = self._operation_of(rank)
        return where is not None and where[0] >= self.number

    def _store_ended(self) -> str:
        return (
            f"{self._me()}, but the process that keeps the ranks' store (rank 0, or the launcher) has ended. Its own "
            "error, or the end of its program, is the cause; look at its output."
        )

    def _store_timed_out(self) -> str:
        return (
            f"{self._me()}, but the host that keeps the ranks' store (rank 0's, or the launcher's) hasn't "
            f"answered for {self._store_timeout_seconds():.0f} s. It is frozen "
            "or cut off from this host; look at the network between them."
        )


def _at(site: str) -> str:
    return f" at {site}" if site else ""
