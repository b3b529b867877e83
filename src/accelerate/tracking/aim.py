"""The tracker for Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..optional import require
from .base import GeneralTracker, as_numbers, on_main_process, queued


class AimTracker(GeneralTracker):
    """A tracker that writes the run to the Aim repository ``logging_dir``; ``kwargs`` go to ``aim.Run``."""

    name = "aim"
    requires_logging_directory = True
    logs_in_background = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        self._aim = require("aim", "aim", purpose="log_with='aim'")
        self.writer = self._aim.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The ``aim.Run``."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        for key, value in as_numbers(values).items():
            self.writer.track(value, name=key, step=step, **kwargs)

    @queued
    def log_images(
        self,
        values: Mapping[str, object],
        step: int | None = None,
        kwargs: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Log each value, an image or a pair of image and caption, under its key.

        ``kwargs["aim_image"]`` goes to ``aim.Image``, ``kwargs["track"]`` to ``Run.track``.
        """
        for_image = (kwargs or {}).get("aim_image", {})
        for_track = (kwargs or {}).get("track", {})
        for key, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            image = self._aim.Image(picture, caption=caption, **for_image)
            self.writer.track(image, name=key, step=step, **for_track)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
