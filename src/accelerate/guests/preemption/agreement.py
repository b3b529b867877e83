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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast, final

from ...torch_private.distributed import set_keys

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
#: The notice that ends a thread's wait for one.
_NONE: Final = "none"


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
        self._agreed: Point | None = None  # the last point that any rank has passed, as all ranks know in this round
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
            with contextlib.suppress(RuntimeError):  # the store has ended
                self._tell([self._rank], _NONE)
                for name in ("passed", f"met/{self._num_met}"):  # this rank passes no more points: the run ends
                    self._coordinator.end_exchange(self._key(name))
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._notices.close()

    # -- the loop's thread ---------------------------------------------------------------------------------

    def wait_for_decision(self, point: Point) -> Point | None:
        """Return the last point that any rank has passed, if this rank's loop must not pass ``point`` before it.

        None if it may pass, or if the ranks don't agree.
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

    def meet(self, where: str, *, goes_on: bool = False) -> bool:
        """Wait until all ranks reach the agreed point; return False if one doesn't within the grace period.

        Also return False if all ranks prefer to continue and have time for it; then they meet at the next point.

        Args:
            where: the point in words, the same on all ranks.
            goes_on: this rank prefers to continue.
        """
        self._is_there = True
        outcome = self._exchange(f"met/{self._num_met}", [where, goes_on], _outcome_of_meeting, "come to the step")
        if isinstance(outcome, str):
            self._give_up(outcome)
        elif outcome is False:
            self._num_met += 1
            self._is_there = False
        return outcome is True

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
        if coordinator.request(lambda: coordinator.store.add(self._key("num_notices"), 1)) == 1:
            self._tell(range(self._size), json.dumps(asdict(notice)))

    def _tell(self, ranks: Iterable[int], text: str) -> None:
        coordinator, keys = self._coordinator, {self._key(f"notice/{rank}"): text for rank in ranks}
        assert coordinator is not None
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
        furthest = self._exchange("passed", self._own, max, "answer")
        self._agreed = None if furthest is None else cast("Point", tuple(furthest))
        self._is_decided.set()

    def _exchange(self, name: str, value: object, combine: Callable[[list[Any]], Any], missed: str) -> Any:
        """Return ``combine(values of all ranks)``, the same on every rank; None if this round has been given up."""
        coordinator = self._coordinator
        if coordinator is None:
            return combine([value])
        answer = coordinator.exchange(
            self._key(name),
            json.dumps(value),
            lambda values: json.dumps(combine(list(map(json.loads, values)))),
            seconds=max(self._seconds_left(), min(self._round_seconds, _LATE_SECONDS)),
        )
        if isinstance(answer, str):
            return json.loads(answer)
        self._run_ends = answer.kind == "left"
        if not self._stopped.is_set():
            self._give_up(f"{answer.text or 'a rank'} didn't {missed} within {self._round_seconds:.0f} s")
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
            _log.error("Preemption (%s): nothing is saved, because %s. The run continues.", notice, reason)
            self._notices.settle()
        self.is_asked = self._is_there = self._is_late = False

    def _seconds_left(self) -> float:
        return max(0.0, self._round_deadline - time.monotonic())

    def _key(self, name: str) -> str:
        return f"preemption/{self._number}/{name}"


def _outcome_of_meeting(given: list[tuple[str, bool]]) -> bool | str:
    """Return whether the run ends, not yet if all ranks prefer to continue; or why the ranks don't meet."""
    if len({where for where, _ in given}) > 1:
        points = ", ".join(f"rank {rank}: {where}" for rank, (where, _) in enumerate(given))
        return f"the ranks came to different steps: {points}"
    return not all(goes_on for _, goes_on in given)
