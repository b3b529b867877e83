"""The conditions of a run, read from a file by its processes, and the record that each of them writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from .evaluations import Evaluation

_CONDITIONS: Final = "conditions.json"
#: The file with the reason why a process couldn't prepare its objects.
REFUSAL: Final = "refusal.txt"
#: How long an evaluation may take in the first run of a script, and in the runs after it.
_FIRST_SECONDS: Final = 30.0
_LATER_SECONDS: Final = 300.0


@final
class Moments(NamedTuple):
    """Sums over the elements of a tensor that one rank holds; those of parts of one tensor can be added up.

    Attributes:
        held: the number of elements of this part.
        size: the number of elements of the whole tensor.
        total: the sum of the values.
        square: the sum of the squares.
        projection: the sum of the values, each times a fixed number in [-1, 1] for its place in the whole tensor.
        dtype: the dtype, without "torch.".
        bits: the sum over the elements of a hash of their bits and place, modulo 2^64; 0 if it isn't taken.
    """

    held: int
    size: int
    total: float
    square: float
    projection: float
    dtype: str
    bits: int = 0

    @property
    def norm(self) -> float:
        """The 2-norm of the values."""
        return self.square**0.5

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both parts."""
        total, square, projection = (one + two for one, two in zip(self[2:5], other[2:5], strict=True))
        held, bits = self.held + other.held, self.bits + other.bits
        return Moments(held, self.size, total, square, projection, self.dtype, bits)

    def divided(self, copies: float) -> Moments:
        """Return the moments of one of several equal copies."""
        total, square, projection = (value / copies for value in (self.total, self.square, self.projection))
        bits = self.bits // max(round(copies), 1) % 2**64
        return Moments(round(self.held / copies), self.size, total, square, projection, self.dtype, bits)


@final
@dataclass
class Step:
    """One step of an optimizer.

    Attributes:
        optimizer: the number of the optimizer, in the order of first steps.
        samples: the indices of the samples of each batch since this optimizer's last step.
        gradients: by parameter, before clipping; None for a trained parameter without a gradient.
        norm: the gradient norm that the script's clipping returned; None without clipping.
        rates: the learning rate of each parameter group.
        weights: by parameter, after the step.
        states: by parameter and name of the state, after the step.
        place: the line of the script that called `step`, and the last one that called `backward`.
        num_reductions: how many backward passes since the last step averaged gradients over the ranks.
        num_clips: how often gradients were clipped by their norm since the last step.
        fingerprint: `Accelerator.fingerprint()` after the step, if all bits are compared.
    """

    optimizer: int = 0
    samples: list[list[int]] = field(default_factory=list[list[int]])
    gradients: dict[str, Moments | None] = field(default_factory=dict[str, "Moments | None"])
    norm: float | None = None
    rates: list[float] = field(default_factory=list[float])
    weights: dict[str, Moments | None] = field(default_factory=dict[str, "Moments | None"])
    states: dict[str, Moments | None] = field(default_factory=dict[str, "Moments | None"])
    place: list[int] = field(default_factory=list[int])
    num_reductions: int = 0
    num_clips: int = 0
    fingerprint: str = ""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Step:
        """Return the step of a record's file."""
        found = cls(**given)
        for moments in (found.gradients, found.weights, found.states):
            moments.update({name: None if value is None else Moments(*value) for name, value in moments.items()})
        return found


@final
@dataclass
class Record:
    """The record of one process.

    Attributes:
        losses: the loss of each backward pass.
        weights: the sum of each trained parameter, and the sum of its absolute values, after the last step.
        steps: the steps of all optimizers, in order, if tensors are kept.
        draws: random numbers were drawn between two backward passes of one pass over a loader.
        normalizes: the names of layers that normalise over their process's batch.
        is_rounded: the forward pass ran in bfloat16 or float16.
        uses: what the script used: "Accelerator", "accumulate", "group" (a process group of its own), "stream",
            "context", "pipeline", "tensor plan", "expert plan", "Trainer" (of transformers), "batch sampler" (its own).
        share: which share of the data this process read; several may read the same.
        evaluations: what the script showed of its evaluations, in order.
        evaluated: the datasets that are only evaluated, by the number of the script's loader that first had it.
        failure: why the evaluation after the last step ended early; "" if it didn't.
    """

    rank: int = 0
    num_processes: int = 1
    share: int = 0
    num_steps: int = 0
    losses: list[float] = field(default_factory=list[float])
    weights: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    steps: list[Step] = field(default_factory=list[Step])
    draws: bool = False
    normalizes: list[str] = field(default_factory=list[str])
    is_rounded: bool = False
    uses: list[str] = field(default_factory=list[str])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    evaluated: list[int] = field(default_factory=list[int])
    failure: str = ""

    @classmethod
    def read_all(cls, folder: Path) -> list[Record]:
        """Read the records in `folder`, by rank."""
        records: list[Record] = []
        for path in folder.glob("rank_*.json"):
            given = json.loads(path.read_text())
            given["steps"] = [Step.read(step) for step in given["steps"]]
            given["evaluations"] = [Evaluation.read(each) for each in given["evaluations"]]
            records.append(cls(**given))
        return sorted(records, key=lambda record: record.rank)

    def write(self, folder: Path) -> None:
        """Write the record to `folder`, at once."""
        path = folder / f"rank_{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(self)))
        path.with_suffix(".part").replace(path)


