"""The tracker for DVCLive."""

from __future__ import annotations

import logging
from typing import Any

from ..optional import require
from .base import GeneralTracker, as_numbers, on_main_process, queued

logger: logging.Logger = logging.getLogger(__name__)


class DVCLiveTracker(GeneralTracker):
    """A tracker that writes to ``live``, or else to a ``dvclive.Live(**kwargs)``; each ``log`` is a step."""

    name = "dvclive"
    requires_logging_directory = False
    logs_in_background = True

    def __init__(self, run_name: str | None = None, live: object = None, **kwargs: object) -> None:
        super().__init__()
        del run_name  # DVC names runs itself
        self.live: Any = live
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        self._dvclive = require("dvclive", "dvclive", purpose="log_with='dvclive'")
        if self.live is None:
            self.live = self._dvclive.Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``dvclive.Live``."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        metric = require("dvclive.plots").Metric
        if step is not None:
            self.live.step = step
        for key, value in as_numbers(values).items():
            if metric.could_log(value):
                self.live.log_metric(key, value, **kwargs)
            else:
                logger.warning("DVCLive metrics are numbers; %r is a %s and is left out.", key, type(value).__name__)
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        self.live.end()
