"""The tracker for SwanLab."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from ..optional import require
from .base import GeneralTracker, as_numbers, on_main_process, queued


class SwanLabTracker(GeneralTracker):
    """A tracker that writes to a run of the SwanLab project ``run_name``; ``kwargs`` go to ``swanlab.init``."""

    name = "swanlab"
    requires_logging_directory = False
    logs_in_background = True
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        self._is_finished = False

    @on_main_process
    def start(self) -> None:
        self._swanlab = require("swanlab", "swanlab", purpose="log_with='swanlab'")
        self.run = self._swanlab.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``swanlab`` run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        self.run.log(as_numbers(values), step=step, **kwargs)

    @queued
    def log_images(self, values: Mapping[str, Iterable[object]], step: int | None = None, **kwargs: object) -> None:
        """Log each value, a list of images, under its key."""
        for key, images in values.items():
            self.log({key: [self._swanlab.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        # SwanLab sets signal handlers when it finishes, which Python allows the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._leave_thread()

    def _leave_thread(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self.run.finish()
