"""What of a training step lies on one rank, for each way of spreading it over several. Pure arithmetic.

Exact where the strategy only divides what one device has; where it gathers and sends, what torch's implementation
holds at once is counted. Activations under tensor parallelism follow Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022: ten parts in thirty-four of a block are on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, final, get_args

from ..devices import CPU
from ..errors import SettingError
from .trace import TrainingTrace

Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad"]

#: What is in shards: (weights, gradients, optimizer state).
_SHARDED: Final[dict[Sharding, tuple[bool, bool, bool]]] = {
    "none": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
    "fsdp-grad": (True, True, True),
}
_ON_EVERY_TENSOR_RANK: Final = 10 / 34
_FULL_PRECISION_BYTES: Final = 4
#: What DeepSpeed sends at once, unless its configuration says another number.
_BUCKET_NUMBERS: Final = 500_000_000


@final
@dataclass(frozen=True)
class Layout:
    """How many ranks share the work, and how."""

    replicas: int = 1
    """Whole copies of the model, or of its shards."""
    shards: int = 1
    """Ranks over which weights, gradients and optimizer state are cut, as ``sharding`` says."""
    sharding: Sharding = "none"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    offload_weights: bool = False
    """Weights, gradients and optimizer state wait in host memory."""
    offload_optimizer: bool = False
    """Optimizer state waits in host memory, and is used there."""

    def __post_init__(self) -> None:
        for name in ("replicas", "shards", "tp", "cp", "pp"):
            if getattr(self, name) < 1:
                raise SettingError(f"Layout({name}={getattr(self, name)}): a number of ranks is at least 1.")
        if self.sharding not in get_args(Sharding):
            raise SettingError(f"Layout(sharding={self.sharding!r}): choose from {', '.join(get_args(Sharding))}.")

    @property
    def ranks(self) -> int:
        """All ranks together."""
        return self.replicas * self.shards * self.tp * self.cp * self.pp

    @property
    def name(self) -> str:
        """``tp4+fsdp8``, as ``parse`` reads it."""
        parts = [f"{axis}{degree}" for axis in ("tp", "cp", "pp") if (degree := getattr(self, axis)) > 1]
        if self.shards > 1 or self.sharding != "none":
            parts.append(f"{self.sharding}{'x' if self.sharding[-1].isdigit() else ''}{self.shards}")
        if self.replicas > 1:
            parts.append(f"ddp{self.replicas}")
        return "+".join(parts) or "single"

    @classmethod
    def parse(cls, text: str, ranks: int) -> Layout:
        """The layout that is written as ``"fsdp"``, ``"ddp"``, ``"tp4+fsdp"``: the part without a number gets the ranks
        that are left.

        Raises:
            SettingError: a part isn't known, or the numbers don't make ``ranks``.
        """
        parts = [] if text == "single" else text.split("+")
        degrees = {name: int(number or 0) for name, number in map(_split_number, parts)}
        open_parts = [name for name, degree in degrees.items() if not degree]
        ways = [name for name in degrees if name in _SHARDED]
        if len(degrees) < len(parts) or len(open_parts) > 1 or len(ways) > 1:
            raise SettingError(
                f"{text!r} is no layout: each part stands once, with at most one way of cutting into shards and with "
                "at most one part without a number, which gets the ranks that are left."
            )
        fixed = prod(degree for degree in degrees.values() if degree)
        if open_parts and ranks % fixed == 0:
            degrees[open_parts[0]] = ranks // fixed
        made = prod(degrees.values())
        if made != ranks:
            raise SettingError(f"{text!r} doesn't make {ranks} ranks: its numbers make {made or fixed}.")
        way: Any = ways[0] if ways else "none"
        return cls(
            replicas=degrees.get("ddp", 1),
            shards=degrees.get(way, 1),
            sharding=way,
            tp=degrees.get("tp", 1),
            cp=degrees.get("cp", 1),
            pp=degrees.get("pp", 1),
        )


def _split_number(part: str) -> tuple[str, str]:
    found = re.fullmatch(r"(ddp|tp|cp|pp|zero[123]|fsdp-grad|fsdp)x?(\d*)", part)
    if found is None:
        raise SettingError(
            f"{part!r} is no part of a layout. Write 'single', or parts joined by '+' with numbers of ranks: ddp, "
            "fsdp, fsdp-grad, zero1, zero2, zero3, tp, cp, pp; for example 'tp4+fsdp' or 'zero2x8'."
        )
    return found[1], found[2]


@final
@dataclass(frozen=True)
class Footprint:
    """The bytes on the busiest rank's device at the fullest moment, by what they are for, and those on its host."""

    layout: Layout
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    """What is gathered, or waits to be sent."""
    host: int

    @property
    def peak(self) -> int:
        """The most that the device holds at one moment."""
        kept = self.weights + self.buffers + self.gradients + self.optimizer
        return kept + self.activations + self.communication


