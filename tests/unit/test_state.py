"""The old global views in a world of one."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, AutocastKwargs, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.distributed.world import current_world, join_world
from accelerate.plugins import Plugins
from accelerate.settings.run import collect
from accelerate.state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    ThreadLocalSharedDict,
    deepspeed_required,
    do_nothing,
    is_initialized,
)
from accelerate.training.accumulation import GradientState as OwnGradientState


def fill(**arguments: Any) -> AcceleratorState:
    """What an Accelerator made with these arguments does."""
    fields = {"deepspeed_plugin": "deepspeed", "fsdp_plugin": "fsdp", "megatron_lm_plugin": "megatron"}
    fields |= {"dynamo_plugin": "dynamo", "parallelism_config": "parallelism", "torch_tp_plugin": "torch_tp"}
    plugins = Plugins(**{fields[name]: value for name, value in arguments.items() if name in fields})
    given = {"mixed_precision": None, "use_cpu": False, **arguments}
    return AcceleratorState._fill(collect(given), join_world(), plugins)


def test_partial_state_is_empty_until_it_is_made_and_a_real_dict_after() -> None:
    assert PartialState._shared_state == {}
    state = PartialState()
    assert PartialState._shared_state != {}
    assert type(PartialState._shared_state) is dict
    assert state.__dict__ is PartialState._shared_state
    assert state.initialized
    assert PartialState().__dict__ is state.__dict__


def test_partial_state_shows_the_world() -> None:
    state = PartialState(cpu=True)
    assert state.device == torch.device("cpu")
    assert state.default_device == torch.device("cpu")
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.backend, state.debug, state.fork_launched) == (None, False, False)
    assert state.distributed_type == DistributedType.NO == "NO"
    assert state.is_main_process is True
    assert state.is_local_main_process is True
    assert state.is_last_process is True
    assert state.use_distributed is False
    assert "Num processes: 1" in repr(state)
    state.set_device()


def test_attributes_are_writable_and_shared() -> None:
    PartialState().distributed_type = DistributedType.MULTI_GPU
    assert PartialState().distributed_type == "MULTI_GPU"
    PartialState().process_index = 3
    PartialState().num_processes = 4
    assert not PartialState().is_main_process
    assert PartialState().is_last_process
    assert PartialState().use_distributed


def test_after_a_reset_attributes_explain_themselves_and_the_next_one_joins_again() -> None:
    state = PartialState()
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    assert current_world() is None
    with pytest.raises(AttributeError, match=r"no attribute `device`.*`PartialState._reset_state\(\)` was called"):
        _ = state.device
    assert not hasattr(state, "device")
    assert PartialState().num_processes == 1
    with pytest.raises(AttributeError, match="no attribute 'color'"):
        _ = state.color


def test_a_library_can_keep_the_process_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(PartialState, "_prepare_backend", lambda self, *args: (None, DistributedType.NO))
    state = PartialState()
    assert state.num_processes == 1
    assert state.distributed_type == DistributedType.NO


def test_prepare_backend_tells_what_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = object.__new__(PartialState)
    assert bare._prepare_backend() == (None, DistributedType.NO)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert bare._prepare_backend(True) == ("gloo", DistributedType.MULTI_CPU)


def test_guards_and_parts_of_the_view(capsys: pytest.CaptureFixture[str]) -> None:
    state = PartialState()

    @state.on_main_process
    def main() -> str:
        return "main"

    @state.on_process(process_index=7)
    def seventh() -> str:
        return "seventh"

    assert (main(), seventh()) == ("main", "seventh")
    assert state.on_last_process(lambda: 1)() == 1
    assert state.on_local_main_process(lambda: 1)() == 1
    assert state.on_local_process(lambda: 1, local_process_index=2)() == 1
    with state.main_process_first(), state.local_main_process_first(), state.split_between_processes([1, 2]) as part:
        assert part == [1, 2]
    state.wait_for_everyone()
    state.print("once")
    assert capsys.readouterr().out == "once\n"
    state.process_index = 1
    state.num_processes = 2
    assert main() is None  # decided at the call


def test_accelerator_state_needs_an_accelerator_first() -> None:
    assert not is_initialized()
    with pytest.raises(ValueError, match=r"accelerator = Accelerator\(\)"):
        AcceleratorState()
    assert AcceleratorState._shared_state == {}


def test_accelerator_state_shows_settings_and_world() -> None:
    state = fill(mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState().mixed_precision == "bf16" == state.mixed_precision
    assert state.num_processes == 1
    assert state.distributed_type == "NO"
    for name in ("deepspeed_plugin", "torch_tp_plugin", "parallelism_config"):
        assert getattr(state, name) is None
    assert state.device_mesh is None
    assert state.is_fsdp2 is False
    assert state.downcast_bfloat is False
    assert PartialState._shared_state != {}
    assert "Mixed precision type: bf16" in repr(state)
    assert "device" in state.__dict__


def test_a_second_one_may_repeat_but_not_contradict() -> None:
    first = fill(mixed_precision="bf16")
    assert fill().mixed_precision == "bf16"
    assert fill(mixed_precision="bf16").__dict__ is first.__dict__
    assert AcceleratorState("bf16", cpu=True).mixed_precision == "bf16"
    with pytest.raises(ValueError, match=r"already been initialized.*'fp16'.*'bf16'"):
        AcceleratorState(mixed_precision="fp16")
    with pytest.raises(ValueError, match="already been initialized"):
        fill(mixed_precision="no")


def test_a_state_before_any_accelerator_is_refused_but_says_who_this_process_is() -> None:
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        AcceleratorState(cpu=True)
    assert PartialState._shared_state["num_processes"] == 1 and AcceleratorState._shared_state == {}
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"


def test_cpu_after_an_accelerator_device_is_refused() -> None:
    state = fill()
    state._world_cpu = False
    with pytest.raises(ValueError, match="cpu=True"):
        AcceleratorState(cpu=True)


def test_built_by_an_accelerator_of_old_spelling() -> None:
    assert AcceleratorState(mixed_precision="bf16", _from_accelerator=True).mixed_precision == "bf16"


def test_resetting_one_view_or_both() -> None:
    fill()
    AcceleratorState._reset_state()
    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state != {}
    state = fill(mixed_precision="bf16")
    state._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    assert not is_initialized()


def test_deepspeed_plugins_are_selected_by_name() -> None:
    class Plugin:
        def __init__(self, config: dict[str, Any]) -> None:
            self.deepspeed_config = config
            self.selected = False

        def select(self, _from_accelerator_state: bool = False) -> None:
            self.selected = True

        def _unselect(self) -> None:
            self.selected = False

    state = fill()
    with pytest.raises(ValueError, match="doesn't use DeepSpeed"):
        state.select_deepspeed_plugin("teacher")
    student, teacher = Plugin({"bf16": {"enabled": True}}), Plugin({})
    student.select()
    state.deepspeed_plugins = {"student": student, "teacher": teacher}
    state.distributed_type = DistributedType.DEEPSPEED
    assert state.get_deepspeed_plugin("teacher") is teacher
    assert state.deepspeed_plugin is student
    assert state.mixed_precision == "bf16"
    state.select_deepspeed_plugin("teacher")
    assert state.deepspeed_plugin is teacher
    assert state.mixed_precision == "no"


def test_plugins_of_fsdp_and_megatron_are_attributes_only_of_runs_that_use_them() -> None:
    """Programs read ``state.fsdp_plugin.auto_wrap_policy`` behind ``hasattr(state, "fsdp_plugin")``."""
    plain = Accelerator(cpu=True).state
    assert not hasattr(plain, "fsdp_plugin") and not hasattr(plain, "megatron_lm_plugin")
    assert plain.deepspeed_plugin is None and plain.deepspeed_plugins is None and not plain.is_fsdp2
    with pytest.raises(AttributeError, match=r"doesn't use FSDP\. Ask with `getattr\(state, 'fsdp_plugin', None\)`"):
        _ = plain.fsdp_plugin
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    sharded = Accelerator(cpu=True, fsdp_plugin=plugin).state
    assert sharded.fsdp_plugin is AcceleratorState().fsdp_plugin is plugin and sharded.is_fsdp2
    assert not hasattr(sharded, "megatron_lm_plugin")
    AcceleratorState._reset_state()
    assert not hasattr(Accelerator(cpu=True).state, "fsdp_plugin"), "of the Accelerator before"


def test_a_function_that_needs_deepspeed_is_refused_under_an_accelerator_without_it() -> None:
    @deepspeed_required
    def launch_ship(speed: int) -> int:
        return speed

    assert launch_ship(9) == 9  # nothing is known yet
    state = fill()
    with pytest.raises(ValueError, match=r"`launch_ship` needs DeepSpeed.*deepspeed_plugin"):
        launch_ship(9)
    state.deepspeed_plugins = {}
    assert launch_ship(9) == 9


def test_the_gradient_state_is_the_clock_itself() -> None:
    assert GradientState is OwnGradientState


def test_do_nothing_does_nothing() -> None:
    assert do_nothing(1, two=2) is None


def test_a_dict_that_is_shared_in_a_thread_is_another_one_in_the_next() -> None:
    class Holder:
        shared = ThreadLocalSharedDict()

    Holder().shared["here"] = 1
    seen: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: seen.append(Holder().shared))
    thread.start()
    thread.join()
    assert seen == [{}] and Holder().shared == {"here": 1}
    holder = Holder()
    holder.shared = {"new": 2}
    assert Holder().shared == {"new": 2}


def test_an_accelerator_fills_both_views_also_when_only_one_was_reset() -> None:
    Accelerator(cpu=True)
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    Accelerator(cpu=True)
    assert PartialState._shared_state["num_processes"] == 1
    PartialState._reset_state()
    AcceleratorState()
    assert PartialState._shared_state["num_processes"] == 1


def test_after_a_reset_the_old_accelerator_says_that_it_has_to_be_made_anew() -> None:
    old = Accelerator(cpu=True)
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match=r"was called.*not reinitialized.*Make the Accelerator anew"):
        old.prepare(torch.nn.Linear(1, 1))
    Accelerator(cpu=True)
    assert isinstance(old.prepare(torch.nn.Linear(1, 1)), torch.nn.Linear)


def test_the_check_of_collectives_is_switched_at_any_time_by_each_view_and_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(cpu=True)
    views = PartialState(), accelerator.state

    def seen() -> set[bool]:
        return {view.debug for view in views} | {accelerator.world.debug}

    assert seen() == {False}
    for view in views:
        view.debug = True
        assert seen() == {True}
        view.debug = False
        assert seen() == {False}
    PartialState._reset_state()
    PartialState()
    assert seen() == {False}
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    assert seen() == {True}


# -- a second Accelerator ------------------------------------------------------------------------------------

#: What `accelerate launch` without options tells its workers.
LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_USE_CPU": "True",
}


def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


def test_under_the_launcher_a_second_accelerator_follows_the_arguments_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch)
    first = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    second = Accelerator()
    assert (second.mixed_precision, second.native_amp) == ("bf16", True)
    assert second.dynamo_plugin is first.dynamo_plugin
    assert second.prepare(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"cannot be changed, restart your runtime.*`mixed_precision='no'`.*'bf16'"):
        Accelerator(mixed_precision="no")


@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
def test_the_second_accelerator_has_its_own_accumulation_loaders_and_project(
    monkeypatch: pytest.MonkeyPatch, mixed_precision: str | None, tmp_path: Path
) -> None:
    launched(monkeypatch)
    first = Accelerator(mixed_precision=mixed_precision)
    second = Accelerator(
        gradient_accumulation_steps=4,
        project_dir=tmp_path,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[AutocastKwargs(enabled=False)],
    )
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (1, 4)
    assert (first.project_dir, second.project_dir) == (None, tmp_path)
    assert (first.split_batches, second.split_batches) == (False, True)
    assert first.autocast_handler is None and second.autocast_handler is not None
    model = second.prepare(torch.nn.Linear(1, 1, bias=False))
    synchronised = []
    for _ in range(4):
        with second.accumulate(model):
            second.backward(model(torch.ones(1, 1)).sum())
            synchronised.append(second.sync_gradients)
    assert synchronised == [False, False, False, True]
    assert model.weight.grad.item() == 1.0


def test_an_engine_of_the_environment_is_not_heard_by_a_second_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    second = Accelerator()
    assert second.settings.fsdp is None
    assert type(second.strategy) is type(first.strategy)


# -- what is published ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended_by", ["deletion", "reset"])
@pytest.mark.parametrize("before", [None, "false"])
def test_an_engine_stands_in_the_environment_as_long_as_its_accelerator(
    monkeypatch: pytest.MonkeyPatch, ended_by: str, before: str | None
) -> None:
    variables = ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if before is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", before)
    shown = {name: os.environ.get(name) for name in variables}
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    )
    assert [os.environ[name] for name in variables] == ["true", "2", "true"]
    if ended_by == "deletion":
        del accelerator
        gc.collect()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert {name: os.environ.get(name) for name in variables} == shown
    assert Accelerator(cpu=True).settings.fsdp is None


def test_what_two_accelerators_publish_stays_until_the_last_is_gone_and_what_others_set_stays() -> None:
    assert os.environ.get("ACCELERATE_USE_FSDP") is None
    first = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    second = Accelerator(cpu=True)
    del first
    gc.collect()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    os.environ["FSDP_VERSION"] = "1"  # by somebody else
    del second
    gc.collect()
    assert os.environ.get("ACCELERATE_USE_FSDP") is None
    assert os.environ["FSDP_VERSION"] == "1"
