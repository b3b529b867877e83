"""Options of the project folder: where checkpoints and logs go."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import OptionGroup, option


@dataclass
class ProjectOptions(OptionGroup, title="Project"):
    """Where a run keeps its checkpoints and logs, and how many."""

    project_dir: str | None = option(None, "The folder of the project.")
    logging_dir: str | None = option(None, "The folder of tracker logs; None: the project's folder.")
    automatic_checkpoint_naming: bool = option(False, "Number checkpoints as checkpoints/checkpoint_<n>.")
    total_limit: int | None = option(None, "How many numbered checkpoints are kept.", minimum=1)
    iteration: int = option(0, "The number of the next checkpoint.", minimum=0)
    save_on_each_node: bool = option(False, "Save on the first process of every machine, not of the run.")
    checkpoint_format: str = option(
        "safe",
        "safe: safetensors and JSON; classic: the older file names with pickles.",
        choices=("safe", "classic"),
    )
    keep_every: int | None = option(
        None, "Every checkpoint whose number this divides is kept, beside the newest total_limit.", minimum=1
    )
    best_metric: str | None = option(
        None, "The checkpoints that are best by this metric of save_state(metrics=...) are kept as well."
    )
    best_mode: str = option("min", "Whether less or more of the metric is better.", choices=("min", "max"))
    keep_best: int = option(1, "How many of the best checkpoints are kept.", minimum=1)
    save_asynchronously: bool = option(False, "save_state() returns as soon as the state is copied to host memory.")
