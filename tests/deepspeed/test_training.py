"""ZeRO on real ranks: twenty updates with accumulation, clipping and a schedule are those of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler
from tests.ranks import run_on_ranks
from tests.sharded_runs import NUM_UPDATES, Network, assert_same_run, samples, train

OFFLOAD = {"device": "cpu", "pin_memory": False}


def train_with(options: dict[str, Any], precision: str = "no", **more: Any) -> dict[str, Any]:
    """The common run under a DeepSpeedPlugin with ``options``."""
    plugin = DeepSpeedPlugin(**{"gradient_clipping": 0.5, "zero3_save_16bit_model": True, **options})
    return train(precision=precision, accelerator={"deepspeed_plugin": plugin}, **more)


def document(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration in which everything that can be is left to be filled in."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **more},
    }


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    """The run of one process without DeepSpeed."""
    return run_on_ranks(train, 1)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_like_one(stage: int, one_process: dict[str, Any]) -> None:
    assert_same_run(run_on_ranks(train_with, 2, {"zero_stage": stage})[0], one_process)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_train_like_one(stage: int, one_process: dict[str, Any]) -> None:
    assert_same_run(run_on_ranks(train_with, 4, {"zero_stage": stage})[0], one_process)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_stays_close_to_bf16_on_one_process(stage: int) -> None:
    reference = run_on_ranks(lambda: train(precision="bf16"), 1)[0]
    assert_same_run(run_on_ranks(train_with, 2, {"zero_stage": stage}, "bf16")[0], reference, tolerance=1e-2)


@pytest.mark.parametrize("stage", [1, 3])
def test_tied_weights_stay_tied(stage: int) -> None:
    reference = run_on_ranks(lambda: train(tied=True), 1)[0]
    assert_same_run(run_on_ranks(lambda: train_with({"zero_stage": stage}, tied=True), 2)[0], reference)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_stay(stage: int) -> None:
    def freeze(model: nn.Module) -> None:
        model.entrance.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    reference = run_on_ranks(lambda: train(change=freeze), 1)[0]
    assert_same_run(run_on_ranks(lambda: train_with({"zero_stage": stage}, change=freeze), 2)[0], reference)


def test_a_single_process_is_an_engine_too(one_process: dict[str, Any]) -> None:
    assert_same_run(run_on_ranks(train_with, 1, {"zero_stage": 2})[0], one_process)


@pytest.mark.parametrize(
    ("stage", "offloads"),
    [(2, {"offload_optimizer": OFFLOAD}), (3, {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD})],
)
def test_offloaded_state_trains_the_same(stage: int, offloads: dict[str, Any], one_process: dict[str, Any]) -> None:
    # With torch's optimizer: DeepSpeed's own on the CPU is compiled when it is first used (minutes).
    given = {"hf_ds_config": {**document(stage, **offloads), "zero_force_ds_cpu_optimizer": False}}
    assert_same_run(run_on_ranks(train_with, 2, given)[0], one_process)


@pytest.mark.skipif("RUN_SLOW" not in os.environ, reason="compiles DeepSpeed's optimizer (minutes): RUN_SLOW=1")
@pytest.mark.timeout(600)
def test_torchs_adam_becomes_deepspeeds_own_where_state_is_offloaded(one_process: dict[str, Any]) -> None:
    given = {"hf_ds_config": document(2, offload_optimizer=OFFLOAD)}
    found = run_on_ranks(train_with, 2, given, timeout_seconds=580)[0]
    assert_same_run(found, one_process)


def test_a_configuration_file_is_filled_in(tmp_path: Path, one_process: dict[str, Any]) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(document(3)))

    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        plugin = DeepSpeedPlugin(hf_ds_config=str(path))
        return train(accelerator={"deepspeed_plugin": plugin}), plugin.deepspeed_config

    (result, filled), _ = run_on_ranks(run, 2)
    assert_same_run(result, one_process)
    assert filled["train_micro_batch_size_per_gpu"] == 4 and filled["train_batch_size"] == 16
    assert filled["gradient_accumulation_steps"] == 2 and filled["zero_allow_untested_optimizer"] is True


def test_what_the_launcher_says_through_the_environment(one_process: dict[str, Any]) -> None:
    said = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    }

    def run() -> dict[str, Any]:
        return train()

    assert_same_run(run_on_ranks(run, 2, environment=said)[0], one_process)


def scheduled(stage: int) -> dict[str, Any]:
    """A run whose optimizer and scheduler DeepSpeed makes from its configuration."""
    given = {
        **document(stage),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
    }
    run = Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given))
    torch.manual_seed(0)
    model = Network()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=NUM_UPDATES * run.num_processes, warmup_num_steps=4)
    loader = DataLoader(samples(), batch_size=8 // run.num_processes)
    model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader)
    rates, norms = [], []
    for inputs, classes in loader:
        with run.accumulate(model):
            run.backward(nn.functional.cross_entropy(model(inputs), classes))
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if run.sync_gradients:
                rates.append(schedule.get_last_lr()[0])
    return {"rates": rates, "norms": norms, "types": [type(optimizer).__name__, type(schedule).__name__]}


def factor(num_updates: int) -> float:
    """What DeepSpeed's WarmupDecayLR multiplies the rate with, that many updates after its first value."""
    return num_updates / 4 if num_updates < 4 else (NUM_UPDATES - num_updates) / (NUM_UPDATES - 4)


def plainly_scheduled() -> list[float]:
    """The gradient norms of the same run in plain torch, on one process."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms: list[float] = []
    batches = list(DataLoader(samples(), batch_size=16))
    for number, (inputs, classes) in enumerate(batches):
        # DeepSpeed's schedule has its first value before the first update, and once more after it.
        optimizer.param_groups[0]["lr"] = 1e-2 * factor(max(0, number - 1))
        nn.functional.cross_entropy(model(inputs), classes).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_and_scheduler_of_the_configuration(stage: int) -> None:
    result = run_on_ranks(scheduled, 2, stage)[0]
    assert result["types"] == ["DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"]
    expected = [1e-2 * factor(number) for number in range(NUM_UPDATES)]
    assert result["rates"] == pytest.approx(expected, abs=1e-9)
    assert result["norms"] == pytest.approx(plainly_scheduled(), rel=1e-4)
