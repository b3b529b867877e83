"""Compilation of whole models and of repeated blocks, on backends that need no compiler."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.big_modeling import dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from accelerate.parallel.compile import (
    compile_model,
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
    uncompiled,
)
from accelerate.plugins.handlers import TorchDynamoPlugin
from tests.ranks import run_on_ranks

# torch looks at `.grad` while it traces and hides the warning from printing only.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Repeated blocks two levels down, mixed lists, a tied child, a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.head = self.embedding
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        self.bound = self.doubled

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.body.blocks:
            x = block(x)
        for layer in self.mixed:
            x = layer(x)
        return self.bound(self.head(x)) + self.offset


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A backend that counts how many graphs it was given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def test_a_list_of_blocks_of_one_class_is_repeated() -> None:
    assert is_repeated_blocks(nn.ModuleList([Block(), Block()]))
    assert is_repeated_blocks(nn.ModuleList([Block()]))
    assert not is_repeated_blocks(nn.ModuleList())
    assert not is_repeated_blocks(nn.ModuleList([Block(), nn.Linear(4, 4)]))
    assert not is_repeated_blocks(nn.Sequential(Block(), Block()))
    assert has_repeated_blocks(Model())
    assert not has_repeated_blocks(Block())


class TestRegions:
    def test_the_result_is_of_the_same_class_over_the_same_tensors(self) -> None:
        model = Model()
        compiled = compile_regions(model, backend="eager")
        assert type(compiled) is Model and compiled is not model
        assert all(is_compiled_module(block) for block in compiled.body.blocks)
        assert is_compiled_module(compiled.embedding) and compiled.head is compiled.embedding
        assert isinstance(compiled.mixed, nn.ModuleList)
        assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
        assert len(list(compiled.parameters())) == len(list(model.parameters()))
        assert not has_compiled_regions(model), "the original was touched"

    def test_results_and_gradients_are_those_of_the_original(self) -> None:
        model = Model()
        compiled = compile_regions(copy.deepcopy(model), backend="aot_eager")
        x = torch.randn(2, 4)
        model(x).sum().backward()
        compiled(x).sum().backward()
        torch.testing.assert_close(compiled(x), model(x))
        for (name, theirs), ours in zip(model.named_parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)

    def test_a_repeated_block_is_compiled_once(self) -> None:
        backend = Compiled()
        model = nn.ModuleDict({"blocks": nn.ModuleList([Block() for _ in range(5)])})
        compiled = compile_regions(model, backend=backend)
        x = torch.randn(2, 4, requires_grad=True)
        for block in compiled["blocks"]:
            x = block(x)
        assert backend.count == 1

    def test_a_parameter_replaced_on_the_result_is_used(self) -> None:
        compiled = compile_regions(Model(), backend="eager")
        x = torch.randn(2, 4)
        before = compiled(x)
        with torch.no_grad():
            compiled.scale = nn.Parameter(torch.zeros(4))
        assert before.abs().sum() > 0 and compiled(x).abs().sum() == 0

    def test_a_forward_that_was_patched_onto_the_instance_runs_the_compiled_blocks(self) -> None:
        def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
            return Model.forward(self, x) + 1

        model, backend, x = Model(), Compiled(), torch.randn(2, 4)
        model.forward = types.MethodType(forward, model)
        compiled = compile_regions(model, backend=backend)
        torch.testing.assert_close(compiled(x), model(x))
        assert backend.count > 0

    def test_a_model_without_repeated_blocks_is_compiled_whole(self) -> None:
        block = Block()
        compiled = compile_regions(block, backend="eager")
        assert is_compiled_module(compiled) and uncompiled(compiled) is block

    def test_compiling_again_changes_nothing(self) -> None:
        compiled = compile_regions(Model(), backend="eager")
        assert compile_regions(compiled, backend="eager") is compiled

    def test_the_original_is_kept(self) -> None:
        model = Model()
        compiled = compile_regions(model, backend="eager")
        assert compiled._orig_mod is model and uncompiled(compiled) is model
        assert uncompiled(model) is model
        assert not is_compiled_module(compiled) and has_compiled_regions(compiled)


@pytest.mark.parametrize("compile_in_place", [compile_regions_deepspeed, compile_regions_fsdp2])
def test_in_place_compilation_keeps_names_and_results(compile_in_place: Callable[..., Any]) -> None:
    model = Model()
    x = torch.randn(2, 4)
    expected, names, backend = model(x), list(model.state_dict()), Compiled()
    compile_in_place(model, backend=backend)
    torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == names
    assert has_compiled_regions(model)
    assert 0 < backend.count <= 4, "one graph for the block, one for each other kind of child"


class TestPlugin:
    @pytest.mark.parametrize("plugin", [None, TorchDynamoPlugin(), TorchDynamoPlugin(backend="no")], ids=repr)
    def test_without_a_backend_the_model_is_the_same_object(self, plugin: TorchDynamoPlugin | None) -> None:
        model = Model()
        assert compile_model(model, plugin) is model

    def test_a_whole_model(self) -> None:
        model = Model()
        compiled = compile_model(model, TorchDynamoPlugin(backend="eager"))
        assert is_compiled_module(compiled) and uncompiled(compiled) is model
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), model(x))

    def test_by_regions(self) -> None:
        compiled = compile_model(Model(), TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
        assert isinstance(compiled, Model) and has_compiled_regions(compiled)

    def test_by_regions_inside_a_replica(self) -> None:
        def on_rank() -> list[list[float]]:
            torch.distributed.init_process_group("gloo")
            gradients: list[list[float]] = []
            for backend in ("eager", "no"):
                torch.manual_seed(0)
                model = Model()
                replica = DistributedDataParallel(model)
                plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
                assert compile_model(replica, plugin) is replica
                assert has_compiled_regions(replica.module) == (backend == "eager")
                assert uncompiled(replica.module) is model
                replica(torch.full((2, 4), float(torch.distributed.get_rank()))).sum().backward()
                gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).tolist())
            return gradients

        first, second = run_on_ranks(on_rank)
        assert first == second, "gradients were not averaged"
        torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(first[1]))

    def test_compiled_twice_is_compiled_once(self) -> None:
        for regional in (False, True):
            plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
            compiled = compile_model(Model(), plugin)
            assert compile_model(compiled, plugin) is compiled

    def test_the_plugins_arguments_arrive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(torch, "compile", lambda module, **kwargs: given.update(kwargs) or module)
        compile_model(Model(), TorchDynamoPlugin(backend="inductor", mode="reduce-overhead", dynamic=True))
        assert given == {"backend": "inductor", "mode": "reduce-overhead", "dynamic": True}

    def test_a_disabled_plugin_runs_without_compiling(self) -> None:
        compiled = compile_model(Block(), TorchDynamoPlugin(backend="eager", disable=True))
        assert compiled(torch.ones(1, 4)).shape == (1, 4)


class Shift(ModelHook):
    """A hook that knows which module it ran on."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[nn.Module] = []

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.modules.append(module)
        return tuple(each + 1 for each in args), kwargs


