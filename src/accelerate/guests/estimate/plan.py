"""Compute the memory per rank of each parallel layout from a trace, and choose the simplest that fits. Internal.

The result is exact if the strategy only divides the tensors of one device. For gathered and sent tensors, the memory of
torch's implementation is counted. Activations under tensor parallelism follow Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022: 10 of 34 parts of a block are on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Final, Literal, final, get_args

from ...devices.memory import convert_bytes
from ...devices.table import CPU
from ...errors import SettingError
from .trace import TrainingTrace

Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad"]

#: What each kind shards: (weights, gradients, optimizer state).
_SHARDED: Final[dict[Sharding, tuple[bool, bool, bool]]] = {
    "none": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp": (True, True, True),
    "fsdp-grad": (True, True, True),
}
#: The fraction of a block's activations that tensor parallelism doesn't divide (Korthikanti et al., above).
_ON_EVERY_TENSOR_RANK: Final = 10 / 34
_FULL_PRECISION_BYTES: Final = 4
#: DiLoCo's bytes for each trained value: the outer weight, what compression has left, and the outer momentum.
_OUTER_BYTES: Final = 12
#: Bytes that it sends for each value in 8 bits, with a scale for each 256 values.
_SENT_BYTES: Final = 1 + 4 / 256
#: Elements in a communication bucket of DeepSpeed: the default of its ``reduce_bucket_size``.
_BUCKET_NUMBERS: Final = 500_000_000


@final
@dataclass(frozen=True)
class Layout:
    """The numbers of ranks along each axis of parallelism, and the kind of sharding."""

    replicas: int = 1
    """Whole copies of the model, or of its shards."""
    shards: int = 1
    """Ranks over which weights, gradients and optimizer state are cut, as ``sharding`` says."""
    sharding: Sharding = "none"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    offload_weights: bool = False
    """Weights, gradients and optimizer state are kept in host memory."""
    offload_optimizer: bool = False
    """Optimizer state is kept and updated in host memory."""
    islands: int = 1
    """Groups of replicas that DiLoCo lets train apart."""

    def __post_init__(self) -> None:
        for name in ("replicas", "shards", "tp", "cp", "pp"):
            if getattr(self, name) < 1:
                raise SettingError(f"Layout({name}={getattr(self, name)}): a number of ranks is at least 1.")
        if self.sharding not in get_args(Sharding):
            raise SettingError(f"Layout(sharding={self.sharding!r}): choose from {', '.join(get_args(Sharding))}.")

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.replicas * self.shards * self.tp * self.cp * self.pp

    @property
    def name(self) -> str:
        """The layout as text for ``parse``, such as ``tp4+fsdp8``."""
        parts = [f"{axis}{degree}" for axis in ("tp", "cp", "pp") if (degree := getattr(self, axis)) > 1]
        if self.shards > 1 or self.sharding != "none":
            parts.append(f"{self.sharding}{'x' if self.sharding[-1].isdigit() else ''}{self.shards}")
        if self.replicas > 1:
            parts.append(f"ddp{self.replicas}")
        if self.islands > 1:
            parts.append(f"islands{self.islands}")
        return "+".join(parts) or "single"

    @classmethod
    def parse(cls, text: str, ranks: int) -> Layout:
        """Parse a layout such as ``"fsdp"`` or ``"tp4+fsdp"``; a part without a number gets the remaining ranks.

        Raises:
            SettingError: a part is unknown, or the product of the numbers isn't ``ranks``.
        """
        parts = [] if text == "single" else text.split("+")
        degrees = {name: int(number or 0) for name, number in map(_split_number, parts)}
        open_parts = [name for name, degree in degrees.items() if not degree]
        shardings = [name for name in degrees if name in _SHARDED]
        if len(degrees) < len(parts) or len(open_parts) > 1 or len(shardings) > 1:
            raise SettingError(
                f"{text!r} is no layout: each part occurs once, with at most one kind of sharding and with at most one "
                "part without a number, which gets the remaining ranks."
            )
        fixed = prod(degree for degree in degrees.values() if degree)
        if open_parts and ranks % fixed == 0:
            degrees[open_parts[0]] = ranks // fixed
        made = prod(degrees.values())
        if made != ranks:
            raise SettingError(f"{text!r} doesn't make {ranks} ranks: its numbers make {made or fixed}.")
        sharding: Any = shardings[0] if shardings else "none"
        return cls(
            replicas=degrees.get("ddp", 1),
            shards=degrees.get(sharding, 1),
            sharding=sharding,
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


#: The uses of a device's memory.
PARTS: Final = ("weights", "buffers", "gradients", "optimizer", "activations", "communication")
#: The columns of a table of footprints.
COLUMNS: Final = (*PARTS, "host", "peak")


@final
@dataclass(frozen=True)
class Footprint:
    """The peak memory in bytes of the busiest rank: of its device by purpose, and of its host."""

    layout: Layout
    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    """Gathered weights, and gradients to be sent."""
    host: int
    sent: int = 0
    """What a rank sends to each other island in a round of DiLoCo, in 8 bits."""

    @property
    def peak(self) -> int:
        """The peak memory of the device in bytes."""
        kept = self.weights + self.buffers + self.gradients + self.optimizer
        return kept + self.activations + self.communication

    def cells(self) -> list[str]:
        """Return the cells of the columns of a table."""
        return [binary_size(getattr(self, column)) for column in COLUMNS]


def footprint(trace: TrainingTrace, layout: Layout) -> Footprint:
    """Return the memory of the training step ``trace`` on each rank of the layout."""
    cut_weights, cut_gradients, cut_optimizer = (layout.shards if cut else 1 for cut in _SHARDED[layout.sharding])
    share = _local_fraction(trace, layout)
    weights, gradients, optimizer = (share * num_bytes for num_bytes in _trained(trace, layout))
    moments = _moments(trace, layout, gradients, cut_gradients)
    kept_weights, kept_optimizer, host = weights / cut_weights, optimizer / cut_optimizer, 0.0
    values = 0.0  # of this rank's part of the outer weights, which DDP's ranks of an island divide
    if layout.islands > 1:
        values = share * trace.num_trainable / (cut_weights * layout.replicas // layout.islands)
        kept_optimizer += _OUTER_BYTES * values
    if layout.offload_weights:
        host = kept_weights + gradients / cut_gradients + kept_optimizer
        kept_weights = kept_optimizer = 0.0
    elif layout.offload_optimizer:
        host, kept_optimizer = kept_optimizer, 0.0
    else:
        step = _activation_fraction(layout) * trace.held_in_step + share * trace.step_temporaries / cut_optimizer
        waiting = _communication_bytes(trace, layout, gradients, 1.0) if layout.sharding == "none" else 0.0
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
        sent=round(_SENT_BYTES * values),
    )


def _moments(
    trace: TrainingTrace, layout: Layout, gradients: float, cut_gradients: int
) -> list[tuple[float, float, float]]:
    """Return the bytes of gradients, activations and communication at each traced moment of forward and backward."""
    step = trace.narrow if trace.narrow is not None and layout.sharding != "none" else trace
    found = []
    for moment in step.moments:
        done = moment.gradients / max(step.gradients, 1)
        kept = 0.0 if layout.offload_weights else done * gradients / cut_gradients
        communicated = _communication_bytes(trace, layout, gradients, done)
        found.append((kept, _activation_fraction(layout) * moment.activations, communicated))
    return found


def _activation_fraction(layout: Layout) -> float:
    return (_ON_EVERY_TENSOR_RANK + (1 - _ON_EVERY_TENSOR_RANK) / layout.tp) / layout.cp


def _communication_bytes(trace: TrainingTrace, layout: Layout, gradients: float, done: float) -> float:
    """Return the bytes of gathered weights and reduced gradients, when ``done`` of the backward is complete."""
    if layout.sharding == "none":  # replicas have buckets for all gradients from the beginning
        return gradients if layout.replicas > 1 else 0.0
    if layout.shards == 1:
        return 0.0
    if layout.sharding in ("zero1", "zero2"):
        return min(gradients, _BUCKET_NUMBERS * (trace.autocast_bytes or _FULL_PRECISION_BYTES)) if done else 0.0
    share = _local_fraction(trace, layout)
    narrower = 1.0
    if trace.autocast_bytes is not None:
        narrower = trace.autocast_bytes * trace.num_parameters / max(trace.weights, 1)
    inside, blocks = trace.weights - trace.outside_blocks, 2 * trace.largest_block
    gathered = (1 - done) * inside if layout.sharding == "fsdp-grad" else blocks
    # The gradients of one block, and those of the block before while they are summed up over the ranks.
    sent = blocks + trace.outside_blocks if done else 0
    staged = trace.largest_block if trace.device_type == CPU.name else 0  # gloo works on copies
    return share * narrower * (trace.outside_blocks + gathered + sent + staged)


def _local_fraction(trace: TrainingTrace, layout: Layout) -> float:
    """Return the fraction of weights on one pipeline stage and tensor-parallel rank, before sharding."""
    total = max(trace.weights, 1)
    undivided = (total - trace.divisible) / total + trace.divisible / total / layout.tp
    inside = (total - trace.outside_blocks) / total
    return undivided * (inside / layout.pp + (1 - inside))


def _trained(trace: TrainingTrace, layout: Layout) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state of the whole model in this strategy."""
    if not layout.sharding.startswith("zero") or trace.autocast_bytes is None:
        return trace.weights, trace.gradients, trace.optimizer
    # In lower precision, DeepSpeed casts the weights themselves, and keeps full-precision ones in the optimizer state.
    weights = trace.num_parameters * trace.autocast_bytes
    gradients = trace.num_trainable * trace.autocast_bytes
    return weights, gradients, trace.optimizer + trace.num_trainable * _FULL_PRECISION_BYTES


