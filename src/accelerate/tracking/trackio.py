"""The tracker for Trackio."""

from __future__ import annotations

from typing import Any

from .base import RunTracker, on_main_process


class TrackioTracker(RunTracker):
    """A tracker that writes to a run of the Trackio project ``run_name``; ``kwargs`` go to ``trackio.init``."""

    name = "trackio"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        # A trackio run's configuration is a plain dict.
        self.run.config.update(values)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