def _hooked(model: nn.Module) -> nn.Module:
    return add_hook_to_module(model, Shift())


def _hooked_twice(model: nn.Module) -> nn.Module:
    return add_hook_to_module(add_hook_to_module(model, Shift()), AlignDevicesHook(), append=True)


def _partially_bound(model: nn.Module) -> nn.Module:
    model.forward = functools.partial(type(model).forward, model)
    return model


def _dispatched(model: nn.Module) -> nn.Module:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


class TestRootsWithAForwardOfTheirOwn:
    @pytest.mark.parametrize("change", [_hooked, _hooked_twice, _partially_bound, _dispatched])
    def test_regions_of_a_model_whose_root_has_a_hook_are_compiled(
        self, change: Callable[[nn.Module], nn.Module]
    ) -> None:
        model, x = change(Model()), torch.ones(2, 4)
        expected, backend = model(x), Compiled()
        compiled = compile_regions(model, backend=backend)
        assert torch.equal(compiled(x), expected)
        assert backend.count > 0
        assert not any(is_compiled_module(part) for part in model.modules())
        before = backend.count
        assert torch.equal(model(x), expected) and backend.count == before  # what was given runs as it did

    def test_a_hook_is_given_the_module_that_runs(self) -> None:
        model, hook = Model(), Shift()
        compiled = compile_regions(add_hook_to_module(model, hook), backend="eager")
        compiled(torch.ones(2, 4))
        assert hook.modules == [compiled]

    def test_a_forward_that_hides_the_module_is_warned_of(self) -> None:
        model = Model()
        original = model.forward
        model.forward = lambda x: original(x)
        with pytest.warns(UserWarning, match=r"Model\.forward was replaced on the instance"):
            compile_regions(model, backend="eager")
