"""The store-based coordinator of a world: barriers, published values, and verdicts on operations that can't complete.

Ranks publish their state in the process group's key-value store, never through a collective, so it arrives even if the
ranks disagree about the next collective. Every operation that needs all ranks has a number. Ranks in different
operations with the same number would wait forever; they get an error instead.

A rank makes a constant number of requests per operation, for any world size: it reports its arrival and waits for one
key. Meanwhile one rank at a time examines the states of all, and publishes under that key why the operation can't
complete.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, final

import torch.distributed as dist

from ..callers import call_site
from ..errors import CollectiveError
from ..torch_private.distributed import get_keys, set_keys, tcp_store
from ..wording import some_ranks
from .call_rendezvous import CallRendezvous
from .exits import ExitWatch, has_clients
from .mismatched_calls import RankState, Verdict, find_conflict, is_in
from .store_requests import (
    RequestThread,
    StoreTimeout,
    Wait,
    WaitingConnections,
    connection_delay,
    delete_keys,
    read_present,
)

if TYPE_CHECKING:
    from ..torch_private.distributed import Store
    from .messages import MessageLengths
    from .watchdog import HangWatch

Response = TypeVar("Response")

#: How often a rank that waits in an exchange checks whether another has left.
_EXCHANGE_CHECK_SECONDS: Final = 0.2
#: How long an operation may take before the states of the other ranks are examined.
CHECK_SECONDS: Final = 2.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
#: If the only group has all ranks, an operation fails after all missing ranks have waited this long in torch's
#: collectives.
_TORCH_CHECK_SECONDS: Final = 5.0
#: How long the process that serves the store may take to respond before it counts as unreachable.
_STORE_TIMEOUT_SECONDS: Final = 10.0
#: Up to this many ranks may make requests at once within that time; with more, it grows in proportion.
_NUM_RANKS_OF_STORE_TIMEOUT: Final = 1024
_LEAVE_SECONDS: Final = 2.0
#: How long the rank that serves the store stays for the others after its own program has ended. torch's server looks up
#: the name of each connecting host, and serves nobody for 5 s if no name server answers.
_READERS_SECONDS: Final = 30.0
#: How often it checks whether any of them still runs.
_READERS_CHECK_SECONDS: Final = 0.5
#: Up to this many ranks, each publishes every operation that it begins; beyond, only those in which it has to wait.
_NUM_PUBLISHING: Final = 128
#: Requests per second of all ranks together while they wait for a missing one.
_RANKS_PER_SECOND: Final = 1024
#: How many notifications are kept for ranks that are about to wait for them.
_KEPT_NOTIFICATIONS: Final = 16
#: Operations in which a rank waits for others in a torch collective.
_IN_TORCH: Final = {"gather", "gather_object", "reduce", "broadcast", "broadcast_object_list", "pad_across_processes"}
#: The value that ends the wait for a key; a verdict raises instead.
_OPEN: Final = "1"
#: The value of an agreement's key if the ranks differ.
_DIFFERENT: Final = "different"
#: Set once any rank makes no more calls.
_ANY_LEFT: Final = "left"
_COUNT_BITS: Final = 20
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1
#: Operations that no rank leaves before all have entered.
_NEEDS_ALL: Final = (
    *("wait_for_everyone", "gather", "gather_object", "reduce"),
    "stream_weights",
    *("save_state", "save_model", "get_state_dict", "export_model"),  # where the state is sharded over the ranks
)


class Work(Protocol):
    """A torch collective that was started asynchronously."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Wait until it is done, for up to `timeout`."""
        ...

    def is_completed(self) -> bool:
        """Return whether it is done."""
        ...


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
        self.has_left: bool = False
        self.operation: str = ""
        self.site: str = ""
        #: How many torch collectives and comparisons of this world's operations this rank has begun.
        self.num_collectives: int = 0
        #: Why the next torch collectives of the ranks don't belong together: a rank still is in an earlier one.
        self.unpaired: str = ""
        self.watch: HangWatch | None = None  # of this world, if there is one
        #: By process group; here, because they end with the world.
        self.lengths: dict[Hashable, MessageLengths] = {}
        self.calls: CallRendezvous = CallRendezvous(self)
        self.exits: ExitWatch = ExitWatch()  # of the processes that this one watches
        self._published_number = 0  # of the operation that this rank has published last
        self._last_barrier = ""
        self._num_agreements: dict[str, int] = {}  # by the ranks among which they were
        #: Held during a request over the store's first connection.
        self.lock: threading.Lock = threading.Lock()
        self._requests = RequestThread("accelerate store requests", self.lock)
        self.waits: WaitingConnections = WaitingConnections(store, self.request, connection_delay(rank, size))

    # -- operations ----------------------------------------------------------------------------------------

    def begin(self, operation: str, *, with_site: bool = False, publish: bool = True) -> int:
        """Begin `operation`, the next one that needs all ranks, and return its number.

        Unless `publish`, the other ranks can see it only once this rank has to wait, or the operation fails.

        Raises:
            CollectiveError: an earlier error has left a rank in a torch collective, which this one would complete.
        """
        if self.unpaired:
            raise CollectiveError(
                f"`{operation}` after an error that has left ranks in different torch collectives: its result would be "
                f"of another call. End the program, and mend the first error: {self.unpaired}"
            )
        self.number += 1
        self.operation = operation
        self.site = call_site() if with_site else ""
        if publish and self.size <= _NUM_PUBLISHING:
            self._publish_operation()
        return self.number

    def withdraw(self, operation: str, site: str) -> None:
        """Undo `begin`: this rank has refused its arguments; before, it was in `operation` at `site`."""
        is_published = self._published_number == self.number
        self.number, self.operation, self.site = self.number - 1, operation, site
        if is_published:
            self._publish_operation()

    def wait_for_everyone(self, operation: str = "wait_for_everyone", *, checks_torch: bool = False) -> None:
        """Wait until every rank makes this call: a barrier.

        Args:
            checks_torch: also check whether all missing ranks wait in torch's collectives; if so, end them.

        Raises:
            CollectiveError: a rank never will, or doesn't within the timeout.
        """
        name = f"{self.begin(operation)}/{operation}"
        last_barrier, self._last_barrier = self._last_barrier, name

        def arrive(store: Store) -> None:
            if store.add(f"{name}/arrived", 1) == self.size:
                if last_barrier:  # which every rank has left
                    delete_keys(store, f"{last_barrier}/arrived", f"{last_barrier}/open")
                store.compare_set(f"{name}/open", "", _OPEN)

        self._raise_verdict(self._wait_for_ranks(f"{name}/open", after=arrive, checks_torch=checks_torch, of_all=True))

    def stop_others(self, operation: str, reason: str) -> None:
        """Make ``operation``, the other ranks' next one, raise on them for ``reason`` instead of taking part.

        If a running operation waits for this rank, it raises too.
        """
        if self.unpaired:
            return  # the others get the same error
        running, verdict = f"{self.number}/{operation}/work", Verdict("stopped", self.rank, text=reason)
        name = f"{self.begin(operation)}/{operation}"
        self._last_barrier = name
        for key in (running, f"{name}/open"):
            self._publish_verdict(key, verdict)

    def require_all(self, operation: str) -> None:
        """Raise CollectiveError on every rank unless all of them make this call."""
        if self.size > 1:
            self.wait_for_everyone(operation, checks_torch=True)

    def publish(self, key: str, text: str) -> None:
        """Publish ``text`` under ``key``; all ranks can read it once this returns."""
        self.request(lambda: self.store.set(key, text) or self.store.check([key]))  # a store doesn't respond to `set`

    def published(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the published values of ``keys``, without keys that aren't set."""
        return read_present(self.store, keys, self.request)

    def set_key(self, key: str) -> None:
        """Set `key`, so that waiting ranks continue."""
        self.send(lambda: self.store.set(key, _OPEN))

    def wait_for_key(self, key: str, setter: int | None = None) -> None:
        """Wait until rank `setter` has set `key`.

        Raises:
            CollectiveError: it never will, or doesn't within the timeout.
        """
        self._raise_verdict(self._wait_for_ranks(key, setter))

    def explain(self, error: Exception) -> str:
        """Return why the running operation failed with `error`, as far as the other ranks' states show."""
        try:
            verdict = self._verdict_of_all()
        except CollectiveError as lost:
            return str(lost)
        return self._broken(error) if verdict is None else self._in_words(verdict)

    def wait_for_work(self, work: Work) -> None:
        """Wait for a collective that was started asynchronously.

        Raises:
            CollectiveError: it never completes, or doesn't within the timeout.
        """
        self.num_collectives += 1
        interval = min(timedelta(seconds=CHECK_SECONDS), self.timeout)
        waited, next_check, num_checks = timedelta(), interval, 0
        key = f"{self.number}/{self.operation}/work"
        while True:
            try:
                work.wait(interval)
                return
            except RuntimeError as error:
                # torch says "Operation timed out!" and keeps the operation going; anything else is its end.
                is_late = "timed out" in str(error).lower() and not work.is_completed()
                if not is_late:
                    raise CollectiveError(self.explain(error)) from error
                waited += interval
                if waited >= next_check:
                    verdict = self._examine(key, num_checks, waited_seconds=waited.total_seconds())
                    if verdict is not None:
                        self._publish_verdict(key, verdict)
                    if key in (found := self.published([key])):
                        self.unpaired = self._in_words(Verdict.of(found[key]))
                        raise CollectiveError(self.unpaired) from None
                    num_checks, next_check = num_checks + 1, waited + timedelta(seconds=self._pause_seconds(0.0))
                if waited >= self.timeout:
                    self.unpaired = self._too_late()
                    raise CollectiveError(self.unpaired) from error

    def agree(self, checksum: int, ranks: Sequence[int]) -> bool:
        """Return whether all of `ranks` gave the same `checksum`; each of them has to make this call.

        Raises:
            CollectiveError: one of them never does, or not within the timeout.
        """
        self.num_collectives += 1
        scope = "" if len(ranks) == self.size else f"{ranks[0]}-{len(ranks)}-{zlib.crc32(repr(list(ranks)).encode())}"
        number = self._num_agreements[scope] = self._num_agreements.get(scope, 0) + 1
        name, before = f"{scope}/{number}/agreement", f"{scope}/{number - 1}/agreement"

        def arrive() -> str:
            try:
                first = self.store.compare_set(f"{name}/first", "", str(checksum))
            except RuntimeError as error:
                if "not implemented" not in str(error).lower():
                    raise
                return _OPEN  # a custom store, or that of a pretended world: nothing to compare
            differs = int(first) != checksum
            # How many ranks have arrived, and above _COUNT_BITS how many of them differ from the first.
            total = self.store.add(f"{name}/arrived", 1 + (differs << _COUNT_BITS))
            if total & _COUNT_MASK < len(ranks):
                return ""
            if number > 1:  # all have left the one before
                delete_keys(self.store, f"{before}/first", f"{before}/arrived", f"{before}/open")
            outcome = _OPEN if total == len(ranks) else _DIFFERENT
            return self.store.compare_set(f"{name}/open", "", outcome).decode()

        outcome = self.request(arrive) or self._wait_for_ranks(f"{name}/open")
        if outcome != _DIFFERENT:
            self._raise_verdict(outcome)
        return outcome == _OPEN

    def exchange(self, name: str, value: str, combine: Callable[[list[str]], str], *, seconds: float) -> str | Verdict:
        """Give `value`, and return `combine(values of all ranks)`, the same on every rank; or why there is none.

        The last rank to arrive combines the values. It isn't a numbered operation, and any thread may call it.

        Args:
            name: of this exchange alone, the same on every rank.
            seconds: after so long, the exchange ends for all ranks; it also ends once a rank leaves the world.
        """
        key = f"{name}/open"
        keys = [f"{name}/given/{rank}" for rank in range(self.size)]

        def arrive(store: Store) -> None:
            store.set(keys[self.rank], value)
            if store.add(f"{name}/arrived", 1) == self.size:
                store.compare_set(key, "", _OPEN + combine(get_keys(store, keys)))

        def find(waited_seconds: float) -> Verdict | None:
            if self.request(lambda: self.store.check([_ANY_LEFT])):
                return Verdict("left")
            if waited_seconds < seconds:
                return None
            given = self.published(keys)
            absent = [rank for rank in range(self.size) if keys[rank] not in given]
            return Verdict("late", self.rank, text=some_ranks(absent, 16) if absent else "")

        pause = max(_EXCHANGE_CHECK_SECONDS, self.size / _RANKS_PER_SECOND)
        answer = self._wait_for_value(key, find, lambda _: pause, seconds, arrive)
        return answer.removeprefix(_OPEN) if answer.startswith(_OPEN) else Verdict.of(answer)

    def end_exchange(self, name: str) -> None:
        """End an exchange for all ranks, unless it has ended, because this rank leaves the world."""
        self._publish_verdict(f"{name}/open", Verdict("left", self.rank))

    def leave(self, *groups: object) -> None:
        """Publish that this rank makes no more calls, and stop the hang watch; `close` ends what is left.

        If the store doesn't respond, `groups` are never freed, because freeing them would wait for its response.
        """
        self.has_left = True
        state = RankState(self.number, self.operation, self.site, has_left=True)
        values = {f"at/{self.rank}": state.text(), _ANY_LEFT: _OPEN, _left(self.rank): _OPEN}
        if self.watch is not None:
            values |= self.watch.begin_to_stop()
        self.exits.close()
        # The process that serves the store may have ended already: then no rank is left to read it.
        with contextlib.suppress(RuntimeError):
            self._requests.run_here(lambda: set_keys(self.store, values), _LEAVE_SECONDS)
            if self.rank == 0:
                self._requests.run(lambda: self.announce("calls"), _LEAVE_SECONDS)  # ranks that wait for this one
        if self.watch is not None:
            self.watch.join()
        self._requests.keep_alive(self.store, *groups)

    def wait_for_readers(self) -> None:
        """Serve the store until all other ranks have left or ended, or for 30 s: they may still read from it.

        Otherwise slower ranks would lose the value that they wait for. Call it after `leave` and after destroying the
        process group, which wakes a rank that waits in it.
        """
        if not self.keeps_store:
            return
        served, until = tcp_store(self.store), time.monotonic() + _READERS_SECONDS
        with self.waits.start(*map(_left, range(self.size))) as wait:
            while not wait.is_over(max(0.0, min(_READERS_CHECK_SECONDS, until - time.monotonic()))):
                # A rank that was killed, or ended by `os._exit`, never says that it has left.
                if time.monotonic() >= until or (served is not None and not has_clients(served.port)):
                    break

    def close(self) -> None:
        """End the threads of requests and close their connections, after `leave`.

        The end of the process does the same in less time.
        """
        self._requests.stop()
        self.waits.close()

    def request(self, call: Callable[[], Response], limit_seconds: float = 0.0) -> Response:
        """Make a request to the store and return its response.

        Args:
            limit_seconds: how long the response may take (default: the timeout of the store).

        Raises:
            CollectiveError: the process that serves the store has ended, or doesn't respond.
        """
        return self._translate_errors(lambda: self._requests.run(call, limit_seconds or self._store_timeout_seconds()))

    def send(self, call: Callable[[], object]) -> None:
        """Make a request that has no response, such as `set`, in the calling thread. Raises as :meth:`request`."""
        # In the request thread, it would take ten times as long.
        self._translate_errors(lambda: self._requests.run_here(call, self._store_timeout_seconds()))

    def _translate_errors(self, call: Callable[[], Response]) -> Response:
        try:
            return call()
        except StoreTimeout as error:
            raise CollectiveError(self._store_timed_out()) from error
        except RuntimeError as error:
            raise CollectiveError(self._store_ended()) from error

    def _store_timeout_seconds(self) -> float:
        # A barrier is a burst of requests of all ranks, which the store serves one after the other.
        seconds = _STORE_TIMEOUT_SECONDS * max(1.0, self.size / _NUM_RANKS_OF_STORE_TIMEOUT)
        return min(seconds, max(1.0, self.timeout.total_seconds()))

    # -- waiting -------------------------------------------------------------------------------------------

    def _wait_for_ranks(
        self,
        key: str,
        setter: int | None = None,
        *,
        after: Callable[[Store], object] | None = None,
        checks_torch: bool = False,
        of_all: bool = False,
    ) -> str:
        """Wait for the value of `key` in a numbered operation, as `_wait_for_value`; one rank examines all.

        Args:
            of_all: the key is set when all ranks have arrived, so the end of a watched process is an error.
        """
        rounds = itertools.count()

        def find(waited_seconds: float) -> Verdict | None:
            if of_all and (ended := self.exits.ended()):
                return Verdict("left", ended[0])
            return self._examine(key, next(rounds), setter, checks_torch=checks_torch, waited_seconds=waited_seconds)

        def pause(waited_seconds: float) -> float:
            return self._pause_seconds(0.0 if of_all and self.exits.is_watching else waited_seconds)

        return self._wait_for_value(key, find, pause, self.timeout.total_seconds(), after)

    def _wait_for_value(
        self,
        key: str,
        find: Callable[[float], Verdict | None],
        pause: Callable[[float], float],
        seconds: float,
        after: Callable[[Store], object] | None = None,
    ) -> str:
        """Make the requests `after`, then wait for the value of `key`; if none will come, publish a verdict as such.

        Args:
            find: returns the verdict, if there is one, after so many seconds of waiting.
            pause: returns the seconds until the next question to `find`, after so many seconds of waiting.
            seconds: how long to wait.
        """
        late, start, waited = Verdict("late", self.rank), time.monotonic(), 0.0
        with self.waits.start(key, given_up=late.encoded(), after=after) as wait:
            while not wait.is_over(max(0.0, min(pause(waited), seconds - waited))):
                waited = time.monotonic() - start
                if (verdict := find(waited) or (late if waited >= seconds else None)) is not None:
                    return self._publish_verdict(key, verdict)
            return self._values_of(wait)[0]

    def _values_of(self, wait: Wait[list[str]]) -> list[str]:
        try:
            return wait.response()
        except RuntimeError as error:
            raise CollectiveError(self._store_ended()) from error

    def _pause_seconds(self, waited_seconds: float) -> float:
        """Return how long to wait before the states are examined again."""
        return max(min(_LONGEST_PAUSE_SECONDS, max(CHECK_SECONDS, waited_seconds / 4)), self.size / _RANKS_PER_SECOND)

    def _raise_verdict(self, value: str) -> None:
        if value != _OPEN:
            verdict = Verdict.of(value)
            text = self._in_words(verdict)
            if verdict.kind == "different" and {verdict.operation, self.operation} & _IN_TORCH:
                self.unpaired = text
            raise CollectiveError(text)

    def _in_words(self, verdict: Verdict) -> str:
        if verdict == Verdict("late", self.rank):
            return self._too_late()
        return verdict.explain(self.rank, self._state())

    def _state(self) -> RankState:
        return RankState(self.number, self.operation, self.site)

    def _publish_operation(self) -> None:
        self._published_number = self.number
        key, text = f"at/{self.rank}", self._state().text()
        self.send(lambda: self.store.set(key, text))

    # -- notifications -------------------------------------------------------------------------------------

    def notify(self, channel: str) -> None:
        """Make the ranks that wait on ``channel`` look again."""
        self.request(lambda: self.announce(channel))

    def announce(self, channel: str) -> None:
        """Notify from within a request."""
        number = self.store.add(f"{channel}/notifications", 1)
        self.store.set(f"{channel}/notifications/{number}", _OPEN)
        if number > _KEPT_NOTIFICATIONS:
            delete_keys(self.store, f"{channel}/notifications/{number - _KEPT_NOTIFICATIONS}")

    def num_notifications(self, channel: str) -> int:
        """Return the number of notifications so far; read it before checking whether to wait for the next one."""
        return self.request(lambda: self.store.add(f"{channel}/notifications", 0))

    def listen(self, channel: str, number: int) -> Wait[list[str]]:
        """Start waiting for the notification after the first `number` ones; for a `with` statement."""
        return self.waits.start(f"{channel}/notifications/{number + 1}", given_up=_OPEN)

    def wait_for(
        self,
        look: Callable[[], Response | None],
        gives_up: Callable[[float], bool] = lambda _: False,
        pause: Callable[[float], float] | None = None,
        channel: str = "calls",
    ) -> Response | None:
        """Wait for a result of ``look()``, which only a notification can change; this isn't a numbered operation.

        Any thread may call it.

        Args:
            gives_up: returns whether there will be no result, after so many seconds of waiting; then return None.
            pause: returns the seconds until the next question to ``gives_up``, after so many seconds of waiting.

        Raises:
            CollectiveError: the timeout has passed.
        """
        start, pause = time.monotonic(), pause or self._pause_seconds
        next_question = start + min(CHECK_SECONDS / 4, pause(0.0))
        while True:
            number = self.num_notifications(channel)
            if (found := self.request(look)) is not None:
                return found
            with self.listen(channel, number) as notification:
                while not notification.is_over(max(0.0, next_question - time.monotonic())):
                    waited = time.monotonic() - start
                    is_over = gives_up(waited)
                    if (found := self.request(look)) is not None or is_over:
                        return found
                    if waited > self.timeout.total_seconds():
                        raise CollectiveError(self._too_late())
                    next_question = time.monotonic() + pause(waited)
                self._values_of(notification)

    def absence_reasons(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return why those of ``ranks`` that can't make this rank's call can't.

        Either they have ended, or they are in a later operation that needs all ranks.
        """
        reasons: dict[int, str] = {}
        for rank, state in self._states(ranks).items():
            if state.has_left:
                reasons[rank] = "has ended (or left the world)"
            elif state.number > self.number and state.operation in _NEEDS_ALL:
                reasons[rank] = f"is in {state.named}, which needs all ranks"
        return reasons

    def stuck_in_torch(self, ranks: Sequence[int], at_least_seconds: float = 0.0) -> dict[int, str]:
        """Return those of ``ranks`` known to wait in torch's collectives, with their positions."""
        return self.watch.ask_for_stuck(ranks, at_least_seconds) if self.watch is not None and ranks else {}

    # -- verdicts ------------------------------------------------------------------------------------------

    def _examine(
        self,
        key: str,
        num_checks: int,
        setter: int | None = None,
        *,
        checks_torch: bool = False,
        waited_seconds: float = 0.0,
    ) -> Verdict | None:
        """Examine all ranks, unless another rank does in this round, and return the verdict."""
        if self._published_number != self.number:
            self._publish_operation()
        round_key = f"{key}/round/{num_checks}"
        if self.request(lambda: self.store.add(round_key, 1)) > 1:
            return None
        if num_checks:
            self.request(lambda: delete_keys(self.store, f"{key}/round/{num_checks - 1}"))
        verdict = self._find_conflict(setter)
        if verdict is None and checks_torch:
            verdict = self._stuck_in_torch()
        elif verdict is None and waited_seconds >= _TORCH_CHECK_SECONDS and dist.get_pg_count() == 1:
            # The only group has all ranks, so any torch collective that the missing ranks are in needs this rank.
            verdict = self._stuck_in_torch(_TORCH_CHECK_SECONDS)
        return verdict

    def _publish_verdict(self, key: str, verdict: Verdict) -> str:
        """Set `key` to `verdict` unless it is set, and return its value."""
        return self.request(lambda: self.store.compare_set(key, "", verdict.encoded())).decode()

    def _find_conflict(self, setter: int | None = None) -> Verdict | None:
        return find_conflict(self.rank, self._state(), self._states(), setter, _NEEDS_ALL)

    def _stuck_in_torch(self, at_least_seconds: float = 0.0) -> Verdict | None:
        """If all missing ranks wait in torch's collectives, end them and return the verdict."""
        absent = self._absent()
        stuck = self.stuck_in_torch(absent, at_least_seconds)
        if not absent or len(stuck) < len(absent) or self.watch is None:
            return None
        where = "; ".join(f"rank {rank} waits in a collective of torch's at {at}" for rank, at in stuck.items())
        verdict = Verdict("stuck", text=where)
        self.watch.end_stuck(absent, self._in_words(verdict))
        return verdict

    def _verdict_of_all(self) -> Verdict | None:
        """Wait until every running rank has had the time to publish its operation; return the verdict."""
        seconds = min(CHECK_SECONDS, self.timeout.total_seconds()) * 1.5
        key = f"{self.number}/{self.operation}/failure"
        if self._published_number != self.number:
            self._publish_operation()
        is_first = self.request(lambda: self.store.add(f"{key}/examined", 1)) == 1
        nothing = Verdict("late", self.rank)

        def find(waited_seconds: float) -> Verdict | None:
            if not is_first:
                return None
            is_last = not self._absent()  # asked first: a rank may publish in between
            return self._find_conflict() or (nothing if is_last else None)

        pause = max(0.02, self.size / _RANKS_PER_SECOND)
        value = self._wait_for_value(key, find, lambda _: pause if is_first else seconds, (2 - is_first) * seconds)
        verdict = Verdict.of(value)
        return None if verdict.kind == "late" else verdict

    def _states(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        """Return the last published state of the given ranks, or of all."""
        published = self.published([f"at/{rank}" for rank in (range(self.size) if ranks is None else ranks)])
        return {int(key.rpartition("/")[2]): RankState.of(text) for key, text in published.items()}

    def _absent(self) -> list[int]:
        states = self._states()
        return [
            rank
            for rank in range(self.size)
            if rank != self.rank and (rank not in states or states[rank].number < self.number)
        ]

    def _broken(self, error: Exception) -> str:
        return (
            f"{self._me()}, and the operation broke off: {error}. Usually another rank has died or made a different "
            "call; its own error says more. ACCELERATE_DEBUG_MODE=true names the ranks that disagree."
        )

    def _too_late(self) -> str:
        absent = self._absent()
        who = f"Not there: {some_ranks(absent, 16)}. " if absent else ""
        return (
            f"{self._me()} and has waited {self.timeout.total_seconds():.0f} s for the others. {who}Where a rank "
            "legitimately takes longer, give a longer time: Accelerator(kwargs_handlers=[InitProcessGroupKwargs("
            "timeout=timedelta(hours=2))])."
        )

    def _me(self) -> str:
        return is_in(self.rank, self._state())

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


def _left(rank: int) -> str:
    """Return the key that `rank` sets when it makes no more calls."""
    return f"{_ANY_LEFT}/given/{rank}"
