"""Activation checkpointing: what is chosen, what of it is kept, and what is refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from accelerate import Accelerator, ActivationCheckpointing
from accelerate.errors import SettingError
from accelerate.training.recompute import chosen_modules, recompute_activations


class Block(nn.Module):
    """Two layers; says how often each operator of it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        """Return two activations later."""
        return self.second(self.first(hidden).sigmoid()).sigmoid()


class Network(nn.Module):
    """Blocks in a list, after an entrance."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance, self.blocks = nn.Linear(4, 4), nn.ModuleList([Block(), Block()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the last block does."""
        hidden = self.entrance(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def calls(module: nn.Module, inputs: torch.Tensor) -> dict[str, int]:
    """How often the backward pass calls products and sigmoids of a forward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {"addmm": 0, "sigmoid": 0}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in counts:
                counts[name] += 1
            return func(*args, **(kwargs or {}))

    loss = module(inputs).sum()
    with Counter():
        loss.backward()
    return counts


@pytest.mark.parametrize(
    ("save_ops", "products", "sigmoids"),
    [
        ((), 2, 2),
        (("mm",), 0, 2),
        (("aten.addmm", "aten::sigmoid"), 0, 0),
        ((torch.ops.aten.addmm.default,), 0, 2),
        ((torch.ops.aten.sigmoid,), 2, 0),
        (lambda context, operator, *args, **kwargs: CheckpointPolicy.MUST_SAVE, 0, 0),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_only_what_is_not_kept_runs_again(save_ops: Any, products: int, sigmoids: int, offload: bool) -> None:
    """Without a remark of torch 2.15, which asks what hooks of an offload are to do with what is kept."""
    torch.manual_seed(0)
    block = Block()
    recompute_activations([block], save_ops=save_ops, offload=offload)
    assert calls(block, torch.randn(3, 4)) == {"addmm": products, "sigmoid": sigmoids}


def test_attention_with_dropout_is_never_kept() -> None:
    """Its random numbers have to be drawn again, or those after it were others."""
    from accelerate.torch_private.modules import draws_numbers

    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.zeros(1, 1, 1, 1)
    assert draws_numbers(flash, (query, query, query, 0.1), {})
    assert draws_numbers(flash, (query, query, query), {"dropout_p": 0.1})
    assert not draws_numbers(flash, (query, query, query), {})
    assert draws_numbers(torch.ops.aten.bernoulli_.float, (query,), {})
    assert not draws_numbers(torch.ops.aten.mm.default, (query, query), {})


def test_which_modules_are_chosen() -> None:
    model = Network()
    both = list(model.blocks)
    assert chosen_modules(model, ActivationCheckpointing()) == both
    assert chosen_modules(model, ActivationCheckpointing(modules=r"blocks\.1")) == both[1:]
    assert chosen_modules(model, ActivationCheckpointing(modules=r"blocks\.1(\..*)?")) == both[1:]  # the outer one
    for listed in (["Block"], [Block], tuple(both)):
        assert chosen_modules(model, ActivationCheckpointing(modules=listed)) == both
    assert chosen_modules(model, ActivationCheckpointing(), units=[model.entrance]) == [model.entrance]
    model._no_split_modules = ["Linear"]  # pyright: ignore[reportArgumentType]
    assert len(chosen_modules(model, ActivationCheckpointing())) == 5


def test_an_empty_cache_of_keys_is_left_out() -> None:
    """A second forward would append to what the first left there; one with contents is the caller's."""

    class Cache:
        def __init__(self, length: int) -> None:
            self.length = length

        def get_seq_length(self) -> int:
            return self.length

    got: list[object] = []
    block = Block()
    original = block.forward

    def forward(hidden: torch.Tensor, **kwargs: object) -> torch.Tensor:
        got.append(kwargs["past_key_values"])
        return original(hidden)

    block.forward = forward
    recompute_activations([block])
    full = Cache(3)
    for cache in (Cache(0), full):
        block(torch.randn(3, 4), past_key_values=cache).sum().backward()
    assert got == [None, None, full, full]


def test_what_is_refused() -> None:
    model = Network()
    with pytest.raises(SettingError, match=r"modules='nothing'\) chooses no module of Network"):
        chosen_modules(model, ActivationCheckpointing(modules="nothing"))
    with pytest.raises(SettingError, match=r"modules='\(' is no regular expression"):
        chosen_modules(model, ActivationCheckpointing(modules="("))
    with pytest.raises(SettingError, match="there is no operator 'mn'"):
        recompute_activations([model], save_ops=("mn",))
    with pytest.raises(SettingError, match=r"there is no operator 'aten\.no_such_thing'"):
        recompute_activations([model], save_ops=("aten.no_such_thing",))
    with pytest.raises(SettingError, match=r"give a list of names, as \('mm',\)"):
        ActivationCheckpointing(save_ops="mm")
    with pytest.raises(SettingError, match="chooses no module: leave it out"):
        ActivationCheckpointing(modules=[])
    with pytest.raises(SettingError, match="only pass one ActivationCheckpointing"):
        Accelerator(cpu=True, kwargs_handlers=[ActivationCheckpointing(), ActivationCheckpointing()])


def test_evaluation_is_left_alone() -> None:
    run = Accelerator(cpu=True, kwargs_handlers=[ActivationCheckpointing()])
    model = run.prepare_model(Network(), evaluation_mode=True)
    assert not any("forward" in block.__dict__ for block in model.blocks)


def normalised(layer: str) -> nn.Module:
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "batch": lambda: nn.BatchNorm1d(4),
        "batch, mean of all": lambda: nn.BatchNorm1d(4, momentum=None),
        "instance": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
        ),
    }
    return nn.Sequential(nn.Linear(4, 4), made[layer](), nn.Linear(4, 4))


def steps(model: Any) -> dict[str, Any]:
    """Train, and return all that the model has then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("way", "layer"),
    [
        *itertools.product(["plain", "kept", "offloaded", "copied"], ["batch", "batch, mean of all", "instance"]),
        ("compiled", "batch"),
    ],
)
def test_running_statistics_follow_each_batch_once(layer: str, way: str) -> None:
    expected, model = steps(normalised(layer)), normalised(layer)
    recompute_activations([model], offload=way == "offloaded", save_ops=("mm",) if way == "kept" else ())
    if way == "copied":
        model = copy.deepcopy(model)
    run: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    steps(run)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def test_an_early_end_of_the_recomputation_keeps_the_buffers() -> None:
    model = normalised("batch")
    recompute_activations([model])
    buffers = [id(buffer) for buffer in model.buffers()]
    steps(model)
    assert [id(buffer) for buffer in model.buffers()] == buffers
