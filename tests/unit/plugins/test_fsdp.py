"""The FSDP plugin: names become torch's objects, each version takes only what it has."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.errors import SettingError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin, get_module_class_from_name
from accelerate.settings import env
from tests.torch_needed import needs_torch

deprecated = pytest.mark.filterwarnings("ignore:.*sharding_strategy:FutureWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


def test_version_1_shards_fully_and_saves_whole_by_default() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 1
    assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert plugin.cpu_offload == CPUOffload(offload_params=False)
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert (plugin.use_orig_params, plugin.sync_module_states, plugin.forward_prefetch) == (False, False, False)


def test_version_2_reshards_and_saves_in_shards_by_default() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.reshard_after_forward is True
    assert isinstance(plugin.cpu_offload, OffloadPolicy)
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)
    only_1 = ("sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states", "forward_prefetch")
    assert [getattr(plugin, name) for name in only_1] == [None] * 5


def test_there_are_two_versions() -> None:
    with pytest.raises(SettingError, match="1, 2"):
        FullyShardedDataParallelPlugin(fsdp_version=3)


@deprecated
@pytest.mark.parametrize("given", ["shard_grad_op", "SHARD_GRAD_OP", 2, "2", ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("argument", ["sharding_strategy", "reshard_after_forward"])
def test_version_1_takes_strategies_by_name_number_or_member(argument: str, given: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(**{argument: given})
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP


def test_the_old_name_of_resharding_warns() -> None:
    with pytest.warns(FutureWarning, match="use reshard_after_forward"):
        FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD")


@deprecated
@pytest.mark.parametrize(("strategy", "reshard"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), (2, False)])
def test_version_2_understands_the_old_strategies(strategy: Any, reshard: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy=strategy)
    assert plugin.reshard_after_forward is reshard


@deprecated
@pytest.mark.parametrize(("strategy", "reshard"), [("HYBRID_SHARD", True), (5, False)])
def test_version_2_says_how_to_ask_for_a_hybrid_strategy(strategy: Any, reshard: bool) -> None:
    with pytest.warns(UserWarning, match="HYBRID_SHARD.*dp_replicate_size.*dp_shard_size"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy=strategy)
    assert plugin.reshard_after_forward is reshard


@deprecated
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reshard_after_forward": True}, "is for FSDP2"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "is for FSDP1"),
        ({"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}, "no equal in FSDP2"),
        ({"sharding_strategy": "SOME_SHARD"}, "sharding_strategy='SOME_SHARD'"),
        ({"backward_prefetch": "SIDEWARD"}, "BACKWARD_PRE"),
        ({"state_dict_type": "HALF"}, "SHARDED_STATE_DICT"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "FSDP2 has no LOCAL_STATE_DICT"),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch"),
        ({"auto_wrap_policy": "GIFT_WRAP"}, "GIFT_WRAP"),
        ({"activation_checkpointing": True, "activation_checkpointing_offload": True}, "fsdp_version=2"),
        ({"fsdp_version": 2, "activation_checkpointing_offload": True}, "activation_checkpointing=True"),
        ({"mixed_precision_policy": "fp7"}, "Invalid mixed precision: fp7"),
        ({"mixed_precision_policy": {"output_dtype": torch.float16}}, "buffer_dtype"),
        ({"fsdp_version": 2, "mixed_precision_policy": {"buffer_dtype": torch.float16}}, "output_dtype"),
        ({"fsdp_version": 2, "cpu_offload": CPUOffload(offload_params=True)}, "must be an instance of"),
        ({"cpu_offload": OffloadPolicy()}, "must be an instance of"),
        ({"fsdp_version": 2, "mixed_precision_policy": MixedPrecision()}, "MixedPrecisionPolicy"),
    ],
    ids=str,
)
def test_what_a_version_does_not_have_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        FullyShardedDataParallelPlugin(**arguments)


@pytest.mark.parametrize("version", [1, 2])
def test_switches_may_be_the_numbers_that_str_to_bool_gives(version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        cpu_offload=1,
        activation_checkpointing=1,
        cpu_ram_efficient_loading=0,
        forward_prefetch=0,
        reshard_after_forward=1,
        min_num_params=0,
    )
    assert plugin.activation_checkpointing is True and plugin.cpu_ram_efficient_loading is False
    if version == 1:
        assert plugin.cpu_offload == CPUOffload(offload_params=True)
        assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
    else:
        assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) and plugin.reshard_after_forward is True


def test_version_2_drops_options_of_version_1_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="backward_prefetch, use_orig_params"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, backward_prefetch="BACKWARD_PRE", use_orig_params=True, sync_module_states=False
        )
    assert plugin.backward_prefetch is None


@pytest.mark.parametrize("given", ["backward_pre", "1", 1, BackwardPrefetch.BACKWARD_PRE])
def test_prefetch_by_name_number_or_member(given: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(backward_prefetch=given)
    assert plugin.backward_prefetch is BackwardPrefetch.BACKWARD_PRE


def test_no_prefetch_is_none() -> None:
    assert FullyShardedDataParallelPlugin(backward_prefetch="NO_PREFETCH").backward_prefetch is None


class TestStateDictType:
    @pytest.mark.parametrize("given", ["sharded_state_dict", 3, "3", StateDictType.SHARDED_STATE_DICT])
    def test_by_name_number_or_member(self, given: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(state_dict_type=given)
        assert "SHARDED_STATE_DICT" in str(plugin.state_dict_type)
        assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)

    def test_can_be_set_later(self) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        plugin.set_state_dict_type("FULL_STATE_DICT")
        assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
        assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


class TestMixedPrecision:
    @pytest.mark.parametrize(
        ("given", "dtype"),
        [("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp16", torch.float16), (torch.float16, torch.float16)],
    )
    def test_one_name_is_a_policy_of_the_version(self, given: Any, dtype: torch.dtype) -> None:
        first, second = FullyShardedDataParallelPlugin(), FullyShardedDataParallelPlugin(fsdp_version=2)
        for plugin in (first, second):
            plugin.set_mixed_precision(given)
        assert first.mixed_precision_policy == MixedPrecision(dtype, dtype, dtype)
        assert second.mixed_precision_policy == MixedPrecisionPolicy(dtype, dtype, dtype)

    def test_buffers_can_stay_in_full_precision(self) -> None:
        plugin = FullyShardedDataParallelPlugin()
        plugin.set_mixed_precision("bf16", buffer_autocast=True)
        assert plugin.mixed_precision_policy.buffer_dtype is torch.float32

    def test_a_policy_stays_unless_it_is_overridden(self) -> None:
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="fp16")
        plugin.set_mixed_precision("bf16")
        assert plugin.mixed_precision_policy.param_dtype is torch.float16
        plugin.set_mixed_precision("bf16", override=True)
        assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16

    def test_a_dictionary_names_each_dtype(self) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": torch.float32}
        )
        assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class TestOffload:
    def test_switches_become_the_policies_of_the_version(self) -> None:
        assert FullyShardedDataParallelPlugin(cpu_offload=True).cpu_offload == CPUOffload(offload_params=True)
        policy = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True).cpu_offload
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory == torch.accelerator.is_available()


class TestWrapping:
    def test_layers_are_found_by_the_models_own_list(self) -> None:
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
        plugin.set_auto_wrap_policy(Model())
        policy = plugin.auto_wrap_policy
        assert isinstance(policy, functools.partial) and policy.func is transformer_auto_wrap_policy
        assert policy.keywords == {"transformer_layer_cls": {Block}}

    @pytest.mark.parametrize("names", ["Block, Linear", ["Block", "Linear"]])
    def test_layers_are_found_by_name(self, names: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=names
        )
        plugin.set_auto_wrap_policy(Model())
        assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block, nn.Linear}}

    def test_a_missing_layer_class_is_refused(self) -> None:
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap="Brick"
        )
        with pytest.raises(SettingError, match="Brick"):
            plugin.set_auto_wrap_policy(Model())

    def test_units_by_size(self) -> None:
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=5)
        plugin.set_auto_wrap_policy(Model())
        assert plugin.auto_wrap_policy.func is size_based_auto_wrap_policy
        assert plugin.auto_wrap_policy.keywords == {"min_num_params": 5}

    def test_units_of_any_size_are_no_units(self) -> None:
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP")
        assert plugin.min_num_params == 0
        plugin.set_auto_wrap_policy(Model())
        assert plugin.auto_wrap_policy is None

    def test_ones_own_policy_stays(self) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return True

        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=policy)
        plugin.set_auto_wrap_policy(Model())
        assert plugin.auto_wrap_policy is policy

    def test_a_class_is_found_by_name_at_any_depth(self) -> None:
        assert get_module_class_from_name(Model(), "Linear") is nn.Linear
        assert FullyShardedDataParallelPlugin.get_module_class_from_name(Model(), "Brick") is None


class TestLoading:
    def test_efficient_loading_synchronises_and_tells_the_environment(self) -> None:
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
        assert plugin.sync_module_states is True
        assert env.flag("FSDP_CPU_RAM_EFFICIENT_LOADING")
        empty = nn.Linear(2, 2, device="meta")
        plugin.param_init_fn(empty)
        assert empty.weight.device.type != "meta"

    def test_a_build_for_gpus_on_a_machine_without_allocates_on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        empty = nn.Linear(2, 2, device="meta")
        plugin.param_init_fn(empty)
        assert empty.weight.device.type == "cpu"

    def test_efficient_loading_without_synchronisation_is_corrected(self) -> None:
        with pytest.warns(UserWarning, match="sync_module_states"):
            plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, sync_module_states=False)
        assert plugin.sync_module_states is True

    def test_a_refused_plugin_leaves_the_environment_alone(self) -> None:
        with pytest.raises(SettingError):
            FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, state_dict_type="HALF")
        assert env.read("FSDP_CPU_RAM_EFFICIENT_LOADING") is None


class TestEnvironment:
    @needs_torch("2.7.0", "version 2 can't leave modules out")
    def test_fills_what_was_not_given(self) -> None:
        with env.patched(
            FSDP_VERSION="2",
            FSDP_RESHARD_AFTER_FORWARD="false",
            FSDP_OFFLOAD_PARAMS="true",
            FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
            FSDP_TRANSFORMER_CLS_TO_WRAP="Block,Linear",
            FSDP_STATE_DICT_TYPE="1",
            FSDP_ACTIVATION_CHECKPOINTING="true",
            FSDP_IGNORED_MODULES="head.*",
        ):
            plugin = FullyShardedDataParallelPlugin(activation_checkpointing=False)
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is False
        assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        assert plugin.transformer_cls_names_to_wrap == ["Block", "Linear"]
        assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
        assert plugin.activation_checkpointing is False
        assert plugin.ignored_modules == "head.*"

    @pytest.mark.parametrize("version", ["1", "2"])
    def test_what_the_launcher_exports_suits_both_versions(self, version: str) -> None:
        with env.patched(
            FSDP_VERSION=version,
            FSDP_SHARDING_STRATEGY="FULL_SHARD",
            FSDP_RESHARD_AFTER_FORWARD="true",
            FSDP_USE_ORIG_PARAMS="true",
            FSDP_SYNC_MODULE_STATES="true",
            FSDP_FORWARD_PREFETCH="false",
            FSDP_CPU_RAM_EFFICIENT_LOADING="true",
        ):
            plugin = FullyShardedDataParallelPlugin()
        if version == "1":
            assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
            assert plugin.use_orig_params is True
        else:
            assert plugin.reshard_after_forward is True
