"""The agreement of all ranks on the point in their loops at which they stop, after a notice to one of them.

Threads of each rank wait for notices, to this rank and to others. After a notice, each rank's thread publishes the last
point that its loop has passed. A loop that reaches a later point waits there until all ranks have published theirs,
which no loop can delay. Then all know the furthest point that any rank has passed, and stop at the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, final

from ...distributed.store_requests import read_present
from ...torch_private.distributed import set_keys
from ...wording import some_ranks

if TYPE_CHECKING:
    from ...distributed.store_client import Coordinator
    from .notices import Notices

#: A point of a loop: the number of earlier Accelerators with loops, of backward passes, and of batches (or reads of
#: ``preempted``) since the last backward pass.
Point = tuple[int, int, int]

_log = logging.getLogger(__name__)
_LISTEN_SECONDS: Final = 0.2
_JOIN_SECONDS: Final = 1.0
#: How long to wait for the threads at the end: one that waits in the store at the interpreter's exit would abort it.
_LEAVE_SECONDS: Final = 5.0
_WAIT_SECONDS: Final = 60.0
#: The fraction of the grace period for reaching the agreed point; the rest is for saving.
_SHARE_TO_MEET: Final = 0.8
#: The fraction of the remaining time for one round, so that there is another round for a late rank; and the remaining
#: seconds below which one round takes all of them.
_SHARE_OF_ROUND: Final = 2 / 3
_SHORTEST_ROUND_SECONDS: Final = 4.0
#: How long a rank that is late itself waits for the others.
_LATE_SECONDS: Final = 10.0
#: The requests per second of all ranks together while they wait.
_RANKS_PER_SECOND: Final = 1024
#: The outcome of a round in which a rank has given up.
_NONE: Final = "none"
_ALL_THERE: Final = "1"
#: The outcome in which all ranks reached the point and continue.
_NOT_YET: Final = "not yet"
#: Set by a rank that leaves the world: it passes no more points, so the run ends normally.
_ENDS: Final = "preemption/ends"


@final
@dataclass(frozen=True)
class Notice:
    """The announcement of a preemption, and the rank that got it.

    Attributes:
        seconds: the remaining time to reach the agreed point, after earlier rounds; None in the first round.
    """

    rank: int
    host: str
    reason: str
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.reason} to rank {self.rank} on {self.host}"


@final
@dataclass(frozen=True)
class Agreed:
    """The last point that any rank has passed, as all ranks know in this round."""

    point: Point
    number: int


@final
class StopAgreement:
    """One rank's part of the agreement.

    At each point, the loop's thread sets :attr:`passed` before it reads :attr:`is_asked`. This object's thread does
    it the other way around, so that the loop never passes a later point than the published one.
    """

    def __init__(self, notices: Notices, coordinator: Coordinator | None, grace_seconds: float) -> None:
        self._notices, self._coordinator = notices, coordinator
        self._rank, self._size = (coordinator.rank, coordinator.size) if coordinator is not None else (0, 1)
        self.allow(grace_seconds)
        self.passed: Point = (0, 0, 0)
        self.is_asked: bool = False
        self.notice: Notice | None = None
        self._number = 0  # of the round; a notice has one or several rounds
        self._own: Point | None = None  # the point that this rank has published
        self._has_published = threading.Event()
        self._agreed: Agreed | None = None
        self._is_decided = threading.Event()
        self._num_met = 0  # how often all ranks have met in this round and continued
        self._is_there = False  # whether this rank is at the agreed point
        self._is_late = False  # whether it is late for it
        self._deadline = 0.0  # of all rounds of the notice
        self._round_seconds, self._round_deadline = 0.0, 0.0
        self._stopped = threading.Event()
        self._run_ends = False  # a rank has left, so the run ends normally
        self._heard: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()  # for a single rank
        self._threads = [
            threading.Thread(target=target, name="accelerate preemption", daemon=True)
            for target in (self._listen, self._run)
        ]

    def allow(self, grace_seconds: float) -> None:
        """Set the grace period; each of the next rounds may take a fixed share of it."""
        self._seconds = grace_seconds * _SHARE_TO_MEET

    @property
    def is_running(self) -> bool:
        """Whether the threads wait for notices: not before the start, after the end, or in a forked child."""
        return not self._stopped.is_set() and all(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start the threads: one waits for notices to this rank, one for notices to any rank."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, at the end of the world."""
        self._stopped.set()
        self._notices.stop()
        self._heard.put(None)
        if self._coordinator is not None:
            met = f"met/{self._num_met}/open"
            with contextlib.suppress(RuntimeError):  # the store has ended
                self._settle(_ENDS, _ALL_THERE)
                for name in (f"notice/{self._rank}", "passed/furthest", met):  # keys for which a thread may wait
                    self._settle(self._key(name), _NONE)
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._notices.close()

    # -- the loop's thread ---------------------------------------------------------------------------------

    def wait_for_decision(self, point: Point) -> Agreed | None:
        """Return the agreement of all ranks if this rank's loop must not pass ``point`` before it.

        None if it may pass, or if there is no agreement.
        """
        self._has_published.wait(self._seconds_left())
        if self._own is not None and point <= self._own:
            return None
        self._is_decided.wait(self._seconds_left() + _JOIN_SECONDS)
        return self._agreed

    @property
    def may_finish(self) -> bool:
        """Whether there is time to finish work that a stop would abandon: in the first round, while it lasts."""
        return self.notice is not None and self.notice.seconds is None and self._seconds_left() > 0.0

    def meet(self, agreed: Agreed, where: str, *, goes_on: bool = False) -> bool:
        """Wait until all ranks reach the agreed point; return False if one doesn't within the grace period.

        Also return False if all ranks prefer to continue and have time for it; then they meet at the next point.

        Args:
            where: the point in words, the same on all ranks.
            goes_on: this rank prefers to continue.
        """
        coordinator, self._is_there = self._coordinator, True
        if coordinator is None:
            self._is_there = not goes_on
            return not goes_on
        name = f"preemption/{agreed.number}/met/{self._num_met}"

        def arrive() -> int:
            coordinator.store.set(f"{name}/{self._rank}", json.dumps([where, goes_on]))
            return coordinator.store.add(f"{name}/arrived", 1)

        if coordinator.request(arrive) == self._size:
            points, go_on = zip(*map(json.loads, self._values(name).values()), strict=True)
            outcome = _NOT_YET if all(go_on) else _ALL_THERE
            self._settle(f"{name}/open", outcome if len(set(points)) == 1 else _NONE)
        outcome = self._wait_for(f"{name}/open")
        if outcome == _NONE:
            self._give_up(self._reason(name))
        elif outcome == _NOT_YET:
            self._num_met += 1
            self._is_there = False
        return outcome == _ALL_THERE

    def _reason(self, name: str) -> str:
        points = {rank: json.loads(text)[0] for rank, text in self._values(name).items()}
        absent = set(range(self._size)) - points.keys()
        if absent:
            return f"{some_ranks(absent, 16)} didn't come to the step within {self._round_seconds:.0f} s"
        return "the ranks came to different steps: " + ", ".join(f"rank {r}: {p}" for r, p in sorted(points.items()))

    # -- this object's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopped.is_set() or self._run_ends) and (notice := self._next_notice()) is not None:
                self._decide(notice)
                while self.is_asked and not self._stopped.wait(_LISTEN_SECONDS):
                    self._complain()
        except RuntimeError:  # the store has ended, which every other call reports
            self.is_asked = False

    def _complain(self) -> None:
        """Log once that this rank hasn't reached the agreed point in time."""
        if not (self._is_there or self._is_late) and time.monotonic() > self._deadline:
            self._is_late = True
            _log.error(
                "Preemption (%s): rank %d hasn't come to the end of a step within %.0f s; it saves when it does, if "
                "nobody ends it before. Past its last loop it only ends, as its script does.",
                self.notice, self._rank, self._seconds,
            )  # fmt: skip

    def _next_notice(self) -> Notice | None:
        """Return the next notice to any rank; None at the end of the world."""
        coordinator = self._coordinator
        if coordinator is None:
            return self._heard.get()
        with coordinator.waits.start(self._key(f"notice/{self._rank}"), given_up=_NONE) as heard:
            while not heard.is_over(_WAIT_SECONDS):
                if self._stopped.is_set():
                    return None
            text = heard.response()[0]
        return None if text == _NONE else Notice(**json.loads(text))

    def _listen(self) -> None:
        """Tell all ranks about each notice to this rank."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            while not self._stopped.is_set():
                if (reason := self._notices.take()) is not None:
                    self._tell_all(Notice(self._rank, socket.gethostname(), reason))

    def _tell_all(self, notice: Notice) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            self._heard.put(notice)
            return
        if coordinator.request(lambda: coordinator.store.add(self._key("num_notices"), 1)) > 1:
            return
        text = json.dumps(asdict(notice))
        keys = {self._key(f"notice/{rank}"): text for rank in range(self._size)}
        coordinator.request(lambda: set_keys(coordinator.store, keys))

    def _decide(self, notice: Notice) -> None:
        """Publish this rank's last passed point, and find the furthest one of all ranks."""
        self._has_published.clear()
        self._is_decided.clear()
        self._own = self._agreed = None
        self._num_met = 0
        left = self._seconds if notice.seconds is None else notice.seconds
        self._round_seconds = left * _SHARE_OF_ROUND if left > _SHORTEST_ROUND_SECONDS else left
        self._deadline, self._round_deadline = time.monotonic() + left, time.monotonic() + self._round_seconds
        self.notice = notice
        self.is_asked = True  # from here on the loop waits at its next point
        self._own = self.passed
        self._has_published.set()
        self._agreed = self._agree(self._own)
        self._is_decided.set()

    def _agree(self, own: Point) -> Agreed | None:
        coordinator = self._coordinator
        if coordinator is None:
            return Agreed(own, self._number)
        name = self._key("passed")

        def answer() -> int:
            coordinator.store.set(f"{name}/{self._rank}", json.dumps(own))
            return coordinator.store.add(f"{name}/answered", 1)

        if coordinator.request(answer) == self._size:
            self._settle(f"{name}/furthest", json.dumps(max(map(json.loads, self._values(name).values()))))
        outcome = self._wait_for(f"{name}/furthest")
        if outcome != _NONE:
            loops, backwards, batches = json.loads(outcome)
            return Agreed((loops, backwards, batches), self._number)
        absent = set(range(self._size)) - self._values(name).keys()
        if not self._stopped.is_set():
            who = some_ranks(absent, 16) if absent else "a rank"
            self._give_up(f"{who} didn't answer within {self._round_seconds:.0f} s")
        return None

    def _give_up(self, reason: str) -> None:
        """Give up this round; the remaining time starts another round, and so does the next notice.

        If a rank has reached the end of its script, the others continue to the end too, without a save or another
        round.
        """
        notice, left = self.notice, self._deadline - time.monotonic()
        assert notice is not None, "a round is about one"
        self._number += 1
        if self._run_ends:
            _log.info("Preemption (%s): a rank has come to the end of its script; so do the others.", notice)
        elif left > _LISTEN_SECONDS and not self._stopped.is_set():
            _log.warning("Preemption (%s): %s. All ranks are asked again for %.0f s.", notice, reason, left)
            self._tell_all(replace(notice, seconds=left))
        else:
            _log.error("Preemption (%s): nothing is saved, because %s. The run goes on.", notice, reason)
            self._notices.settle()
        self.is_asked = self._is_there = self._is_late = False

    # -- the store -----------------------------------------------------------------------------------------

    def _settle(self, key: str, outcome: str) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        coordinator.request(lambda: coordinator.store.compare_set(key, "", outcome))

    def _wait_for(self, key: str) -> str:
        """Return the outcome of a round, the same on all ranks; a rank that gives up sets it to an empty one."""
        coordinator = self._coordinator
        assert coordinator is not None
        until = time.monotonic() + max(self._seconds_left(), min(self._round_seconds, _LATE_SECONDS))
        pause = max(_LISTEN_SECONDS, self._size / _RANKS_PER_SECOND)
        with coordinator.waits.start(key, given_up=_NONE) as outcome:
            while not outcome.is_over(max(0.0, min(pause, until - time.monotonic()))):
                if time.monotonic() >= until or self._has_any_left():
                    break
        found = coordinator.request(lambda: coordinator.store.get(key)).decode()
        self._run_ends = found == _NONE and self._has_any_left()
        return found

    def _has_any_left(self) -> bool:
        coordinator = self._coordinator
        assert coordinator is not None
        return coordinator.request(lambda: coordinator.store.check([_ENDS]))

    def _seconds_left(self) -> float:
        return max(0.0, self._round_deadline - time.monotonic())

    def _key(self, name: str) -> str:
        return f"preemption/{self._number}/{name}"

    def _values(self, name: str) -> dict[int, str]:
        coordinator = self._coordinator
        assert coordinator is not None
        found = read_present(coordinator.store, [f"{name}/{rank}" for rank in range(self._size)], coordinator.request)
        return {int(key.rpartition("/")[2]): text for key, text in found.items()}
