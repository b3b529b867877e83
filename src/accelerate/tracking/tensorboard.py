"""The tracker for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..optional import is_installed, require
from .base import GeneralTracker, as_numbers, on_main_process, queued


class TensorBoardTracker(GeneralTracker):
    """A tracker that writes event files under ``{logging_dir}/{run_name}``; ``kwargs`` go to ``SummaryWriter``."""

    name = "tensorboard"
    requires_logging_directory = True
    logs_in_background = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir_param = logging_dir
        self.logging_dir: str = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        # torch's own writer needs the tensorboard package; tensorboardX has the same class.
        module = "torch.utils.tensorboard" if is_installed("tensorboard") else "tensorboardX"
        writer_class = require(module, "tensorboard", purpose="log_with='tensorboard'").SummaryWriter
        self.writer = writer_class(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` (int, float, str, bool or tensor) in the HPARAMS tab and in ``hparams.yml``."""
        import torch
        import yaml

        plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers as scalars, strings as texts, dicts as groups of scalars."""
        for key, value in as_numbers(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
        self.writer.flush()

    @queued
    def log_images(self, values: Mapping[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log each value, a batch of images, under its key; ``kwargs`` go to ``add_images``."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