# --------------------------------------------------------------------------------------------------
# The planner: the simplest layout that fits, by arithmetic on a trace
#
# Layouts are tried in the order of their cost in communication and computation. Shards stay inside a host if that
# suffices. Tensor parallelism never spans hosts, because every layer waits for its communication.

#: The fraction of a device's memory reserved for fragmentation, kernels, and the communication library.
RESERVE: Final = 0.1
#: Sizes of tensor parallelism to try, within one host; context parallelism may span hosts.
_TENSOR_DEGREES: Final = (2, 4, 8)
_CONTEXT_DEGREES: Final = (*_TENSOR_DEGREES, 16, 32)


@final
@dataclass(frozen=True)
class Candidate:
    """One layout with or without recomputation, its memory on the busiest rank, and whether it fits."""

    layout: Layout
    recompute: bool
    footprint: Footprint
    fits: bool

    @property
    def name(self) -> str:
        """The layout, offloading and recomputation as text, such as ``tp2+fsdp8, recomputing``."""
        offload = ", offloaded" if self.layout.offload_weights else ""
        return self.layout.name + offload + (", recomputing" if self.recompute else "")


@final
@dataclass(frozen=True)
class Plan:
    """The candidate layouts in the order of trial, ending with the first that fits."""

    model: str
    gpus: int
    memory: int  # bytes of one device
    usable: int  # bytes of it that a plan may use
    batch: int  # samples of a micro-batch on one data-parallel rank
    sequence: int
    candidates: tuple[Candidate, ...]
    #: Why activations aren't included; None if they are.
    untraced: str | None = None

    @property
    def chosen(self) -> Candidate | None:
        """The first candidate that fits; None if none does."""
        return next((each for each in self.candidates if each.fits), None)

    def as_json(self) -> dict[str, object]:
        """Return the plan as JSON values, sizes in bytes."""
        return {
            "model": self.model,
            "gpus": self.gpus,
            "memory": self.memory,
            "usable": self.usable,
            "batch": self.batch,
            "sequence": self.sequence,
            "activations_left_out": self.untraced,
            "chosen": None if self.chosen is None else self.chosen.name,
            "ways": [
                {
                    "way": each.name,
                    "recompute": each.recompute,
                    "layout": asdict(each.layout),
                    **{column: getattr(each.footprint, column) for column in COLUMNS},
                    "sent": each.footprint.sent,
                    "fits": each.fits,
                }
                for each in self.candidates
            ],
        }


