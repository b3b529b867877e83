"""Checkpoints of DeepSpeed runs: going on under DeepSpeed, and weights from and to every other strategy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import Network, samples

PLUGINS: dict[str, Any] = {
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    **{
        f"zero{stage}": lambda stage=stage: {
            "deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, zero3_save_16bit_model=True)
        }
        for stage in (1, 2, 3)
    },
}


class Run:
    """A run that can be saved and go on."""

    def __init__(self, kind: str, precision: str = "no") -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, **PLUGINS[kind]())
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = DataLoader(samples(80), batch_size=8 // self.accelerator.num_processes, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def train(self, num_updates: int, save_after: tuple[int, Path] | None = None) -> list[float]:
        """The losses of the next updates of the epoch; on the way, the run is saved."""
        losses = []
        for inputs, classes in self.loader:
            loss = nn.functional.cross_entropy(self.model(inputs), classes)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if save_after is not None and len(losses) == save_after[0]:
                self.accelerator.save_state(save_after[1])
            if len(losses) == num_updates:
                break
        return losses

    def scores(self) -> list[float]:
        """What the model says now."""
        with torch.no_grad():
            return self.model(samples(4).tensors[0]).flatten().tolist()


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_a_resumed_run_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    def whole() -> list[float]:
        return Run(kind).train(10, (4, tmp_path / "saved"))[4:]

    def resumed() -> list[float]:
        run = Run(kind)
        run.accelerator.load_state(tmp_path / "saved")
        return run.train(6)

    expected = run_on_ranks(whole, 2)
    assert (tmp_path / "saved" / "pytorch_model").is_dir() and (tmp_path / "saved" / "model.safetensors").is_file()
    assert run_on_ranks(resumed, 2) == expected


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("zero2", "ddp"),
        ("zero3", "ddp"),
        ("zero3", "fsdp2"),
        ("zero1", "fsdp1"),
        ("ddp", "zero2"),
        ("fsdp1", "zero1"),
        ("fsdp2", "zero3"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_move_between_strategies(saver: str, loader: str, num_ranks: int, tmp_path: Path) -> None:
    if num_ranks == 1 and "zero" in loader:
        pytest.skip("the rank count of the saving run changes with the other direction")

    def save() -> list[float]:
        run = Run(saver)
        run.train(3)
        run.accelerator.save_state(tmp_path / "saved")
        return run.scores()

    def load() -> list[float]:
        run = Run(loader)
        run.accelerator.load_state(tmp_path / "saved")
        scores = run.scores()
        run.train(1)
        return scores

    expected = run_on_ranks(save, 2)[0]
    assert run_on_ranks(load, num_ranks)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_full_precision_survives_a_move_under_bf16(kind: str, tmp_path: Path) -> None:
    """The model computes in bf16; what it is updated from is saved, and comes back, in fp32."""

    def save() -> None:
        run = Run(kind, "bf16")
        run.train(3)
        run.accelerator.save_state(tmp_path / "first")

    def move() -> None:
        run = Run("ddp")
        run.accelerator.load_state(tmp_path / "first")
        run.accelerator.save_state(tmp_path / "second")

    def take_back() -> None:
        run = Run(kind, "bf16")
        run.accelerator.load_state(tmp_path / "second")
        run.accelerator.save_state(tmp_path / "third")

    for step in (save, move, take_back):
        run_on_ranks(step, 2)
    first, third = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "third"))
    assert first.keys() == third.keys()
    assert all(torch.equal(first[name], third[name]) for name in first)
    weight = first["head.weight"]
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())


def save_ungathered(folder: Path) -> dict[str, Any]:
    run = Run("zero3")
    run.train(3)
    weights = run.accelerator.get_state_dict(run.model)
    run.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"][
        "stage3_gather_16bit_weights_on_model_save"
    ] = False
    run.accelerator.save_state(folder)
    return weights


def test_stage_3_saves_no_whole_weights_unless_allowed(tmp_path: Path) -> None:
    weights = run_on_ranks(save_ungathered, 2, tmp_path / "saved")[0]
    assert not (tmp_path / "saved" / "model.safetensors").exists()

    def load(**options: Any) -> dict[str, Any]:
        run = Run("ddp")
        run.accelerator.load_state(tmp_path / "saved", **options)
        return run.accelerator.get_state_dict(run.model)

    with pytest.raises(RankFailed, match="weights_only"):
        run_on_ranks(load, 1)
    loaded = run_on_ranks(lambda: load(load_kwargs={"weights_only": False}), 1)[0]
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def test_deepspeeds_own_script_makes_the_same_weights(tmp_path: Path) -> None:
    weights = run_on_ranks(save_ungathered, 2, tmp_path / "saved")[0]
    words = [sys.executable, "zero_to_fp32.py", ".", "out", "--safe_serialization"]
    done = subprocess.run(words, cwd=tmp_path / "saved", text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    made = load_file(tmp_path / "saved" / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], made[name]) for name in made) and "head.weight" in made


@pytest.mark.parametrize(("kind", "num_ranks"), [("zero3", 1), ("zero2", 2)])
def test_another_number_of_ranks_or_stage_takes_the_weights(kind: str, num_ranks: int, tmp_path: Path) -> None:
    weights = run_on_ranks(save_ungathered, 2, tmp_path / "saved")[0]

    def load() -> dict[str, Any]:
        run = Run(kind)
        run.accelerator.load_state(tmp_path / "saved")
        loaded = run.accelerator.get_state_dict(run.model)
        run.train(1)
        return loaded

    loaded = run_on_ranks(load, num_ranks)[0]
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def test_save_model_writes_what_others_load(tmp_path: Path) -> None:
    def save() -> list[float]:
        run = Run("zero3")
        run.accelerator.save_model(run.model, tmp_path)
        return run.scores()

    expected = run_on_ranks(save, 2)[0]
    network = Network()
    network.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert network(samples(4).tensors[0]).flatten().tolist() == pytest.approx(expected, abs=1e-6)
