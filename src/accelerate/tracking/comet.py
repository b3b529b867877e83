"""The tracker for Comet."""

from __future__ import annotations

from typing import Any

from ..optional import is_installed, require
from .base import GeneralTracker, as_numbers, on_main_process, queued


class CometMLTracker(GeneralTracker):
    """A tracker that writes to an experiment of the Comet project ``run_name``; ``kwargs`` go to ``comet_ml.start``.

    Before version 3.41, which added ``start``, they go to ``comet_ml.Experiment``.
    """

    name = "comet_ml"
    requires_logging_directory = False
    logs_in_background = True

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        comet_ml = require("comet_ml", "comet_ml", purpose="log_with='comet_ml'")
        begin = comet_ml.start if is_installed("comet_ml", at_least="3.41.0") else comet_ml.Experiment
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``comet_ml`` experiment."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers as metrics, strings as "others", dicts as groups of metrics."""
        if step is not None:
            self.writer.set_step(step)
        for key, value in as_numbers(values).items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(key, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.end()
