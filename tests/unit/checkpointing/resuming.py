"""Resume from the newest checkpoint of a folder, without an Accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch

from accelerate.checkpointing import LoadedCheckpoint, LoadOptions, RunState, resume_run
from accelerate.checkpointing.sharded import GivenState
from accelerate.settings.training import ProjectOptions


def resume_models(
    models: Sequence[torch.nn.Module],
    root: str | PathLike[str] | None = None,
    project: ProjectOptions | None = None,
    **options: Any,
) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint of ``root``, or of ``project``, into ``models``."""
    run = RunState(GivenState(), None, project or ProjectOptions(), models=models)
    return resume_run(run, root, LoadOptions.of(**options))
