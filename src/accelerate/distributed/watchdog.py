"""Hang detection: a verdict that names the stuck ranks, the source line each is at, and the rank they wait for.

A thread of each rank reads the stack position of the rank's own thread. When that hasn't changed for a while, one rank
asks all others for theirs through the store of the process group, never through a collective, and logs the verdict. So
a rank that is stuck in DDP's own all-reduce is noticed too, long before the group's timeout.
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
from .failures import Frame
from .world import release_before_leaving

if TYPE_CHECKING:
    from .world import World

_log = logging.getLogger(__name__)

VARIABLE: Final = "ACCELERATE_HANG_SECONDS"
DEFAULT_SECONDS: Final = 300.0
_TICK_SECONDS: Final = 1.0
_RANKS_PER_TICK: Final = 128  # limits the rate of requests to the store
_NUM_TICKS_TO_ANSWER: Final = 4
#: A rank that is in one and the same collective of torch's for so long, and uses almost no CPU time, waits there.
_STUCK_SECONDS: Final = 2.0
_IDLE_FRACTION: Final = 0.2
_FREQUENT_SECONDS: Final = 15.0
_ENDING_SECONDS: Final = 5.0
_PASSED_THROUGH: Final = ("torch/_ops.py", "torch/autograd/function.py", "torch/utils/_contextlib.py")
#: A rank whose stack has one of these files waits for other ranks.
_WAITING_FILES: Final = (
    *("torch/distributed/", "torch/autograd/"),
    *(f"accelerate/distributed/{name}.py" for name in ("store_client", "call_rendezvous", "rendezvous", "collectives")),
)


@final
@dataclass(frozen=True)
class StackPosition:
    """The line that one rank's thread is at, and since when.

    Attributes:
        seconds: since its thread last made progress.
        place: the innermost line of the user's code, as ``train.py:31``.
        source: the text of that line.
        waits: it is inside something that needs other ranks.
        is_stuck: it is inside a collective of torch's, and uses no CPU time.
    """

    rank: int
    seconds: float
    place: str
    source: str
    waits: bool
    is_stuck: bool = False

    def describe(self, has_stopped: bool) -> str:
        """Return this rank's line of the table."""
        how = f"has been stuck for {self.seconds:.0f} s" if has_stopped else "makes progress"
        return f"rank {self.rank} {how} at {self.at}{', waiting for other ranks' if self.waits else ''}"

    @property
    def at(self) -> str:
        """The place, with its source line."""
        return f"{self.place} `{self.source}`" if self.source else self.place


class ProgressCounter(Protocol):
    """A counter of the training loop's progress."""

    @property
    def progress(self) -> Hashable:
        """A value that changes with every micro-batch and every batch."""
        ...


def watch_for_hangs(world: World, counter: ProgressCounter) -> None:
    """Watch the calling thread until the world is left; one thread watches all loops of a world.

    Raises:
        SettingError: ACCELERATE_HANG_SECONDS is no number.
    """
    coordinator = world.coordinator
    seconds = _hang_seconds()
    if coordinator is None or seconds == 0 or world.size == 1:
        return
    if coordinator.watch is None:
        sees_backward = world.kind.name == "cpu"
        coordinator.watch = HangWatch(
            coordinator.store, world.rank, world.size, seconds, threading.get_ident(), sees_backward
        )
        coordinator.watch.start()
        release_before_leaving(coordinator.watch.stop)
    coordinator.watch.counters.add(counter)


