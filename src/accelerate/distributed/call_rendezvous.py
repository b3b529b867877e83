"""Rendezvous of the ranks in calls that the main process may also make alone.

The coordinator doesn't number these calls, so later collectives still match if only some ranks make a call. A call is
identified by its call stack and its target. Each rank counts its calls there. For each count, rank 0 publishes whether
all ranks take part or rank 0 continues alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypedDict, final

from ..errors import CollectiveError
from .store_requests import delete_keys, read_if_set

if TYPE_CHECKING:
    from types import FrameType

    from ..torch_private.distributed import Store
    from .store_client import Coordinator

logger: logging.Logger = logging.getLogger(__name__)

#: How long rank 0 waits for the others at a call stack that it hasn't seen before.
GRACE_SECONDS: Final = 2.0
#: How long rank 0 waits where the others came the last time, if no hang watch can tell whether they wait in torch: it
#: is off, or the ranks compute on an accelerator and may wait in any line that reads from it.
UNWATCHED_SECONDS: Final = 60.0
#: Number of calls kept in the store for ranks that come late; the keys of older ones are deleted.
KEPT_CALLS: Final = 64
#: The outcome of a call whose keys were deleted before this rank read it: rank 0 has made many calls since.
_FORGOTTEN: Final = json.dumps({"identity": "", "error": ""})
_CLAIM: Final = 1 << 20  # added to a count of arrived ranks once rank 0 relies on it
#: How often rank 0 checks whether a rank that it waits for can no longer come.
_SHORTEST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 0.5
#: The notification channels: for what rank 0 publishes, and for the other ranks' arrivals.
_DECISIONS: Final = "calls"
_ARRIVALS: Final = "arrivals"
_LOCK_TIMEOUT_SECONDS: Final = 30.0
#: How often rank 0 checks whether the ranks that it waits for wait in torch.
_CHECK_SECONDS: Final = 2.0
#: Rank 0 logs what it waits for after this long, if only the limit can end the wait.
_WARNING_SECONDS: Final = 10.0
_OTHER_PACKAGES: Final = ("torch", "contextlib", "threading", "runpy", "importlib", "multiprocessing")


class _Decision(TypedDict):
    """Rank 0's decision about one call, as published."""

    all: bool
    moment: str
    names: list[str]
    address: str


@dataclass
@final
class CallParticipants:
    """The ranks that make one call.

    Attributes:
        has_all: every rank makes it, so it may use collectives.
        is_main: this is rank 0.
        is_first: rank 0 is alone for the first time at this call stack.
    """

    has_all: bool = True
    is_main: bool = True
    is_first: bool = False
    _coordinator: Coordinator | None = None
    _names: tuple[str, ...] = ()
    _moment: str = ""
    _address: str = field(default="", init=False)

    # -- rank 0 alone --------------------------------------------------------------------------------------

    def begin(self, address: str) -> None:
        """Publish the address for other ranks at this call, and that rank 0 writes alone."""
        self._address = address
        self._publish_decision()

    def _publish_decision(self) -> None:
        content = _Decision(all=self.has_all, moment=self._moment, names=list(self._names), address=self._address)
        self._publish("decision", content)

    def finish(self, identity: str = "", error: BaseException | None = None) -> None:
        """Publish how the call ended; ``identity`` names what was committed."""
        if not self._address:
            self.begin("")
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._publish("outcome", {"identity": identity, "error": text})

    def _publish(self, key: str, content: Mapping[str, object]) -> None:
        coordinator, text = self._coordinator, json.dumps(content)
        if coordinator is not None:
            for name in self._names:
                coordinator.publish(f"{name}/{key}", text)
            coordinator.notify(_DECISIONS)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Enter a context that admits one rank at a time, unless all ranks make the call together."""
        coordinator = self._coordinator
        if coordinator is None or self.has_all:
            yield
            return
        ticket = coordinator.request(lambda: coordinator.store.add("calls/tickets", 1))
        if ticket > 1:
            with coordinator.waits.start(f"calls/served/{ticket - 1}", given_up="1") as turn:
                turn.is_over(_LOCK_TIMEOUT_SECONDS)  # not longer, in case a rank has died inside of its context
            coordinator.request(lambda: coordinator.store.delete_key(f"calls/served/{ticket - 1}"))
        try:
            yield
        finally:
            coordinator.set_key(f"calls/served/{ticket}")

    # -- the others ----------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The path that rank 0 writes to."""
        return self._address

    def wait_for_outcome(self) -> str:
        """Wait for rank 0 and return the identity of what it committed.

        Raises:
            CollectiveError: it failed; the text says why.
        """
        coordinator = self._coordinator
        assert coordinator is not None
        store, name = coordinator.store, self._names[0]

        def look() -> str | None:
            found = read_if_set(store, f"{name}/outcome")
            if found is None and _first_kept(store, name) <= _number_of(name):
                return None
            return found or _FORGOTTEN

        outcome = json.loads(coordinator.wait_for(look) or _FORGOTTEN)  # rank 0 notifies when it has set it
        if outcome["error"]:
            raise CollectiveError(f"rank 0: {outcome['error']}")
        return outcome["identity"]


