"""The services are stubs here: each test says which of the service's calls one of ours becomes."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from accelerate.tracking import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
    finish,
    init_trackers,
    services,
)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`service("wandb")` is a stub that `import wandb` finds."""

    def stub(name: str) -> MagicMock:
        module = MagicMock(spec=ModuleType(name), name=name)
        module.mock_add_spec(None)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return stub


def started(tracker: GeneralTracker) -> Any:
    tracker.start()
    return tracker


@pytest.mark.parametrize(("tracker_class", "name"), [(WandBTracker, "wandb"), (SwanLabTracker, "swanlab")])
def test_wandb_and_swanlab_log_to_one_run(service: Any, tracker_class: Any, name: str) -> None:
    module = service(name)
    tracker = started(tracker_class("project", tags=["a"]))
    module.init.assert_called_once_with(project="project", tags=["a"])
    run = module.init.return_value
    assert tracker.run is run and tracker.tracker is run
    tracker.store_init_configuration({"lr": 1})
    run.config.update.assert_called_once()
    assert run.config.update.call_args.args == ({"lr": 1},)
    tracker.log({"loss": 2}, step=3, commit=True)
    run.log.assert_called_once_with({"loss": 2}, step=3, commit=True)
    tracker.log_images({"samples": ["i", "j"]}, step=4)
    assert module.Image.call_args_list == [call("i"), call("j")]
    assert run.log.call_args == call({"samples": [module.Image.return_value] * 2}, step=4)
    tracker.finish()
    run.finish.assert_called_once_with()


def test_wandb_logs_tables(service: Any) -> None:
    wandb = service("wandb")
    tracker = started(WandBTracker("project"))
    tracker.log_table("answers", columns=["q"], data=[["a"]], step=1)
    wandb.Table.assert_called_once_with(columns=["q"], data=[["a"]], dataframe=None)
    assert tracker.run.log.call_args == call({"answers": wandb.Table.return_value}, step=1)


def test_trackio_logs_with_a_step_only_where_there_is_one(service: Any) -> None:
    trackio = service("trackio")
    tracker = started(TrackioTracker("project", space_id="me/space"))
    trackio.init.assert_called_once_with(project="project", space_id="me/space")
    tracker.log({"loss": 1})
    tracker.log({"loss": 2}, step=5)
    assert tracker.run.log.call_args_list == [call({"loss": 1}), call({"loss": 2}, step=5)]
    tracker.log_images({"digits": [1, 2]}, step=6)
    assert tracker.run.log.call_args == call({"digits": [trackio.Image.return_value] * 2}, step=6)
    tracker.finish()
    tracker.run.finish.assert_called_once_with()


