from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelerate.tracking import JSONLTracker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_call_is_one_line_on_the_disk_before_the_next(tmp_path: Path) -> None:
    tracker = JSONLTracker("runs/first", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "folder": tmp_path})
    tracker.log({"loss": 1.5}, step=3)
    tracker.log({"done": True}, extra="for services")
    config, logged, last = lines(tmp_path / "runs" / "first.jsonl")
    assert config["config"] == {"lr": 0.1, "folder": str(tmp_path)}
    assert (logged["step"], logged["loss"]) == (3, 1.5)
    assert last["done"] is True and "step" not in last and "extra" not in last
    assert logged["time"] > 1e9
    tracker.finish()


def test_tensors_and_arrays_are_numbers(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log({"a": torch.tensor(2.0), "b": torch.tensor([1, 2]), "c": np.float32(0.5), "d": np.arange(2)})
    [line] = lines(tracker.tracker)
    assert (line["a"], line["b"], line["c"], line["d"]) == (2.0, [1, 2], 0.5, [0, 1])
    tracker.finish()


def test_a_restarted_run_adds_to_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JSONLTracker("run", tmp_path)
        tracker.start()
        tracker.log({"loss": 0}, step=step)
        tracker.finish()
    assert [line["step"] for line in lines(tmp_path / "run.jsonl")] == [1, 2]


def test_logging_after_the_end_does_nothing(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": 1})
    tracker.finish()
    tracker.log({"loss": 2})
    tracker.finish()
    assert [line["loss"] for line in lines(tracker.path)] == [1]
