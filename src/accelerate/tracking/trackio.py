"""The tracker for Trackio."""

from __future__ import annotations

from typing import Any

from ..optional import require
from .base import GeneralTracker, as_numbers, on_main_process, queued


class TrackioTracker(GeneralTracker):
    """A tracker that writes to a run of the Trackio project ``run_name``; ``kwargs`` go to ``trackio.init``."""

    name = "trackio"
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
        self.run = require("trackio", "trackio", purpose="log_with='trackio'").init(
            project=self.run_name, **self.init_kwargs
        )

    @property
    def tracker(self) -> Any:
        """The ``trackio`` run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        # A trackio run's configuration is a plain dict.
        self.run.config.update(values)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        self.run.log(as_numbers(values), **({} if step is None else {"step": step}), **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
