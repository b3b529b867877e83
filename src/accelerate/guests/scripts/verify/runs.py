"""Recorded runs of a script, and the comparison of their losses and weights."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, final

from ....distributed import watchdog
from ....errors import AccelerateError
from ....ports import get_free_port
from ....settings.env import snapshot
from .evaluations import Evaluation, differences
from .record import REFUSAL, Conditions, Record

ORIGINAL: Final = "original"
#: The tolerance relative to the larger value: on one process, on two, and with 16-bit rounding.
_SAME: Final = 1e-5
_SAME_ON_TWO: Final = 1e-3
_ROUNDED: Final = 5e-2
_LIMIT_SECONDS: Final = 900
#: Ranks without progress count as hung after so long, unless the environment says another time.
_HANG_SECONDS: Final = 120
_LOOK_SECONDS: Final = 0.5
#: The last line of a report on hung ranks begins with it.
_HANG_REPORT: Final = f"({watchdog.VARIABLE}=SECONDS"
_NUM_LINES: Final = 40
_TORCHRUN: Final = ("-m", "torch.distributed.run")
_LAUNCH: Final = ("-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0")
#: Environment variables with a process's rank and its visible devices.
_OF_A_RANK: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class VerificationError(AccelerateError, RuntimeError):
    """The error for a script that couldn't be run for a comparison."""