@final
class CallRendezvous:
    """One rank's count of calls; the ranks use it to find each other in the next call."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._counts: dict[str, int] = {}
        self._together: set[str] = set()  # call stacks at which all ranks called the last time
        self._alone: dict[str, tuple[str, ...]] = {}  # by call stack: the last call that rank 0 made alone
        self._calls_in_store: deque[tuple[str, ...]] = deque()  # rank 0's, the oldest first

    def find_participants(self, operation: str, target: str = "", *, moment: str = "") -> CallParticipants:
        """Find out which ranks make this call now.

        Rank 0 waits for the others if they came the last time, and for a moment at a new call stack. It
        doesn't wait if it was alone the last time, or if another rank can no longer come (it has ended, or waits in a
        collective). The others wait for rank 0.

        Args:
            target: what the call writes to, if known; ranks with the same target find each other from different lines.
            moment: tells apart two calls that the same ranks make from the same line.

        Raises:
            CollectiveError: rank 0 has ended, or is in another operation that needs all ranks.
        """
        keys = _keys_of_call(operation, target)
        moment = f"{self._coordinator.number}|{moment}"
        if self._coordinator.rank:
            return self._wait_for_decision(operation, keys, moment)
        names, key = self._begin_call(keys), keys[0]
        has_all = self._await_others(operation, key, names)
        is_first = not has_all and key not in self._alone
        participants = CallParticipants(has_all, True, is_first, self._coordinator, names, moment)
        if has_all:
            self._together.add(key)
            participants._publish_decision()
        else:
            self._together.discard(key)
            self._alone[key] = names
        return participants

    def main_alone(self, operation: str, target: str, *, moment: str = "") -> CallParticipants:
        """Begin a call that rank 0 makes without waiting; other ranks only wait for its outcome."""
        keys, moment = _keys_of_call(operation, target), f"{self._coordinator.number}|{moment}"
        if self._coordinator.rank:
            return self._wait_for_decision(operation, keys, moment)
        return CallParticipants(False, True, False, self._coordinator, self._begin_call(keys), moment)

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _await_others(self, operation: str, key: str, names: tuple[str, ...]) -> bool:
        """Return whether every other rank comes to this call; if so, none of them can withdraw."""
        coordinator, watch = self._coordinator, self._coordinator.watch
        others = range(1, coordinator.size)
        is_watched = watch is not None and watch.sees_backward
        waits_for_all = key in self._together or (key in self._alone and self._arrived_late(self._alone[key]))
        limit = coordinator.timeout.total_seconds() if waits_for_all else GRACE_SECONDS
        if not is_watched:
            limit = min(limit, UNWATCHED_SECONDS)
        if key in self._alone and not waits_for_all:
            limit = 0.0
        next_check, has_warned = _CHECK_SECONDS, False

        def gives_up(waited_seconds: float) -> bool:
            nonlocal next_check, has_warned
            if waited_seconds >= limit or coordinator.absence_reasons(others):
                return True
            if waited_seconds >= next_check:
                next_check = waited_seconds + _CHECK_SECONDS
                if coordinator.stuck_in_torch(others):  # there they wait for this rank
                    return True
            if not (is_watched or has_warned) and waited_seconds >= _WARNING_SECONDS:
                has_warned = True
                logger.warning(_still_waiting(operation, limit))
            return False

        def pause(waited_seconds: float) -> float:
            return min(
                max(_SHORTEST_PAUSE_SECONDS, min(_LONGEST_PAUSE_SECONDS, waited_seconds / 2)), limit - waited_seconds
            )

        return coordinator.wait_for(lambda: self._claim(names), gives_up, pause, _ARRIVALS) is not None

    def _claim(self, names: tuple[str, ...]) -> bool | None:
        """Return True if every other rank is at this call, else None; if so, none of them can withdraw."""
        store, num_others = self._coordinator.store, self._coordinator.size - 1
        for name in names:
            if store.add(f"{name}/arrived", 0) >= num_others:
                if store.add(f"{name}/arrived", _CLAIM) - _CLAIM >= num_others:
                    return True
                store.add(f"{name}/arrived", -_CLAIM)  # one has just withdrawn
        return None

    def _arrived_late(self, names: tuple[str, ...]) -> bool:
        """Return whether all ranks have come to the call of these names, which rank 0 made alone."""
        store, num_others = self._coordinator.store, self._coordinator.size - 1
        return self._coordinator.request(lambda: any(store.add(f"{name}/arrived", 0) >= num_others for name in names))

    def _begin_call(self, keys: list[str]) -> tuple[str, ...]:
        """Return the names of rank 0's next call, and delete the oldest call's keys from the store."""
        coordinator = self._coordinator
        names = tuple(map(self._next, keys))
        kept = {name for one in self._calls_in_store for name in one}
        for base, _, number in (name.rpartition("/") for name in names):
            if int(number) and f"{base}/{int(number) - 1}" not in kept:
                coordinator.publish(f"{base}/first", number)
        self._calls_in_store.append(names)
        while len(self._calls_in_store) > KEPT_CALLS:
            for name in self._calls_in_store.popleft():
                base, _, number = name.rpartition("/")
                if self._counts[base] > int(number) + 1:
                    coordinator.publish(f"{base}/first", str(int(number) + 1))
                old = [f"{name}/{key}" for key in ("arrived", "decision", "outcome")]
                coordinator.request(lambda old=old: delete_keys(coordinator.store, *old))
        return names

    # -- the others ----------------------------------------------------------------------------------------

    def _wait_for_decision(self, operation: str, keys: list[str], moment: str) -> CallParticipants:
        """Wait until rank 0 has decided about this call; skip earlier ones that it made alone."""
        coordinator = self._coordinator
        names = {base: self._next(base) for base in keys}
        arrived_at: set[str] = set()
        reasons: dict[int, str] = {}  # why rank 0 can't come

        def look() -> CallParticipants | None:
            for base in keys:
                self._skip_deleted(base, names, arrived_at)
                while text := read_if_set(coordinator.store, f"{names[base]}/decision"):
                    decision: _Decision = json.loads(text)
                    is_this = decision["all"] or decision["moment"] == moment
                    if is_this and self._withdraw_elsewhere(names, decision, arrived_at):
                        return self._participants_of(decision, names[base])
                    if is_this:
                        break  # rank 0 has claimed this rank at another of these names
                    if names[base] in arrived_at:
                        arrived_at.discard(names[base])
                        coordinator.store.add(f"{names[base]}/arrived", -1)
                    names[base] = self._next(base)
                if names[base] not in arrived_at:
                    arrived_at.add(names[base])
                    if coordinator.store.add(f"{names[base]}/arrived", 1) == coordinator.size - 1:
                        coordinator.announce(_ARRIVALS)
            return None

        def gives_up(_: float) -> bool:
            reasons.update(coordinator.absence_reasons([0]))
            return bool(reasons)

        found = coordinator.wait_for(look, gives_up)
        if found is None:
            raise CollectiveError(_rank_0_is_absent(operation, coordinator.rank, reasons[0]))
        return found

    def _skip_deleted(self, base: str, names: dict[str, str], arrived_at: set[str]) -> None:
        """Advance ``names`` past calls whose keys rank 0 has deleted, to one still undecided."""
        number = _first_kept(self._coordinator.store, names[base])
        if number <= _number_of(names[base]):
            return
        arrived_at.discard(names[base])
        names[base] = f"{base}/{number}"
        self._counts[base] = number + 1

    def _withdraw_elsewhere(self, names: dict[str, str], decision: _Decision, arrived_at: set[str]) -> bool:
        """Withdraw from calls other than ``decision``'s; return False if rank 0 has claimed this rank."""
        store = self._coordinator.store
        for name in [name for name in names.values() if name in arrived_at and name not in decision["names"]]:
            if store.add(f"{name}/arrived", -1) >= _CLAIM // 2:
                store.add(f"{name}/arrived", 1)
                return False
            arrived_at.discard(name)
        for name in decision["names"]:
            if name not in arrived_at:
                store.add(f"{name}/arrived", 1)
        return True

    def _participants_of(self, decision: _Decision, name: str) -> CallParticipants:
        for one in decision["names"]:  # all ranks continue from rank 0's count
            base, _, number = one.rpartition("/")
            self._counts[base] = int(number) + 1
        participants = CallParticipants(decision["all"], False, False, self._coordinator, (name,))
        participants._address = decision["address"]
        return participants

    def _next(self, base: str) -> str:
        number = self._counts.get(base, 0)
        self._counts[base] = number + 1
        return f"{base}/{number}"


