"""True half and true double: everything in one dtype, as a loop without us would have it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.errors import SettingError
from accelerate.plugins.handlers import AutocastKwargs


class Net(nn.Module):
    """A layer, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Scores."""
        hidden = self.norm(self.layer(inputs))
        return hidden if scale is None else hidden * scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_training_in_one_dtype_is_what_a_plain_loop_in_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Net()
    model: nn.Module = copy.deepcopy(plain)
    run = Accelerator(cpu=True, parameter_dtype=dtype)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    plain.to(dtype)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        inputs = torch.randn(8, 4)
        run.backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        outputs = plain(inputs.to(dtype))
        (outputs if dtype is torch.float64 else outputs.float()).pow(2).mean().backward()
        reference.step()
        reference.zero_grad()
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {dtype}
    assert run.mixed_precision == "no" and run.scaler is None


def test_outputs_are_float32_unless_asked_otherwise() -> None:
    inputs = torch.ones(2, 4)
    assert Accelerator(cpu=True, parameter_dtype=torch.bfloat16).prepare(Net())(inputs).dtype is torch.float32
    kept = Accelerator(
        cpu=True, parameter_dtype=torch.bfloat16, kwargs_handlers=[AutocastKwargs(output_dtype=None)]
    ).prepare(Net())
    assert kept(inputs, scale=inputs).dtype is torch.bfloat16
    assert Accelerator(cpu=True, parameter_dtype=torch.float64).prepare(Net())(inputs).dtype is torch.float64


def test_the_forward_is_the_users_again_and_the_copy_has_its_own() -> None:
    run = Accelerator(cpu=True, parameter_dtype=torch.bfloat16)
    model = run.prepare(Net())
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.norm.weight)
    nn.init.zeros_(twin.norm.bias)
    assert twin(torch.ones(2, 4)).abs().sum() == 0 and model(torch.rand(2, 4)).abs().sum() > 0
    run.free_memory()
    assert "forward" not in model.__dict__


def test_contradictions_are_refused() -> None:
    with pytest.raises(SettingError, match=r"parameter_dtype=torch\.bfloat16 contradicts.*mixed_precision"):
        Accelerator(cpu=True, mixed_precision="bf16", parameter_dtype=torch.bfloat16)
    with pytest.raises(SettingError, match=r"parameter_dtype=torch\.int8: choose one of .*torch\.float64"):
        Accelerator(cpu=True, parameter_dtype=torch.int8)
