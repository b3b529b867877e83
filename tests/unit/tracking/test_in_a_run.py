"""From the Accelerator's side: ask for trackers, log, end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, JSONLTracker


class MemoryTracker(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.values

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.values.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.values.append((values, step, kwargs))

    def finish(self) -> None:
        self.values.append("finish")


def test_a_tracker_object_receives_the_run() -> None:
    mine = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=mine)
    accelerator.init_trackers("my_run", config={"lr": 0.1})
    assert accelerator.trackers == [mine]
    accelerator.log({"loss": 1.0}, step=2, log_kwargs={"memory": {"commit": True}})
    assert accelerator.get_tracker("memory") is mine
    assert accelerator.get_tracker("memory", unwrap=True) is mine.values
    accelerator.end_training()
    assert mine.values == [{"lr": 0.1}, ({"loss": 1.0}, 2, {"commit": True}), "finish"]


def test_with_a_project_folder_the_run_is_logged_there_without_any_service(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("my_run", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=2)
    accelerator.end_training()
    config, line = (json.loads(text) for text in (tmp_path / "my_run.jsonl").read_text().splitlines())
    assert config["config"] == {"lr": 0.1}
    assert (line["loss"], line["step"]) == (1.0, 2)
    assert isinstance(accelerator.get_tracker("jsonl"), JSONLTracker)


def test_the_list_of_trackers_holds_what_was_asked_for_and_nothing_else(tmp_path: Path) -> None:
    """Programs branch on the names of all trackers, and remark on one that they don't know."""
    mine = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=mine, project_dir=tmp_path)
    assert accelerator.trackers == []
    accelerator.init_trackers("my_run")
    assert accelerator.trackers == [mine]
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert mine.values[0] == ({"loss": 1.0}, None, {})
    assert len((tmp_path / "my_run.jsonl").read_text().splitlines()) == 1
    nothing = Accelerator(cpu=True, project_dir=tmp_path)
    nothing.init_trackers("other")
    assert nothing.trackers == []
    nothing.end_training()


def test_a_tracker_that_was_not_asked_for_is_blank_without_any_and_refused_beside_others() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.get_tracker("wandb").log({"loss": 1.0})
    accelerator.get_tracker("wandb", unwrap=True).anything.at_all()
    accelerator = Accelerator(cpu=True, log_with=MemoryTracker())
    accelerator.init_trackers("my_run")
    with pytest.raises(ValueError, match="wandb is not an available tracker stored inside the `Accelerator`"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_an_unknown_tracker_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="Unsupported logging capability: wandbb"):
        Accelerator(cpu=True, log_with="wandbb")
