"""Compare torch's flight records of the ranks' last collectives, to find the rank that is behind.

torch numbers the collectives of each process group on each rank. If ranks wait for each other, the one with the lower
number hasn't made a call that the others have made. Without torch's record there is nothing to compare, and results are
empty. The exception hook of a failing rank adds the ranks' current collectives to its traceback.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, final

from ..errors import CollectiveError
from ..settings.env import read
from ..torch_private.distributed import flight_records, ranks_of_group
from ..wording import by_number, some_ranks
from .failures import OWN_COLLECTIVE, RECORDS_VARIABLE, is_about_another_rank, logs_of_launcher

#: How many of a rank's collectives are sent to the rank that compares.
_NUM_SENT: Final = 20
#: The rank lists of larger groups are sent only if the ranks are evenly spaced.
_LARGEST_LIST: Final = 64
_MOST_SENTENCES: Final = 4
_SHOWN_RANKS: Final = 8
_WRITE_SECONDS: Final = 1.0
_DEFAULT: Final = "default_pg"
_BYTES: Final = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
}
#: Collectives in which all ranks' tensors have the same shape.
_EQUAL_SHAPES: Final = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@final
@dataclass(frozen=True)
class Collective:
    """One collective that a rank has entered.

    Attributes:
        group: the backend and the name of its process group.
        number: its sequence number among that group's collectives on this rank.
        sizes: the shapes of this rank's input tensors.
        is_done: it has ended.
    """

    group: str
    description: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    is_done: bool

    def __str__(self) -> str:
        """``all_reduce #812 (4.2 MB, Float [1024, 1024]) of the default group``"""
        return f"{self.operation} #{self.number}{self._content} of {self.group_in_words}"

    @property
    def outline(self) -> str:
        """The operation, with dtype and shape if these must be equal on all ranks."""
        return f"{self.operation}{self._content if self.operation.lstrip('_').startswith(_EQUAL_SHAPES) else ''}"

    @property
    def group_in_words(self) -> str:
        """``the default group``, or ``group 3 (mesh_dp)``."""
        if self.description == _DEFAULT:
            return "the default group"
        name = self.group.partition(":")[2]
        return f"group {name}" + (f" ({self.description})" if self.description not in ("", "undefined") else "")

    @property
    def _content(self) -> str:
        num_bytes = sum(math.prod(shape) for shape in self.sizes) * _BYTES.get(self.dtype, 1)
        if not num_bytes:
            return ""
        shapes = f"{list(self.sizes[0])}" if len(self.sizes) == 1 else f"{len(self.sizes)} tensors"
        return f" ({_in_units(num_bytes)}, {self.dtype} {shapes})"


def _in_units(num_bytes: int) -> str:
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes} B"


def collectives_of(dump: str) -> list[Collective]:
    """Read torch's record, the oldest collective first, without point-to-point operations.

    torch marks a coalesced call as ended, but not its parts; they have the same number.
    """
    found: list[Collective] = []
    for entry in json.loads(dump).get("entries", ()):
        if entry["is_p2p"]:
            continue
        backend, _, operation = entry["profiling_name"].rpartition(":")
        name, description = entry["process_group"]
        found.append(
            Collective(
                f"{backend}:{name}", description, entry["collective_seq_id"], operation,
                tuple(tuple(shape) for shape in entry["input_sizes"]), next(iter(entry["input_dtypes"]), ""),
                bool(entry["retired"]) or entry["state"] == "completed",
            )
        )  # fmt: skip
    ended = {(one.group, one.number) for one in found if one.is_done}
    return [replace(one, is_done=(one.group, one.number) in ended) for one in found]


def own_collectives() -> list[Collective]:
    """Return this rank's recorded collectives; empty if torch keeps no record."""
    return [one for dump in flight_records() for one in collectives_of(dump)]


