from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from accelerate.tracking import TensorBoardTracker

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture
def tracker(tmp_path: Path) -> TensorBoardTracker:
    tracker = TensorBoardTracker("my_run", tmp_path, max_queue=3)
    tracker.start()
    return tracker


def events(folder: Path) -> Any:
    accumulator = event_accumulator.EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_numbers_texts_and_groups_are_written_under_the_run(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": 0.5, "epochs": 2, "note": "hello", "accuracy": {"train": 0.9, "test": 0.8}}, step=7)
    tracker.finish()
    run = events(tmp_path / "my_run")
    [scalar] = run.Scalars("loss")
    assert (scalar.step, scalar.value) == (7, 0.5)
    assert run.Scalars("epochs")[0].value == 2
    assert "note/text_summary" in run.Tags()["tensors"]
    assert events(tmp_path / "my_run" / "accuracy_train").Scalars("accuracy")[0].value == pytest.approx(0.9)


def test_hyper_parameters_are_readable_as_yaml(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.store_init_configuration({"lr": 0.1, "layers": 2, "name": "x", "fast": True, "scale": torch.tensor(2.0)})
    tracker.finish()
    [file] = (tmp_path / "my_run").glob("*/hparams.yml")
    assert yaml.safe_load(file.read_text()) == {"lr": 0.1, "layers": 2, "name": "x", "fast": True, "scale": 2.0}


def test_images_are_written(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log_images({"samples": np.zeros((2, 4, 4, 3))}, step=1, dataformats="NHWC")
    tracker.finish()
    assert any(tag.startswith("samples") for tag in events(tmp_path / "my_run").Tags()["images"])


def test_the_raw_writer_is_at_hand(tracker: TensorBoardTracker) -> None:
    tracker.tracker.add_scalar("by_hand", 1.0)
    assert tracker.writer is tracker.tracker
    tracker.finish()
