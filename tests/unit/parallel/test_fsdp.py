"""What FSDP decides without other ranks: units, ignored modules, recomputing; and that a strategy is one file."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate import parallel as strategies
from accelerate.distributed.world import World
from accelerate.errors import MissingDependency, SettingError
from accelerate.parallel import Strategy
from accelerate.parallel.fsdp import fsdp2, setup
from accelerate.parallel.fsdp.wrapping import find_ignored, find_wrap_units
from accelerate.parallel.gradient_norm import clip_sharded_grad_norm
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.settings.labels import DistributedType
from accelerate.training.recompute import recompute_activations
from accelerate.utils.fsdp_utils import (
    ensure_weights_retied,
    fsdp2_canonicalize_names,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_switch_optimizer_parameters,
    get_parameters_from_modules,
)
from tests.sharded_runs import BLOCKS, Network


def policy(model: nn.Module, **options: Any) -> Any:
    """The policy of a plugin, ready for ``model``."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    plugin.set_auto_wrap_policy(model)
    return plugin.auto_wrap_policy


def test_units_are_the_named_layers_children_first() -> None:
    """None without a policy; not the ignored ones."""
    model = Network()
    assert find_wrap_units(model, policy(model, **BLOCKS)) == list(model.layers)
    assert find_wrap_units(model, None) == []
    assert find_wrap_units(model, policy(model, **BLOCKS), [model.layers[0]]) == [model.layers[1]]


def test_units_by_size_leave_the_rest_to_their_parent() -> None:
    """A block of 289 parameters is one; its layers are too small."""
    model = Network()
    found = find_wrap_units(model, policy(model, auto_wrap_policy="size_based_wrap", min_num_params=250))
    assert found == list(model.layers)


def test_the_embedding_is_a_unit_unless_tied_and_the_head_belongs_to_the_root() -> None:
    """Programs read the weight of a head without calling it."""

    class Speaker(Network):
        def get_input_embeddings(self) -> nn.Module:
            """As transformers names it."""
            return self.entrance

        def get_output_embeddings(self) -> nn.Module:
            """As transformers names it."""
            return self.head

    model, tied = Speaker(), Speaker(tied=True)
    assert find_wrap_units(model, policy(model, **BLOCKS))[2:] == [model.entrance]
    assert find_wrap_units(tied, policy(tied, **BLOCKS)) == list(tied.layers)
    assert fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2), model) is None


def test_ignored_modules_are_named_by_an_expression() -> None:
    """For whole names; one that matches nothing is a mistake."""
    model = Network()
    assert find_ignored(r"layers\.\d\.up", model) == [layer.up for layer in model.layers]
    assert get_parameters_from_modules("head", model, torch.device("cpu")) == set(model.head.parameters())
    with pytest.raises(SettingError, match="matches no module"):
        find_ignored("up", model)
    with pytest.raises(SettingError, match="no regular expression"):
        find_ignored("(", model)


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_gradients_are_the_same(offload: bool) -> None:
    """And the layer really runs again."""
    torch.manual_seed(0)
    model, inputs = Network(), torch.randn(4, 8)
    model(inputs).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    runs: list[int] = []
    model.get_submodule("layers.0.up").register_forward_hook(lambda *_: runs.append(1))
    recompute_activations(model.layers, offload=offload)
    recompute_activations(model.layers, offload=offload)
    model(inputs).sum().backward()
    assert len(runs) == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_norm_of_plain_gradients_is_torchs() -> None:
    """Also of infinite order, and where it is not finite."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0])
    cpu = torch.device("cpu")
    assert clip_sharded_grad_norm([parameter], 1e9, float("inf"), False, cpu).item() == 4.0
    assert clip_sharded_grad_norm([parameter], 1.0, 2.0, False, cpu).item() == pytest.approx(5.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert clip_sharded_grad_norm([], 1.0, 2.0, False, cpu).item() == 0.0
    parameter.grad = torch.tensor([float("nan"), 0.0, 0.0])
    with pytest.raises(RuntimeError, match="nan"):
        clip_sharded_grad_norm([parameter], 1.0, 2.0, True, cpu)


def test_small_documented_functions() -> None:
    """Names, switched parameters, weights tied again."""
    assert list(fsdp2_canonicalize_names({"a._checkpoint_wrapped_module.b": 1})) == ["a.b"]
    old, new = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([old], lr=0.1)
    fsdp2_switch_optimizer_parameters(optimizer, {old: new})
    assert optimizer.param_groups[0]["params"][0] is new
    with pytest.raises(KeyError, match="tied"):
        fsdp2_switch_optimizer_parameters(optimizer, {old: new})
    model = Network(tied=True).to("meta")
    model.head.weight = model.entrance.weight
    initialise = ensure_weights_retied(lambda module: module.to_empty(device="cpu", recurse=False), model, "cpu")  # pyright: ignore[reportArgumentType]
    model.apply(initialise)
    assert model.head.weight is model.entrance.weight and model.head.weight.device.type == "cpu"


def test_fsdp_without_other_processes_is_one_device() -> None:
    """No process group, nothing to shard over."""
    run = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = run.prepare(nn.Linear(2, 2))
    assert run.distributed_type == DistributedType.NO and type(model) is nn.Linear


def _double(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return outputs * 2


class Doubling(Strategy):
    """Every model is followed by a doubling."""

    @property
    def label(self) -> DistributedType:
        return DistributedType.NO

    def _wrap(self, model: nn.Module) -> nn.Module:
        model.register_forward_hook(_double)
        return model


@pytest.mark.parametrize(("device", "refuses"), [("cpu", True), ("meta", False)])
def test_on_cpu_a_torch_that_would_add_gradients_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, refuses: bool
) -> None:
    """torch 2.7 and 2.8 ask gloo for a mean and get a sum, and nothing tells."""
    monkeypatch.setattr(setup, "OLDEST_ON_CPU", "99.0")
    expected = pytest.raises(MissingDependency, match=r"version 2 on CPU needs torch 99\.0.*installed is")
    with expected if refuses else nullcontext():
        options = SimpleNamespace(mesh=object(), plugins=SimpleNamespace(parallelism=None))
        fsdp2.FullyShard(World(device=torch.device(device)), options)


def test_a_strategy_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new way of laying models out, without touching anything else."""
    candidate = strategies.Candidate(__name__, "Doubling", lambda settings, world: True)
    monkeypatch.setattr(strategies, "ORDER", (candidate, *strategies.ORDER))
    run = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = prepared(torch.ones(1, 1)).sum()
    run.backward(loss)
    optimizer.step()
    assert loss.item() == 2.0 and model.weight.item() == pytest.approx(0.8)
