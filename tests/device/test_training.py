"""Training on the imitated accelerator gives the CPU's numbers, bit by bit: its kernels are the CPU's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.plugins.parallelism import PipelineParallelConfig
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    set_seed,
)
from tests.device.devices import on_cpu, on_devices
from tests.slow import mostly_slow, slow_for

slow = slow_for("many layouts", "device")


class Model(nn.Module):
    tp_plan = {"wide": "colwise", "back": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.back = nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.back(self.norm(self.wide(rows)).relu())


class Plain(Model):
    """Without the statistics that tensor parallelism would split."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.back(self.wide(rows).relu())


def accelerator_for(kind: str, precision: str = "no", **options: Any) -> Accelerator:
    if kind == "compiled":
        options["dynamo_backend"] = "aot_eager"  # inductor makes no code for devices of extensions
    if kind.startswith("fsdp"):
        form = "SHARDED_STATE_DICT" if "shards" in kind else "FULL_STATE_DICT"
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(kind[4]), state_dict_type=form)
    if kind == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=2)
    if kind == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(mixed_precision=precision, **options)


def prepared(accelerator: Accelerator, kind: str, **loader: Any) -> tuple[Any, ...]:
    set_seed(3)
    model = Model() if kind in ("ddp", "one") else Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = torch.randn(24, 4)
    data = DataLoader(TensorDataset(rows, rows[:, :2] * 2), batch_size=2, shuffle=True, **loader)
    return accelerator.prepare(model, optimizer, schedule, data)


def train(
    kind: str, precision: str = "no", accumulation: int = 1, folder: str | None = None, **loader: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two epochs and the weights; with ``folder``, saved and resumed amid the second."""
    # Torch's FSDP 1 makes graph nodes in a stream of its own when it loads into flat parameters, and says so.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True) if folder else None
    accelerator = accelerator_for(kind, precision, gradient_accumulation_steps=accumulation, project_config=project)
    model, optimizer, schedule, data = prepared(accelerator, kind, **loader)
    resumed = accelerator.resume() is not None if folder else False
    losses: list[float] = []
    for epoch in range(1 if resumed else 0, 2):
        for step, (rows, targets) in enumerate(data):
            assert rows.device == accelerator.device == next(model.parameters()).device
            with accelerator.accumulate(model):
                loss = (model(rows) - targets).square().mean()
                if folder:  # a draw of the device's own stream
                    loss = loss * (1 + torch.rand((), device=rows.device))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).sum().item())
            if folder and epoch == 1 and step == 1 and not resumed:
                accelerator.save_state()
    state = accelerator.get_state_dict(model)
    assert all(torch.isfinite(torch.tensor(losses)))
    return losses, {name: value.cpu() for name, value in state.items()}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"kind": "one"}),
    "one bf16": (1, {"kind": "one", "precision": "bf16"}),
    "one fp16": (1, {"kind": "one", "precision": "fp16"}),
    "compiled": (1, {"kind": "compiled"}),
    "one accumulated": (1, {"kind": "one", "accumulation": 3}),
    "ddp": (2, {"kind": "ddp"}),
    "ddp fp16 accumulated": (2, {"kind": "ddp", "precision": "fp16", "accumulation": 2}),
    "fsdp1": (2, {"kind": "fsdp1"}),
    "fsdp2": (2, {"kind": "fsdp2"}),
    "fsdp2 bf16": (2, {"kind": "fsdp2", "precision": "bf16"}),
    "tp": (2, {"kind": "tp"}),
    "hsdp": (4, {"kind": "hsdp"}),
}


QUICK = ("one", "one fp16", "ddp fp16 accumulated", "fsdp2", "tp")


@pytest.mark.parametrize("case", mostly_slow(CASES, QUICK, slow))
def test_training_gives_the_cpus_numbers(case: str) -> None:
    num_ranks, options = CASES[case]
    expected = on_cpu(train, num_ranks, **options)
    found = on_devices(train, num_ranks, **options)
    for (losses, weights), (right_losses, right) in zip(found, expected, strict=True):
        assert losses == right_losses
        assert weights.keys() == right.keys()
        assert all(torch.equal(weights[name], right[name]) for name in right)


SAVED = ("one", "ddp", "fsdp1", "fsdp1 shards", "fsdp2", "fsdp2 shards", "tp")


@pytest.mark.parametrize("kind", mostly_slow(SAVED, ["ddp", "fsdp2 shards"], slow))
def test_a_resumed_run_is_the_run_that_was_saved(kind: str, tmp_path: Path) -> None:
    num_ranks, options = 1 if kind == "one" else 2, {"kind": kind}
    whole = on_devices(train, num_ranks, folder=str(tmp_path), **options)
    resumed = on_devices(train, num_ranks, folder=str(tmp_path), **options)
    for (losses, weights), (right_losses, right) in zip(resumed, whole, strict=True):
        assert losses == right_losses[-len(losses) :]
        assert 0 < len(losses) < len(right_losses)
        assert all(torch.equal(weights[name], right[name]) for name in right)


def counts_of_steps(num_workers: int, non_blocking: bool) -> tuple[dict[str, int], int]:
    configuration = DataLoaderConfiguration(non_blocking=non_blocking)
    accelerator = Accelerator(dataloader_config=configuration, step_scheduler_with_optimizer=False)
    model, optimizer, schedule, data = prepared(accelerator, "one", num_workers=num_workers, pin_memory=True)
    by_epoch: list[dict[str, int]] = []
    for _epoch in range(2):
        with torch.sim.counting() as counted:
            for rows, targets in data:
                with accelerator.accumulate(model):
                    loss = (model(rows) - targets).square().mean()
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        by_epoch.append(counted)
    return by_epoch[1], len(data)  # the second epoch is steady


def stages(microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a pipeline of two stages, and the weights after them."""
    config = ParallelismConfig(
        pp_size=2, pp_handler=PipelineParallelConfig(split_points="back", num_micro_batches=microbatches)
    )
    accelerator = Accelerator(parallelism_config=config)
    set_seed(3)
    model = Plain()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for step in range(4):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(accelerator.device)
        loss = accelerator.pipeline_step(model, (rows, rows[:, :2]), nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}


def test_a_pipeline_gives_the_cpus_numbers() -> None:
    for (losses, weights), (right_losses, right) in zip(on_devices(stages, 2, 4), on_cpu(stages, 2, 4), strict=True):
        assert losses == right_losses
        assert weights.keys() == right.keys()
        assert all(torch.equal(weights[name], right[name]) for name in right)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_steady_step_waits_for_nothing_and_copies_each_tensor_once(num_workers: int) -> None:
    counted, steps = on_devices(counts_of_steps, 1, num_workers, True)[0]
    assert counted["host_to_device"] == counted["asynchronous_copies"] == 2 * steps  # rows and targets
    assert counted["synchronizations"] == counted["scalars_read"] == counted["device_to_host"] == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(rows).tanh())


def tied() -> tuple[bool, int, list[float]]:
    accelerator = Accelerator()
    set_seed(3)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(model)
    losses = []
    for step in range(4):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(accelerator.device)
        loss = (model(rows) - rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return inner.first.weight is inner.last.weight, len(optimizer.param_groups[0]["params"]), losses


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tied_weights_stay_tied_on_the_device(num_ranks: int) -> None:
    """A move to a device of an extension makes new parameters, one for each place of a tied weight."""
    found = on_devices(tied, num_ranks)
    assert found == on_cpu(tied, num_ranks)
    assert [one[:2] for one in found] == [(True, 3)] * num_ranks
