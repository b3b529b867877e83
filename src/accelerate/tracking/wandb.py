"""The tracker for Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import RunTracker, on_main_process, queued


class WandBTracker(RunTracker):
    """A tracker that writes to a run of the W&B project ``run_name``; ``kwargs`` go to ``wandb.init``."""

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

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
        table = self._package.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