def _hang_seconds() -> float:
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
        seconds: how long a rank may make no progress before all ranks are asked for their positions.
        thread_id: of the watched thread.
        sees_backward: backward passes compute on the host, so that one that uses no processor waits for other ranks.
    """

    def __init__(
        self, store: Any, rank: int, size: int, seconds: float, thread_id: int, sees_backward: bool = False
    ) -> None:
        from ..torch_private.distributed import PrefixStore

        # A connection of its own: while this thread waits on a dead one, other users of it would wait too.
        with contextlib.suppress(AttributeError, RuntimeError):  # an older torch; a store without connections
            store = store.clone()
        self._store = PrefixStore("hang", store)
        self._rank, self._size, self._seconds, self._thread_id = rank, size, seconds, thread_id
        self._tick_seconds = max(min(_TICK_SECONDS, seconds / 4), size / _RANKS_PER_TICK)
        self.counters: WeakSet[ProgressCounter] = WeakSet()
        self._signature: Hashable = ()
        self._progress_at, self._cpu_at = time.monotonic(), time.process_time()
        self.sees_backward = sees_backward
        self._frequent_until = 0.0  # after a question, a rank may request that this one is ended
        self._threshold = seconds  # grows with every verdict about the same hang
        self._num_answered = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, unless it waits for the store."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            self._num_answered = self._store.add("questions", 0)
            while not self._stopped.wait(self._pause_seconds()):
                self._check()
        except RuntimeError:
            return  # the process that serves the store has ended, which every other call reports

    def _pause_seconds(self) -> float:
        """Return the seconds to the next check: fewer after a question, which others may follow."""
        return self._tick_seconds / (4 if time.monotonic() < self._frequent_until else 1)

    def _check(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        # Where a loop spends most of its time in one call, its stack is the same at each check: then counters tell.
        signature = (_signature_of(frame), *(counter.progress for counter in list(self.counters)))
        if signature != self._signature:
            self._signature, self._progress_at, self._threshold = signature, time.monotonic(), self._seconds
            self._cpu_at = time.process_time()
        stalled_seconds = time.monotonic() - self._progress_at
        num_questions = self._store.add("questions", 0)
        if num_questions > self._num_answered:
            self._publish_position(num_questions, frame, stalled_seconds)
        elif stalled_seconds >= self._threshold and self._store.add(f"{num_questions}/asking", 1) == 1:
            number = self._store.add("questions", 1)
            self._publish_position(number, frame, stalled_seconds)
            del frame  # not kept alive longer than it is needed
            self._log_verdict(number)
        elif time.monotonic() < self._frequent_until and self._store.check([f"end/{self._rank}"]):
            self._end_process(self._store.get(f"end/{self._rank}").decode())

    def _publish_position(self, number: int, frame: FrameType, stalled_seconds: float) -> None:
        self._num_answered = number
        self._threshold = max(self._seconds, 2 * stalled_seconds)
        self._frequent_until = time.monotonic() + _FREQUENT_SECONDS
        is_idle = time.process_time() - self._cpu_at < _IDLE_FRACTION * stalled_seconds
        position = replace(
            _position_of(self._rank, stalled_seconds, frame),
            is_stuck=is_idle and _is_in_torch(frame, self.sees_backward),
        )
        self._store.set(f"{number}/{self._rank}", json.dumps(asdict(position)))

    def _log_verdict(self, number: int) -> None:
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        for _ in range(_NUM_TICKS_TO_ANSWER):
            if self._store.check(keys) or self._stopped.wait(self._tick_seconds):
                break
        positions = [
            StackPosition(**json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys
        ]
        if not self._stopped.is_set():
            _log.error("%s", verdict(positions, self._seconds))

    # -- questions of a rank that waits for others ---------------------------------------------------------

    def ask_for_stuck(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return those of ``ranks`` that wait in collectives of torch's, and where; for the watched thread."""
        number = self._store.add("questions", 1)
        keys = [f"{number}/{rank}" for rank in ranks]
        until = time.monotonic() + _NUM_TICKS_TO_ANSWER * self._tick_seconds
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(self._tick_seconds / 10)
        positions = [StackPosition(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]
        return {one.rank: one.at for one in positions if one.is_stuck and one.seconds >= _STUCK_SECONDS}

    def end_stuck(self, ranks: Sequence[int], reason: str) -> None:
        """End the given ranks: their collectives raise, and their processes exit."""
        for rank in ranks:
            self._store.set(f"end/{rank}", reason)

    def _end_process(self, reason: str) -> None:
        self._frequent_until = 0.0
        _log.error("%s", reason)
        before = sys.excepthook

        def explain(*error: Any) -> None:
            before(*error)
            print(f"Why: {reason}", file=sys.stderr)

        sys.excepthook = explain
        signature = _signature_of(sys._current_frames().get(self._thread_id))
        close_connections()
        if self._stopped.wait(_ENDING_SECONDS):
            return
        if _signature_of(sys._current_frames().get(self._thread_id)) == signature:  # nothing else ends it
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)


