"""Buffers that differ between ranks are saved for each, and go back to their rank; equal ones are saved once."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig, PipelineParallelConfig, TorchTensorParallelConfig
from tests.ranks import run_on_ranks
from tests.slow import slow_for

slow = slow_for("many layouts", "meshes")

PLAN = {"first": "colwise_gather_output"}


class Normed(nn.Module):
    """Two layers around a BatchNorm, and a buffer that is the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("table", torch.arange(64.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


def _fsdp(version: Literal[1, 2], form: str, **mesh: Any) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=f"{form}_STATE_DICT")
    return {"fsdp_plugin": plugin, **({"parallelism_config": ParallelismConfig(**mesh)} if mesh else {})}


LAYOUTS: dict[str, Any] = {
    "ddp": lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False)]},
    "fsdp2-sharded": lambda: _fsdp(2, "SHARDED"),
    "fsdp2-full": lambda: _fsdp(2, "FULL"),
    "fsdp1-sharded": lambda: _fsdp(1, "SHARDED"),
    "fsdp1-full": lambda: _fsdp(1, "FULL"),
    "adopted": dict,
    "hsdp": lambda: _fsdp(2, "SHARDED", dp_replicate_size=2, dp_shard_size=2),
    "tp": lambda: _fsdp(2, "SHARDED", dp_shard_size=2, tp_size=2, tp_handler=TorchTensorParallelConfig(plan=PLAN)),
    "pp": lambda: {
        "parallelism_config": ParallelismConfig(
            dp_replicate_size=2, pp_size=2, pp_handler=PipelineParallelConfig(split_points=["last"])
        )
    },
}
RANKS = {"hsdp": 4, "tp": 4, "pp": 4}


def run_of(layout: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **LAYOUTS[layout]())
    torch.manual_seed(0)
    model = Normed()
    if layout == "adopted":
        fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of DDP's broadcast_buffers
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 2) -> None:
    share = accelerator.mesh.data_share()
    generator = torch.Generator().manual_seed(10 + share.index)
    for _ in range(steps):
        inputs, targets = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
        if accelerator.mesh.size("pp") > 1:
            accelerator.pipeline_step(model, ((inputs,), targets), nn.functional.mse_loss)
        else:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def buffers_of(accelerator: Accelerator, model: Any) -> dict[str, list[float]]:
    inner = accelerator.unwrap_model(model)
    found = {name: buffer for name, buffer in inner.named_buffers() if not buffer.is_meta}
    return {name.replace("_fsdp_wrapped_module.", ""): buffer.tolist() for name, buffer in found.items()}


def _saved(layout: str, folder: Path, asynchronous: bool) -> dict[str, list[float]]:
    accelerator, model, optimizer = run_of(layout)
    train(accelerator, model, optimizer)
    before = buffers_of(accelerator, model)
    accelerator.save_state(folder, asynchronous=asynchronous)
    train(accelerator, model, optimizer, 1)  # what is written later is what was there
    accelerator.wait_for_checkpoint()
    return before


def _loaded(layout: str, folder: Path) -> dict[str, list[float]]:
    accelerator, model, _ = run_of(layout)
    accelerator.load_state(folder)
    return buffers_of(accelerator, model)


def _both(layout: str, folder: Path) -> Any:
    """Save, go on, and load into the same run; and again with a save in the background."""
    accelerator, model, optimizer = run_of(layout)
    found: list[Any] = []
    for asynchronous in (False, True):
        train(accelerator, model, optimizer)
        before, path = buffers_of(accelerator, model), folder / str(asynchronous)
        accelerator.save_state(path, asynchronous=asynchronous)
        train(accelerator, model, optimizer, 1)
        accelerator.wait_for_checkpoint()
        accelerator.load_state(path)
        found.append((before, buffers_of(accelerator, model)))
    return found


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=slow if name in RANKS else ()) for name in LAYOUTS],
)
def test_buffers_that_differ_go_back_to_their_rank(layout: str, tmp_path: Path) -> None:
    answers = run_on_ranks(_both, RANKS.get(layout, 2), layout, tmp_path, timeout_seconds=180)
    for rank, cases in enumerate(answers):
        for before, after in cases:
            assert after == before, rank
    means = {str(before.get("norm.running_mean")) for cases in answers for before, _ in cases[:1]} - {"None"}
    assert len(means) > 1  # they did differ
    for path in (tmp_path / "False", tmp_path / "True"):
        own = list(path.glob("buffers_*.safetensors"))
        assert own and max(one.stat().st_size for one in own) < 600  # 17 numbers and the header: no table


def _other_number(folder: Path) -> tuple[dict[str, list[float]], str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate.checkpointing").addHandler(handler)
    return _loaded("fsdp2-sharded", folder), "\n".join(lines)


@pytest.mark.parametrize("layout", ["fsdp2-sharded", pytest.param("fsdp2-full", marks=slow)])
def test_on_another_number_of_ranks_all_go_on_with_the_first_rank_s_and_it_is_said_once(
    layout: str, tmp_path: Path
) -> None:
    saved = run_on_ranks(_saved, 2, layout, tmp_path / "ck", False)
    assert saved[0] != saved[1]
    answers = run_on_ranks(_other_number, 3, tmp_path / "ck")
    for buffers, _ in answers:
        assert buffers == saved[0]
    said = [text.count("all ranks now have those of the first") for _, text in answers]
    assert said == [1, 0, 0]


def _plain(folder: Path) -> list[str]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = Normed(), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer)
    accelerator.save_state(folder / "ddp")
    accelerator, model, optimizer = run_of("fsdp2-sharded")
    accelerator.save_state(folder / "equal")
    return [path.name for name in ("ddp", "equal") for path in (folder / name).glob("buffers*")]


def test_replicas_whose_buffers_are_broadcast_and_equal_buffers_are_saved_once(tmp_path: Path) -> None:
    assert run_on_ranks(_plain, 2, tmp_path) == [[], []]


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which is a buffer that training depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return self.linear(inputs - self.mean)


def _replicas_from(folder: Path, first: int, accumulation: int, evaluates: bool, saves: bool) -> list[Any]:
    """Losses, buffers and weights after each of 6 batches, from the checkpoint before batch ``first`` on."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = Centred()
    loader = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    if not saves:
        accelerator.load_state(folder / f"before_{first}")
    found: list[Any] = []
    for number, rows in enumerate(loader, first):
        with accelerator.accumulate(model):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                model(rows)  # in training mode: the buffer changes
        found.append((number, loss.item(), *(value.tolist() for value in model.module.state_dict().values())))
        if saves:
            accelerator.save_state(folder / f"before_{number + 1}")
    return found


@pytest.mark.parametrize(
    ("num_ranks", "accumulation", "evaluates"),
    [pytest.param(2, 1, True, marks=slow), (2, 2, False), pytest.param(3, 2, True, marks=slow)],
)
def test_replicas_resume_with_buffers_that_are_not_broadcast_next(
    num_ranks: int, accumulation: int, evaluates: bool, tmp_path: Path
) -> None:
    """DDP broadcasts buffers before a forward only if gradients were reduced after the one before."""
    undisturbed = run_on_ranks(_replicas_from, num_ranks, tmp_path, 0, accumulation, evaluates, True)
    for first in range(1, len(undisturbed[0])):
        resumed = run_on_ranks(_replicas_from, num_ranks, tmp_path, first, accumulation, evaluates, False)
        for rank, found in enumerate(resumed):
            assert found == undisturbed[rank][first:], (rank, first)
