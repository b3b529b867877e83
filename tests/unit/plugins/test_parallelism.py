"""Axes of parallelism: sizes that fit, names of axes, and the mesh on real ranks."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.errors import SettingError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate.settings import env
from tests.ranks import run_on_ranks


def _accelerator(num_processes: int, *, fsdp_version: int | None = None) -> Any:
    plugin = None if fsdp_version is None else FullyShardedDataParallelPlugin(fsdp_version=fsdp_version)
    return SimpleNamespace(
        num_processes=num_processes, is_fsdp2=fsdp_version == 2, state=SimpleNamespace(fsdp_plugin=plugin)
    )


def test_nothing_given_is_one_process() -> None:
    config = ParallelismConfig()
    assert (config.total_size, config.active_mesh_dims, config._get_mesh()) == (1, [], ((), ()))
    assert config.build_device_mesh("cpu") is None


def test_all_axes_but_sequence() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=5, tp_size=7)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp"]
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (2, 3, 5, 7))
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (210, 6, 35)
    enabled = [getattr(config, f"{axis}_enabled") for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
    assert enabled == [True, True, True, True, False]


def test_sequence_parallel_axes() -> None:
    config = ParallelismConfig(dp_shard_size=4, sp_size=2)
    assert config.non_dp_dim_names == ["sp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard"]
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.build_device_mesh("cpu") is None  # DeepSpeed makes its own groups


def test_sizes_can_be_changed_later() -> None:
    config = ParallelismConfig(dp_shard_size=2)
    config.tp_size = 4
    config._set_size("dp_shard", 3)
    assert (config.total_size, config._sizes["tp"]) == (12, 4)


def test_the_environment_fills_what_was_not_given() -> None:
    with env.patched(
        PARALLELISM_CONFIG_DP_SHARD_SIZE="2",
        PARALLELISM_CONFIG_CP_SIZE="4",
        PARALLELISM_CONFIG_TP_SIZE="8",
        PARALLELISM_CONFIG_CP_COMM_STRATEGY="alltoall",
        PARALLELISM_CONFIG_EP_SIZE="16",
    ):
        config = ParallelismConfig(tp_size=1)
    assert (config.dp_shard_size, config.cp_size, config.tp_size) == (2, 4, 1)
    assert config.cp_handler.cp_comm_strategy == "alltoall"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp_size": 0}, "tp_size must be a whole number of at least 1"),
        ({"dp_shard_size": "2"}, "dp_shard_size"),
        ({"cp_size": 2, "sp_size": 2}, "mutually exclusive"),
        ({"tp_size": 2, "dp_replicate_size": 2}, "pure replication"),
        ({"cp_size": 2, "dp_replicate_size": 2}, "pure replication"),
        ({"cp_backend": "ring"}, "torch"),
        ({"sp_backend": "ring"}, "deepspeed"),
        ({"cp_size": 2, "cp_handler": 3}, "TorchContextParallelConfig"),
    ],
    ids=str,
)
def test_contradictions_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        ParallelismConfig(**arguments)


def test_refusals_show_the_whole_equation() -> None:
    with pytest.raises(SettingError, match=r"dp_replicate_size 2 \* dp_shard_size 1 \* .* tp_size 4 = 8"):
        ParallelismConfig(dp_replicate_size=2, tp_size=4)


def test_handlers_are_made_where_an_axis_is_active() -> None:
    config = ParallelismConfig(cp_size=2, tp_size=2, dp_shard_size=2)
    assert isinstance(config.cp_handler, TorchContextParallelConfig)
    assert isinstance(config.tp_handler, TorchTensorParallelConfig)
    assert isinstance(ParallelismConfig(sp_size=2).sp_handler, DeepSpeedSequenceParallelConfig)


def test_a_handler_without_its_axis_warns() -> None:
    with pytest.warns(UserWarning, match="cp_size is 1"):
        ParallelismConfig(cp_handler=TorchContextParallelConfig())


def test_json_is_json() -> None:
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    told = json.loads(config.to_json())
    assert (told["dp_shard_size"], told["cp_handler"]) == (2, {"cp_comm_strategy": "allgather"})


class TestFit:
    def test_nothing_asked_for_is_replication(self) -> None:
        config = ParallelismConfig()
        config._validate_accelerator(_accelerator(4))
        assert config.dp_replicate_size == 4

    @pytest.mark.parametrize("sizes", [{"dp_shard_size": 4}, {"dp_shard_size": 2, "tp_size": 2}, {"cp_size": 4}])
    def test_products_that_match_pass(self, sizes: dict[str, int]) -> None:
        ParallelismConfig(**sizes)._validate_accelerator(_accelerator(4, fsdp_version=2))

    def test_a_product_that_does_not_match_is_refused_with_the_equation(self) -> None:
        with pytest.raises(SettingError, match=r"\(2\).*\(4\).*dp_shard_size 2.*= 2"):
            ParallelismConfig(dp_shard_size=2)._validate_accelerator(_accelerator(4, fsdp_version=2))

    def test_ulysses_groups_are_deepspeeds_business(self) -> None:
        ParallelismConfig(sp_size=2)._validate_accelerator(_accelerator(4))
        with pytest.raises(SettingError, match="sp_size=2 doesn't divide the 3 processes"):
            ParallelismConfig(sp_size=2)._validate_accelerator(_accelerator(3))

    def test_fsdp_needs_an_axis_of_its_own(self) -> None:
        with pytest.raises(SettingError, match="no axis to shard over"):
            ParallelismConfig(tp_size=4)._validate_accelerator(_accelerator(4, fsdp_version=2))

    def test_fsdp_version_1_is_refused(self) -> None:
        with pytest.raises(SettingError, match="needs FSDP2"):
            ParallelismConfig(dp_shard_size=2)._validate_accelerator(_accelerator(2, fsdp_version=1))


class TestSequenceParallel:
    def test_variable_lengths_need_no_length(self) -> None:
        assert DeepSpeedSequenceParallelConfig().sp_seq_length_is_variable is True

    def test_equal_lengths_need_the_length(self) -> None:
        with pytest.raises(SettingError, match="PARALLELISM_CONFIG_SP_SEQ_LENGTH"):
            DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
        with env.patched(PARALLELISM_CONFIG_SP_SEQ_LENGTH="128"):
            assert DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False).sp_seq_length == 128

    @pytest.mark.parametrize("attention", ["eager", "flex_attention"])
    def test_attention_over_the_whole_sequence_is_refused(self, attention: str) -> None:
        with pytest.raises(SettingError, match=attention):
            DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention)


def test_the_mesh_has_the_active_and_the_flattened_axes() -> None:
    def on_rank() -> dict[str, Any]:
        torch.distributed.init_process_group("gloo")
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        with pytest.raises(SettingError, match="device_type"):
            config.get_device_mesh()
        mesh = config.get_device_mesh("cpu")
        assert mesh is not None and config.get_device_mesh() is mesh
        with pytest.raises(SettingError, match="built for"):
            config.get_device_mesh("meta")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: keep flattened meshes yourself; old callers slice by name
            fsdp = mesh[tuple(config.fsdp_dim_names)]
            assert mesh["dp_shard_cp"] == config.flattened_meshes["dp_shard_cp"]
        return {
            "names": mesh.mesh_dim_names,
            "dp": config.flattened_meshes["dp"].mesh.tolist(),
            "dp_cp": config.flattened_meshes["dp_cp"].size(),
            "fsdp": (fsdp.mesh_dim_names, tuple(fsdp.mesh.shape)),
            "shard": config.flattened_meshes["dp_shard_cp"].mesh.tolist(),
        }

    answers = run_on_ranks(on_rank, 4)
    assert answers[0]["names"] == ("dp_replicate", "dp_shard")
    assert answers[0]["dp"] == [0, 1, 2, 3] and answers[0]["dp_cp"] == 4
    assert answers[0]["fsdp"] == (("dp_replicate", "dp_shard_cp"), (2, 2))
    assert [answer["shard"] for answer in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