def close_connections() -> None:
    """Close all TCP connections of this process, except those of a store, so that what waits on one raises."""
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
    """Return whether the innermost call is one of torch's collectives, or a backward pass that may contain one."""
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if not name.endswith(_PASSED_THROUGH):
            return "torch/distributed/" in name or (on_host and name.endswith("torch/autograd/graph.py"))
        frame = frame.f_back
    return False


def _signature_of(frame: FrameType | None) -> tuple[int, ...]:
    """Return a value that changes with every instruction that the thread executes."""
    found: list[int] = []
    while frame is not None:
        found += (id(frame), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _position_of(rank: int, seconds: float, frame: FrameType) -> StackPosition:
    current: FrameType | None = frame
    waits, nearest = False, None
    while current is not None:
        name = current.f_code.co_filename
        found = Frame(name, current.f_lineno, current.f_code.co_name)
        waits = waits or any(place in name.replace(os.sep, "/") for place in _WAITING_FILES)
        if nearest is None or found.is_own:
            nearest = found
        if found.is_own:
            break
        current = current.f_back
    assert nearest is not None
    source = linecache.getline(nearest.file, nearest.line).strip()
    return StackPosition(rank, seconds, f"{os.path.basename(nearest.file)}:{nearest.line}", source[:80], waits)


# -- the verdict -------------------------------------------------------------------------------------------


def verdict(positions: Sequence[StackPosition | None], seconds: float) -> str:
    """Format a table of the ranks and the rank that is waited for; None means that a rank didn't respond."""
    absent = [rank for rank, position in enumerate(positions) if position is None]
    known = [position for position in positions if position is not None]
    stuck = [position for position in known if position.seconds >= seconds / 2]
    lines = [f"No progress for {seconds:.0f} s: {len(stuck)} of {len(positions)} ranks are stuck."]
    lines += [f"  {position.describe(position in stuck)}" for position in known]
    lines += [f"  rank {rank} doesn't respond" for rank in absent]
    lines.append(f"Verdict: {_who_is_waited_for(known, stuck, absent)}")
    lines.append(f"({VARIABLE}=SECONDS sets the time without progress; 0 switches this off.)")
    return "\n".join(lines)


def _who_is_waited_for(known: list[StackPosition], stuck: list[StackPosition], absent: list[int]) -> str:
    if absent:
        return f"{_ranks(absent)} doesn't respond: its process has ended, is stopped, or its host is cut off."
    elsewhere = [position for position in known if position not in stuck]
    if not elsewhere:
        elsewhere = [position for position in stuck if not position.waits]
        if len(elsewhere) == len(stuck):
            elsewhere = []
    places = _by_place(stuck)
    if not elsewhere and len(places) > 1:
        elsewhere = places[0]
        if len(places[0]) == len(places[1]):
            calls = "; ".join(f"{_ranks([position.rank for position in group])} at {group[0].at}" for group in places)
            return f"the ranks wait for each other in different calls: {calls}."
    if not elsewhere:
        return (
            f"all ranks are stuck at {known[0].at}: they wait for something other than a rank (data, a disk, a lock)."
        )
    where = "; ".join(sorted({position.at for position in elsewhere}))
    has_progress = elsewhere[0] not in stuck
    still = ", which still makes progress" if has_progress else ""
    return f"the others wait for {_ranks([position.rank for position in elsewhere])}{still}, at {where}."


def _by_place(stuck: list[StackPosition]) -> list[list[StackPosition]]:
    """Group the positions by place, the smallest groups first."""
    places: dict[str, list[StackPosition]] = {}
    for position in stuck:
        places.setdefault(position.place, []).append(position)
    return sorted(places.values(), key=len)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
