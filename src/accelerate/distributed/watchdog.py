"""Hang detection: a verdict that names the stuck ranks, the source line each is at, and the rank they wait for.

A thread on each rank reads the stack position of the training thread. If it hasn't changed for a while, one rank asks
all others for theirs through the process group's store, never through a collective, and logs the verdict. This also
finds a rank that is stuck in DDP's own all-reduce, long before the group's timeout.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import json
import linecache
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, final
from weakref import WeakSet

from ..errors import SettingError
from ..settings.env import read
from ..torch_private.distributed import set_keys
from ..wording import by_number, some_ranks
from .failures import Frame
from .flight_record import FailureHook, RankRecord, compare, shared_folder, write_own, write_summary
from .store_requests import delete_keys, read_present

if TYPE_CHECKING:
    from ..torch_private.distributed import Store
    from .store_client import Coordinator
    from .store_requests import Wait
    from .world import World

Response = TypeVar("Response")

_log = logging.getLogger(__name__)

VARIABLE: Final = "ACCELERATE_HANG_SECONDS"
DEFAULT_SECONDS: Final = 300.0
_TICK_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 4.0
#: A rank that ends by an exception waits this long for the others' flight records, and they for it.
_COLLECTING_SECONDS: Final = 3.0
#: ... and this long once its launcher has told it to stop.
_LAST_SECONDS: Final = 0.1
_STORE_TIMEOUT_SECONDS: Final = 60.0
#: The questions to a rank: nothing (only other ranks are asked); its position; its position and flight record, which it
#: also writes to a file; the same without the file. Any other text is the reason for which the rank has to end.
_NOTHING: Final = "-"
_WHERE: Final = "?"
_WHERE_AND_RECORD: Final = "??"
_RECORD: Final = "???"
_POSITIONS: Final = (_WHERE, _WHERE_AND_RECORD, _RECORD)
#: A rank counts as waiting in a torch collective after it has been there this long and hardly used the CPU.
_STUCK_SECONDS: Final = 2.0
_IDLE_FRACTION: Final = 0.2
_NUM_LOOKS: Final = 5
_LOOK_SECONDS: Final = 0.01
_ENDING_SECONDS: Final = 5.0
#: Beyond this many ranks, a verdict has a line for each place instead of each rank.
_LARGEST_TABLE: Final = 16
#: In a larger world, the list of ranks at one place shows this many of them.
_NUM_SHOWN: Final = 3
_PASSED_THROUGH: Final = (
    *("torch/_ops.py", "torch/_library/autograd.py"),
    *("torch/autograd/function.py", "torch/utils/_contextlib.py"),
)
#: A rank whose stack has one of these files waits for other ranks.
_WAITING_FILES: Final = (
    *("torch/distributed/", "torch/autograd/"),
    *(
        f"accelerate/distributed/{name}.py"
        for name in ("store_client", "store_requests", "call_rendezvous", "rendezvous", "collectives")
    ),
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
        is_stuck: it is inside a torch collective, and uses almost no CPU time.
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
        """The place and its source line."""
        return f"{self.place} `{self.source}`" if self.source else self.place


#: A rank's position, and its flight record if that was requested.
Answer = tuple[StackPosition, RankRecord | None]


class ProgressCounter(Protocol):
    """A counter of the training loop's progress."""

    @property
    def progress(self) -> Hashable:
        """A value that changes with every micro-batch and every batch."""
        ...


def watch_for_hangs(world: World, counter: ProgressCounter, project_dir: str | None = None) -> None:
    """Watch the calling thread until the process leaves its world; one thread watches all loops of a world.

    Args:
        project_dir: where flight records are written.

    Raises:
        SettingError: ACCELERATE_HANG_SECONDS isn't a number.
    """
    coordinator = world.coordinator
    seconds = hang_seconds()
    if coordinator is None or world.size == 1:
        return
    hook = FailureHook.install()
    if seconds == 0:
        return
    if coordinator.watch is None:
        sees_backward = world.kind.name == "cpu"
        coordinator.watch = HangWatch(coordinator, seconds, threading.get_ident(), sees_backward)
        coordinator.watch.start()  # until the coordinator leaves
        hook.collect = coordinator.watch.report_of_failure
    coordinator.watch.counters.add(counter)
    coordinator.watch.project_dir = project_dir or coordinator.watch.project_dir


