"""A watched run on one rank and on two: reports, callbacks, one decision to stop, and the files."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.errors import RunStopped
from accelerate.utils import ProjectConfiguration
from accelerate.watching import Flops, LossRules, RunCallback, RunWatch, StepReport
from tests.ranks import run_on_ranks


class Notes(RunCallback):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def on_step(self, run: RunWatch) -> None:
        self.said.append(("step", run.updates))

    def on_report(self, run: RunWatch, report: StepReport) -> None:
        self.said.append(("report", report.step, report.loss))

    def on_epoch(self, run: RunWatch, epoch: int) -> None:
        self.said.append(("epoch", epoch))

    def on_save(self, run: RunWatch, folder: str) -> None:
        self.said.append(("save", Path(folder).name))

    def on_stop(self, run: RunWatch, reason: str) -> None:
        self.said.append(("stop", reason))


def prepared(folder: str | None = None, **given: Any) -> tuple[Accelerator, Any, Any, Any]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True) if folder else None
    accelerator = Accelerator(cpu=True, project_config=project, **given)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def losses_of(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, run: RunWatch, epochs: int) -> Any:
    seen: list[float] = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
                run.step(loss, tokens=10, lot=float(len(seen)))
    return seen


def lines(folder: str | Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (Path(folder) / "monitor" / f"rank_{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def events(folder: str | Path, rank: int = 0) -> list[str]:
    return [line["event"] for line in lines(folder, rank) if "event" in line]


def watched(folder: str, steps: int = 1) -> dict[str, Any]:
    accelerator, model, optimizer, loader = prepared(folder, gradient_accumulation_steps=steps)
    notes = Notes()
    run = accelerator.watch_run(3, callbacks=[notes], total_steps=100, flops=Flops(per_token=10.0, peak=1e12))
    seen = losses_of(accelerator, model, optimizer, loader, run, 2)
    accelerator.save_state()
    report = run.last_report
    accelerator.end_training()
    return {"losses": seen, "said": notes.said, "report": report, "updates": run.updates}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
def test_reports_are_the_means_of_all_ranks(ranks: int, steps: int, tmp_path: Path) -> None:
    results = run_on_ranks(watched, ranks, str(tmp_path), steps)
    said = results[0]["said"]
    mean = [sum(each) / ranks for each in zip(*(result["losses"] for result in results), strict=True)]
    updates = [sum(mean[at : at + steps]) / steps for at in range(0, len(mean), steps)]
    assert [entry[1] for entry in said if entry[0] == "step"] == list(range(1, len(updates) + 1))
    for _, step, loss in (entry for entry in said if entry[0] == "report"):
        begin = (step - 1) // 3 * 3
        assert loss == pytest.approx(sum(updates[begin:step]) / (step - begin), rel=1e-6)
    assert [entry[1] for entry in said if entry[0] == "epoch"] == [0, 1]
    assert said[-1] == ("save", "checkpoint_0")
    assert all(result["said"] == said for result in results)  # the same on every rank
    report = results[0]["report"]
    assert report.step == len(updates) and report.total_steps == 100 and report.learning_rate == 0.01
    assert report.samples_per_second == pytest.approx(report.tokens_per_second / 10 * 4, rel=1e-6)
    assert report.mfu == pytest.approx(10 * report.tokens_per_second / (1e12 * ranks))
    assert report.wait_seconds < report.step_seconds and report.memory_bytes > 0 and report.eta_seconds > 0
    assert report.values == {"lot": float(len(mean))}
    for rank in range(ranks):
        kinds = events(tmp_path, rank)
        assert kinds[0] == "start" and kinds[-1] == "end" and "save" in kinds and kinds.count("epoch") == 2
        assert [line for line in lines(tmp_path, rank) if "event" not in line][-1]["step"] == len(updates)


def lost(folder: str, rank: int, rules: Any) -> Any:
    accelerator, model, _optimizer, loader = prepared(folder)
    notes = Notes()
    run = accelerator.watch_run(4, callbacks=[notes], rules=rules)
    try:
        for number, (inputs, targets) in enumerate(loader):
            factor = math.nan if number >= 1 and accelerator.process_index == rank else 1.0
            run.step(torch.nn.functional.mse_loss(model(inputs), targets) * factor)
    except RunStopped as stop:
        return str(stop), notes.said[-1][0], run.updates
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_lost_on_one_rank_stops_all_in_the_same_update(rank: int, tmp_path: Path) -> None:
    results = run_on_ranks(lost, 2, str(tmp_path), rank, LossRules())
    assert results[0] == results[1]
    text, last, updates = results[0]
    assert updates == 4 and last == "stop"
    assert f"the loss on rank {rank} is not finite since step 2 (1 of 2 ranks)" in text
    assert "stop" in events(tmp_path, 0) and "stop" in events(tmp_path, 1)


def test_a_run_without_rules_goes_on_and_says_so(tmp_path: Path) -> None:
    assert run_on_ranks(lost, 2, str(tmp_path), 1, None) == [None, None]
    assert "non_finite" in events(tmp_path, 0)
    assert any(line.get("loss") == "nan" for line in lines(tmp_path, 0))


def spiking() -> Any:
    accelerator, _, _, _ = prepared()
    run = accelerator.watch_run(1, rules=LossRules(spike=5.0, spike_patience=2))
    try:
        for number in range(20):
            # Only the mean of both ranks is a spike.
            run.step(torch.tensor(1.0 if number < 10 or accelerator.process_index == 0 else 100.0))
    except RunStopped as stop:
        return str(stop), run.updates
    return None


def test_a_spike_stops_all_ranks() -> None:
    first, second = run_on_ranks(spiking, 2)
    assert first == second and first[1] == 12
    assert "the loss is 50.5, 50.5 times the usual 1" in first[0]


def asked_to_stop() -> Any:
    accelerator, _, _, _ = prepared()
    run = accelerator.watch_run(5)
    try:
        for number in range(20):
            if number == 6 and accelerator.process_index == 1:
                run.stop("validation has not improved for 3 epochs")
            run.step(torch.tensor(1.0))
    except RunStopped as stop:
        return str(stop), run.updates
    return None


def test_one_rank_may_ask_all_to_stop() -> None:
    first, second = run_on_ranks(asked_to_stop, 2)
    assert first == second == ("The run is stopped at step 10: validation has not improved for 3 epochs.", 10)


def saves_a_lost_run(folder: str) -> bool:
    accelerator, _, _, _ = prepared(folder)
    run = accelerator.watch_run(100)
    run.step(torch.tensor(math.nan if accelerator.process_index else 1.0))
    try:
        accelerator.save_state()
    except RunStopped:
        return not (Path(folder) / "checkpoints").exists()
    return False


def test_a_lost_run_is_not_saved(tmp_path: Path) -> None:
    assert run_on_ranks(saves_a_lost_run, 2, str(tmp_path)) == [True, True]


def restarted(folder: str) -> tuple[int, int]:
    accelerator, model, optimizer, loader = prepared(folder)
    run = accelerator.watch_run(2)
    accelerator.resume()
    before = run.updates
    losses_of(accelerator, model, optimizer, loader, run, 1)
    accelerator.save_state()
    accelerator.end_training()
    return before, run.updates


def test_a_restarted_run_counts_on_and_adds_to_its_files(tmp_path: Path) -> None:
    assert run_on_ranks(restarted, 1, str(tmp_path)) == [(0, 12)]
    assert run_on_ranks(restarted, 1, str(tmp_path)) == [(12, 24)]
    kinds = events(tmp_path)
    assert kinds.count("start") == 2 and kinds.count("load") == 1
    steps = [line["step"] for line in lines(tmp_path) if "event" not in line]
    assert steps == sorted(steps) and steps[-1] == 24


def watched_later(folder: str) -> int:
    accelerator, _, _, _ = prepared(folder)
    accelerator.resume()
    return accelerator.watch_run().updates


def test_a_watch_that_begins_after_resuming_counts_on_too(tmp_path: Path) -> None:
    run_on_ranks(restarted, 1, str(tmp_path))
    assert run_on_ranks(watched_later, 1, str(tmp_path)) == [12]


def test_steps_between_reports_ask_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _, _ = prepared()
    run = accelerator.watch_run(1000)
    asked: list[str] = []
    for name in ("item", "tolist", "cpu", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *_, name=name: asked.append(name))
    for _ in range(20):
        run.step(torch.tensor(1.0), tokens=torch.tensor(5))
    assert asked == []


def test_warnings_are_events_and_a_project_behind_a_network_has_no_files(tmp_path: Path) -> None:
    accelerator, _, _, _ = prepared(str(tmp_path))
    run = accelerator.watch_run(1)
    logging.getLogger("somewhere").warning("the disk is %s", "full")
    run.note("looked at by hand")
    run.step(torch.tensor(1.0))
    accelerator.end_training()
    logging.getLogger("somewhere").warning("too late")
    texts = [line.get("text") for line in lines(tmp_path) if line.get("event") in ("warning", "note")]
    assert texts == ["the disk is full", "looked at by hand"]
    from accelerate.guests.monitor.run_monitor import folder_of

    assert folder_of("s3://bucket/run") is None and folder_of(None) is None


def test_reports_reach_the_trackers_and_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator, _, _, _ = prepared(str(tmp_path))
    accelerator.init_trackers("run")
    run = accelerator.watch_run(2, print_line=True)
    for _ in range(4):
        run.step(torch.tensor(2.0))
    accelerator.end_training()
    logged = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in logged if "loss" in line] == [(2, 2.0), (4, 2.0)]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and printed[0].startswith("step 2  loss 2  lr 0.01")


def test_a_run_that_fails_says_why_in_its_file(tmp_path: Path) -> None:
    program = (
        "from accelerate import Accelerator\n"
        f"run = Accelerator(cpu=True, project_dir={str(tmp_path)!r}).watch_run()\n"
        "raise ValueError('no such word: ß')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, env={**os.environ}
    )
    assert done.returncode == 1
    assert lines(tmp_path)[-1]["event"] == "error" and lines(tmp_path)[-1]["text"] == "ValueError: no such word: ß"


def test_a_folder_that_cant_be_written_costs_no_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    accelerator, _, _, _ = prepared(str(tmp_path))
    (tmp_path / "monitor" / "rank_0.jsonl").mkdir(parents=True)
    run = accelerator.watch_run(1)
    run.step(torch.tensor(1.0))
    accelerator.end_training()
    assert "can't be written" in capfd.readouterr().err


def test_a_report_of_no_update_is_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        prepared()[0].watch_run(0)
