"""Calls that the main process may make alone: which ranks make one, found out through the store.

Nothing here has a number among the operations of `seat`: where some ranks don't make a call, the later collectives of
all ranks stay in step. A call is recognised by the lines of the program that lead to it and by what it writes to; each
rank counts its calls there, and rank 0 says at each count whether all ranks take part or it goes on alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from ..errors import CollectiveError

if TYPE_CHECKING:
    from types import FrameType

    from .seat import Meeting

logger = logging.getLogger(__name__)

#: How long rank 0 waits for the others at a place of the program where it hasn't been before.
GRACE_SECONDS: Final = 2.0
#: How long it waits where they came the last time, if nobody watches whether they wait in torch themselves.
UNWATCHED_SECONDS: Final = 60.0
#: So many calls are kept in the store for ranks that come late; those before them are forgotten.
KEPT_CALLS: Final = 64
_CLAIM: Final = 1 << 20  # added to a count of ranks that rank 0 relies on
_SHORTEST_SLEEP_SECONDS: Final = 1e-3
_LONGEST_SLEEP_SECONDS: Final = 0.02
_LONGEST_TURN_SECONDS: Final = 30.0
#: How often it is asked whether those who are waited for wait in torch themselves.
_LOOK_SECONDS: Final = 2.0
#: After so long a wait that has no other end than its limit, rank 0 says what it waits for.
_REMARK_SECONDS: Final = 10.0
_OTHER_PACKAGES: Final = ("torch", "contextlib", "threading", "runpy", "importlib", "multiprocessing")


@dataclass
@final
class Attendance:
    """Who makes one call.

    Attributes:
        has_all: every rank makes it; they may talk in collectives.
        is_main: this is rank 0.
        is_first: rank 0 is alone for the first time at this place of the program.
    """

    has_all: bool = True
    is_main: bool = True
    is_first: bool = False
    _meeting: Meeting | None = None
    _names: tuple[str, ...] = ()
    _moment: str = ""
    _address: str = field(default="", init=False)

    # -- rank 0, alone -------------------------------------------------------------------------------------

    def begin(self, address: str) -> None:
        """Tell the ranks that come to this call too what is being written, and that it is written without them."""
        self._address = address
        self._decide()

    def _decide(self) -> None:
        content = {"all": self.has_all, "moment": self._moment, "names": self._names, "address": self._address}
        self._publish("decision", content)

    def finish(self, identity: str = "", error: BaseException | None = None) -> None:
        """Tell them how it ended: ``identity`` is what was committed."""
        if not self._address:
            self.begin("")
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._publish("outcome", {"identity": identity, "error": text})

    def _publish(self, key: str, content: dict[str, Any]) -> None:
        meeting, text = self._meeting, json.dumps(content)
        if meeting is not None:
            for name in self._names:
                meeting.ask(lambda name=name: meeting.store.set(f"{name}/{key}", text))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block that one rank at a time is in, of those that change what was written without all ranks."""
        meeting = self._meeting
        if meeting is None or self.has_all:
            yield
            return
        ticket = meeting.ask(lambda: meeting.store.add("calls/tickets", 1))
        until = time.monotonic() + _LONGEST_TURN_SECONDS  # whoever has died in its turn is waited for no longer
        while meeting.ask(lambda: meeting.store.add("calls/served", 0)) < ticket - 1 and time.monotonic() < until:
            time.sleep(_LONGEST_SLEEP_SECONDS)
        try:
            yield
        finally:
            meeting.ask(lambda: meeting.store.add("calls/served", 1))

    # -- the others ----------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What rank 0 writes to."""
        return self._address

    def wait_for_outcome(self) -> str:
        """The identity of what rank 0 has committed.

        Raises:
            CollectiveError: it failed; the text says why.
        """
        meeting = self._meeting
        assert meeting is not None
        key = f"{self._names[0]}/outcome"
        meeting.wait_for(lambda: meeting.store.check([key]))
        outcome = json.loads(meeting.ask(lambda: meeting.store.get(key)))
        if outcome["error"]:
            raise CollectiveError(f"rank 0: {outcome['error']}")
        return outcome["identity"]


