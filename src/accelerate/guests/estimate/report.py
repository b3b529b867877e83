"""An estimate as tables, as JSON, and as a chart. Internal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Final, final

import torch
from torch import nn

from ...big_models.sizes import calculate_maximum_sizes, dtype_byte_size
from ...optional import require
from ...settings.labels import CustomDtype
from .plan import COLUMNS, PARTS, Footprint, Layout, aligned, binary_size, footprint
from .trace import Traceable, TrainingTrace, trace_or_sizes

#: The documented names of precisions.
DTYPE_NAMES: Final[dict[str, torch.dtype | CustomDtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": CustomDtype.INT4,
}
_COLORS: Final = ("#4477aa", "#99bbdd", "#66ccee", "#228833", "#ee6677", "#ccbb44")


@final
@dataclass(frozen=True)
class StoredSize:
    """The sizes in bytes of a model in one precision."""

    dtype: str
    largest_layer: int
    total: int
    training: int | None
    """Weights, gradients and the two values that Adam keeps for each; None where nothing is trained in this dtype."""


@final
@dataclass(frozen=True)
class Estimate:
    """The sizes of a model per precision, and its memory in training per layout."""

    model: str
    num_parameters: int
    stored: tuple[StoredSize, ...]
    trace: TrainingTrace
    footprints: tuple[Footprint, ...]
    untraced: str | None
    """Why activations aren't in the numbers; None where they are."""

    def as_json(self) -> dict[str, object]:
        """Return the estimate as JSON values, sizes in bytes."""
        return {
            "model": self.model,
            "parameters": self.num_parameters,
            "stored": [asdict(size) for size in self.stored],
            "step": {
                "batch": self.trace.batch,
                "sequence": self.trace.sequence,
                "optimizer": self.trace.optimizer_name,
                "activations_left_out": self.untraced,
            },
            "ranks": [
                {
                    "layout": each.layout.name,
                    "ranks": each.layout.ranks,
                    **{column: getattr(each, column) for column in COLUMNS},
                }
                for each in self.footprints
            ],
        }


def estimate(subject: Traceable, dtypes: Sequence[str], layouts: Sequence[Layout], **step: Any) -> Estimate:
    """Estimate the model's size in each precision, and the memory of one training step per rank of each layout.

    ``step`` are arguments of ``trace_training``. If the model can't be traced, activations are omitted and ``untraced``
    is the reason.
    """
    trace, untraced = trace_or_sizes(subject, **step)
    return Estimate(
        model=subject.name,
        num_parameters=trace.num_parameters,
        stored=stored_sizes(subject.build(), dtypes),
        trace=trace,
        footprints=tuple(footprint(trace, layout) for layout in layouts),
        untraced=untraced,
    )


def stored_sizes(model: nn.Module, dtypes: Sequence[str]) -> tuple[StoredSize, ...]:
    """Return the sizes of the model in each of the precisions."""
    total, (largest, _) = calculate_maximum_sizes(model.to(torch.float32))
    found = []
    for name in dtypes:
        share = dtype_byte_size(DTYPE_NAMES[name]) / torch.float32.itemsize
        is_trained = isinstance(DTYPE_NAMES[name], torch.dtype) and DTYPE_NAMES[name].is_floating_point  # pyright: ignore[reportAttributeAccessIssue]
        # In mixed precision the weights that are trained, their gradients and the optimizer's values stay whole.
        training = 4 * total + (0 if share == 1 else int(total * share)) if is_trained else None
        found.append(StoredSize(name, int(largest * share), int(total * share), training))
    return tuple(found)


def as_text(found: Estimate) -> str:
    """Format the estimate as tables."""
    stored = [("dtype", "largest layer", "total", "training")]
    for size in found.stored:
        training = "-" if size.training is None else binary_size(size.training)
        stored.append((size.dtype, binary_size(size.largest_layer), binary_size(size.total), training))
    rows: list[tuple[str, ...]] = [("layout", "ranks", *COLUMNS)]
    for each in found.footprints:
        rows.append((each.layout.name, str(each.layout.ranks), *each.cells()))
    lines = [f"{found.model}: {found.num_parameters:,} parameters", "", "Stored, and in training with Adam:", ""]
    lines += aligned(stored)
    if found.footprints:
        lines += ["", f"{_title(found)}, on the busiest rank at its fullest moment:", "", *aligned(rows)]
    if found.untraced is not None:
        lines += ["", f"Without activations of forward and backward. {found.untraced}"]
    return "\n".join(lines)


def _title(found: Estimate) -> str:
    trace = found.trace
    return f"One training step of batch {trace.batch}, sequence {trace.sequence}, {trace.optimizer_name}"


def draw(found: Estimate, path: str | PathLike[str]) -> None:
    """Write a chart to the file, with one bar per layout, divided by the purpose of memory.

    Raises:
        MissingDependency: matplotlib isn't installed.
    """
    require("matplotlib", "examples", purpose="Drawing an estimate")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size, unit = _unit(max((each.peak for each in found.footprints), default=0))
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(found.footprints)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    names = [f"{each.layout.name} ({_ranks(each.layout.ranks)})" for each in found.footprints]
    left = [0.0] * len(names)
    for part, color in zip(PARTS, _COLORS, strict=True):
        widths = [getattr(each, part) / size for each in found.footprints]
        if any(widths):
            axes.barh(names, widths, left=left, color=color, label=part, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, each in enumerate(found.footprints):
        axes.text(left[row], row, f" {binary_size(each.peak)}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"{unit} on each rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{found.model}\n{_title(found)}", loc="left", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _unit(largest: float) -> tuple[int, str]:
    power = 0
    while largest >= 1024 and power < 4:
        largest, power = largest / 1024, power + 1
    return 1024**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
