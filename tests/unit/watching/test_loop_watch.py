"""A run that is watched by `accelerate launch --monitor`, with no change of its script."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.errors import SettingError
from accelerate.guests.monitor.loop_watch import ToldWatch
from accelerate.guests.monitor.records import shown_command
from accelerate.guests.monitor.serve import check_shown, folder_of_launch, shown
from accelerate.guests.reproduce.chain import LOCK
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from accelerate.launch.preflight import Host
from accelerate.settings.run import collect
from tests.fresh import run_fresh


def lines_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "monitor" / "rank_0.jsonl").read_text().splitlines()]


def train(accelerator: Accelerator, updates: int, *, losses: list[float], backwards: int = 1) -> torch.optim.Optimizer:
    torch.manual_seed(0)  # of one model in a hundred, the gradients are zero after 20 updates
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(updates):
        for _ in range(backwards):
            with accelerator.accumulate(model):
                loss = model(torch.ones(3, 2)).square().mean()
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return optimizer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_variable_has_a_loop_watched_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    losses: list[float] = []
    train(Accelerator(cpu=True, gradient_accumulation_steps=accumulation), 20, losses=losses, backwards=accumulation)
    lines = lines_in(tmp_path / "run")
    assert [line["event"] for line in lines if "event" in line] == ["start", "end"]
    assert lines[0]["watched_by"] == "launcher" and lines[0]["accumulation_steps"] == accumulation
    reports = [line for line in lines if "step" in line and "event" not in line]
    assert reports[-1]["step"] == 20 and reports[-1]["learning_rate"] == 0.25
    assert reports[-1]["loss"] == pytest.approx(sum(losses[10 * accumulation :]) / (10 * accumulation), rel=1e-4)
    assert isinstance(norm := reports[-1]["gradient_norm"], float) and norm > 0


@pytest.mark.parametrize("form", ["backward_in_parts", "pipeline_step"])
def test_the_other_forms_of_a_backward_are_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    inputs, targets = torch.ones(4, 2), torch.zeros(4, 1)
    loss = torch.nn.functional.mse_loss(model(inputs), targets).item()
    for _ in range(10):
        if form == "pipeline_step":
            accelerator.pipeline_step(model, (inputs, targets), torch.nn.functional.mse_loss)
        else:
            accelerator.backward_in_parts(
                lambda part: torch.nn.functional.mse_loss(model(part[0]), part[1]), (inputs, targets)
            )
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    (report,) = (line for line in lines_in(tmp_path / "run") if "event" not in line)
    assert report["step"] == 10 and report["loss"] == pytest.approx(loss, rel=1e-4)


def test_a_model_after_another_is_watched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    accelerator = Accelerator(cpu=True)
    watch: Any = None
    for rate in (0.5, 0.25):  # two folds of a cross-validation
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        for _ in range(10):
            accelerator.backward(model(torch.ones(3, 2)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
        (told,) = accelerator.gradient_state.hooks.of(ToldWatch)
        watch = watch or told.watch
        assert watch is told.watch
    assert watch is not None and watch.updates == 20
    assert watch.last_report is not None and watch.last_report.learning_rate == 0.25
    accelerator.end_training()


def test_a_loss_of_one_row_is_read_as_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(10):
        accelerator.backward(model(torch.ones(1, 2)).square().flatten())  # [1]: torch takes it
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    (report,) = (line for line in lines_in(tmp_path / "run") if "event" not in line)
    assert isinstance(report["loss"], float)


@pytest.mark.parametrize("weights", [(3, 1), (3, 0), (0, 0), (torch.tensor(2.0), torch.tensor(0.0))])
def test_weighted_losses_are_read_as_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[float, float]
) -> None:
    """Sums over ``weights`` items of 2.0 each; a micro-batch without any is no NaN."""
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(10):
        for weight in weights:
            with accelerator.accumulate(model):
                loss = model(torch.ones(1, 1)).sum()
                accelerator.backward(loss - loss.detach() + 2.0 * weight, weight=weight)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    lines = lines_in(tmp_path / "run")
    assert [line["event"] for line in lines if "event" in line] == ["start", "end"]
    (report,) = (line for line in lines if "event" not in line)
    assert report["loss"] == pytest.approx(2.0 if sum(weights) else 0.0)


class Bare(torch.optim.SGD):
    """An optimizer that has no hooks, as it doesn't call torch's constructor."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.defaults, self.state = [{"params": list(parameters), "lr": 0.1}], {}, defaultdict(dict)

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


