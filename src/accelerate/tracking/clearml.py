"""The tracker for ClearML."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import SettingError
from ..optional import require
from ..settings import env
from .base import GeneralTracker, as_numbers, on_main_process, queued

logger: logging.Logger = logging.getLogger(__name__)

_SERIES: Final = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """A tracker that writes to the running ClearML task, or else to a new one created with ``kwargs``.

    A task that was already running isn't closed. ``CLEARML_PROJECT`` and ``CLEARML_TASK`` name the project and the task
    if ``kwargs`` don't.
    """

    name = "clearml"
    requires_logging_directory = False
    logs_in_background = True

    def __init__(self, run_name: str | None = None, **kwargs: object) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._opened_here = False

    @on_main_process
    def start(self) -> None:
        task_class = require("clearml", "clearml", purpose="log_with='clearml'").Task
        self.task = task_class.current_task()
        if self.task is not None:
            return
        named = {
            "project_name": env.read("CLEARML_PROJECT") or self.user_provided_run_name,
            "task_name": env.read("CLEARML_TASK") or self.user_provided_run_name,
        }
        self.task = task_class.init(**{**named, **self.init_kwargs})
        self._opened_here = True

    @property
    def tracker(self) -> Any:
        """The ClearML task."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Report numbers as scalars at ``step``; without a step, as single values.

        ``train_loss`` and ``eval_loss`` are two series of one plot, ``loss``.
        """
        reporter = self.task.get_logger()
        for key, value in as_numbers(values).items():
            if not isinstance(value, (int, float)):
                logger.warning("ClearML scalars are numbers; %r is a %s and is left out.", key, type(value).__name__)
            elif step is None:
                reporter.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = self._get_title_series(key)
                reporter.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @queued
    def log_images(self, values: Mapping[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log each value, an image, under its key."""
        reporter = self.task.get_logger()
        for key, image in values.items():
            title, series = self._get_title_series(key)
            reporter.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

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
        if dataframe is None and data is None:
            raise SettingError("`log_table` got no table: give `data` (with `columns`), or `dataframe`.")
        table = dataframe
        if dataframe is None and data is not None:
            table = [columns, *data] if columns else data
        title, series = self._get_title_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.task is not None and self._opened_here:
            self.task.close()

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        series, separator, title = name.partition("_")
        return (title, series) if separator and series in _SERIES else (name, "train")