@final
@dataclass(frozen=True)
class RankRecord:
    """The part of a rank's record that is sent: each group's first unfinished and last collective, and the newest ones.

    Attributes:
        members: the ranks of the groups in which this rank waits, if known; without the default group.
    """

    collectives: tuple[Collective, ...] = ()
    members: Mapping[str, tuple[int, ...]] | None = None

    @classmethod
    def own(cls) -> RankRecord:
        """Return this rank's record."""
        collectives = _selected(own_collectives())
        waits_in = {one.group: one for one in collectives if not one.is_done and one.description != _DEFAULT}
        return cls(collectives, {name: tuple(ranks_of_group(name.partition(":")[2])) for name in waits_in})

    def encoded(self) -> list[object]:
        """Return the record as JSON values, to be sent."""
        members = {name: _packed(ranks) for name, ranks in (self.members or {}).items()}
        return [[list(asdict(one).values()) for one in self.collectives], members]

    @classmethod
    def of(cls, value: Sequence[object]) -> RankRecord:
        """Decode what `encoded` returned."""
        rows, packed = value
        assert isinstance(rows, list) and isinstance(packed, dict)
        collectives = tuple(
            Collective(group, text, number, operation, tuple(map(tuple, sizes)), dtype, is_done)
            for group, text, number, operation, sizes, dtype, is_done in rows
        )
        return cls(collectives, {name: _unpacked(ranks) for name, ranks in packed.items()})


def _selected(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    last = {one.group: one for one in collectives}
    first_open = {one.group: one for one in reversed(collectives) if not one.is_done}
    ordered = dict.fromkeys(chain(first_open.values(), last.values(), reversed(collectives)))
    return tuple(list(ordered)[:_NUM_SENT])


def _packed(ranks: Sequence[int]) -> dict[str, list[int]]:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step) if ranks else ()):
        return {"range": [ranks[0], ranks[-1] + 1, step]} if ranks else {"list": []}
    return {"list": list(ranks)} if len(ranks) <= _LARGEST_LIST else {"list": []}


