from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import accelerate.hooks
from accelerate.errors import CheckpointError, PreparationError
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.hooks.align import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)

META = torch.device("meta")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The documented forward."""
        return self.last(self.norm(self.first(x))) * scale


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


class Add(ModelHook):
    """Adds to the input, and to the output."""

    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before, self.after = before, after
        self.seen: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + self.after

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append("detach")
        return module


# ------------------------------------------------------------------------------------------- around a forward


def test_a_hook_changes_input_and_output_and_goes_without_a_trace(net: Net, x: torch.Tensor) -> None:
    plain, attributes = net(x), set(net.__dict__)
    hook = Add(1, 2)
    assert add_hook_to_module(net, hook) is net
    assert torch.equal(net(x), Net.forward(net, x + 1) + 2)
    assert torch.equal(net(x, scale=2.0), Net.forward(net, x + 1, 2.0) + 2)
    assert net._hf_hook is hook
    assert torch.equal(net._old_forward(x), plain)
    remove_hook_from_module(net)
    assert torch.equal(net(x), plain)
    assert set(net.__dict__) == attributes
    assert hook.seen == ["init", "detach"]


def test_the_signature_stays(net: Net) -> None:
    before = inspect.signature(net.forward)
    add_hook_to_module(net, Add())
    assert inspect.signature(net.forward) == before
    assert net.forward.__doc__ == "The documented forward."


def test_a_hook_replaces_another_or_follows_it(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    add_hook_to_module(net, Add(after=1))
    add_hook_to_module(net, Add(after=2))
    assert torch.equal(net(x), plain + 2)
    add_hook_to_module(net, Add(after=3), append=True)
    assert torch.equal(net(x), plain + 2 + 3)
    assert isinstance(net._hf_hook, SequentialHook) and len(net._hf_hook.hooks) == 2
    remove_hook_from_module(net)
    assert torch.equal(net(x), plain)


def test_a_duck_is_a_hook(net: Net, x: torch.Tensor) -> None:
    class Duck:
        def init_hook(self, module: Any) -> Any:
            return module

        detach_hook = init_hook

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            return -output

    plain = net(x)
    add_hook_to_module(net, Duck())
    assert torch.equal(net(x), -plain)


def test_no_grad_is_a_wish_of_the_hook(net: Net, x: torch.Tensor) -> None:
    hook = Add()
    add_hook_to_module(net, hook)
    assert net(x).requires_grad
    hook.no_grad = True
    assert not net(x).requires_grad


def test_a_forward_of_the_module_itself_comes_back(net: Net, x: torch.Tensor) -> None:
    own = lambda x: x * 2  # noqa: E731
    net.forward = own
    add_hook_to_module(net, Add(after=1))
    assert torch.equal(net(x), x * 2 + 1)
    remove_hook_from_module(net)
    assert net.forward is own


def test_a_copy_and_a_pickle_of_a_hooked_module_are_whole(net: Net, x: torch.Tensor) -> None:
    add_hook_to_module(net, Add(after=1))
    expected = net(x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            twin.last.bias += 1
        assert torch.equal(net(x), expected), "the copy has its own weights"
        assert not torch.equal(twin(x), expected), "and its forward uses them"


def test_libraries_may_replace_hook_and_old_forward(net: Net, x: torch.Tensor) -> None:
    add_hook_to_module(net, Add(after=1))
    net._old_forward = lambda x: torch.zeros(1)
    assert net(x) == 1
    net._hf_hook = Add(after=5)
    assert net(x) == 5


def test_hooks_go_from_all_submodules(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    for module in net.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(net)
    assert not any("_hf_hook" in module.__dict__ or "forward" in module.__dict__ for module in net.modules())
    assert torch.equal(net(x), plain)


def test_a_traced_module_can_be_hooked(x: torch.Tensor) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    plain = traced(x)
    add_hook_to_module(traced, Add(after=1))
    assert torch.equal(traced(x), plain + 1)
    remove_hook_from_module(traced)
    assert torch.equal(traced(x), plain)


def test_adding_a_hook_does_not_import_the_compiler() -> None:
    program = (
        "import sys, torch; from accelerate.hooks import *; from accelerate.hooks import add_hook_to_module, ModelHook;"
        "add_hook_to_module(torch.nn.Linear(1, 1), ModelHook())(torch.ones(1));"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_compiler_does_not_look_into_hooks(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    for layer in (net.first, net.last):
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), plain)
        assert torch.equal(compiled(x), plain)
    assert net.first.weight.is_meta


def test_the_compiler_sees_a_hook_that_does_nothing(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    add_hook_to_module(net, ModelHook())
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), plain)


# ----------------------------------------------------------------------------------------- weights that wait


def rebuilt(hook: Any) -> Any:
    """What transformers, peft and diffusers do to clone a hook."""
    cls = getattr(accelerate.hooks, type(hook).__name__)
    names = set(inspect.signature(cls.__init__).parameters)
    return cls(**{name: value for name, value in hook.__dict__.items() if name in names})


@pytest.mark.parametrize(
    "hook",
    [
        AlignDevicesHook("cpu", True, True, {"a": 1}, True, True, ["k"], {}),
        CpuOffload("cpu"),
        LayerwiseCastingHook(torch.float16, torch.float32, True),
    ],
)
def test_a_hook_can_be_rebuilt_from_its_attributes(hook: Any) -> None:
    twin = rebuilt(hook)
    names = set(inspect.signature(type(hook).__init__).parameters) - {"self"}
    assert names <= set(hook.__dict__)
    assert {name: getattr(hook, name) for name in names} == {name: getattr(twin, name) for name in names}


def test_the_weights_are_there_only_while_the_module_runs(net: Net, x: torch.Tensor) -> None:
    plain, layer = net.first(x), net.first
    weight = layer.weight.detach().clone()
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    assert layer.weight.is_meta and layer.bias.is_meta
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.requires_grad
    placeholder = layer.weight
    assert torch.equal(layer(x), plain)
    assert layer.weight is placeholder
    assert layer._hf_hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    remove_hook_from_module(layer)
    assert torch.equal(layer.weight, weight)


def test_buffers_stay_unless_asked(net: Net) -> None:
    expected = net.norm(torch.ones(1, 4))
    add_hook_to_module(net.norm, AlignDevicesHook("cpu", offload=True))
    assert net.norm.weight.is_meta and not net.norm.running_mean.is_meta
    remove_hook_from_module(net.norm)
    net.norm.register_buffer("lost", torch.ones(1), persistent=False)
    add_hook_to_module(net.norm, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    assert net.norm.running_mean.is_meta and net.norm.num_batches_tracked.is_meta
    assert not net.norm.lost.is_meta, "no state dict brings it back"
    assert torch.equal(net.norm(torch.ones(1, 4)), expected)
    remove_hook_from_module(net.norm)
    assert torch.equal(net.norm(torch.ones(1, 4)), expected)


def test_one_hook_may_bring_a_whole_subtree(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    add_hook_to_module(net, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    assert net.first.weight.is_meta and net.last.bias.is_meta
    assert torch.equal(net(x), plain)
    assert net.first.weight.is_meta


def test_the_pair_can_be_called_by_hand(net: Net) -> None:
    weight = net.first.weight.detach().clone()
    add_hook_to_module(net.first, AlignDevicesHook("cpu", offload=True))
    net.first._hf_hook.pre_forward(net.first)
    assert torch.equal(net.first.weight, weight)
    net.first._hf_hook.post_forward(net.first, ())
    assert net.first.weight.is_meta


def test_a_new_weights_map_is_used_from_then_on(net: Net, x: torch.Tensor) -> None:
    add_hook_to_module(net.first, AlignDevicesHook("cpu", offload=True))
    net.first._hf_hook.weights_map = {"weight": torch.zeros(4, 3), "bias": torch.ones(4)}
    assert torch.equal(net.first(x), torch.ones(2, 4))


def test_weights_keep_the_dtype_of_the_module(net: Net, x: torch.Tensor) -> None:
    weights = {"weight": torch.ones(4, 3, dtype=torch.float16), "bias": torch.zeros(4, dtype=torch.float16)}
    add_hook_to_module(net.first, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert net.first(x).dtype is torch.float32


def test_weights_that_nobody_has_are_named(net: Net, x: torch.Tensor) -> None:
    net.first.to("meta")
    add_hook_to_module(net.first, AlignDevicesHook("cpu", offload=True, weights_map={"bias": torch.zeros(4)}))
    with pytest.raises(PreparationError, match="weight are on the meta device"):
        net.first(x)


def test_inputs_move_and_outputs_return() -> None:
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook("meta", io_same_device=False))
    assert layer.weight.is_meta
    assert layer(torch.ones(1, 2)).is_meta


def test_arguments_that_are_there_are_the_same_objects() -> None:
    seen: dict[str, Any] = {}

    class Looks(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            seen.update(args=args, kwargs=kwargs)

    given = [torch.ones(1), {"a": torch.ones(1)}]
    module = add_hook_to_module(Looks(), AlignDevicesHook("cpu"))
    module(given, b=given)
    assert seen["args"][0] is given and seen["kwargs"]["b"] is given
    module = add_hook_to_module(Looks(), AlignDevicesHook("meta", skip_keys=["stays"]))
    module(given, stays=given[0], goes=(given[0], 3))
    assert seen["args"][0][1]["a"].is_meta and seen["kwargs"]["goes"][0].is_meta and seen["kwargs"]["goes"][1] == 3
    assert seen["kwargs"]["stays"] is given[0]


def test_tied_weights_are_one_copy_while_they_are_there() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    weight = first.weight.detach().clone()
    copies: Any = {weight.data_ptr(): {}}
    seen = []
    for layer in (first, second):
        hook = AlignDevicesHook("cpu", offload=True, weights_map={"weight": weight}, tied_params_map=copies)
        add_hook_to_module(layer, hook)
    first._hf_hook.pre_forward(first)
    second._hf_hook.pre_forward(second)
    seen = [first.weight, second.weight]
    assert seen[0] is seen[1]
    second._hf_hook.post_forward(second, ())
    assert copies[weight.data_ptr()], "the first one still uses it"
    first._hf_hook.post_forward(first, ())
    assert not copies[weight.data_ptr()]


# ---------------------------------------------------------------------------------------------- whole models


def test_every_module_with_tensors_gets_its_hook(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    attach_align_device_hook(net, "cpu", offload=True, weights_map=net.state_dict())
    assert "_hf_hook" not in net.__dict__
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.first._hf_hook.weights_map.prefix == "first."
    assert torch.equal(net(x), plain)


def test_a_preloaded_class_brings_all_it_holds(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    attach_align_device_hook(net, "cpu", offload=True, weights_map=net.state_dict(), preload_module_classes=["Net"])
    assert net._hf_hook.place_submodules and "_hf_hook" not in net.first.__dict__
    assert torch.equal(net(x), plain)


def test_execution_hooks_do_not_replace_others(net: Net) -> None:
    hook = add_hook_to_module(net.first, ModelHook())._hf_hook
    attach_execution_device_hook(net, "cpu")
    assert net.first._hf_hook is hook
    assert isinstance(net._hf_hook, AlignDevicesHook) and net.last._hf_hook.execution_device == "cpu"
    other = Net()
    attach_execution_device_hook(other, "cpu", preload_module_classes=["Net"])
    assert "_hf_hook" in other.__dict__ and "_hf_hook" not in other.first.__dict__


def test_blocks_have_a_device_and_an_answer_each(net: Net, x: torch.Tensor) -> None:
    plain, state = net(x), dict(net.state_dict())
    attach_align_device_hook_on_blocks(
        net,
        {"first": "cpu", "norm": "cpu", "last": "cpu"},
        {"first": True, "norm": False, "last": True},
        weights_map=state,
    )
    assert net.first.weight.is_meta and not net.norm.weight.is_meta and net.last.weight.is_meta
    assert net._hf_hook.io_same_device and not net.norm._hf_hook.io_same_device
    assert torch.equal(net(x), plain)


def test_an_output_of_an_offloaded_root_returns_to_where_its_input_came_from() -> None:
    layer = nn.Linear(2, 2)
    attach_align_device_hook_on_blocks(layer, {"": "meta"}, {"": True}, weights_map=dict(layer.state_dict()))
    layer._hf_hook.pre_forward(layer, torch.ones(1, 2))
    assert layer._hf_hook.hooks[0].input_device == torch.device("cpu")


# ---------------------------------------------------------------------------------------------------- stages


def test_a_stage_comes_stays_and_sends_the_one_before_away(net: Net, x: torch.Tensor) -> None:
    plain = net(x)
    calls: list[str] = []

    class Before(UserCpuOffloadHook):
        def offload(self) -> None:
            calls.append("offload")

    previous = Before(nn.Linear(1, 1), CpuOffload("cpu"))
    add_hook_to_module(net, CpuOffload("cpu", previous))
    assert torch.equal(net(x), plain)
    assert calls == [], "the stage was there already"
    handle = UserCpuOffloadHook(net, net._hf_hook)
    handle.offload()
    assert net.first.weight.device.type == "cpu"
    handle.remove()
    assert "_hf_hook" not in net.__dict__
    away = add_hook_to_module(nn.Linear(1, 1), CpuOffload("meta", previous))
    away(torch.ones(1))
    assert calls == ["offload"]
    away(torch.ones(1))
    assert calls == ["offload"] and away.weight.is_meta


def test_a_layer_computes_in_a_larger_dtype_than_it_waits_in(net: Net, x: torch.Tensor) -> None:
    add_hook_to_module(net.first, LayerwiseCastingHook(torch.bfloat16, torch.float32, False))
    assert net.first.weight.dtype is torch.bfloat16
    assert net.first(x).dtype is torch.float32
    assert net.first.weight.dtype is torch.bfloat16


# ---------------------------------------------------------------------------------------------------- values


def test_offloaded_weights_can_be_borrowed(net: Net) -> None:
    weight = net.first.weight.detach().clone()
    assert not has_offloaded_params(net.first)
    add_hook_to_module(net.first, AlignDevicesHook("cpu", offload=True))
    assert has_offloaded_params(net.first)
    with align_module_device(net.first):
        assert torch.equal(net.first.weight, weight)
    assert net.first.weight.is_meta
    with align_module_device(net.first, "meta"):
        assert net.first.weight.is_meta
    assert net.first._hf_hook.execution_device == "cpu"
    with pytest.raises(ZeroDivisionError), align_module_device(net.first):
        raise ZeroDivisionError
    assert net.first.weight.is_meta, "also after an error"


def test_own_tensors_move_for_the_block_and_return(net: Net) -> None:
    weight = net.first.weight
    with align_module_device(net.first, "meta"):
        assert net.first.weight.is_meta
    assert net.first.weight is weight
    with align_module_device(net.first, "cpu"):
        net.first.weight.data = torch.ones(4, 3)
    assert torch.equal(net.first.weight, torch.ones(4, 3))


def test_the_state_dict_of_an_offloaded_model_is_whole(net: Net) -> None:
    expected = {name: each.clone() for name, each in net.state_dict().items()}
    add_hook_to_module(net.last, AlignDevicesHook("cpu", offload=True))
    attach_align_device_hook(net.norm, "cpu", offload=True, offload_buffers=True)
    state = get_state_dict_offloaded_model(net)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert net.last.weight.is_meta


def test_a_subtree_under_one_hook_is_in_the_state_dict(net: Net) -> None:
    expected = {name: each.clone() for name, each in net.state_dict().items()}
    add_hook_to_module(net, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    state = get_state_dict_offloaded_model(net)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_weights_without_values_are_named_instead_of_saved(net: Net) -> None:
    net.first.to("meta")
    with pytest.raises(CheckpointError, match=r"first\.weight, first\.bias"):
        get_state_dict_offloaded_model(net)


def test_one_module_fills_its_part_of_a_state_dict(net: Net) -> None:
    expected = net.first.weight.detach().clone()
    add_hook_to_module(net.first, AlignDevicesHook("cpu", offload=True))
    state = dict(net.state_dict())
    assert state["first.weight"].is_meta
    get_state_dict_from_offload(net.first, "first.weight", state)
    assert torch.equal(state["first.weight"], expected)
