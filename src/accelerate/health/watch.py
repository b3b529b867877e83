"""Ranks that no longer move: a verdict that names them, the source line where each stands, and who is waited for.

A thread of each rank looks at where the rank's own thread stands. When that hasn't moved for a while, one rank asks all
others through the store of the process group, never through a collective, and says what it learned. So a rank that is
stuck in DDP's own all-reduce is noticed too, long before the group's timeout.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol, final
from weakref import WeakSet

from ..errors import SettingError
from ..settings.env import read
from ..world import release_before_leaving
from .failure import Frame

if TYPE_CHECKING:
    from ..world import World

_log = logging.getLogger(__name__)

VARIABLE: Final = "ACCELERATE_HANG_SECONDS"
DEFAULT_SECONDS: Final = 300.0
_TICK_SECONDS: Final = 1.0
_RANKS_PER_TICK: Final = 128  # so that the store isn't asked more often than that, however many ranks there are
_NUM_TICKS_TO_ANSWER: Final = 4
#: A rank that is in one and the same collective of torch's for so long, and computes next to nothing, waits there.
_STUCK_SECONDS: Final = 2.0
_IDLE_SHARE: Final = 0.2
_LISTENING_SECONDS: Final = 15.0
_ENDING_SECONDS: Final = 5.0
_PASSED_THROUGH: Final = ("torch/_ops.py", "torch/autograd/function.py", "torch/utils/_contextlib.py")
#: Who stands in one of these waits for other ranks.
_MEETING_PLACES: Final = ("torch/distributed/", "torch/autograd/", "accelerate/meeting/", "accelerate/collectives.py")


@final
@dataclass(frozen=True)
class Stand:
    """Where one rank is.

    Attributes:
        seconds: since its thread last moved.
        place: the nearest line of the user's own, as ``train.py:31``.
        source: the text of that line.
        waits: it is inside something that needs other ranks.
        is_stuck: it is inside a collective of torch's, and computes nothing.
    """

    rank: int
    seconds: float
    place: str
    source: str
    waits: bool
    is_stuck: bool = False

    def describe(self, is_standing: bool) -> str:
        """One line of the table."""
        how = f"stands for {self.seconds:.0f} s" if is_standing else "moves"
        return f"rank {self.rank} {how} at {self.at}{', waiting for other ranks' if self.waits else ''}"

    @property
    def at(self) -> str:
        """The place, and what is written there."""
        return f"{self.place} `{self.source}`" if self.source else self.place


class Moving(Protocol):
    """Something that counts what the training loop does."""

    @property
    def progress(self) -> Hashable:
        """Another value after every micro-batch and every batch."""
        ...


def watch_for_hangs(world: World, clock: Moving) -> None:
    """The calling thread is watched until the world is left; one thread watches all loops of a world.

    Raises:
        SettingError: ACCELERATE_HANG_SECONDS is no number.
    """
    meeting = world.meeting
    seconds = _asked_seconds()
    if meeting is None or seconds == 0 or world.size == 1:
        return
    if meeting.watch is None:
        on_host = world.kind.name == "cpu"
        meeting.watch = HangWatch(meeting.store, world.rank, world.size, seconds, threading.get_ident(), on_host)
        meeting.watch.start()
        release_before_leaving(meeting.watch.stop)
    meeting.watch.clocks.add(clock)


def _asked_seconds() -> float:
    text = read(VARIABLE) or str(DEFAULT_SECONDS)
    try:
        return max(0.0, float(text))
    except ValueError:
        raise SettingError(f"{VARIABLE}={text!r}: give seconds without progress, or 0 for no watch.") from None


@final
class HangWatch:
    """The thread that watches one rank.

    Args:
        store: shared by the ranks of the world.
        seconds: how long a rank may stand before all are asked.
        thread_id: the thread that is watched.
        on_host: backward passes compute on the host, so that one that uses no processor waits for other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float, thread_id: int, on_host: bool = False) -> None:
        from ..torch_private.distributed import PrefixStore

        # A connection of its own: while this thread waits on a dead one, whoever else used it would wait too.
        with contextlib.suppress(AttributeError, RuntimeError):  # an older torch; a store without connections
            store = store.clone()
        self._store = PrefixStore("hang", store)
        self._rank, self._size, self._seconds, self._thread_id = rank, size, seconds, thread_id
        self._tick_seconds = max(min(_TICK_SECONDS, seconds / 4), size / _RANKS_PER_TICK)
        self.clocks: WeakSet[Moving] = WeakSet()
        self._signature: Hashable = ()
        self._moved_at, self._cpu_at = time.monotonic(), time.process_time()
        self._on_host = on_host
        self._listens_until = 0.0  # after a question, somebody may say that this rank is to be ended
        self._patience = seconds  # grows with every verdict about one and the same hang
        self._num_answered = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)

    def start(self) -> None:
        """The thread runs."""
        self._thread.start()

    def stop(self) -> None:
        """The thread has ended, unless the store keeps it waiting."""
        self._over.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            self._num_answered = self._store.add("questions", 0)
            while not self._over.wait(self._pause_seconds()):
                self._look()
        except RuntimeError:
            return  # the store is gone with its process: every other call says so

    def _pause_seconds(self) -> float:
        """Shorter after a question: whoever asked may ask again soon, or have this rank ended."""
        return self._tick_seconds / (4 if time.monotonic() < self._listens_until else 1)

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        # Where a loop spends most of its time in one call, its stack looks the same every time: then its counts tell.
        signature = (_signature_of(frame), *(clock.progress for clock in list(self.clocks)))
        if signature != self._signature:
            self._signature, self._moved_at, self._patience = signature, time.monotonic(), self._seconds
            self._cpu_at = time.process_time()
        standing = time.monotonic() - self._moved_at
        num_questions = self._store.add("questions", 0)
        if num_questions > self._num_answered:
            self._answer(num_questions, frame, standing)
        elif standing >= self._patience and self._store.add(f"{num_questions}/asking", 1) == 1:
            number = self._store.add("questions", 1)
            self._answer(number, frame, standing)
            del frame  # it is kept alive no longer than it is looked at
            self._judge(number)
        elif time.monotonic() < self._listens_until and self._store.check([f"end/{self._rank}"]):
            self._end(self._store.get(f"end/{self._rank}").decode())

    def _answer(self, number: int, frame: FrameType, standing: float) -> None:
        self._num_answered = number
        self._patience = max(self._seconds, 2 * standing)
        self._listens_until = time.monotonic() + _LISTENING_SECONDS
        is_idle = time.process_time() - self._cpu_at < _IDLE_SHARE * standing
        stand = replace(_stand(self._rank, standing, frame), is_stuck=is_idle and _is_in_torch(frame, self._on_host))
        self._store.set(f"{number}/{self._rank}", json.dumps(asdict(stand)))

    def _judge(self, number: int) -> None:
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        for _ in range(_NUM_TICKS_TO_ANSWER):
            if self._store.check(keys) or self._over.wait(self._tick_seconds):
                break
        stands = [Stand(**json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]
        if not self._over.is_set():
            _log.error("%s", verdict(stands, self._seconds))

    # -- asked by a rank that waits for others ---------------------------------------------------------------

    def ask_for_stuck(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of ``ranks`` that wait in collectives of torch's, and where. From the watched thread."""
        number = self._store.add("questions", 1)
        keys = [f"{number}/{rank}" for rank in ranks]
        until = time.monotonic() + _NUM_TICKS_TO_ANSWER * self._tick_seconds
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(self._tick_seconds / 10)
        stands = [Stand(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]
        return {one.rank: one.at for one in stands if one.is_stuck and one.seconds >= _STUCK_SECONDS}

    def end_stuck(self, ranks: Sequence[int], reason: str) -> None:
        """The given ranks stop waiting: what they are in raises, and their processes end."""
        for rank in ranks:
            self._store.set(f"end/{rank}", reason)

    def _end(self, reason: str) -> None:
        self._listens_until = 0.0
        _log.error("%s", reason)
        before = sys.excepthook

        def explain(*error: Any) -> None:
            before(*error)
            print(f"Why: {reason}", file=sys.stderr)

        sys.excepthook = explain
        signature = _signature_of(sys._current_frames().get(self._thread_id))
        close_connections()
        if self._over.wait(_ENDING_SECONDS):
            return
        if _signature_of(sys._current_frames().get(self._thread_id)) == signature:  # nothing else moves it
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)


def close_connections() -> None:
    """Every TCP connection of this process ends, except those to and from a store: what waits on one raises."""
    from ..torch_private.distributed import default_store

    stores = {str(getattr(default_store(), "port", ""))} | {read("MASTER_PORT") or ""}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            ports = {str(connection.getsockname()[1]), str(connection.getpeername()[1])}
            if not ports & stores:
                connection.shutdown(socket.SHUT_RDWR)


def _is_in_torch(frame: FrameType | None, on_host: bool) -> bool:
    """Whether the innermost call is one of torch's collectives, or a backward pass that may hold one."""
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if not name.endswith(_PASSED_THROUGH):
            return "torch/distributed/" in name or (on_host and name.endswith("torch/autograd/graph.py"))
        frame = frame.f_back
    return False


def _signature_of(frame: FrameType | None) -> tuple[int, ...]:
    """What changes with every step that the thread takes."""
    found: list[int] = []
    while frame is not None:
        found += (id(frame), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _stand(rank: int, seconds: float, frame: FrameType) -> Stand:
    current: FrameType | None = frame
    waits, nearest = False, None
    while current is not None:
        name = current.f_code.co_filename
        found = Frame(name, current.f_lineno, current.f_code.co_name)
        waits = waits or any(place in name.replace(os.sep, "/") for place in _MEETING_PLACES)
        if nearest is None or found.is_own:
            nearest = found
        if found.is_own:
            break
        current = current.f_back
    assert nearest is not None
    source = linecache.getline(nearest.file, nearest.line).strip()
    return Stand(rank, seconds, f"{os.path.basename(nearest.file)}:{nearest.line}", source[:80], waits)


# ------------------------------------------------------------------------------------------------ the verdict


def verdict(stands: Sequence[Stand | None], seconds: float) -> str:
    """A table of the ranks, and who is waited for; None stands for a rank that gave no answer."""
    absent = [rank for rank, stand in enumerate(stands) if stand is None]
    known = [stand for stand in stands if stand is not None]
    standing = [stand for stand in known if stand.seconds >= seconds / 2]
    lines = [f"No progress for {seconds:.0f} s: {len(standing)} of {len(stands)} ranks stand still."]
    lines += [f"  {stand.describe(stand in standing)}" for stand in known]
    lines += [f"  rank {rank} gives no answer" for rank in absent]
    lines.append(f"Verdict: {_who_is_waited_for(known, standing, absent)}")
    lines.append(f"({VARIABLE}=SECONDS sets when this is asked; 0 never asks.)")
    return "\n".join(lines)


def _who_is_waited_for(known: list[Stand], standing: list[Stand], absent: list[int]) -> str:
    if absent:
        return f"{_ranks(absent)} gives no answer: its process has ended, is stopped, or its host is cut off."
    elsewhere = [stand for stand in known if stand not in standing]
    if not elsewhere:
        elsewhere = [stand for stand in standing if not stand.waits]
        if len(elsewhere) == len(standing):
            elsewhere = []
    places = _by_place(standing)
    if not elsewhere and len(places) > 1:
        elsewhere = places[0]
        if len(places[0]) == len(places[1]):
            calls = "; ".join(f"{_ranks([stand.rank for stand in group])} at {group[0].at}" for group in places)
            return f"the ranks wait for each other in different calls: {calls}."
    if not elsewhere:
        return f"all ranks stand at {known[0].at}: they wait for something that is no rank (data, a disk, a lock)."
    where = "; ".join(sorted({stand.at for stand in elsewhere}))
    is_moving = elsewhere[0] not in standing
    still = ", which still moves" if is_moving else ""
    return f"the others wait for {_ranks([stand.rank for stand in elsewhere])}{still}, at {where}."


def _by_place(standing: list[Stand]) -> list[list[Stand]]:
    """Those at one place together, the fewest first."""
    places: dict[str, list[Stand]] = {}
    for stand in standing:
        places.setdefault(stand.place, []).append(stand)
    return sorted(places.values(), key=len)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
