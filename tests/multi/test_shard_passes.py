"""What torch keeps of a pass over shards has the names and the meaning that this version relies on.

If one of these fails with a new torch, read what ``fully_shard`` and ``FullyShardedDataParallel`` keep between passes
there, and mend ``torch_private/fsdp.py``: it is the only file that knows.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from accelerate.distributed.world import join_world
from accelerate.torch_private.fsdp import (
    managed_parameters,
    reset_flat_runtime,
    reset_sharded_runtime,
    snapshot_flat_gradients,
    snapshot_sharded_gradients,
)
from accelerate.training.oom_retry import snapshot_gradients
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(
    getattr(FSDPModule, "reset_iter_state", None) is None, reason="this torch can't reset a pass"
)
KINDS = ("fully_shard", "flat", "flat, original parameters")


class _Unit(nn.Module):
    """A layer that breaks in the middle when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.breaks = nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if self.breaks:
            raise RuntimeError("in the middle")
        return out


def _sharded(kind: str) -> tuple[Any, list[_Unit]]:
    torch.manual_seed(0)
    units = [_Unit(), _Unit()]
    if kind == "fully_shard":
        for unit in units:
            fully_shard(unit)
        return fully_shard(nn.Sequential(*units)), units
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's words on its older way
        wrap = functools.partial(
            FullyShardedDataParallel,
            device_id=torch.device("cpu"),
            use_orig_params=kind.endswith("parameters"),
        )
        return wrap(nn.Sequential(*map(wrap, units))), units


def _backward(model: Any, value: float, *, syncs: bool) -> None:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(syncs)
        model(torch.full((2, 3), value)).sum().backward()
    elif syncs:
        model(torch.full((2, 3), value)).sum().backward()
    else:
        with model.no_sync():
            model(torch.full((2, 3), value)).sum().backward()


def _gradients(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [g.to_local().clone() if hasattr(g, "to_local") else g.clone() for g in found if g is not None]


def _given_up_and_smooth(kind: str, given_up_syncs: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of one window: with two passes in the middle that were given up, and without."""
    join_world()
    snapshot, reset = (
        (snapshot_sharded_gradients, reset_sharded_runtime)
        if kind == "fully_shard"
        else (snapshot_flat_gradients, reset_flat_runtime)
    )
    (model, units), (smooth, _) = _sharded(kind), _sharded(kind)
    snapshot(model, snapshot_gradients)()
    reset(model)  # before any forward
    for one in (model, smooth):
        _backward(one, 1.0, syncs=True)
        _backward(one, 2.0, syncs=False)
    restore = snapshot(model, snapshot_gradients)
    _backward(model, 5.0, syncs=given_up_syncs)
    units[1].breaks = True
    with pytest.raises(RuntimeError, match="in the middle"):
        model(torch.ones(2, 3))
    units[1].breaks = False
    with torch.no_grad():
        reset(model)
        restore()
    for one in (model, smooth):
        _backward(one, 3.0, syncs=True)
    return _gradients(model), _gradients(smooth)


@pytest.mark.parametrize("given_up_syncs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_given_up_leave_the_gradients_from_before(kind: str, given_up_syncs: bool) -> None:
    """Sharded ones, and those left whole by a pass without reduction."""
    for given_up, smooth in run_on_ranks(functools.partial(_given_up_and_smooth, kind, given_up_syncs), 2):
        assert len(given_up) == len(smooth) > 0
        assert all(torch.equal(one, other) for one, other in zip(given_up, smooth, strict=True))


def _records_of_fully_shard() -> list[tuple[bool, bool, bool]]:
    join_world()
    model, units = _sharded("fully_shard")
    _backward(model, 1.0, syncs=True)
    _backward(model, 1.0, syncs=False)
    parameters = [parameter for unit in units for parameter in managed_parameters(unit)]
    return [
        (
            p.sharded_param.grad is not None,
            p._unsharded_param.grad is not None,
            # From torch 2.15 on it only shows the gradient of the unsharded parameter, and isn't in the record itself.
            vars(p).get("unsharded_accumulated_grad") is None,
        )
        for p in parameters
    ]


def test_the_records_of_fully_shard() -> None:
    for found in run_on_ranks(_records_of_fully_shard, 2):
        assert found == [(True, True, True)] * 4


def _records_of_flat_parameters() -> list[tuple[bool, bool, int]]:
    join_world()
    model, _ = _sharded("flat, original parameters")
    _backward(model, 1.0, syncs=True)
    _backward(model, 1.0, syncs=False)
    flats: list[Any] = [
        unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle
    ]
    return [
        (
            hasattr(flat, "_saved_grad_shard"),
            flat.grad.shape == flat._unpadded_unsharded_size != flat.shape,
            len(flat._is_grad_none_mask),
        )
        for flat in flats
    ]


def test_the_records_of_flat_parameters() -> None:
    for found in run_on_ranks(_records_of_flat_parameters, 2):
        assert found == [(True, True, 2)] * 2
