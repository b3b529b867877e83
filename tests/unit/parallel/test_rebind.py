"""Optimizers get the parameters of the prepared model, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.errors import PreparationError
from accelerate.parallel.rebind import OptimizerRebinding, canonical_name


def test_groups_hold_the_parameters_of_the_same_names() -> None:
    """In place, tied names once, strangers untouched, state along."""
    old, new, stranger = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [old.weight, stranger]}, {"params": [old.bias]}], lr=0.1, momentum=0.9)
    old(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[old.weight]["momentum_buffer"]
    held = optimizer.param_groups[0]["params"]
    before = {"weight": old.weight, "bias": old.bias, "tied": old.weight}
    after = {"weight": new.weight, "bias": new.bias, "tied": new.weight}
    OptimizerRebinding([optimizer], before.items()).resolve(after)
    assert optimizer.param_groups[0]["params"] is held
    assert held[0] is new.weight and held[1] is stranger
    assert optimizer.param_groups[1]["params"][0] is new.bias
    assert torch.equal(optimizer.state[new.weight]["momentum_buffer"], momentum)
    assert old.weight not in optimizer.state


def test_several_names_of_one_new_parameter_are_one_entry() -> None:
    """As with flat parameters; in two groups they are refused."""
    old, flat = nn.Linear(2, 2), nn.Parameter(torch.ones(6))
    before = {"weight": old.weight, "bias": old.bias}
    together = torch.optim.SGD(old.parameters(), lr=0.1)
    OptimizerRebinding([together], before.items()).resolve(dict.fromkeys(before, flat))
    assert [id(p) for p in together.param_groups[0]["params"]] == [id(flat)]
    apart = torch.optim.SGD([{"params": [old.weight]}, {"params": [old.bias]}], lr=0.1)
    with pytest.raises(PreparationError, match="use_orig_params"):
        OptimizerRebinding([apart], before.items()).resolve(dict.fromkeys(before, flat))


def test_a_model_on_the_meta_device_takes_its_optimizer_along() -> None:
    """Where moving makes new parameters, prepared objects still belong together."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.named_parameters())
    model.to("meta")
    OptimizerRebinding([optimizer], before.items()).resolve(dict(model.named_parameters()))
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_preparing_where_nothing_is_replaced_changes_nothing() -> None:
    """One process."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(optimizer.param_groups[0]["params"])
    Accelerator(cpu=True).prepare(model, optimizer)
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    assert optimizer.param_groups[0]["foreach"] is None  # torch updates them jointly where it can


@pytest.mark.parametrize(
    "name", ["_orig_mod.a.b", "a._checkpoint_wrapped_module.b", "_fsdp_wrapped_module.a._orig_mod.b"]
)
def test_wrappers_leave_no_trace_in_names(name: str) -> None:
    """Compiling, recomputing, sharding."""
    assert canonical_name(name) == "a.b"
