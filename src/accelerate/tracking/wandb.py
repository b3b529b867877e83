"""The tracker for Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..optional import require
from .base import GeneralTracker, as_numbers, on_main_process, queued


class WandBTracker(GeneralTracker):
    """A tracker that writes to a run of the W&B project ``run_name``; ``kwargs`` go to ``wandb.init``."""

    name = "wandb"
    requires_logging_directory = False
    logs_in_background = True
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        self._wandb = require("wandb", "wandb", purpose="log_with='wandb'")
        self.run = self._wandb.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``wandb`` run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        self.run.log(as_numbers(values), step=step, **kwargs)

    @queued
    def log_images(self, values: Mapping[str, Iterable[object]], step: int | None = None, **kwargs: object) -> None:
        """Log each value, a list of images, under its key."""
        for key, images in values.items():
            self.log({key: [self._wandb.Image(image) for image in images]}, step=step, **kwargs)

    @queued
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[object]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **kwargs: object,
    ) -> None:
        """Log a table, a ``dataframe`` or ``columns`` and ``data``, under ``table_name``."""
        table = self._wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
