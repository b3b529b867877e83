"""The optimizer wrapper: transparent, gated by the gradient state, honest about skipped steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.training.accumulation import GradientState
from accelerate.training.optimizer import AcceleratedOptimizer, move_to_device


@pytest.fixture(autouse=True)
def gradient_state() -> Iterator[GradientState]:
    GradientState._reset_state()
    yield GradientState.create()
    GradientState._reset_state()


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value))


def test_it_is_an_optimizer_and_its_groups_are_the_inner_ones(gradient_state: GradientState) -> None:
    inner = torch.optim.SGD([parameter()], lr=0.1)
    wrapped = AcceleratedOptimizer(inner)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert wrapped.param_groups is inner.param_groups and wrapped.state is inner.state
    wrapped.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    wrapped.add_param_group({"params": [parameter()]})
    assert len(inner.param_groups) == 2


def test_nothing_moves_inside_a_window(gradient_state: GradientState) -> None:
    weight = parameter()
    wrapped = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.grad = torch.ones(2)
    gradient_state.sync_gradients = False
    wrapped.step()
    wrapped.zero_grad()
    assert torch.equal(weight, torch.ones(2)) and weight.grad is not None
    gradient_state.sync_gradients = True
    wrapped.step()
    assert torch.allclose(weight, torch.full((2,), 0.9))
    wrapped.zero_grad()
    assert weight.grad is None


def test_a_closure_reaches_the_inner_optimizer(gradient_state: GradientState) -> None:
    weight = parameter()
    wrapped = AcceleratedOptimizer(torch.optim.LBFGS([weight], max_iter=5))

    def closure() -> torch.Tensor:
        weight.grad = None
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert wrapped.step(closure).item() == pytest.approx(2.0)
    assert weight.abs().max() < 1e-3


def test_zero_grad_keeps_to_what_the_optimizer_knows(gradient_state: GradientState) -> None:
    class Old(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad()

    wrapped = AcceleratedOptimizer(Old([parameter()], lr=0.1))
    wrapped.zero_grad()
    with pytest.raises(ValueError, match="set_to_none"):
        wrapped.zero_grad(set_to_none=False)


KINDS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_is_seen_and_skipped_for_every_kind_of_optimizer(gradient_state: GradientState, kind: str) -> None:
    weight = parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = AcceleratedOptimizer(torch.optim.AdamW([weight], lr=0.1, **KINDS[kind]), scaler=scaler)

    def step(loss: torch.Tensor) -> bool:
        wrapped.zero_grad()
        scaler.scale(loss).backward()
        wrapped.step()
        return wrapped.step_was_skipped

    before = weight.detach().clone()
    assert step((weight * float("inf")).sum()) and torch.equal(weight, before) and scaler.get_scale() == 2.0
    assert not step((weight**2).sum()) and not torch.equal(weight, before)


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_updates_are_not_counted_and_no_step_waits_for_the_device(
    gradient_state: GradientState, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the device knows, in a fused kernel: the count is that of the optimizer's own steps."""
    weight = parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = AcceleratedOptimizer(torch.optim.AdamW([weight], lr=0.1, **KINDS[kind]), scaler=scaler)
    reads: list[torch.Tensor] = []
    read = torch.Tensor.item
    for factor in (1.0, float("inf"), 1.0, float("inf"), 1.0):
        scaler.scale((weight * factor).sum()).backward()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda tensor: reads.append(tensor) or read(tensor))
            wrapped.step()
        wrapped.zero_grad()
    assert not (kind == "fused" and reads)
    own = int(wrapped.state[weight]["step"])
    assert wrapped.num_updates == own == 3
    assert pickle.loads(pickle.dumps(wrapped)).num_updates == 3
    wrapped.num_updates = 7
    assert wrapped.num_updates == 7


def test_state_loaded_or_present_before_lies_on_the_device(gradient_state: GradientState) -> None:
    weight = parameter()
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(2)
    inner.step()
    wrapped = AcceleratedOptimizer(inner, device=torch.device("cpu"))
    saved = copy.deepcopy(wrapped.state_dict())
    wrapped.step()
    wrapped.load_state_dict(saved)
    assert torch.equal(wrapped.state[weight]["momentum_buffer"], torch.ones(2))
    assert move_to_device({"a": [torch.ones(1)]}, "meta")["a"][0].device.type == "meta"


def test_it_survives_pickling(gradient_state: GradientState) -> None:
    wrapped = AcceleratedOptimizer(torch.optim.SGD([parameter()], lr=0.1))
    again = pickle.loads(pickle.dumps(wrapped))
    assert again.param_groups[0]["lr"] == 0.1 and again.gradient_state is gradient_state
    again.step()


def test_schedule_free_modes_reach_the_inner_optimizer(gradient_state: GradientState) -> None:
    class ScheduleFree(torch.optim.SGD):
        mode = "unset"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    inner = ScheduleFree([parameter()], lr=0.1)
    wrapped = AcceleratedOptimizer(inner)
    wrapped.train()
    assert inner.mode == "train"
    wrapped.eval()
    assert inner.mode == "eval"
    AcceleratedOptimizer(torch.optim.SGD([parameter()], lr=0.1)).train()


def test_an_optimizer_that_steps_in_backward_is_left_alone(gradient_state: GradientState) -> None:
    lomo = type("Lomo", (torch.optim.SGD,), {"__module__": "lomo_optim.lomo"})
    weight = parameter()
    wrapped = AcceleratedOptimizer(lomo([weight], lr=0.1))
    weight.grad = torch.ones(2)
    wrapped.step()
    assert wrapped.is_fused_into_backward and torch.equal(weight, torch.ones(2))