def _number_of(name: str) -> int:
    return int(name.rpartition("/")[2])


def _first_kept(store: Store, name: str) -> int:
    """Return the number of the oldest call of this kind whose keys rank 0 hasn't deleted."""
    return int(read_if_set(store, f"{name.rpartition('/')[0]}/first") or 0)


def _rank_0_is_absent(operation: str, rank: int, where: str) -> str:
    return (
        f"Rank {rank} is in `{operation}`, but rank 0 {where}: it writes what all ranks have in common, and won't "
        f"come. `{operation}` is called by the main process, or by all ranks."
    )


def _still_waiting(operation: str, limit_seconds: float) -> str:
    return (
        f"Rank 0 is in `{operation}` and waits for the other ranks, which made this call the last time, for up to "
        f"{limit_seconds:.0f} s; then it continues alone. Let every rank make it, or only the main process, each time. "
        "Or, on the CPU, leave ACCELERATE_HANG_SECONDS as it is: a rank that waits elsewhere is then found out at once."
    )


def _keys_of_call(operation: str, target: str) -> list[str]:
    """Return the keys that identify a call on all ranks: its call stack, and its target."""
    keys = [f"{operation}/at/{_digest(*_stack())}"]
    return [*keys, f"{operation}/to/{_digest(target)}"] if target else keys


def _digest(*parts: str) -> str:
    return hashlib.sha1("\n".join(parts).encode(), usedforsecurity=False).hexdigest()[:16]


def _stack() -> Iterator[str]:
    """Yield the program's stack frames, innermost first, in a form that is the same on every host."""
    frame: FrameType | None = sys._getframe(1)
    own, found = __name__.partition(".")[0], False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in (own, *_OTHER_PACKAGES):
            found = True
            file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
            yield f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    if not found:
        yield own
