from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.big_models.placement import rebuild_parameter, set_module_tensor_to_device
from accelerate.errors import PreparationError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_a_parameter_moves_and_stays_a_parameter() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    set_module_tensor_to_device(net, "0.weight", "meta")
    assert net[0].weight.is_meta
    assert isinstance(net[0].weight, nn.Parameter)
    assert not net[0].weight.requires_grad


def test_values_come_in_the_dtype_that_was_there_unless_one_is_asked() -> None:
    net = model().half()
    set_module_tensor_to_device(net, "0.weight", "cpu", value=torch.ones(4, 3))
    assert net[0].weight.dtype is torch.float16
    set_module_tensor_to_device(net, "0.weight", "cpu", value=torch.ones(4, 3), dtype=torch.float64)
    assert net[0].weight.dtype is torch.float64
    set_module_tensor_to_device(net, "0.weight", "cpu", dtype="bfloat16")
    assert net[0].weight.dtype is torch.bfloat16
    set_module_tensor_to_device(net, "1.num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16)
    assert net[1].num_batches_tracked.dtype is torch.int64, "integers are counted, not rounded"


def test_buffers_move_too() -> None:
    net = model()
    set_module_tensor_to_device(net, "1.running_mean", "meta")
    assert net[1].running_mean.is_meta
    set_module_tensor_to_device(net, "1.running_mean", "cpu", value=torch.ones(4))
    assert torch.equal(net[1].running_mean, torch.ones(4))
    assert "running_mean" in net[1]._buffers


@pytest.mark.parametrize("name", ["0.missing", "2.weight", "0.weight.data", "nothing"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no part|no parameter"):
        set_module_tensor_to_device(model(), name, "cpu")


def test_a_tensor_without_values_needs_some() -> None:
    with pytest.raises(PreparationError, match=r"0\.weight of Sequential is on the meta device"):
        set_module_tensor_to_device(model().to("meta"), "0.weight", "cpu")


def test_another_shape_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3\), and the value given has \(3, 4\)"):
        set_module_tensor_to_device(model(), "0.weight", "cpu", value=torch.ones(3, 4))


def test_a_parameter_that_is_none_can_be_filled() -> None:
    net = nn.Linear(2, 2, bias=False)
    set_module_tensor_to_device(net, "bias", "cpu", value=torch.ones(2))
    assert net.bias is not None


def test_ties_stay_ties_on_the_new_device() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    copies: dict[int, dict[torch.device, torch.Tensor]] = {first.weight.data_ptr(): {}}
    for layer in (first, second):
        set_module_tensor_to_device(layer, "weight", "meta", tied_params_map=copies)
    assert first.weight is second.weight
    assert first.weight.is_meta


class Marked(nn.Parameter):
    """A parameter class with an attribute of its own."""


def test_a_parameter_keeps_its_class_and_its_marks() -> None:
    net = nn.Linear(2, 2)
    weight = Marked(torch.ones(2, 2))
    weight.mark = "kept"  # pyright: ignore[reportAttributeAccessIssue]
    net.weight = weight
    set_module_tensor_to_device(net, "weight", "meta")
    assert isinstance(net.weight, Marked)
    assert net.weight.mark == "kept"  # pyright: ignore[reportAttributeAccessIssue]


def test_integers_have_no_gradient() -> None:
    assert not rebuild_parameter(nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.int8)).requires_grad
