"""Documented errors about parallel settings: of the documented class, naming the setting and the way out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.construction import _check_engines
from accelerate.distributed.mesh import Mesh
from accelerate.distributed.world import World
from accelerate.errors import AccelerateError
from accelerate.local_sgd import LocalSGD
from accelerate.parallel import StrategyOptions
from accelerate.parallel.fsdp.fsdp2 import FullyShard
from accelerate.parallel.pipeline.strategy import Pipeline
from accelerate.plugins import Plugins
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from accelerate.plugins.fp8 import FP8RecipeKwargs, TERecipeKwargs
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import GradientAccumulationPlugin, TorchDynamoPlugin
from accelerate.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate.plugins.quantization import BnbQuantizationConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin

V1: dict[str, Any] = {"fsdp_version": 1}
V2: dict[str, Any] = {"fsdp_version": 2}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def fsdp(**options: Any) -> Callable[[], object]:
    return lambda: FullyShardedDataParallelPlugin(**options)


def axes(**options: Any) -> Callable[[], object]:
    return lambda: ParallelismConfig(**options)


def accelerator(**options: Any) -> Callable[[], object]:
    return lambda: Accelerator(cpu=True, **options)


def in_world_of(size: int, fsdp_version: int | None = None, **options: Any) -> Callable[[], object]:
    """The last check, as the Accelerator makes it."""
    plugin = None if fsdp_version is None else SimpleNamespace(fsdp_version=fsdp_version)
    state = SimpleNamespace(fsdp_plugin=plugin)
    here: Any = SimpleNamespace(num_processes=size, is_fsdp2=fsdp_version == 2, state=state)
    return lambda: ParallelismConfig(**options)._validate_accelerator(here)


def prepared(*objects: Any, **options: Any) -> Callable[[], object]:
    return lambda: Accelerator(cpu=True, **options).prepare(*objects)


def missing_class() -> None:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Nothing"]
    )
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))


def fsdp2_arguments(*objects: Any) -> Callable[[], object]:
    def check() -> None:
        from accelerate.parallel.base import PreparedArguments

        world = World.pretend(size=2)
        options = StrategyOptions(plugins=Plugins(fsdp=FullyShardedDataParallelPlugin(**V2)))
        FullyShard(world, options).check(PreparedArguments.classify(objects, None, True))

    return check


def pipeline_with(**degrees: int) -> Callable[[], object]:
    def make() -> None:
        world = World.pretend(size=4)
        Pipeline(world, StrategyOptions(mesh=Mesh.of(world, None, **degrees)))

    return make


def unprepared_local_sgd() -> None:
    here: Any = SimpleNamespace(num_processes=2)
    LocalSGD(here, nn.Linear(1, 1), 2)


LINEAR = nn.Linear(2, 2)
SGD = torch.optim.SGD(LINEAR.parameters(), lr=0.1)

#: What is documented: (what is asked for, its documented class, the setting's name, the way out).
DOCUMENTED: dict[str, tuple[Callable[[], object], type[Exception], str, str]] = {
    # plugins.md 1: FSDP
    "a bool reshards in version 1": (
        fsdp(**V1, reshard_after_forward=True),
        ValueError,
        "reshard_after_forward=True",
        "fsdp_version=2",
    ),
    "a word reshards in version 2": (
        fsdp(**V2, reshard_after_forward="FULL_SHARD"),
        ValueError,
        "reshard_after_forward='FULL_SHARD'",
        "True (saves memory)",
    ),
    "forward prefetch in version 2": (
        fsdp(**V2, forward_prefetch=True),
        ValueError,
        "forward_prefetch=True",
        "fsdp_version=1",
    ),
    "local state in version 2": (
        fsdp(**V2, state_dict_type="LOCAL_STATE_DICT"),
        ValueError,
        "LOCAL_STATE_DICT",
        "SHARDED_STATE_DICT",
    ),
    "offloaded recomputation in version 1": (
        fsdp(**V1, activation_checkpointing=True, activation_checkpointing_offload=True),
        ValueError,
        "activation_checkpointing_offload",
        "fsdp_version=2",
    ),
    "offloaded recomputation of nothing": (
        fsdp(**V2, activation_checkpointing_offload=True),
        ValueError,
        "activation_checkpointing_offload",
        "activation_checkpointing=True",
    ),
    "an unknown sharding strategy": (
        fsdp(**V1, sharding_strategy="HALF"),
        ValueError,
        "sharding_strategy",
        "FULL_SHARD",
    ),
    "an unknown wrap policy": (
        fsdp(auto_wrap_policy="SOME_WRAP"),
        ValueError,
        "auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
    ),
    "an unknown state dict type": (fsdp(state_dict_type="NO_STATE"), ValueError, "state_dict_type", "FULL_STATE_DICT"),
    "an unknown prefetch": (fsdp(**V1, backward_prefetch="SOMETIMES"), ValueError, "backward_prefetch", "BACKWARD_PRE"),
    "an unknown precision": (fsdp(mixed_precision_policy="fp5"), ValueError, "fp5", "bf16"),
    "keys of the other version's precision": (
        fsdp(**V2, mixed_precision_policy={"buffer_dtype": torch.bfloat16}),
        ValueError,
        "buffer_dtype",
        "output_dtype",
    ),
    "a precision of another class": (
        fsdp(**V2, mixed_precision_policy=3),
        ValueError,
        "mixed_precision_policy",
        "MixedPrecisionPolicy",
    ),
    "an offload of another class": (fsdp(**V2, cpu_offload=3), ValueError, "cpu_offload", "Give true or false"),
    "a class that the model doesn't have": (missing_class, ValueError, "Nothing", "transformer_cls_names_to_wrap"),
    "two models at once": (fsdp2_arguments(LINEAR, nn.Linear(2, 2), SGD), ValueError, "FSDP2", "once for each"),
    "a model without its optimizer": (fsdp2_arguments(LINEAR), ValueError, "FSDP2", "evaluation_mode=True"),
    "an optimizer without its model": (fsdp2_arguments(SGD), ValueError, "FSDP2", "passed together"),
    # plugins.md 2: DeepSpeed
    "a config without ZeRO": (
        lambda: DeepSpeedPlugin(hf_ds_config={"train_batch_size": 1}),
        ValueError,
        "ZeRO",
        "DeepSpeed config",
    ),
    "axes that DeepSpeed doesn't lay out": (
        lambda: _check_engines(ParallelismConfig(tp_size=2), has_fsdp=False, has_engine=True),
        ValueError,
        "tp_size=2",
        "autotp_size",
    ),
    "stages beside DeepSpeed": (
        lambda: _check_engines(ParallelismConfig(pp_size=2), has_fsdp=False, has_engine=True),
        ValueError,
        "pp_size=2",
        "FSDP2",
    ),
    "groups that don't divide the ranks": (
        in_world_of(3, sp_size=2),
        ValueError,
        "sp_size=2",
        "another number of processes",
    ),
    # plugins.md 4: axes
    "a size of nothing": (axes(tp_size=0), ValueError, "tp_size", "at least 1"),
    "two ways to split a sequence": (axes(cp_size=2, sp_size=2), ValueError, "sp", "cp_size=1 or sp_size=1"),
    "matrices split over replicas": (axes(tp_size=2, dp_replicate_size=2), ValueError, "tp_size", "dp_shard_size > 1"),
    "sequences split over replicas": (axes(cp_size=2, dp_replicate_size=2), ValueError, "cp_size", "dp_shard_size > 1"),
    "another number of processes": (
        in_world_of(8, dp_shard_size=4),
        ValueError,
        "dp_shard_size 4",
        "start 4 processes",
    ),
    "axes and version 1": (in_world_of(4, 1, dp_shard_size=4), ValueError, "fsdp_version=1", "set it to 2"),
    "nothing to shard over": (in_world_of(4, 2, tp_size=4), ValueError, "dp_shard_size", "launch without FSDP"),
    "a handler of another class": (
        axes(tp_size=2, tp_handler=TorchContextParallelConfig()),
        ValueError,
        "tp_handler",
        "TorchTensorParallelConfig",
    ),
    "a pipeline's handler of another class": (
        axes(pp_size=2, pp_handler=TorchTensorParallelConfig()),
        ValueError,
        "pp_handler",
        "PipelineParallelConfig",
    ),
    "an unknown way to exchange keys": (
        lambda: TorchContextParallelConfig(cp_comm_strategy="ring"),
        ValueError,
        "cp_comm_strategy",
        "allgather",
    ),
    "one length, unsaid": (
        lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
        ValueError,
        "sp_seq_length",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
    ),
    "attention that sees it all": (
        lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"),
        ValueError,
        "sp_attn_implementation",
        "sdpa",
    ),
    "a mesh for no device": (
        lambda: ParallelismConfig(dp_shard_size=2).get_device_mesh(),
        ValueError,
        "device_type",
        "'cpu'",
    ),
    "an axis that isn't one": (lambda: Mesh.of(World.pretend(size=2), None, xp=2), ValueError, "'xp'", "dp_shard"),
    "ranks along no axis": (
        lambda: Accelerator(cpu=True).tensor_parallel_rank,
        RuntimeError,
        "'tp'",
        "parallelism_config=",
    ),
    "shards without FSDP": (
        accelerator(parallelism_config=ParallelismConfig(dp_shard_size=1, tp_size=2)),
        ValueError,
        "tp_size 2",
        "start 2 processes",
    ),
    # pipelines
    "an unknown schedule": (lambda: PipelineParallelConfig(schedule="2f2b"), ValueError, "schedule='2f2b'", "'1f1b'"),
    "a pipeline of cut sequences": (pipeline_with(pp=2, cp=2), NotImplementedError, "pp_size=2", "pp_size=1"),
    # plugins.md 5-7
    "two compilers": (
        accelerator(dynamo_backend="inductor", dynamo_plugin=TorchDynamoPlugin()),
        ValueError,
        "dynamo_plugin",
        "dynamo_backend",
    ),
    "an unknown compiler": (lambda: TorchDynamoPlugin(backend="gcc"), ValueError, "gcc", "INDUCTOR"),
    "an unknown fp8 package": (lambda: FP8RecipeKwargs(backend="NOPE"), ValueError, "NOPE", "TE"),
    "fp8 options without fp8": (
        accelerator(mixed_precision="bf16", kwargs_handlers=[TERecipeKwargs()]),
        ValueError,
        "TERecipeKwargs",
        "fp8",
    ),
    "both bit widths": (
        lambda: BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True),
        ValueError,
        "load_in_8bit",
        "load_in_4bit",
    ),
    "no bit width": (lambda: BnbQuantizationConfig(), ValueError, "load_in_8bit", "load_in_4bit"),
    # api.md 2-4
    "an unknown run precision": (accelerator(mixed_precision="fp12"), ValueError, "fp12", "bf16"),
    "two accumulations": (
        accelerator(
            gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)
        ),
        ValueError,
        "gradient_accumulation_steps",
        "gradient_accumulation_plugin",
    ),
    "two handlers of a kind": (
        accelerator(kwargs_handlers=[DistributedDataParallelKwargs()] * 2),
        ValueError,
        "DistributedDataParallelKwargs",
        "only pass one",
    ),
    "a handler that is none": (
        accelerator(kwargs_handlers=[3]),
        AssertionError,
        "kwargs_handlers",
        "DistributedDataParallelKwargs",
    ),
    "an FSDP plugin that is none": (
        accelerator(fsdp_plugin=3),
        TypeError,
        "fsdp_plugin",
        "FullyShardedDataParallelPlugin",
    ),
    "axes that are none": (accelerator(parallelism_config=3), TypeError, "parallelism_config", "ParallelismConfig"),
    "placements that don't match": (
        lambda: Accelerator(cpu=True).prepare(LINEAR, device_placement=[True, True]),
        ValueError,
        "device_placement",
        "one per object",
    ),
    "an unknown communication hook": (
        lambda: DistributedDataParallelKwargs(comm_hook="powersgd"),
        ValueError,
        "comm_hook",
        "power_sgd",
    ),
    "local steps without replicas": (unprepared_local_sgd, NotImplementedError, "LocalSGD", "enabled=False"),
}


@pytest.mark.parametrize("case", DOCUMENTED)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # deprecated spellings raise their errors too
def test_it_is_raised_with_the_setting_and_the_way_out(case: str) -> None:
    ask, documented, setting, way_out = DOCUMENTED[case]
    with pytest.raises(documented) as caught:
        ask()
    text = str(caught.value)
    assert setting in text, f"the setting is not named: {text}"
    assert way_out in text, f"the way out is not named: {text}"
    assert isinstance(caught.value, (AccelerateError, TypeError, AssertionError, RuntimeError))
