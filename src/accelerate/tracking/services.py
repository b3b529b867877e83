"""The trackers of logging services, one class for each; MLflow's is in `mlflow`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError
from ..optional import is_installed, require
from ..settings import env
from .base import GeneralTracker, as_numbers, on_main_process, queued

logger: logging.Logger = logging.getLogger(__name__)

#: The prefixes of names that ClearML shows as series of one plot.
_SERIES: Final = ("eval", "test", "train")


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


class TensorBoardTracker(GeneralTracker):
    """A tracker that writes event files under ``{logging_dir}/{run_name}``; ``kwargs`` go to ``SummaryWriter``."""

    name = "tensorboard"
    requires_logging_directory = True
    logs_in_background = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir_param = logging_dir
        self.logging_dir: str = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        # torch's own writer needs the tensorboard package; tensorboardX has the same class.
        module = "torch.utils.tensorboard" if is_installed("tensorboard") else "tensorboardX"
        writer_class = require(module, "tensorboard", purpose="log_with='tensorboard'").SummaryWriter
        self.writer = writer_class(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` (int, float, str, bool or tensor) in the HPARAMS tab and in ``hparams.yml``."""
        import torch
        import yaml

        plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers as scalars, strings as texts, dicts as groups of scalars."""
        for key, value in as_numbers(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
        self.writer.flush()

    @queued
    def log_images(self, values: Mapping[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log each value, a batch of images, under its key; ``kwargs`` go to ``add_images``."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


class RunTracker(GeneralTracker):
    """A tracker of a package that logs dictionaries to a run; ``kwargs`` go to the package's ``init``.

    The package has the tracker's name. The run belongs to its project ``run_name``.
    """

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
        self._package: Any = require(self.name, self.name, purpose=f"log_with={self.name!r}")
        self.run = self._package.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        self.run.log(as_numbers(values), **({} if step is None else {"step": step}), **kwargs)

    @queued
    def log_images(self, values: Mapping[str, Iterable[object]], step: int | None = None, **kwargs: object) -> None:
        """Log each value, a list of images, under its key."""
        for key, images in values.items():
            self.log({key: [self._package.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class SwanLabTracker(RunTracker):
    """A tracker that writes to a run of the SwanLab project ``run_name``; ``kwargs`` go to ``swanlab.init``."""

    name = "swanlab"
    _is_finished: bool = False

    @on_main_process
    def finish(self) -> None:
        # SwanLab sets signal handlers when it finishes, which Python allows the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._leave_thread()

    def _leave_thread(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self.run.finish()


class TrackioTracker(RunTracker):
    """A tracker that writes to a run of the Trackio project ``run_name``; ``kwargs`` go to ``trackio.init``."""

    name = "trackio"


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
