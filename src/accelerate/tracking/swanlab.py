"""The tracker for SwanLab."""

from __future__ import annotations

import threading
from typing import Any

from .base import RunTracker, on_main_process


class SwanLabTracker(RunTracker):
    """A tracker that writes to a run of the SwanLab project ``run_name``; ``kwargs`` go to ``swanlab.init``."""

    name = "swanlab"
    _is_finished: bool = False

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def finish(self) -> None:
        # SwanLab sets signal handlers when it finishes, which Python allows the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._leave_thread()

    def _leave_thread(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self.run.finish()
