"""A log of the run that needs no service: one JSON object per line, in the project folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, final

from .base import GeneralTracker, on_main_process, queued


@final
class JSONLTracker(GeneralTracker):
    """A tracker that appends all values of the run to ``{logging_dir}/{run_name}.jsonl``, line by line.

    Values survive a crash: its thread writes them within milliseconds, and the rest is written at exit. Each line has
    ``time`` (of the call, in seconds since 1970) and either ``config`` or the logged values and their ``step``. A
    restarted run appends to the file of the first one.
    """

    name = "jsonl"
    requires_logging_directory = True
    logs_in_background = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        super().__init__()
        self.path: Path = Path(logging_dir) / f"{run_name}.jsonl"
        self._is_open = False

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_open = True

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": values})

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        del kwargs  # meant for services
        self._write({"step": step, **values} if step is not None else dict(values))

    @on_main_process
    def finish(self) -> None:
        self._is_open = False

    def _write(self, line: dict[str, object]) -> None:
        if not self._is_open:
            return
        when = time.time() if self._background_queue is None else self._background_queue.when
        text = json.dumps({"time": round(when, 3), **line}, default=_as_json)
        # Open the file for each line, so that a run that dies leaves nothing unflushed.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _as_json(value: object) -> object:
    """Return tensors and arrays as numbers, and other objects as text."""
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else str(value)
