"""The record that one process keeps of its training, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from .evaluations import Evaluation


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
