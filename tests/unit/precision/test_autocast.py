"""Autocast around a forward: put on once, taken off again, on copies too."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from accelerate.plugins.handlers import AutocastKwargs
from accelerate.precision.base import AutocastPrecision, FullPrecision


def product_dtype() -> torch.dtype:
    """The dtype in which a product is computed here."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def bf16(handler: AutocastKwargs | None = None) -> AutocastPrecision:
    return AutocastPrecision("bf16", "cpu", handler=handler)


class Tiny(nn.Module):
    """Says in which dtype it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.computed: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The product."""
        outputs = self.linear(inputs) * scale
        self.computed = outputs.dtype
        return outputs


def test_a_disabled_context_inside_gives_full_precision_back() -> None:
    precision = bf16()
    with precision.autocast():
        assert product_dtype() is torch.bfloat16
        with precision.autocast(AutocastKwargs(enabled=False)):
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.bfloat16


def test_a_precision_that_is_switched_off_neither_casts_nor_patches() -> None:
    precision, model = bf16(), Tiny()
    precision.is_autocast = False
    with precision.autocast():
        assert product_dtype() is torch.float32
    precision.patch_forward(model)
    assert "forward" not in model.__dict__


def test_patching_twice_is_patching_once_and_can_be_undone() -> None:
    precision, model = bf16(), Tiny()
    precision.patch_forward(model)
    once = model.__dict__["forward"]
    precision.patch_forward(model)
    assert model.__dict__["forward"] is once
    assert model(torch.ones(1, 2)).dtype is torch.float32 and model.computed is torch.bfloat16
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "scale"], "libraries read the signature"
    precision.restore_forward(model)
    assert not {"forward", "_original_forward"} & set(model.__dict__)
    precision.restore_forward(model)
    model(torch.ones(1, 2))
    assert model.computed is torch.float32


def test_a_forward_that_the_user_put_on_the_instance_comes_back() -> None:
    precision, model = bf16(), Tiny()
    own = lambda inputs: inputs @ inputs  # noqa: E731
    model.forward = own  # type: ignore[method-assign]
    precision.patch_forward(model)
    assert model(torch.ones(2, 2)).dtype is torch.float32 and model.forward is not own
    precision.restore_forward(model)
    assert model.forward is own


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_can_be_patched_again_and_computes_with_its_own_weights(duplicate: object) -> None:
    precision, model = bf16(), Tiny()
    precision.patch_forward(model)
    twin = duplicate(model)  # type: ignore[operator]
    precision.patch_forward(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(torch.ones(1, 2)).abs().sum() == 0 and twin.computed is torch.bfloat16
    assert model(torch.ones(1, 2)).abs().sum() > 0


def test_any_precision_unscales_with_the_scaler_that_it_was_given() -> None:
    precision = FullPrecision()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    precision.unscale(optimizer)
    precision.unscale(optimizer)
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]
