"""torch's own functions for states of optimizers and for clipping, on what `prepare` returned or didn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from tests.ranks import run_on_ranks


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_state_that_torch_creates_is_no_update(precision: str) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=2048.0)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0) if precision == "fp16" else None
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.scaler = scaler
    state = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state)
    assert optimizer.num_updates == 0 and optimizer.param_groups[0]["lr"] == 0.1
    assert scaler is None or (scaler.get_scale() == 2048.0 and scaler.state_dict()["_growth_tracker"] == 0)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert optimizer.num_updates == 1


def test_a_first_step_at_a_rate_of_zero_is_an_update() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.zeros(1, 2)).sum() * 0)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_updates == 2


def clipped_beside_shards(limit: float | None) -> tuple[float, list[float]]:
    """Clip a sharded and a whole parameter of a model that wasn't prepared; return the norm and all gradients."""
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = nn.Parameter(torch.zeros(2))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    whole.grad = torch.full((2,), 3.0)
    sharded.grad = distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)])
    norm = torch.zeros(())
    if limit is None:
        accelerator.clip_grad_value_([whole, sharded], 1.0)
    else:
        norm = accelerator.clip_grad_norm_([whole, sharded], limit)
    return float(norm), [*whole.grad.tolist(), *sharded.grad.full_tensor().tolist()]


def test_shards_that_were_not_prepared_are_clipped_beside_whole_parameters() -> None:
    norm = 34**0.5  # of 3, 3 and four times 2
    for found, gradients in run_on_ranks(clipped_beside_shards, 2, 1.0):
        assert found == pytest.approx(norm)
        assert gradients == pytest.approx([3 / norm] * 2 + [2 / norm] * 4, rel=1e-5)
    assert run_on_ranks(clipped_beside_shards, 2, None) == [(0.0, [1.0] * 6)] * 2