@final
class CallRendezvous:
    """What one rank knows of the calls that its world has made."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._counts: dict[str, int] = {}
        self._together: set[str] = set()  # stacks from which all ranks called the last time
        self._alone: dict[str, tuple[str, ...]] = {}  # by stack the last call that rank 0 made alone
        self._kept: deque[tuple[str, ...]] = deque()  # rank 0's calls whose keys are in the store, the oldest first

    def meet(
        self, operation: str, target: str = "", *, moment: str = "", grace_seconds: float = GRACE_SECONDS
    ) -> Attendance:
        """Find out whether all ranks make this call now.

        Rank 0 waits for the others where they came the last time, up to ``grace_seconds`` at a new place, and not at
        all where it was alone the last time, or where another rank can't come any more (it has ended, or waits in a
        collective). The others wait for rank 0.

        Args:
            target: what is written to, if that is known; ranks that name the same one meet from different lines too.
            moment: what differs between two calls from the same place that the same ranks make.

        Raises:
            CollectiveError: rank 0 has ended, or is in another operation that needs all ranks.
        """
        bases = _bases(operation, target)
        moment = f"{self._meeting.number}|{moment}"
        if self._meeting.rank:
            return self._come(operation, bases, moment)
        names, key = self._keep(bases), bases[0]
        has_all = self._await_others(operation, key, names, grace_seconds)
        is_first = not has_all and key not in self._alone
        attendance = Attendance(has_all, True, is_first, self._meeting, names, moment)
        if has_all:
            self._together.add(key)
            attendance._decide()
        else:
            self._together.discard(key)
            self._alone[key] = names
        return attendance

    def tell(self, operation: str, target: str, *, moment: str = "") -> Attendance:
        """As :meth:`meet`, for a call in which the others only learn how it ended: rank 0 waits for nobody."""
        bases, moment = _bases(operation, target), f"{self._meeting.number}|{moment}"
        if self._meeting.rank:
            return self._come(operation, bases, moment)
        return Attendance(False, True, False, self._meeting, self._keep(bases), moment)

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _await_others(self, operation: str, key: str, names: tuple[str, ...], grace_seconds: float) -> bool:
        start, is_watched, has_remarked = time.monotonic(), self._meeting.watch is not None, False
        came_late = key in self._alone and self._came_late(self._alone[key])
        waits_for_all = key in self._together or came_late
        limit = self._meeting.timeout.total_seconds() if waits_for_all else grace_seconds
        if not is_watched:
            limit = min(limit, UNWATCHED_SECONDS)
        if key in self._alone and not waits_for_all:
            limit = 0.0
        next_look, sleep_seconds = start + _LOOK_SECONDS, _SHORTEST_SLEEP_SECONDS
        while not self._have_come(names):
            now = time.monotonic()
            if now - start >= limit or self._somebody_is_elsewhere():
                return self._have_come(names)
            if now >= next_look:
                if self._meeting.stuck_in_torch(range(1, self._meeting.size)):  # there it waits for this rank
                    return self._have_come(names)
                next_look = time.monotonic() + _LOOK_SECONDS
            if not (is_watched or has_remarked) and now - start >= _REMARK_SECONDS:
                has_remarked = True
                logger.warning(_still_waiting(operation, limit))
            time.sleep(sleep_seconds)
            sleep_seconds = min(_LONGEST_SLEEP_SECONDS, sleep_seconds * 1.5)
        return True

    def _have_come(self, names: tuple[str, ...]) -> bool:
        """Whether every other rank is at this call; they can't leave it any more then."""
        meeting = self._meeting

        def claim() -> bool:
            for name in names:
                if meeting.store.add(f"{name}/came", 0) >= meeting.size - 1:
                    if meeting.store.add(f"{name}/came", _CLAIM) - _CLAIM >= meeting.size - 1:
                        return True
                    meeting.store.add(f"{name}/came", -_CLAIM)  # one has just left
            return False

        return meeting.ask(claim)

    def _came_late(self, names: tuple[str, ...]) -> bool:
        meeting = self._meeting
        return any(meeting.ask(lambda n=n: meeting.store.add(f"{n}/came", 0)) >= meeting.size - 1 for n in names)

    def _somebody_is_elsewhere(self) -> bool:
        return any(self._meeting.whereabouts(rank) for rank in range(1, self._meeting.size))

    def _keep(self, bases: list[str]) -> tuple[str, ...]:
        """The names of rank 0's next call. The oldest of those that the store keeps is forgotten for it."""
        meeting = self._meeting
        names = tuple(map(self._next, bases))
        kept = {name for one in self._kept for name in one}
        for base, _, number in (name.rpartition("/") for name in names):
            if int(number) and f"{base}/{int(number) - 1}" not in kept:
                meeting.note(f"{base}/first", number)
        self._kept.append(names)
        while len(self._kept) > KEPT_CALLS:
            for name in self._kept.popleft():
                base, _, number = name.rpartition("/")
                if self._counts[base] > int(number) + 1:
                    meeting.note(f"{base}/first", str(int(number) + 1))
                for key in ("came", "decision", "outcome"):
                    try:
                        meeting.ask(lambda key=f"{name}/{key}": meeting.store.delete_key(key))
                    except CollectiveError:
                        return names  # a store that can't forget, such as a file
        return names

    # -- the others ----------------------------------------------------------------------------------------

    def _come(self, operation: str, bases: list[str], moment: str) -> Attendance:
        """Wait until rank 0 says what becomes of this call; earlier ones that it made alone are passed over."""
        meeting = self._meeting
        names = {base: self._next(base) for base in bases}
        found: list[Attendance] = []

        def decided() -> bool:
            for base in bases:
                self._pass_forgotten(base, names, announced)
                while meeting.store.check([f"{names[base]}/decision"]):
                    decision: dict[str, Any] = json.loads(meeting.store.get(f"{names[base]}/decision"))
                    is_this = decision["all"] or decision["moment"] == moment
                    if is_this and self._leave_others(names, decision, announced):
                        found.append(self._joined(decision, names[base]))
                        return True
                    if is_this:
                        break  # rank 0 counts on this rank at another of these names
                    if names[base] in announced:
                        announced.discard(names[base])
                        meeting.store.add(f"{names[base]}/came", -1)
                    names[base] = self._next(base)
                if names[base] not in announced:
                    announced.add(names[base])
                    meeting.store.add(f"{names[base]}/came", 1)
            return False

        def hopeless() -> str | None:
            where = meeting.whereabouts(0)
            return None if where is None else _never_comes(operation, meeting.rank, where)

        announced: set[str] = set()
        meeting.wait_for(decided, hopeless)
        return found[0]

    def _pass_forgotten(self, base: str, names: dict[str, str], announced: set[str]) -> None:
        """This rank waits at no call that rank 0 has forgotten: ``names`` holds one that may still be decided."""
        store, first = self._meeting.store, f"{base}/first"
        if not store.check([first]) or (number := int(store.get(first))) <= int(names[base].rpartition("/")[2]):
            return
        announced.discard(names[base])
        names[base] = f"{base}/{number}"
        self._counts[base] = number + 1

    def _leave_others(self, names: dict[str, str], decision: dict[str, Any], announced: set[str]) -> bool:
        """This rank waits at no other call than that of ``decision``; False where rank 0 already counts on it there."""
        store = self._meeting.store
        for name in [name for name in names.values() if name in announced and name not in decision["names"]]:
            if store.add(f"{name}/came", -1) >= _CLAIM // 2:
                store.add(f"{name}/came", 1)
                return False
            announced.discard(name)
        for name in decision["names"]:
            if name not in announced:
                store.add(f"{name}/came", 1)
        return True

    def _joined(self, decision: dict[str, Any], name: str) -> Attendance:
        for one in decision["names"]:  # rank 0's count is everybody's
            base, _, number = one.rpartition("/")
            self._counts[base] = int(number) + 1
        attendance = Attendance(decision["all"], False, False, self._meeting, (name,))
        attendance._address = decision.get("address", "")
        return attendance

    def _next(self, base: str) -> str:
        number = self._counts.get(base, 0)
        self._counts[base] = number + 1
        return f"{base}/{number}"


def _never_comes(operation: str, rank: int, where: str) -> str:
    return (
        f"Rank {rank} is in `{operation}`, but rank 0 {where}: it writes what all ranks have in common, and won't "
        f"come. `{operation}` is called by the main process, or by all ranks."
    )


def _still_waiting(operation: str, limit_seconds: float) -> str:
    return (
        f"Rank 0 is in `{operation}` and waits for the other ranks, which made this call the last time, for up to "
        f"{limit_seconds:.0f} s; then it goes on alone. Let every rank make it, or the main process alone, each time; "
        "or leave ACCELERATE_HANG_SECONDS as it is: a rank that waits elsewhere is then found out at once."
    )


def _bases(operation: str, target: str) -> list[str]:
    """By what a call is counted on all ranks: the lines of the program that lead to it, and what it writes to."""
    bases = [f"{operation}/at/{_digest(*_stack())}"]
    return [*bases, f"{operation}/to/{_digest(target)}"] if target else bases


def _digest(*parts: str) -> str:
    return hashlib.sha1("\n".join(parts).encode(), usedforsecurity=False).hexdigest()[:16]


def _stack() -> Iterator[str]:
    """The lines of the program that lead here, the nearest first, as they read on every host."""
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
