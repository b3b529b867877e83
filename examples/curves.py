"""Plot the curves of one run or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LINE_STYLES = ("-", "--", ":", "-.")
TITLES = {"loss": "training loss", "accuracy": "held-out accuracy", "f1": "held-out F1"}


def plot_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path, title: str) -> Path:
    """A PNG at `path` with one panel a quantity, and in it one line a run.

    `runs` names each run and gives its epochs in order, each a mapping such as {"epoch": 1, "loss": 0.5}. Texts aren't
    drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs_of_first = next(iter(runs.values()))
    quantities = [name for name, value in epochs_of_first[0].items() if name != "epoch" and not isinstance(value, str)]
    figure, panels = pyplot.subplots(1, len(quantities), figsize=(4.2 * len(quantities), 3.4), squeeze=False)
    for panel, quantity in zip(panels[0], quantities, strict=True):
        for index, (name, epochs) in enumerate(runs.items()):
            panel.plot(
                [epoch["epoch"] for epoch in epochs],
                [epoch[quantity] for epoch in epochs],
                LINE_STYLES[index % len(LINE_STYLES)],
                marker="o",
                markersize=7 - 3 * min(index, 1),  # the second run lies on the first: both stay visible
                linewidth=2,
                label=name,
            )
        panel.set_xlabel("epoch")
        panel.set_title(TITLES.get(quantity, quantity.replace("_", " ")))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylim(bottom=0 if quantity != "accuracy" else None)
        panel.grid(alpha=0.3)
    if len(runs) > 1:
        panels[0][0].legend()
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