@pytest.mark.parametrize("first", ["never steps", "has no hooks"])
def test_the_optimizer_that_steps_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    parts = [[model.bias], [model.weight]]
    kind = torch.optim.SGD if first == "never steps" else Bare
    made = [kind(parts[0]), torch.optim.SGD(parts[1], lr=0.1)] if first == "never steps" else [kind(model.parameters())]
    model, *optimizers = accelerator.prepare(model, *made)
    for _ in range(10):
        accelerator.backward(model(torch.ones(3, 2)).square().mean())
        optimizers[-1].step()
        optimizers[-1].zero_grad()
    accelerator.end_training()
    (report,) = (line for line in lines_in(tmp_path / "run") if "event" not in line)
    assert report["step"] == 10


def test_a_second_accelerator_of_the_process_is_no_end_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    first = Accelerator(cpu=True)
    model = first.prepare(torch.nn.Linear(2, 1))
    first.backward(model(torch.ones(3, 2)).sum())
    train(Accelerator(cpu=True), 10, losses=[])
    events = [line["event"] for line in lines_in(tmp_path / "run") if "event" in line]
    assert events == ["start", "start", "end"]
    first.end_training()


def test_nothing_is_written_where_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MONITOR", raising=False)
    train(Accelerator(cpu=True, project_dir=str(tmp_path)), 20, losses=[])
    assert {path.name for path in tmp_path.iterdir()} <= {LOCK}  # the record of each run


def test_a_loop_that_nobody_watches_imports_no_monitor() -> None:
    """Neither the constructor nor the first clipping does; in a process of its own, whose modules are few."""
    code = """if True:
        import sys, torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.backward(model(torch.ones(3, 2)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 1
        print([name for name in sys.modules if name.startswith("accelerate.guests.monitor.")])
    """
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_MONITOR"}
    said = run_fresh(code, environment=environment)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == "[]"


def test_a_script_that_watches_its_run_does_so_in_the_launch_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MONITOR", str(tmp_path / "run"))
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path / "project"))
    run = accelerator.watch_run(every=1)
    train(accelerator, 3, losses=[])
    assert run.updates == 0  # only the script's own calls count
    lines = lines_in(tmp_path / "run")
    assert [line["event"] for line in lines] == ["start", "end"] and lines[0]["watched_by"] == "script"


def test_secrets_of_a_command_line_are_not_shown() -> None:
    words = ["train.py", "--hf_token", "abc", "--lr", "1e-3", "--api-key=abc", "--name", "two words"]
    assert shown_command(words) == "train.py --hf_token '***' --lr 1e-3 '--api-key=***' --name 'two words'"
    words = ["train.py", "--tokenizer", "gpt2", "--max_tokens=128", "--keyframes", "3"]
    assert shown_command(words) == " ".join(words)
    assert shown_command(["train.py", "postgres://me:secret@host/db"]) == "train.py postgres://me:***@host/db"


def test_the_launcher_serves_the_page_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_MONITOR", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    args = argparse.Namespace(training_script="some/train.py", log_dir=None)
    folder = folder_of_launch(args)
    assert folder.parent == tmp_path / "runs" and folder.name.startswith("train_") and args.log_dir == f"{folder}/logs"
    monkeypatch.setenv("ACCELERATE_MONITOR", "of_the_environment")
    for given, name in ((True, "of_the_environment"), ("", "of_the_environment"), ("named", "named")):
        named = argparse.Namespace(training_script="train.py", log_dir="kept", monitor=given)
        expected = tmp_path / name if given else tmp_path / "runs"
        assert folder_of_launch(named) == expected or (not given and folder_of_launch(named).parent == expected)
    plan = LaunchPlan("local", ("python",), {"A": "1"}, ranks=({},))
    with shown(plan, folder) as planned:
        assert planned.environment == {"A": "1", "ACCELERATE_MONITOR": str(folder)}
        address = next(word for word in capsys.readouterr().err.split() if word.startswith("http://")).rstrip(",")
        with urllib.request.urlopen(address + "runs") as answer:
            assert json.load(answer)["is_one"]
    with pytest.raises(OSError):
        urllib.request.urlopen(address)


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ({"num_processes": 1}, None),
        ({"num_processes": 2}, None),
        ({"num_processes": 2, "max_restarts": 1}, None),
        ({"num_processes": 2, "rdzv_backend": "c10d"}, None),
        ({"num_processes": 4, "num_machines": 2, "main_process_ip": "node0"}, "on each of 2 machine.* hands it on"),
        ({"num_processes": 2, "keep_replicas": 3}, "--monitor shows a mean over all ranks.* as any may be lost"),
    ],
)
def test_runs_whose_ranks_are_on_this_machine_are_shown(flags: dict[str, Any], refusal: str | None) -> None:
    settings, host = collect({}, {}, flags={"cpu": True, **flags}), Host(name="box", num_cores=8, free_port=40000)
    plan = choose(settings, host).plan(settings, Program("train.py"), host)
    with pytest.raises(SettingError, match=refusal) if refusal else contextlib.nullcontext():
        check_shown(plan)
