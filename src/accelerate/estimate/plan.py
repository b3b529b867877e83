"""Which way of spreading a training step over the ranks is the simplest one that fits: pure arithmetic over a trace.

Ways are tried in the order of what they cost in communication and computation. Shards stay inside a host where that is
enough; matrices never leave one, because every layer waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ..errors import SettingError
from ..memory import convert_bytes
from .layout import Footprint, Layout, footprint
from .trace import TrainingTrace

#: What of a device's memory isn't planned for: the allocator's gaps, kernels, the communication library.
RESERVE: Final = 0.1
_DEGREES: Final = (2, 4, 8)
_PARTS: Final = ("weights", "buffers", "gradients", "optimizer", "activations", "communication", "host")


@final
@dataclass(frozen=True)
class Way:
    """One way of spreading the step, and what it takes on the busiest rank."""

    layout: Layout
    recompute: bool
    footprint: Footprint
    fits: bool

    @property
    def name(self) -> str:
        """``tp2+fsdp8, recomputing``."""
        offload = ", offloaded" if self.layout.offload_weights else ""
        return self.layout.name + offload + (", recomputing" if self.recompute else "")


@final
@dataclass(frozen=True)
class Plan:
    """The ways that were tried, in order, up to the first that fits, which is chosen."""

    model: str
    gpus: int
    memory: int  # bytes of one device
    usable: int  # of which are planned with
    batch: int  # samples of a micro-batch on one data-parallel rank
    sequence: int
    ways: tuple[Way, ...]

    @property
    def chosen(self) -> Way | None:
        """The first way that fits; None where none does."""
        return next((way for way in self.ways if way.fits), None)

    def as_json(self) -> dict[str, Any]:
        """For programs: bytes, and plain names."""
        return {
            "model": self.model,
            "gpus": self.gpus,
            "memory": self.memory,
            "usable": self.usable,
            "batch": self.batch,
            "sequence": self.sequence,
            "chosen": None if self.chosen is None else self.chosen.name,
            "ways": [
                {
                    "way": way.name,
                    "recompute": way.recompute,
                    "layout": asdict(way.layout),
                    **{part: getattr(way.footprint, part) for part in _PARTS},
                    "peak": way.footprint.peak,
                    "fits": way.fits,
                }
                for way in self.ways
            ],
        }


def layouts(gpus: int, gpus_per_host: int) -> Iterator[Layout]:
    """Ways of spreading over ``gpus`` devices, the cheapest in communication first."""
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
    for degree in _DEGREES:
        if degree <= inside and degree < gpus and inside % degree == 0:
            yield _with_shards(gpus, tp=degree)
    for degree in (*_DEGREES, 16, 32):
        if degree <= gpus and gpus % degree == 0:
            yield _with_shards(gpus, cp=degree)
    if inside in _DEGREES and gpus > inside:
        yield _with_shards(gpus, tp=inside, cp=gpus // inside)
    yield Layout(shards=gpus, sharding="fsdp", offload_weights=True)


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
) -> Plan:
    """The plan for ``gpus`` devices of ``memory`` bytes each.

    Args:
        trace_step: the traced step, with activation checkpointing or without.

    Raises:
        SettingError: numbers that can't be.
    """
    if gpus < 1 or gpus_per_host < 1 or (gpus > gpus_per_host and gpus % gpus_per_host):
        raise SettingError(
            f"--gpus {gpus} on hosts of {gpus_per_host}: give a number of at least 1 that fills its hosts, or say "
            "--gpus_per_host."
        )
    if memory < 1 or not 0 <= reserve < 1:
        raise SettingError(f"memory={memory} bytes with reserve={reserve}: give more than nothing, and less than all.")
    usable = int(memory * (1 - reserve))
    traces: dict[bool, TrainingTrace] = {False: trace_step(False)}
    ways: list[Way] = []
    for layout, recompute in _in_order(gpus, gpus_per_host):
        if recompute not in traces:
            traces[recompute] = trace_step(recompute)
        # FSDP shards over the context-parallel ranks too.
        counted = replace(layout, shards=layout.shards * layout.cp)
        found = replace(footprint(traces[recompute], counted), layout=layout)
        ways.append(Way(layout, recompute, found, found.peak <= usable))
        if ways[-1].fits:
            break
    return Plan(model, gpus, memory, usable, traces[False].batch, traces[False].sequence, tuple(ways))


def _in_order(gpus: int, gpus_per_host: int) -> Iterator[tuple[Layout, bool]]:
    """Data-parallel ways first without recomputing, then with; what costs more is only tried with it, under FSDP."""
    every = list(layouts(gpus, gpus_per_host))
    simple = [each for each in every if each.tp == each.cp == 1 and not each.offload_weights]
    yield from ((each, False) for each in simple)
    yield from ((each, True) for each in simple if each.sharding.startswith("fsdp"))
    yield from ((each, each.sharding.startswith("fsdp")) for each in every if each not in simple)


def as_text(plan: Plan) -> str:
    """The table, and the sentence."""
    head = ("way", *_PARTS, "peak", "fits")
    rows = [(way.name, *map(convert_bytes, _bytes_of(way)), "yes" if way.fits else "") for way in plan.ways]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        f"{plan.model} on {plan.gpus} x {convert_bytes(plan.memory)} ({convert_bytes(plan.usable)} planned with): one "
        f"training step of batch {plan.batch} per data-parallel rank and sequence {plan.sequence}, on the busiest rank",
        "",
    ]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    chosen = plan.chosen
    lines.append("")
    if chosen is None:
        lines.append("Nothing fits. Use more devices, a smaller --batch or --sequence, or lower precision.")
    else:
        lines.append(f"Chosen: {chosen.name}, the first that fits: {_why(chosen)}")
    return "\n".join(lines)


def _bytes_of(way: Way) -> list[int]:
    return [*(getattr(way.footprint, part) for part in _PARTS), way.footprint.peak]


def _why(way: Way) -> str:
    layout = way.layout
    if layout.offload_weights:
        return "weights and optimizer state wait in host memory, which is slow."
    if layout.cp > 1:
        return "each sequence is split, because its activations are too large for one device."
    if layout.tp > 1:
        return "matrices are split inside a host."
    if layout.sharding == "none":
        return "every device has the whole model." if layout.replicas > 1 else "it is one device."
    kept = (
        "weights stay gathered between forward and backward" if layout.sharding == "fsdp-grad" else "all is in shards"
    )
    inside = " inside a host, replicated over hosts" if layout.replicas > 1 else ""
    return f"{kept}{inside}."