@final
@dataclass(frozen=True)
class Conditions:
    """The conditions of a run.

    Attributes:
        num_steps: the number of optimizer steps after which to end.
        splits_batches: several processes share each batch of the script, and loaders give only full batches.
        multiple: full batches have a multiple of this many samples.
        num_parts: how many micro-batches each batch of the script becomes, in scripts that accumulate gradients.
        num_shares: by how much smaller batches are, in scripts that divide the data between processes themselves, or
            whose schedule is as many times longer; prepared loaders then don't split batches.
        divides_itself: the script makes its batches smaller by the number of shares itself.
        counts_updates: the lengths of loaders that the script asks for are in updates, not in micro-batches.
        dtype: the dtype of parameters and inputs; "" leaves them as they are.
        batch_parts: the number of parts of an update, which makes every bit equal; 0 leaves it as it is.
        mixed_precision: of the Accelerator; "" leaves it as it is.
        mesh: the size of each axis of parallelism that isn't 1, in place of the script's own sizes.
        shards: the model is sharded by FSDP; if not, the script's own FSDP plugin isn't used.
        reorders: reverse the samples of each batch, which changes the order of sums and nothing else.
        noise: how much to change each parameter at first, relative to its value.
        recomputes: compute activations again in the backward pass.
        keeps_tensors: record gradients, parameters and optimizer states of each step.
        saves_at: the number of steps after which to save the run; 0 saves nothing.
        save_to: the folder for it.
        evaluates: record what the script's evaluations show.
        evaluation_seconds: let the script go on after the last step until it trains again, for an evaluation that
            takes no longer; 0 ends it.
        evaluated: the datasets whose loaders keep their last batch, as in `Record.evaluated`.
        resumes_from: a folder to resume from when the first prepared loader is read; "" begins anew.
    """

    num_steps: int
    splits_batches: bool
    multiple: int = 2
    num_parts: int = 1
    num_shares: int = 1
    divides_itself: bool = False
    counts_updates: bool = False
    dtype: str = ""
    batch_parts: int = 0
    mixed_precision: str = ""
    mesh: dict[str, int] = field(default_factory=dict[str, int])
    shards: bool = False
    reorders: bool = False
    noise: float = 0.0
    recomputes: bool = False
    keeps_tensors: bool = False
    saves_at: int = 0
    save_to: str = ""
    evaluates: bool = False
    evaluation_seconds: float = 0.0
    evaluated: list[int] = field(default_factory=list[int])
    resumes_from: str = ""

    @classmethod
    def read(cls, folder: Path) -> Conditions:
        """Read the conditions from `folder`."""
        return cls(**json.loads((folder / _CONDITIONS).read_text()))

    def write(self, folder: Path) -> None:
        """Write the conditions to `folder`."""
        (folder / _CONDITIONS).write_text(json.dumps(asdict(self)))

    def for_first_run(self, script: Path) -> Conditions:
        """Return the conditions of a script's first run, which shows whether it evaluates."""
        evaluates = ".eval()" in script.read_text(encoding="utf-8", errors="replace")
        return replace(self, evaluates=evaluates, evaluation_seconds=_FIRST_SECONDS if evaluates else 0.0)

    def after(self, first: Record) -> Conditions:
        """Return the conditions of runs that are compared with a script's first run."""
        shows = [each.num_steps for each in first.evaluations if each.shown]
        seconds = _LATER_SECONDS if first.num_steps in shows else 0.0
        return replace(self, evaluates=bool(shows), evaluation_seconds=seconds, evaluated=first.evaluated)
