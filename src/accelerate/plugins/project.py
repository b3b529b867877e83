"""Where a run keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

from ..settings.project import ProjectOptions
from .base import settle


@dataclass
class ProjectConfiguration(ProjectOptions):
    """The project's folder, its logging folder, and how its checkpoints are named, limited and written.

    ``checkpoint_format="safe"`` writes files that hold no pickle; ``"classic"`` the names and layout that
    other tools know from before. Both are read.

    Of numbered checkpoints the newest ``total_limit`` are kept (None: all), and besides: every ``keep_every``-th, the
    ``keep_best`` by ``best_metric``, and those that were saved with ``pin=True``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, "total_limit", "iteration", "checkpoint_format", "keep_every", "best_mode", "keep_best")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """The project lies in ``project_dir``, and so do its logs unless they were sent elsewhere."""
        self.project_dir = cast("str | None", project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
