"""The comparison of a script and its conversion by running both for some steps, on one process and on two."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ...errors import AccelerateError
from .refuse import Refused

if TYPE_CHECKING:
    from . import Migration
    from .observe import Record

#: How far two values may lie apart, relative to the larger: on one process, on two, and where 16-bit numbers round.
_SAME: Final = 1e-5
_SAME_ON_TWO: Final = 1e-3
_ROUNDED: Final = 5e-2
_LIMIT_SECONDS: Final = 900
_NUM_LINES: Final = 40
#: What says which rank a process is, and which devices it sees.
_OF_A_RANK: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class VerificationError(AccelerateError, RuntimeError):
    """A script, or its conversion, couldn't be run for comparison."""


@final
@dataclass(frozen=True)
class Run:
    """A column of the comparison.

    Attributes:
        losses: of each backward pass, the mean over the processes.
    """

    title: str
    losses: list[float]
    weights: list[tuple[float, float]]
    draws: bool = False
    normalizes: bool = False
    is_rounded: bool = False

    @classmethod
    def of(cls, title: str, records: Sequence[Record]) -> Run:
        """Return the run of the processes with these records."""
        losses = [sum(each) / len(records) for each in zip(*(record.losses for record in records), strict=False)]
        return cls(
            title,
            losses,
            [(total, absolute) for total, absolute in records[0].weights],
            any(record.draws for record in records),
            any(record.normalizes for record in records),
            any(record.is_rounded for record in records),
        )

    def checksum(self) -> float:
        """Return the sum of the absolute values of all weights."""
        return sum(absolute for _, absolute in self.weights)


@final
@dataclass(frozen=True)
class Comparison:
    """A run of the original and the runs of the conversion that have to equal it.

    Attributes:
        excused: the titles of runs that differ by design, with the reason.
    """

    runs: list[Run]
    excused: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def differences(self) -> list[str]:
        """Where a run of the conversion leaves the original, in words."""
        original, *others = self.runs
        return [text for run in others if run.title not in self.excused and (text := _difference(original, run))]

    def table(self) -> str:
        """Return losses and weight checksums side by side."""
        titles = [run.title for run in self.runs]
        width = max(14, *(len(title) + 2 for title in titles))
        rows = [f"{'backward':>10}" + "".join(f"{title:>{width}}" for title in titles)]
        for number in range(max(len(run.losses) for run in self.runs)):
            cells = (f"{run.losses[number]:.6g}" if number < len(run.losses) else "-" for run in self.runs)
            rows.append(f"{number + 1:>10}" + "".join(f"{cell:>{width}}" for cell in cells))
        rows.append(f"{'weights':>10}" + "".join(f"{run.checksum():>{width}.9g}" for run in self.runs))
        return "\n".join(rows)


