"""Old address: option classes and labels."""

from __future__ import annotations

from ..nested import TensorInformation
from ..plugins.accumulation import GradientAccumulationPlugin
from ..plugins.base import KwargsHandler
from ..plugins.data import DataLoaderConfiguration
from ..plugins.ddp import DistributedDataParallelKwargs
from ..plugins.deepspeed import DeepSpeedPlugin
from ..plugins.dynamo import TorchDynamoPlugin
from ..plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from ..plugins.fsdp import FullyShardedDataParallelPlugin, get_module_class_from_name
from ..plugins.megatron import MegatronLMPlugin
from ..plugins.megatron_models import add_model_config_to_megatron_parser
from ..plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from ..plugins.precision import AutocastKwargs, GradScalerKwargs
from ..plugins.process_group import InitProcessGroupKwargs
from ..plugins.profile import ProfileKwargs
from ..plugins.project import ProjectConfiguration
from ..plugins.quantization import BnbQuantizationConfig
from ..settings.labels import (
    BaseEnum,
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BaseEnum",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "add_model_config_to_megatron_parser",
    "get_module_class_from_name",
]