@pytest.mark.parametrize("new", [True, False])
def test_comet_starts_an_experiment(service: Any, monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    comet_ml = service("comet_ml")
    monkeypatch.setattr(services, "is_installed", lambda *_args, **_kwargs: new)
    tracker = started(CometMLTracker("project", online=False))
    begin = comet_ml.start if new else comet_ml.Experiment
    begin.assert_called_once_with(project_name="project", online=False)
    tracker.log({"loss": 1.5, "note": "x", "group": {"a": 1}}, step=2)
    writer = tracker.writer
    writer.set_step.assert_called_once_with(2)
    writer.log_metric.assert_called_once_with("loss", 1.5, step=2)
    writer.log_other.assert_called_once_with("note", "x")
    writer.log_metrics.assert_called_once_with({"a": 1}, step=2)
    tracker.store_init_configuration({"lr": 1})
    writer.log_parameters.assert_called_once_with({"lr": 1})
    tracker.finish()
    writer.end.assert_called_once_with()


def test_aim_tracks_values_and_captioned_images(service: Any) -> None:
    aim = service("aim")
    tracker = started(AimTracker("run", "folder", system_tracking_interval=None))
    aim.Run.assert_called_once_with(repo="folder", system_tracking_interval=None)
    run = tracker.tracker
    assert run.name == "run"
    tracker.log({"loss": 1}, step=2, context={"subset": "train"})
    run.track.assert_called_once_with(1, name="loss", step=2, context={"subset": "train"})
    tracker.log_images(
        {"a": ("image", "caption"), "b": "plain"}, 3, {"aim_image": {"quality": 5}, "track": {"epoch": 1}}
    )
    assert aim.Image.call_args_list == [
        call("image", caption="caption", quality=5),
        call("plain", caption="", quality=5),
    ]
    assert run.track.call_args == call(aim.Image.return_value, name="b", step=3, epoch=1)
    tracker.finish()
    run.close.assert_called_once_with()


class TestMLflow:
    @pytest.fixture
    def mlflow(self, service: Any) -> Any:
        mlflow = service("mlflow")
        mlflow.utils.validation.MAX_PARAM_VAL_LENGTH = 10
        return mlflow

    def test_the_run_belongs_to_the_experiment_which_is_made_once(self, mlflow: Any) -> None:
        mlflow.get_experiment_by_name.return_value = None
        tracker = started(MLflowTracker("project", logging_dir="folder", tags={"a": "b"}, run_name="first"))
        mlflow.create_experiment.assert_called_once_with("project", artifact_location="folder", tags={"a": "b"})
        begun = mlflow.start_run.call_args.kwargs
        assert begun["experiment_id"] is mlflow.create_experiment.return_value
        assert (begun["run_name"], begun["nested"], begun["run_id"]) == ("first", False, None)
        mlflow.get_experiment_by_name.return_value = MagicMock(experiment_id="7")
        started(MLflowTracker("project"))
        assert mlflow.start_run.call_args.kwargs["experiment_id"] == "7"
        assert mlflow.create_experiment.call_count == 1
        assert tracker.tracker is mlflow.start_run.return_value

    def test_variables_complete_the_arguments(self, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
        monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
        monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
        monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
        started(MLflowTracker("project"))
        mlflow.get_experiment_by_name.assert_called_once_with("from the environment")
        begun = mlflow.start_run.call_args.kwargs
        assert (begun["tags"], begun["nested"], begun["run_id"]) == ({"team": "a"}, True, "abc")
        started(MLflowTracker("project", run_id="mine", tags={"own": 1}))
        begun = mlflow.start_run.call_args.kwargs
        assert (begun["tags"], begun["run_id"]) == ({"own": 1}, "mine")

    def test_a_nested_run_switched_off_by_text_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_NESTED_RUN", "false")
        assert MLflowTracker("project").nested_run is False

    @pytest.mark.parametrize("tags", ["{", "[1]"])
    def test_tags_that_are_no_json_object_are_refused(self, tags: str) -> None:
        with pytest.raises(ValueError, match="MLFLOW_TAGS"):
            MLflowTracker("project", tags=tags)

    def test_parameters_go_in_hundreds_and_long_ones_are_left_out(
        self, mlflow: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        tracker = started(MLflowTracker("project"))
        tracker.store_init_configuration({**{f"p{i}": i for i in range(150)}, "long": "x" * 11})
        first, second = (each.args[0] for each in mlflow.log_params.call_args_list)
        assert (len(first), len(second)) == (100, 50)
        assert "'long'" in caplog.text

    def test_only_numbers_are_metrics_and_the_rest_is_named_once(
        self, mlflow: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        tracker = started(MLflowTracker("project"))
        for step in (1, 2):
            tracker.log({"loss": 0.5, "note": "x"}, step=step)
        assert mlflow.log_metrics.call_args == call(
            {"loss": 0.5}, step=2, run_id=mlflow.start_run.return_value.info.run_id
        )
        assert caplog.text.count("'note'") == 1

    def test_a_run_that_nobody_ended_is_given_up_within_seconds_at_exit(
        self, mlflow: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        patience: list[str | None] = []

        def end_run() -> None:
            names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
            patience.extend(os.environ.get(name) for name in names)
            raise ConnectionError("no server")

        mlflow.end_run.side_effect = end_run
        tracker = started(MLflowTracker("project"))
        tracker._end_at_exit()
        tracker._end_at_exit()  # nothing is left to end
        assert patience == ["5", "0"]
        assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ
        assert caplog.text.count("still shows it as running") == 1

    def test_files_that_are_removed_after_the_call_are_sent_all_the_same(self, mlflow: Any, tmp_path: Path) -> None:
        sent: list[tuple[str, str]] = []
        client = mlflow.MlflowClient.return_value

        def one(_run: str, path: str, **_where: Any) -> None:
            sent.append((Path(path).name, Path(path).read_text()))

        def folder(_run: str, path: str, **_where: Any) -> None:
            sent.extend((f"{Path(path).name}/{each.name}", each.read_text()) for each in sorted(Path(path).iterdir()))

        client.log_artifact.side_effect, client.log_artifacts.side_effect = one, folder
        [tracker] = init_trackers([MLflowTracker("project")], "project")
        held = threading.Event()
        tracker._background_queue.put(held.wait, "hold")  # type: ignore[union-attr]
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "a.txt").write_text("one")
        tracker.log_artifact(str(tmp_path / "results" / "a.txt"))  # type: ignore[attr-defined]
        tracker.log_artifacts(str(tmp_path / "results"))  # type: ignore[attr-defined]
        shutil.rmtree(tmp_path / "results")
        held.set()
        finish([tracker])
        assert sent == [("a.txt", "one"), ("results/a.txt", "one")]

    def test_files_and_figures_are_artifacts(self, mlflow: Any, tmp_path: Path) -> None:
        tracker = started(MLflowTracker("project"))
        tracker.log_figure("figure", "f.png", dpi=3)
        client, run = mlflow.MlflowClient.return_value, mlflow.start_run.return_value.info.run_id
        client.log_figure.assert_called_once_with(run, "figure", "f.png", dpi=3)
        tracker.log_artifacts(str(tmp_path), "there")
        client.log_artifacts.assert_called_once_with(run, str(tmp_path), artifact_path="there")
        tracker.log_artifact("file")
        client.log_artifact.assert_called_once_with(run, "file", artifact_path=None)
        tracker.finish()
        mlflow.end_run.assert_called_once_with()

    def test_the_run_is_ended_by_the_tracker_s_thread_and_forgotten_by_the_one_that_started_it(
        self, mlflow: Any
    ) -> None:
        client, run = mlflow.MlflowClient.return_value, mlflow.start_run.return_value.info.run_id
        threads: dict[str, str] = {}
        client.set_terminated.side_effect = lambda _run: threads.update(ended=threading.current_thread().name)
        mlflow.end_run.side_effect = lambda: threads.update(forgotten=threading.current_thread().name)
        [tracker] = init_trackers([MLflowTracker("project")], "project")
        finish([tracker])
        client.set_terminated.assert_called_once_with(run)
        assert threads == {"ended": "tracker mlflow", "forgotten": threading.current_thread().name}


class TestClearML:
    def test_a_running_task_is_used_and_left_open(self, service: Any) -> None:
        clearml = service("clearml")
        tracker = started(ClearMLTracker("project"))
        assert tracker.tracker is clearml.Task.current_task.return_value
        tracker.finish()
        tracker.task.close.assert_not_called()

    def test_a_task_of_its_own_is_named_and_closed(self, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clearml = service("clearml")
        clearml.Task.current_task.return_value = None
        monkeypatch.setenv("CLEARML_TASK", "a task")
        tracker = started(ClearMLTracker("project", output_uri="there"))
        clearml.Task.init.assert_called_once_with(project_name="project", task_name="a task", output_uri="there")
        tracker.finish()
        tracker.task.close.assert_called_once_with()

    def test_scalars_are_split_into_title_and_series(self, service: Any, caplog: pytest.LogCaptureFixture) -> None:
        service("clearml")
        tracker = started(ClearMLTracker("project"))
        reporter = tracker.task.get_logger.return_value
        tracker.log({"train_loss": 1, "eval_f1": 2, "speed": 3}, step=4)
        assert reporter.report_scalar.call_args_list == [
            call(title="loss", series="train", value=1, iteration=4),
            call(title="f1", series="eval", value=2, iteration=4),
            call(title="speed", series="train", value=3, iteration=4),
        ]
        tracker.log({"total": 5, "note": "x"})
        reporter.report_single_value.assert_called_once_with(name="total", value=5)
        assert "'note'" in caplog.text

    def test_tables_come_as_rows_or_as_a_dataframe(self, service: Any) -> None:
        service("clearml")
        tracker = started(ClearMLTracker("project"))
        reporter = tracker.task.get_logger.return_value
        tracker.log_table("test_answers", columns=["q"], data=[["a"]], step=1)
        reporter.report_table.assert_called_once_with(
            title="answers", series="test", table_plot=[["q"], ["a"]], iteration=1
        )
        tracker.log_table("answers", dataframe="frame")
        assert reporter.report_table.call_args.kwargs["table_plot"] == "frame"
        with pytest.raises(ValueError, match="`data`"):
            tracker.log_table("answers")


def test_dvclive_takes_a_step_with_each_log(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    dvclive = service("dvclive")
    plots = service("dvclive.plots")
    plots.Metric.could_log = lambda value: isinstance(value, (int, float))
    tracker = started(DVCLiveTracker("run", dir="there"))
    dvclive.Live.assert_called_once_with(dir="there")
    live = tracker.tracker
    tracker.log({"loss": 1, "note": object()}, step=6)
    live.log_metric.assert_called_once_with("loss", 1)
    assert live.step == 6
    live.next_step.assert_called_once_with()
    assert "'note'" in caplog.text
    mine = MagicMock()
    assert started(DVCLiveTracker(live=mine)).tracker is mine


@pytest.mark.parametrize("tracker_class", [WandBTracker, CometMLTracker, TrackioTracker, SwanLabTracker])
def test_a_service_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tracker_class: type[GeneralTracker]
) -> None:
    monkeypatch.setitem(sys.modules, tracker_class.name, None)
    tracker: Any = tracker_class("project")  # type: ignore[call-arg]
    with pytest.raises(ImportError, match=f"log_with='{tracker_class.name}' needs .* pip install"):
        tracker.start()