@final
class LayoutRefused(VerificationError):
    """The error for a layout that a script can't be run in.

    Attributes:
        reason: why, in a sentence.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@final
@dataclass(frozen=True)
class Run:
    """A column of the comparison.

    Attributes:
        losses: the mean over the processes for each backward pass.
        evaluations: by the number of steps before: of each process.
        failure: why the evaluation after the last step ended early; "" if it didn't.
    """

    title: str
    losses: list[float]
    weights: list[tuple[float, float]]
    draws: bool = False
    normalizes: bool = False
    is_rounded: bool = False
    evaluations: dict[int, list[Evaluation]] = field(default_factory=dict[int, list[Evaluation]])
    failure: str = ""

    @classmethod
    def of(cls, title: str, records: Sequence[Record]) -> Run:
        """Return the run with these records of its processes."""
        evaluations: dict[int, list[Evaluation]] = {}
        for each in (each for record in records for each in record.evaluations if each.shown):
            evaluations.setdefault(each.num_steps, []).append(each)
        losses = [sum(each) / len(records) for each in zip(*(record.losses for record in records), strict=False)]
        return cls(
            title,
            losses,
            [(total, absolute) for total, absolute in records[0].weights],
            any(record.draws for record in records),
            any(bool(record.normalizes) for record in records),
            any(record.is_rounded for record in records),
            evaluations,
            next((record.failure for record in records if record.failure), ""),
        )

    @property
    def place(self) -> str:
        """The run, in words for a sentence."""
        return f"the {self.title}" if self.title == ORIGINAL else f"the run of {self.title}"


@final
@dataclass(frozen=True)
class Comparison:
    """A run and others that must be equal to it.

    Attributes:
        excused: titles of runs that differ by design -> the reason.
    """

    runs: list[Run]
    excused: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def differences(self) -> list[str]:
        """The first difference of each other run from the first run, in words."""
        original, *others = self.runs
        return [
            text
            for before, run in zip(self.runs, others, strict=False)
            if run.title not in self.excused
            and (text := _difference(original, run) or _evaluation_difference(original, run, before))
        ]

    def table(self) -> str:
        """Return losses and weight checksums side by side."""
        titles = [run.title for run in self.runs]
        width = max(14, *(len(title) + 2 for title in titles))
        rows = [f"{'backward':>10}" + "".join(f"{title:>{width}}" for title in titles)]
        for number in range(max(len(run.losses) for run in self.runs)):
            cells = (f"{run.losses[number]:.6g}" if number < len(run.losses) else "-" for run in self.runs)
            rows.append(f"{number + 1:>10}" + "".join(f"{cell:>{width}}" for cell in cells))
        sums = (f"{sum(each for _, each in run.weights):>{width}.9g}" for run in self.runs)
        rows.append(f"{'weights':>10}" + "".join(sums))
        return "\n".join(rows)

    def text(self, conclusion: str) -> str:
        """Return the table, followed by the differences, or by the conclusion if there are none."""
        lines = [self.table()]
        lines += [f"Not compared on {title}: {why}." for title, why in self.excused.items()]
        same = [run.title for run in self.runs[1:] if run.title not in self.excused]
        lines += self.differences or ([f"{conclusion} ({', '.join(same)})."] if same else [])
        return "\n".join(lines)


@final
@dataclass
class Runs:
    """Runs of one script for a number of steps, each recorded in a subfolder of `folder`."""

    folder: Path
    script: Path
    arguments: list[str]
    num_steps: int
    _count: int = 0
    _conditions: Conditions | None = None  # of the runs after the first

    def observe(
        self, title: str, source: Path, ranks: int | None = None, *, splits: bool = True, by_hand: bool = False
    ) -> list[Record]:
        """Run `source` on a number of ranks (None: as a program of its own), and return the record of each.

        The first run shows whether the script evaluates. If it does, it runs again with whole evaluations.
        """
        if self._conditions is not None:
            conditions = replace(self._conditions, splits_batches=splits)
            return self.observe_under(conditions, title, source, ranks, by_hand=by_hand)
        first = Conditions(self.num_steps, splits).for_first_run(self.script)
        records = self.observe_under(first, title, source, ranks, by_hand=by_hand)
        self._conditions = first.after(records[0])
        if splits and self._conditions.evaluated:
            return self.observe(title, source, ranks, splits=splits, by_hand=by_hand)
        return records

    def observe_under(
        self,
        conditions: Conditions,
        title: str,
        source: Path,
        ranks: int | None,
        flags: Sequence[str] = (),
        *,
        by_hand: bool = False,
    ) -> list[Record]:
        """Run `source` under `conditions`, and return the record of each rank.

        Args:
            ranks: the number of processes; None runs it as a program of its own.
            flags: of `accelerate launch`.
            by_hand: the script makes a process group itself, and is started by torchrun.
        """
        self._count += 1
        folder = self.folder / f"run_{self._count}"
        folder.mkdir()
        conditions.write(folder)
        launcher = (
            () if ranks is None else _torchrun(ranks) if by_hand else (*_LAUNCH, "--num_processes", str(ranks), *flags)
        )
        program = ("-m", f"{__package__}.observe", str(folder), str(source), str(self.script), *self.arguments)
        self._run(title, [*launcher, *program], folder / REFUSAL)
        records = Record.read_all(folder)
        if not records or len(records) != records[0].num_processes:
            raise VerificationError(
                f"{self.script}: the run '{title}' ended without a backward pass on every process, so there is nothing "
                "to compare. Give arguments with which it trains, after --."
            )
        return records

    def _run(self, title: str, command: list[str], refusal: Path) -> None:
        environment = {watchdog.VARIABLE: str(_HANG_SECONDS)}
        environment |= {name: value for name, value in snapshot().items() if name not in _OF_A_RANK}
        environment |= dict.fromkeys(_NO_DEVICES, "") | {"ACCELERATE_USE_CPU": "true", "PYTHONHASHSEED": "0"}
        environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_CONFIG_FILE": os.devnull}
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
        output = self.folder / f"output_{self._count}.txt"
        with output.open("wb") as file:
            run = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )
            why = _wait(run, output)
        text = output.read_text(errors="replace").partition(_HANG_REPORT)[0]
        said = "\n".join(text.rstrip().splitlines()[-_NUM_LINES:])
        if why:
            raise VerificationError(f"{self.script}: the run '{title}' {why}\n{said}".rstrip())
        if run.returncode != 0:
            text = f"{self.script}: the run '{title}' failed with exit code {run.returncode}:\n{said}"
            if f"\nusage: {self.script.name}" in f"\n{said}":  # of argparse
                text += "\nGive the script's own arguments after --."
            if refusal.exists():
                raise LayoutRefused(text, refusal.read_text())
            raise VerificationError(text)


def _wait(run: subprocess.Popen[bytes], output: Path) -> str:
    """Wait for the end of ``run``; return "" or why it was stopped."""
    end = time.monotonic() + _LIMIT_SECONDS
    try:
        while time.monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                run.wait(_LOOK_SECONDS)
                return ""
            if _HANG_REPORT in output.read_text(errors="replace"):
                return "hangs:"
        return (
            f"took longer than {_LIMIT_SECONDS} s. Give fewer steps (--num_steps), or arguments that make it smaller, "
            "after --."
        )
    finally:
        if run.poll() is None:
            run.kill()  # its ranks end with it
            run.wait()


def _torchrun(ranks: int) -> list[str]:
    """Return the arguments of Python for torchrun, with a port: `--standalone` ends half a minute late."""
    port = str(get_free_port())
    return [*_TORCHRUN, "--nproc_per_node", str(ranks), "--master_addr", "127.0.0.1", "--master_port", port]


def title_of(num_processes: int) -> str:
    """Return the title of a run by its number of processes."""
    return "1 process" if num_processes == 1 else f"{num_processes} processes"


def _difference(original: Run, run: Run) -> str:
    """Return the first difference of `run` from the original, in words; "" if there is none."""
    limit, place = _limit(run), original.place
    if len(run.losses) != len(original.losses):
        return f"{run.title}: {len(run.losses)} backward passes, and {len(original.losses)} in {place}"
    for number, (before, after) in enumerate(zip(original.losses, run.losses, strict=True), start=1):
        if not _are_within(before, after, limit * max(abs(before), abs(after))):
            return f"{run.title}: the loss of backward pass {number} is {after:.6g}, and {before:.6g} in {place}"
    if len(run.weights) != len(original.weights):
        return f"{run.title}: {len(run.weights)} parameters are trained, and {len(original.weights)} in {place}"
    for number, (before, after) in enumerate(zip(original.weights, run.weights, strict=True)):
        scale = max(before[1], after[1])
        if not all(_are_within(one, other, limit * scale) for one, other in zip(before, after, strict=True)):
            return (
                f"{run.title}: parameter {number} sums up to {after[0]:.9g} after the last step, and to "
                f"{before[0]:.9g} in {place}"
            )
    return ""


def _evaluation_difference(original: Run, run: Run, before: Run) -> str:
    """Return the first difference of what evaluations show from the original's, else from the run `before`'s."""
    for other in (original, before):
        for num_steps, ranks in other.evaluations.items():
            each = differences(ranks, run.evaluations.get(num_steps, []), lambda _: _limit(run))
            for found in (one for one in each if not one.is_alone):
                where = f"the evaluation after step {num_steps} (line {found.line})"
                return f"{run.title}: {where}: {found.name}: {found.text} in {other.place}"
    if run.failure and not original.failure:
        return f"{run.title}: the evaluation after the last step ended early: {run.failure}"
    return ""


def _limit(run: Run) -> float:
    return _ROUNDED if run.is_rounded else _SAME if run.title == title_of(1) else _SAME_ON_TWO


def _are_within(one: float, other: float, distance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):  # both diverged, and in the same way
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= distance + 1e-6