def _unpacked(packed: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    return tuple(range(*packed["range"])) if "range" in packed else tuple(packed["list"])


# -- the comparison ----------------------------------------------------------------------------------------


def compare(records: Mapping[int, RankRecord], size: int) -> list[str]:
    """Return one sentence for each group with waiting ranks: which rank is behind, or how the calls differ."""
    groups: dict[str, tuple[int, ...]] = {}
    for rank, record in records.items():
        for one in record.collectives:
            if not one.is_done:
                known = (record.members or {}).get(one.group) or (range(size) if one.description == _DEFAULT else ())
                groups[one.group] = tuple(known) or (*groups.get(one.group, ()), rank)
    found = [_compared(records, group, members) for group, members in sorted(groups.items())]
    return found[:_MOST_SENTENCES]


def _compared(records: Mapping[int, RankRecord], group: str, members: Sequence[int]) -> str:
    entered = {
        rank: {one.number: one for one in records[rank].collectives if one.group == group}
        for rank in members
        if rank in records
    }
    number = min(one.number for calls in entered.values() for one in calls.values() if not one.is_done)
    inside = {rank: calls[number] for rank, calls in entered.items() if number in calls and not calls[number].is_done}
    outlines: dict[str, list[int]] = {}
    for rank, one in inside.items():
        outlines.setdefault(one.outline, []).append(rank)
    waited = next(iter(inside.values()))
    waiting = some_ranks(inside, _SHOWN_RANKS)
    if len(outlines) > 1:
        calls = "; ".join(f"{some_ranks(ranks, _SHOWN_RANKS)} in {outline}" for outline, ranks in outlines.items())
        return f"collective #{number} of {waited.group_in_words} isn't the same on all ranks: {calls}."
    behind = {rank: max(calls, default=0) for rank, calls in entered.items() if max(calls, default=0) < number}
    if not behind:
        return f"{waiting} {by_number(inside, 'waits', 'wait')} in {waited}."
    rank = min(behind, key=lambda one: (behind[one], one))
    missing = number - behind[rank]
    last = entered[rank].get(behind[rank])
    far = "one collective" if missing == 1 else f"{missing} collectives"
    others = [one for one in behind if one != rank]
    also = f" ({some_ranks(others, _SHOWN_RANKS)} too)" if others else ""
    return (
        f"rank {rank} is {far} behind: it hasn't entered {waited}{also}, in which {waiting} "
        f"{by_number(inside, 'waits', 'wait')}. Its last one there: "
        f"{f'{last.operation} #{last.number}' if last is not None else 'none'}."
    )


def last_collective(collectives: Iterable[Collective]) -> Collective | None:
    """Return the newest unfinished collective, else the newest one."""
    newest = list(collectives)[::-1]
    return next((one for one in newest if not one.is_done), newest[0] if newest else None)


# -- files -------------------------------------------------------------------------------------------------

_SUMMARY: Final = "summary.json"


def shared_folder(project_dir: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder for flight records: in the project's folder, else in the launcher's log folder, else None."""
    if project_dir is None:
        project_dir = logs_of_launcher(read(RECORDS_VARIABLE))
    return None if project_dir is None else Path(project_dir) / "flight_record"


def write_own(folder: Path, rank: int) -> None:
    """Write torch's whole record of this rank to the rank's own file, if there are any entries.

    torch with CUDA has one record for NCCL and one for the host; if both have entries, the file is a list of both.
    """
    dumps = [record for dump in flight_records() if (record := json.loads(dump)).get("entries")]
    if dumps:
        _write(folder / f"rank_{rank}.json", dumps[0] if len(dumps) == 1 else dumps)


def write_summary(folder: Path | None, text: str, records: Mapping[int, RankRecord], size: int) -> Path:
    """Write the verdict, the collected records, and the ranks without one to a file; return its path.

    Args:
        folder: None for a temporary folder.
    """
    ranks = {rank: [asdict(one) for one in record.collectives] for rank, record in sorted(records.items())}
    missing = [rank for rank in range(size) if rank not in records]
    path = (folder or Path(tempfile.mkdtemp(prefix="accelerate_flight_record_"))) / _SUMMARY
    _write(path, {"verdict": text.splitlines(), "missing": missing, "ranks": ranks})
    return path


def _write(path: Path, value: object) -> None:
    def write() -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value, indent=1), encoding="utf-8")

    # A hanging disk must not block the report or the end of the process.
    writing = threading.Thread(target=write, name="accelerate flight record", daemon=True)
    writing.start()
    writing.join(_WRITE_SECONDS)


# -- the exception hook ------------------------------------------------------------------------------------
#
# The first rank that fails collects all ranks' flight records, while the others stay to answer. A launcher soon stops
# the other ranks after one has died. The rank then reports the records that have arrived.

#: Collects flight records until the given function returns true (urgent), and returns the report; empty if there is
#: none.
Collect = Callable[[Callable[[], bool]], str]


@final
class FailureHook:
    """This process's `sys.excepthook`, which calls the previous one first.

    Attributes:
        collect: the newest world's function to collect records; None without a hang watch.
    """

    #: Whether an exception ends this process.
    has_failed: ClassVar[bool] = False
    _installed: ClassVar[FailureHook | None] = None

    def __init__(self) -> None:
        self._before = sys.excepthook
        #: Checked before another hook that writes the launcher's file is installed.
        self.records_failures: bool = getattr(self._before, "records_failures", False)
        self.collect: Collect | None = None

    @classmethod
    def install(cls) -> FailureHook:
        """Install the hook once per process, and return it."""
        if cls._installed is None:
            cls._installed = cls()
            sys.excepthook = cls._installed
        return cls._installed

    @classmethod
    def forget(cls, collect: Collect) -> None:
        """Stop using ``collect``, because its world has ended."""
        if cls._installed is not None and cls._installed.collect == collect:
            cls._installed.collect = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the exception, then all ranks' current collectives, as far as known."""
        FailureHook.has_failed = True
        text = _own_collective(error)
        if text and sys.version_info >= (3, 11):
            error.add_note(text)
        # At once: the launcher uses the time of each traceback to find the rank that failed first.
        self._before(kind, error, trace)
        if text and sys.version_info < (3, 11):
            print(text, file=sys.stderr)
        if self.collect is None or not issubclass(kind, Exception):
            return
        sys.stderr.flush()
        # The store may have ended, which the traceback says.
        with _sigterm_put_off() as is_stopped, contextlib.suppress(RuntimeError):
            if found := self.collect(is_stopped):
                print(found, file=sys.stderr, flush=True)


def _own_collective(error: BaseException) -> str:
    """Return this rank's current collective, if another rank's end or absence caused the error."""
    if not isinstance(error, (CollectiveError, RuntimeError)) or not is_about_another_rank(str(error)):
        return ""
    last = last_collective(own_collectives())
    return "" if last is None else f"{OWN_COLLECTIVE}{last}."


@contextlib.contextmanager
def _sigterm_put_off() -> Iterator[Callable[[], bool]]:
    """Delay SIGTERM to the end of this block; yield a function that returns whether it came."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if stopped.is_set():  # else the process would wait for the others as it leaves, until it is killed
            os.kill(os.getpid(), signal.SIGTERM)