def layouts(gpus: int, gpus_per_host: int) -> Iterator[Layout]:
    """Yield layouts for ``gpus`` devices, the cheapest in communication first."""
    inside = min(gpus, gpus_per_host)
    hosts = gpus // inside
    if gpus == 1:
        yield Layout()
        yield Layout(sharding="zero3", offload_weights=True)
        return
    yield Layout(replicas=gpus)
    if hosts > 1:
        yield Layout(shards=inside, replicas=hosts, sharding="fsdp-grad")
        yield Layout(shards=inside, replicas=hosts, sharding="fsdp")
    yield Layout(shards=gpus, sharding="fsdp-grad")
    yield Layout(shards=gpus, sharding="fsdp")
    for degree in _TENSOR_DEGREES:
        if degree <= inside and degree < gpus and inside % degree == 0:
            yield _with_shards(gpus, tp=degree)
    for degree in _CONTEXT_DEGREES:
        if degree <= gpus and gpus % degree == 0:
            yield _with_shards(gpus, cp=degree)
    if inside in _TENSOR_DEGREES and gpus > inside:
        yield _with_shards(gpus, tp=inside, cp=gpus // inside)
    yield Layout(shards=gpus, sharding="fsdp", offload_weights=True)


def layouts_of_islands(gpus: int, gpus_per_host: int, islands: int) -> Iterator[Layout]:
    """Yield layouts whose replicas are islands: replicas of one island only hold the whole model."""
    for layout in layouts(gpus // islands, gpus_per_host):
        is_island = layout.sharding == "none" or (layout.replicas == 1 and layout.shards > 1)
        if is_island and not layout.offload_weights:
            yield replace(layout, replicas=layout.replicas * islands, islands=islands)


def _with_shards(gpus: int, tp: int = 1, cp: int = 1) -> Layout:
    left = gpus // (tp * cp)
    return Layout(tp=tp, cp=cp, shards=left, sharding="fsdp")


def propose(
    model: str,
    trace_step: Callable[[bool], TrainingTrace],
    *,
    gpus: int,
    memory: int,
    gpus_per_host: int = 8,
    reserve: float = RESERVE,
    islands: int = 1,
) -> Plan:
    """Return the plan for ``gpus`` devices of ``memory`` bytes each.

    Args:
        islands: the number of groups of devices that DiLoCo lets train apart.
        trace_step: returns the traced step, with activation checkpointing or without.

    Raises:
        SettingError: a number is invalid.
    """
    if gpus < 1 or gpus_per_host < 1 or (gpus > gpus_per_host and gpus % gpus_per_host):
        raise SettingError(
            f"--gpus {gpus} on hosts of {gpus_per_host}: give a number of at least 1 that fills its hosts, or say "
            "--gpus_per_host."
        )
    if islands < 1 or gpus % islands or (gpus // islands > gpus_per_host and gpus // islands % gpus_per_host):
        raise SettingError(
            f"--islands {islands} of {gpus} GPUs on hosts of {gpus_per_host}: each island has as many, and more than "
            "one host only as whole ones. Choose another number."
        )
    if memory < 1 or not 0 <= reserve < 1:
        raise SettingError(f"memory={memory} bytes with reserve={reserve}: give more than nothing, and less than all.")
    usable = int(memory * (1 - reserve))
    traces: dict[bool, TrainingTrace] = {False: trace_step(False)}
    candidates: list[Candidate] = []
    every = layouts(gpus, gpus_per_host) if islands == 1 else layouts_of_islands(gpus, gpus_per_host, islands)
    for layout, recompute in _in_order([*every]):
        if recompute not in traces:
            traces[recompute] = trace_step(recompute)
        # FSDP shards over the context-parallel ranks too.
        counted = replace(layout, shards=layout.shards * layout.cp)
        found = replace(footprint(traces[recompute], counted), layout=layout)
        candidates.append(Candidate(layout, recompute, found, found.peak <= usable))
        if candidates[-1].fits:
            break
    return Plan(model, gpus, memory, usable, traces[False].batch, traces[False].sequence, tuple(candidates))


def _in_order(every: Sequence[Layout]) -> Iterator[tuple[Layout, bool]]:
    """Yield layouts with ``recompute``: data-parallel ones without it, then with it, then the costlier ones."""
    simple = [each for each in every if each.tp == each.cp == 1 and not each.offload_weights]
    yield from ((each, False) for each in simple)
    yield from ((each, True) for each in simple if each.sharding.startswith("fsdp"))
    yield from ((each, each.sharding.startswith("fsdp")) for each in every if each not in simple)


def as_text(plan: Plan) -> str:
    """Format the plan as a table with a sentence about the choice."""
    rows = [("way", *COLUMNS, "fits")]
    rows += [(each.name, *each.footprint.cells(), "yes" if each.fits else "") for each in plan.candidates]
    lines = [
        f"{plan.model} on {plan.gpus} x {binary_size(plan.memory)} ({binary_size(plan.usable)} planned with): "
        f"one training step of batch {plan.batch} per data-parallel rank and sequence {plan.sequence}, on the busiest "
        "rank",
        "",
        *aligned(rows),
        "",
    ]
    chosen = plan.chosen
    if chosen is None:
        lines.append("Nothing fits. Use more devices, a smaller --batch or --sequence, or lower precision.")
    else:
        lines.append(f"Chosen: {chosen.name}, the first that fits: {_reason(chosen)}")
        if sent := chosen.footprint.sent:
            lines.append(
                f"In a round of DiLoCo (inner_steps updates) each rank sends {binary_size(sent)} to each of "
                f"{chosen.layout.islands - 1} other islands, in 8 bits."
            )
    if plan.untraced is not None:
        lines += ["", f"Without activations of forward and backward; --reserve leaves room for them. {plan.untraced}"]
    return "\n".join(lines)


def binary_size(num_bytes: float) -> str:
    """Format a number of bytes in powers of 1024: ``binary_size(1536)`` is ``"1.5 KiB"``."""
    return convert_bytes(num_bytes).replace("B", "iB")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def _reason(candidate: Candidate) -> str:
    layout = candidate.layout
    if layout.offload_weights:
        return "weights and optimizer state are in host memory, which is slow."
    if layout.cp > 1:
        return "each sequence is split, because its activations are too large for one device."
    if layout.tp > 1:
        return "matrices are split inside a host."
    if layout.sharding == "none":
        return "every device has the whole model." if layout.replicas > 1 else "it is one device."
    kept = (
        "weights stay gathered between forward and backward"
        if layout.sharding == "fsdp-grad"
        else "everything is sharded"
    )
    inside = " inside an island" if layout.islands > 1 else " inside a host, replicated over hosts"
    inside = inside if layout.replicas > 1 else ""
    return f"{kept}{inside}."