def hang_seconds() -> float:
    """Return the seconds without progress after which a rank counts as hung; 0 for never.

    Raises:
        SettingError: ACCELERATE_HANG_SECONDS isn't a number.
    """
    text = read(VARIABLE) or str(DEFAULT_SECONDS)
    try:
        return max(0.0, float(text))
    except ValueError:
        raise SettingError(f"{VARIABLE}={text!r}: give seconds without progress, or 0 for no watch.") from None


@final
class HangWatch:
    """The thread that watches one rank, and answers other ranks' questions about it.

    Until a rank asks, it makes no requests: it waits in the store for its own key.

    Args:
        coordinator: of the rank's world.
        seconds: how long a rank may make no progress before all ranks are asked for their positions.
        thread_id: of the watched thread.
        sees_backward: backward passes compute on the CPU, so one that uses no CPU time waits for other ranks.
    """

    def __init__(self, coordinator: Coordinator, seconds: float, thread_id: int, sees_backward: bool = False) -> None:
        self._coordinator, self._store = coordinator, coordinator.store
        self._rank, self._size = coordinator.rank, coordinator.size
        self._seconds, self._thread_id = seconds, thread_id
        self._tick_seconds = min(_TICK_SECONDS, seconds / 4)
        self.counters: WeakSet[ProgressCounter] = WeakSet()
        self._signature: Hashable = ()
        self._progress_at, self._cpu_at = time.monotonic(), time.process_time()
        self.sees_backward = sees_backward
        self.project_dir: str | None = None  # where flight records are written
        self._threshold = seconds  # grows with every verdict about the same hang
        self._num_heard = 0  # questions that this rank has received
        self._num_answered = 0  # the last of them that it has answered
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def begin_to_stop(self) -> dict[str, str]:
        """Stop checking, and return the keys and values to set in the store to end the thread."""
        self._stopped.set()
        return {self._question_key(self._rank, self._num_heard + 1): _NOTHING}

    def join(self) -> None:
        """Wait for the end of the thread, unless it waits for the store; later failures collect no records."""
        FailureHook.forget(self.report_of_failure)
        self._thread.join(timeout=_JOIN_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended or doesn't respond; other calls report that
            self._num_heard = self._request(lambda: self._store.add("hang/questions", 0))
            answer: Callable[[Store], object] | None = None
            while not self._stopped.is_set():
                key = self._question_key(self._rank, self._num_heard + 1)
                with self._coordinator.waits.start(key, after=answer) as question:
                    while not question.is_over(self._tick_seconds):
                        if self._stopped.is_set():
                            question.is_over(_JOIN_SECONDS)  # the value that ends it is on its way
                            return
                        self._look()
                    self._num_heard += 1
                    if self._stopped.is_set():
                        return
                    answer = self._answer_to(self._num_heard, question.response()[0])

    def _request(self, call: Callable[[], Response]) -> Response:
        return self._coordinator.request(call, _STORE_TIMEOUT_SECONDS)

    def _question_key(self, rank: int, number: int) -> str:
        return f"hang/{rank}/question/{number}"

    def _look(self) -> None:
        """If this rank has made no progress for too long, ask all ranks for their positions and log the verdict."""
        stalled_seconds = self._stalled_seconds()
        if stalled_seconds < self._threshold:
            return
        self._threshold = self._next_threshold(stalled_seconds)
        number = self._num_heard
        if self._request(lambda: self._store.add(f"hang/{number}/asking", 1)) > 1:
            return
        number = self._ask(range(self._size), _WHERE_AND_RECORD)
        answer = self._position_as_answer(number, _WHERE_AND_RECORD)
        self._request(lambda: answer(self._store))
        self._log_verdict(number)

    def _next_threshold(self, stalled_seconds: float) -> float:
        """Return the stalled seconds after which to ask again: not before the answers to this question can have come.

        Each answer replaces the previous one.
        """
        return max(self._seconds, 2 * stalled_seconds, stalled_seconds + 2 * _ANSWER_SECONDS)

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the watched thread's last known progress."""
        return time.monotonic() - self._progress_at

    def _stalled_seconds(self) -> float:
        """Look at the watched thread, and return the seconds since its last progress."""
        frame = _frame_of(self._thread_id)
        if frame is None:
            return 0.0
        # If a loop spends most of its time in one call, its stack is the same at each look; the counters show its
        # progress.
        signature = (_signature_of(frame), *(counter.progress for counter in list(self.counters)))
        if signature != self._signature:
            self._signature, self._progress_at, self._threshold = signature, time.monotonic(), self._seconds
            self._cpu_at = time.process_time()
        return time.monotonic() - self._progress_at

    def _ask(self, ranks: Sequence[int], question: str) -> int:
        """Ask `ranks` the question, and tell the others to ignore it; return the number of the question."""
        number = self._request(lambda: self._store.add("hang/questions", 1))
        asked = set(ranks)
        questions = {
            self._question_key(rank, number): question if rank in asked else _NOTHING for rank in range(self._size)
        }
        self._request(lambda: set_keys(self._store, questions))
        return number

    def _answer_to(self, number: int, question: str) -> Callable[[Store], object]:
        """Return the requests that answer a question with this rank's position; end this process if told to.

        They delete the question's key, which only the connection that has read it may do: a woken wait reads its key in
        a second request, and would find nothing if the key were deleted between the two.
        """
        is_asked = question in _POSITIONS and number != self._num_answered
        answer = self._position_as_answer(number, question) if is_asked else None
        if question not in (*_POSITIONS, _NOTHING, ""):
            self._end_process(question)

        def publish(store: Store) -> None:
            if answer is not None:
                answer(store)
            delete_keys(store, self._question_key(self._rank, number))

        return publish

    def _position_as_answer(self, number: int, question: str) -> Callable[[Store], None]:
        """Return the requests that publish this rank's position, in place of its previous answer."""
        before, self._num_answered = self._num_answered, number
        position = self._position(question != _WHERE)

        def publish(store: Store) -> None:
            if position:
                store.set(f"hang/{number}/{self._rank}", position)
            if before:
                delete_keys(store, f"hang/{before}/{self._rank}")
            if question == _WHERE_AND_RECORD and (folder := shared_folder(self.project_dir)) is not None:
                write_own(folder, self._rank)

        return publish

    def _position(self, with_record: bool = False) -> str:
        """Return the watched thread's position, encoded for the store; empty once the thread has ended."""
        stalled_seconds = self._stalled_seconds()
        frame = _frame_of(self._thread_id)
        if frame is None:
            return ""
        self._threshold = self._next_threshold(stalled_seconds)
        is_idle = time.process_time() - self._cpu_at < _IDLE_FRACTION * stalled_seconds
        position = replace(
            _position_of(self._rank, stalled_seconds, frame),
            is_stuck=is_idle and _is_in_torch(frame, self.sees_backward) and _all_threads_sleep(),
        )
        return json.dumps([asdict(position), RankRecord.own().encoded() if with_record else None])

    def _answers(
        self,
        number: int,
        ranks: Sequence[int],
        seconds: float = _ANSWER_SECONDS,
        is_urgent: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Return the answers of `ranks` that arrive in time, or before `is_urgent()` is true."""
        keys = [f"hang/{number}/{rank}" for rank in ranks]
        if not keys:
            return []
        with self._coordinator.waits.start(*keys) as answers:
            if _is_over(answers, seconds, is_urgent):
                return [_read_answer(text) for text in answers.response() if text]
        found = read_present(self._store, keys, self._request)
        return [_read_answer(text) for text in found.values() if text]

    def _log_verdict(self, number: int) -> None:
        positions: list[StackPosition | None] = [None] * self._size
        records: dict[int, RankRecord] = {}
        for position, record in self._answers(number, range(self._size)):
            positions[position.rank] = position
            if record is not None:
                records[position.rank] = record
        if self._stopped.is_set():
            return
        text = verdict(positions, self._seconds, compare(records, self._size))
        if any(record.collectives for record in records.values()):
            text += f"\n{self._written(text, records)}"
        _log.error("%s", text)

    def _written(self, text: str, records: Mapping[int, RankRecord]) -> str:
        """Write the report and the collected flight records to one file; return a line with its path."""
        path = write_summary(shared_folder(self.project_dir), text, records, self._size)
        return f"Flight records of {some_ranks(records, 16)}: {path}"

    # -- a rank that ends by an exception ------------------------------------------------------------------

    def report_of_failure(self, is_urgent: Callable[[], bool]) -> str:
        """Return the collectives in which ranks wait for each other; empty if none does.

        The first rank that fails asks all. Another rank returns nothing, after the first one has collected the answers.

        Raises:
            CollectiveError: the store has ended.
        """
        request, store = self._coordinator.request, self._store
        if request(lambda: store.add("failure/reports", 1), _COLLECTING_SECONDS) > 1:
            with self._coordinator.waits.start("failure/collected") as collected:
                _is_over(collected, _COLLECTING_SECONDS + _LAST_SECONDS)
            return ""
        number = self._ask(range(self._size), _RECORD)
        answers = self._answers(number, range(self._size), _COLLECTING_SECONDS, is_urgent)
        request(lambda: store.set("failure/collected", "1"), _COLLECTING_SECONDS)
        records = {position.rank: record for position, record in answers if record is not None}
        sentences = compare(records, self._size)
        if not sentences:
            return ""
        lines = [f"Collectives: {sentence}" for sentence in sentences]
        if absent := [rank for rank in range(self._size) if rank not in records]:
            how = by_number(absent, "it has ended, is stopped, or is", "they have ended, are stopped, or are")
            lines.insert(0, f"No flight record of {some_ranks(absent, 16)}: {how} cut off.")
        text = "\n".join(lines)
        return f"{text}\n{self._written(text, records)}"

    # -- questions of a rank that waits for others ---------------------------------------------------------

    def ask_for_stuck(self, ranks: Sequence[int], at_least_seconds: float = 0.0) -> dict[int, str]:
        """Return those of ``ranks`` that wait in torch's collectives, with their positions.

        Only the watched thread may call it.
        """
        seconds = max(at_least_seconds, _STUCK_SECONDS)
        number = self._ask(ranks, _WHERE)
        positions = [position for position, _ in self._answers(number, ranks)]
        return {one.rank: one.at for one in positions if one.is_stuck and one.seconds >= seconds}

    def end_stuck(self, ranks: Sequence[int], reason: str) -> None:
        """End the given ranks: their collectives raise, and their processes exit."""
        self._ask(ranks, reason)

    def _end_process(self, reason: str) -> None:
        _log.error("%s", reason)
        before = sys.excepthook

        def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            print(f"Why: {reason}", file=sys.stderr)

        sys.excepthook = explain
        signature = _signature_of(_frame_of(self._thread_id))
        close_connections()
        if self._stopped.wait(_ENDING_SECONDS):
            return
        if _signature_of(_frame_of(self._thread_id)) == signature:  # nothing else ends it
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)


def _is_over(wait: Wait[list[str]], seconds: float, is_urgent: Callable[[], bool] | None = None) -> bool:
    """Wait up to `seconds`, or a moment if it is urgent, and return whether the wait has ended."""
    if is_urgent is None:
        return wait.is_over(seconds)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not is_urgent():
        if wait.is_over(_LAST_SECONDS):
            return True
    return wait.is_over(_LAST_SECONDS)


def close_connections() -> None:
    """Close all TCP connections of this process except a store's, so that threads waiting on them raise."""
    from ..torch_private.distributed import default_store

    stores = {str(getattr(default_store(), "port", ""))} | {read("MASTER_PORT") or ""}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            ports = {str(connection.getsockname()[1]), str(connection.getpeername()[1])}
            if not ports & stores:
                connection.shutdown(socket.SHUT_RDWR)


def _read_answer(text: str) -> Answer:
    position, record = json.loads(text)
    return StackPosition(**position), None if record is None else RankRecord.of(record)


def _is_in_torch(frame: FrameType | None, on_host: bool) -> bool:
    """Return whether the innermost call is one of torch's collectives, or a backward pass that may contain one."""
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if not name.endswith(_PASSED_THROUGH):
            return "torch/distributed/" in name or (on_host and name.endswith("torch/autograd/graph.py"))
        frame = frame.f_back
    return False


def _all_threads_sleep() -> bool:
    """Return whether all other threads of this process sleep, in each of a few samples.

    A computing thread gets little CPU time if there are more processes than cores, but it is always ready to run. Only
    Linux shows this; elsewhere the caller relies on the CPU time alone.
    """
    own = str(threading.get_native_id())
    for _ in range(_NUM_LOOKS):
        for file in glob.glob("/proc/self/task/[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                state = Path(file).read_text().rpartition(")")[2].split()[0]
                if state in "RD" and file.split("/")[-2] != own:  # ready or running; reading from a disk
                    return False
        time.sleep(_LOOK_SECONDS)
    return True


def _frame_of(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a thread; None once it has ended.

    `sys._current_frames` holds a lock that a starting thread needs. Before Python 3.11.9, a garbage collection inside
    it could run a finalizer that releases the GIL to such a thread, and the whole process stopped for ever (CPython
    issue 106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    # In a variable, the dict would be a cycle with this call's own frame, and all threads' variables would live on.
    frame = sys._current_frames().get(thread_id)
    if was_enabled:
        gc.enable()
    return frame


def _signature_of(frame: FrameType | None) -> tuple[int, ...]:
    """Return a value that changes with every instruction executed by the thread."""
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


def verdict(positions: Sequence[StackPosition | None], seconds: float, collectives: Sequence[str] = ()) -> str:
    """Format a table of the ranks and the rank they wait for; None means that a rank didn't respond.

    Args:
        collectives: sentences that compare the ranks' flight records.
    """
    absent = [rank for rank, position in enumerate(positions) if position is None]
    known = [position for position in positions if position is not None]
    stuck = [position for position in known if position.seconds >= seconds / 2]
    lines = [f"No progress for {seconds:.0f} s: {len(stuck)} of {len(positions)} ranks are stuck."]
    if len(positions) <= _LARGEST_TABLE:
        lines += [f"  {position.describe(position in stuck)}" for position in known]
        lines += [f"  rank {rank} doesn't respond" for rank in absent]
    else:
        lines += _table_by_place(known, stuck)
        lines += [f"  {some_ranks(absent, _NUM_SHOWN)} without a response"] if absent else []
    lines.append(f"Verdict: {_who_is_waited_for(known, stuck, absent)}")
    lines += [f"Collectives: {sentence}" for sentence in collectives]
    lines.append(f"({VARIABLE}=SECONDS sets the time without progress; 0 switches this off.)")
    return "\n".join(lines)


def _who_is_waited_for(known: list[StackPosition], stuck: list[StackPosition], absent: list[int]) -> str:
    if absent:
        how = by_number(
            absent,
            "doesn't respond: its process has ended, is stopped, or its host is",
            "don't respond: their processes have ended, are stopped, or their hosts are",
        )
        return f"{_ranks(absent)} {how} cut off."
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
    still = f", which still {by_number(elsewhere, 'makes', 'make')} progress" if has_progress else ""
    return f"the others wait for {_ranks([position.rank for position in elsewhere])}{still}, at {where}."


def _table_by_place(known: list[StackPosition], stuck: list[StackPosition]) -> list[str]:
    """Return one line per place for all ranks there, the places with the fewest ranks first."""
    stuck_ranks = {position.rank for position in stuck}
    groups = [
        group
        for has_stopped in (False, True)
        for group in _by_place([position for position in known if (position.rank in stuck_ranks) is has_stopped])
    ]
    lines: list[str] = []
    for group in groups[:_LARGEST_TABLE]:
        one = group[0]
        how = f"stuck for {one.seconds:.0f} s" if one.rank in stuck_ranks else "making progress"
        waits = ", waiting for other ranks" if one.waits else ""
        lines.append(f"  {some_ranks((position.rank for position in group), _NUM_SHOWN)}: {how} at {one.at}{waits}")
    return lines


def _by_place(stuck: list[StackPosition]) -> list[list[StackPosition]]:
    """Group the positions by place, the smallest groups first."""
    places: dict[str, list[StackPosition]] = {}
    for position in stuck:
        places.setdefault(position.place, []).append(position)
    return sorted(places.values(), key=len)


def _ranks(ranks: Sequence[int]) -> str:
    return some_ranks(ranks, _LARGEST_TABLE if len(ranks) <= _LARGEST_TABLE else _NUM_SHOWN)