def footprint(trace: TrainingTrace, layout: Layout) -> Footprint:
    """What the training step of ``trace`` needs on each rank of the layout."""
    cut_weights, cut_gradients, cut_optimizer = (layout.shards if cut else 1 for cut in _SHARDED[layout.sharding])
    share = _held_share(trace, layout)
    weights, gradients, optimizer = (share * num_bytes for num_bytes in _trained(trace, layout))
    moments = _moments(trace, layout, gradients, cut_gradients)
    kept_weights, kept_optimizer, host = weights / cut_weights, optimizer / cut_optimizer, 0.0
    if layout.offload_weights:
        host = kept_weights + gradients / cut_gradients + kept_optimizer
        kept_weights = kept_optimizer = 0.0
    elif layout.offload_optimizer:
        host, kept_optimizer = kept_optimizer, 0.0
    else:
        step = _activations_share(layout) * trace.held_in_step + share * trace.step_temporaries / cut_optimizer
        waiting = _communicated(trace, layout, gradients, 1.0) if layout.sharding == "none" else 0.0
        moments.append((gradients / cut_gradients, step, waiting))
    fullest = max(moments, key=sum)
    return Footprint(
        layout,
        weights=round(kept_weights),
        buffers=trace.buffers,
        gradients=round(fullest[0]),
        optimizer=round(kept_optimizer),
        activations=round(fullest[1]),
        communication=round(fullest[2]),
        host=round(host),
    )


def _moments(
    trace: TrainingTrace, layout: Layout, gradients: float, cut_gradients: int
) -> list[tuple[float, float, float]]:
    """Gradients, activations and communication at the full moments of the forward and backward pass."""
    step = trace.narrow if trace.narrow is not None and layout.sharding != "none" else trace
    found = []
    for moment in step.moments:
        done = moment.gradients / max(step.gradients, 1)
        kept = 0.0 if layout.offload_weights else done * gradients / cut_gradients
        communicated = _communicated(trace, layout, gradients, done)
        found.append((kept, _activations_share(layout) * moment.activations, communicated))
    return found


def _activations_share(layout: Layout) -> float:
    return (_ON_EVERY_TENSOR_RANK + (1 - _ON_EVERY_TENSOR_RANK) / layout.tp) / layout.cp


def _communicated(trace: TrainingTrace, layout: Layout, gradients: float, done: float) -> float:
    """Whole weights that are put together from shards, and gradients on their way, when a share is ``done``."""
    if layout.sharding == "none":  # replicas have buckets for all gradients from the beginning
        return gradients if layout.replicas > 1 else 0.0
    if layout.shards == 1:
        return 0.0
    if layout.sharding in ("zero1", "zero2"):
        return min(gradients, _BUCKET_NUMBERS * (trace.autocast_bytes or _FULL_PRECISION_BYTES)) if done else 0.0
    share = _held_share(trace, layout)
    narrower = 1.0
    if trace.autocast_bytes is not None:
        narrower = trace.autocast_bytes * trace.num_parameters / max(trace.weights, 1)
    inside, blocks = trace.weights - trace.outside_blocks, 2 * trace.largest_block
    gathered = (1 - done) * inside if layout.sharding == "fsdp-grad" else blocks
    # The gradients of one block, and those of the block before while they are summed up over the ranks.
    sent = blocks + trace.outside_blocks if done else 0
    staged = trace.largest_block if trace.device_type == CPU.name else 0  # gloo works on copies
    return share * narrower * (trace.outside_blocks + gathered + sent + staged)


def _held_share(trace: TrainingTrace, layout: Layout) -> float:
    """The share of the weights that one pipeline stage and one tensor rank has before anything is cut into shards."""
    total = max(trace.weights, 1)
    undivided = (total - trace.divisible) / total + trace.divisible / total / layout.tp
    inside = (total - trace.outside_blocks) / total
    return undivided * (inside / layout.pp + (1 - inside))


def _trained(trace: TrainingTrace, layout: Layout) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of the whole model, as the strategy keeps them."""
    if not layout.sharding.startswith("zero") or trace.autocast_bytes is None:
        return trace.weights, trace.gradients, trace.optimizer
    # DeepSpeed trains lower precision on the weights themselves, and keeps full ones beside the optimizer state.
    weights = trace.num_parameters * trace.autocast_bytes
    gradients = trace.num_trainable * trace.autocast_bytes
    return weights, gradients, trace.optimizer + trace.num_trainable * _FULL_PRECISION_BYTES
