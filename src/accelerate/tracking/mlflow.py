"""The tracker for MLflow."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, Final, final

from ..errors import SettingError
from ..optional import require
from ..settings import env
from .base import GeneralTracker, as_numbers, on_main_process, queued

logger: logging.Logger = logging.getLogger(__name__)

#: The service refuses more parameters than this in one request.
PARAMETERS_PER_REQUEST: Final = 100
#: How long the exit of the program waits for a server to close a run that is still open: MLflow itself would try for
#: minutes.
EXIT_SECONDS: Final = 5


class MLflowTracker(GeneralTracker):
    """A tracker that writes to a run of the MLflow experiment ``experiment_name``.

    MLflow's environment variables replace missing arguments: ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` (a JSON object) and
    ``MLFLOW_NESTED_RUN``. ``MLFLOW_EXPERIMENT_NAME`` always replaces ``experiment_name``, because ``init_trackers``
    sets that to the project's name.
    """

    name = "mlflow"
    requires_logging_directory = False
    logs_in_background = True

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, object] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name: str | None = env.read("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id: str | None = run_id if run_id is not None else env.read("MLFLOW_RUN_ID")
        self.tags: Mapping[str, object] | None = _tags(tags if tags is not None else env.read("MLFLOW_TAGS"))
        self.nested_run: bool = bool(nested_run) or env.flag("MLFLOW_NESTED_RUN")
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None
        self._thread_of_run: int | None = None
        self._metrics_refused: set[str] = set()

    @on_main_process
    def start(self) -> None:
        self._mlflow = require("mlflow", "mlflow", purpose="log_with='mlflow'")
        self.active_run = self._mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )
        self._thread_of_run = threading.get_ident()
        atexit.register(self._end_at_exit)  # after MLflow's own handler was registered, so called before it
        self._client = self._mlflow.MlflowClient()
        self._id: str = self.active_run.info.run_id

    def _experiment(self) -> str | None:
        """Return the id of the experiment, created if necessary; None lets MLflow choose."""
        if self.experiment_name is None:
            return None
        experiment = self._mlflow.get_experiment_by_name(self.experiment_name)
        if experiment is not None:
            return experiment.experiment_id
        location = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return self._mlflow.create_experiment(self.experiment_name, artifact_location=location, tags=self.tags)

    @property
    def tracker(self) -> Any:
        """The active MLflow run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log ``values`` as the run's parameters; skip values that are too long for MLflow, with a warning."""
        longest: int = self._mlflow.utils.validation.MAX_PARAM_VAL_LENGTH
        kept: list[tuple[str, Any]] = []
        for key, value in values.items():
            if len(str(value)) > longest:
                logger.warning("MLflow takes parameters of at most %d characters; %r is left out.", longest, key)
            else:
                kept.append((key, value))
        for first in range(0, len(kept), PARAMETERS_PER_REQUEST):
            self._mlflow.log_params(dict(kept[first : first + PARAMETERS_PER_REQUEST]))

    @queued
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers as metrics; skip other values, with one warning per name."""
        metrics: dict[str, float] = {}
        for key, value in as_numbers(values).items():
            if isinstance(value, (int, float)):
                metrics[key] = value
            elif key not in self._metrics_refused:
                self._metrics_refused.add(key)
                logger.warning("MLflow metrics are numbers; %r is a %s and is left out.", key, type(value).__name__)
        # Pass the run, here and below: MLflow's active run is local to the thread that started it.
        self._mlflow.log_metrics(metrics, step=step, **{"run_id": self._id, **kwargs})

    @queued
    def log_figure(self, figure: object, artifact_file: str, **save_kwargs: object) -> None:
        """Log the figure as an artifact of the run, named ``artifact_file``."""
        self._client.log_figure(self._id, figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Upload a copy of the folder's current files as artifacts of the run, under ``artifact_path``."""
        self._send(_Files(local_dir, keep=self._background_queue is not None), artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Upload a copy of the file in its current state as an artifact of the run, under ``artifact_path``."""
        self._send(_Files(local_path, keep=self._background_queue is not None), artifact_path)

    @queued
    def _send(self, files: _Files, artifact_path: str | None) -> None:
        send = self._client.log_artifacts if os.path.isdir(files.path) else self._client.log_artifact
        with files:
            send(self._id, files.path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        if threading.get_ident() == self._thread_of_run:
            self._leave_thread()
        else:
            self._client.set_terminated(self._id)

    def _leave_thread(self) -> None:
        if self._thread_of_run is not None:
            self._thread_of_run = None
            atexit.unregister(self._end_at_exit)
            self._mlflow.end_run()

    def _end_at_exit(self) -> None:
        """Close a run that is still open at exit, within seconds, and log a failure."""
        with env.patched(MLFLOW_HTTP_REQUEST_TIMEOUT=EXIT_SECONDS, MLFLOW_HTTP_REQUEST_MAX_RETRIES=0):
            try:
                self._leave_thread()
            except Exception as error:  # the service's; the program ends either way
                logger.warning(
                    "MLflow could not be told that run %s has ended (%s); it still shows it as running.",
                    self._id, type(error).__name__,
                )  # fmt: skip


@final
class _Files:
    """A link or copy of a file or folder, kept until it is uploaded, in case the caller removes the original."""

    def __init__(self, path: str | os.PathLike[str], *, keep: bool) -> None:
        self.path = os.fspath(path)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if keep:
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            kept = os.path.join(self._folder.name, os.path.basename(os.path.normpath(self.path)))
            try:
                if os.path.isdir(self.path):
                    shutil.copytree(self.path, kept, copy_function=_link)
                else:
                    _link(self.path, kept)
            except OSError:  # missing file or full disk: logged when the file is sent, like any failure of a tracker
                return
            self.path = kept

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exception: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _link(source: str, target: str) -> str:
    """Create a hard link to the file if the file system supports them, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _tags(tags: Mapping[str, object] | str | None) -> Mapping[str, object] | None:
    if not isinstance(tags, str):
        return tags
    try:
        parsed = json.loads(tags)
    except json.JSONDecodeError as error:
        raise SettingError(
            f"The MLflow tags {tags!r} (argument `tags`, or MLFLOW_TAGS) aren't JSON: {error}"
        ) from error
    if not isinstance(parsed, dict):
        raise SettingError(f"The MLflow tags {tags!r} (argument `tags`, or MLFLOW_TAGS) aren't a JSON object.")
    return parsed