def verify(found: Migration, script: Path, arguments: Sequence[str], num_steps: int) -> list[Comparison]:
    """Train with the script and with its conversion and return what to compare.

    A script for one device is run on one process; its conversion on one, and on two that share each batch. One that is
    distributed by hand is run on as many processes as its conversion. All run on the CPU, without dropout.

    Raises:
        VerificationError: one of the runs failed or trained nothing.
        Refused: the script spawns a number of processes that its conversion can't be given.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate_verify_") as name:
        runs = _Runs(Path(name), script, list(arguments), num_steps)
        converted = runs.folder / script.name
        converted.write_bytes(found.after.encode("utf-8"))
        if found.is_spawning:
            original = runs.observe("original", script, splits=False)
            ranks = len(original)
            return [_compared(original, runs.observe(_title(ranks), converted, ranks, splits=False))]
        if found.is_by_hand:
            return [
                _compared(
                    runs.observe("original", script, ranks, splits=False, launcher="torch.distributed.run"),
                    runs.observe(_title(ranks), converted, ranks, splits=False),
                )
                for ranks in (1, 2)
            ]
        original = runs.observe("original", script)
        return [_compared(original, *(runs.observe(_title(ranks), converted, ranks) for ranks in (1, 2)))]


def _title(num_processes: int) -> str:
    return "1 process" if num_processes == 1 else f"{num_processes} processes"


def _compared(original: Sequence[Record], *others: Sequence[Record]) -> Comparison:
    before = Run.of("original", original)
    runs = [Run.of(_title(len(records)), records) for records in others]
    excused: dict[str, str] = {}
    for run, records in zip(runs, others, strict=True):
        if len(records) == len(original):
            continue
        if run.normalizes:
            excused[run.title] = "a layer normalises over the batch of its process (BatchNorm), which is smaller"
        elif run.draws:
            excused[run.title] = "the loop draws random numbers, and each process draws its own"
    return Comparison([before, *runs], excused)


@final
@dataclass
class _Runs:
    folder: Path
    script: Path
    arguments: list[str]
    num_steps: int
    _count: int = 0

    def observe(
        self, title: str, source: Path, ranks: int | None = None, *, splits: bool = True, launcher: str | None = None
    ) -> list[Record]:
        """Run `source` on so many ranks (None: as a program of its own) and return the record of each."""
        from .observe import Conditions, Record

        self._count += 1
        records_folder = self.folder / f"run_{self._count}"
        records_folder.mkdir()
        Conditions(self.num_steps, splits).write(records_folder)
        program = ["-m", f"{__package__}.observe", str(records_folder), str(source), str(self.script), *self.arguments]
        if ranks is None:
            command = program
        elif launcher is not None:
            command = ["-m", launcher, "--standalone", "--nproc_per_node", str(ranks), *program]
        else:
            command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks), *program]
        self._run(title, command)
        records = Record.read_all(records_folder)
        if not records or len(records) != records[0].num_processes:
            raise VerificationError(
                f"{self.script}: the run '{title}' ended without a backward pass on every process, so there is nothing "
                "to compare. Give arguments with which it trains, after --."
            )
        return records

    def _run(self, title: str, command: list[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        environment |= dict.fromkeys(_NO_DEVICES, "") | {"ACCELERATE_USE_CPU": "true", "PYTHONHASHSEED": "0"}
        environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_CONFIG_FILE": os.devnull}
        try:
            run = subprocess.run(
                [sys.executable, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                timeout=_LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise VerificationError(
                f"{self.script}: the run '{title}' took longer than {_LIMIT_SECONDS} s. Give fewer steps "
                "(--num_steps), or arguments that make it smaller, after --."
            ) from None
        if run.returncode != 0:
            said = "\n".join(run.stdout.rstrip().splitlines()[-_NUM_LINES:])
            raise VerificationError(f"{self.script}: the run '{title}' failed with exit code {run.returncode}:\n{said}")


def _difference(original: Run, run: Run) -> str:
    """Return where `run` leaves the original, in words; "" if it doesn't."""
    limit = _ROUNDED if run.is_rounded else _SAME if run.title == _title(1) else _SAME_ON_TWO
    if len(run.losses) != len(original.losses):
        return f"{run.title}: {len(run.losses)} backward passes, and {len(original.losses)} in the original"
    for number, (before, after) in enumerate(zip(original.losses, run.losses, strict=True), start=1):
        if not _are_close(before, after, limit):
            return f"{run.title}: the loss of backward pass {number} is {after:.6g}, and {before:.6g} in the original"
    if len(run.weights) != len(original.weights):
        return f"{run.title}: {len(run.weights)} parameters are trained, and {len(original.weights)} in the original"
    for number, (before, after) in enumerate(zip(original.weights, run.weights, strict=True)):
        scale = max(before[1], after[1])
        if not all(abs(one - other) <= limit * scale + 1e-6 for one, other in zip(before, after, strict=True)):
            return (
                f"{run.title}: parameter {number} sums up to {after[0]:.9g} after the last step, and to "
                f"{before[0]:.9g} in the original"
            )
    return ""


def _are_close(one: float, other: float, limit: float) -> bool:
    return abs(one - other) <= limit * max(abs(one), abs(other)) + 1e-6 or (one != one and other != other)


__all__ = ["Comparison", "Refused", "Run", "VerificationError", "verify"]
