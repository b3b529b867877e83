"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..guests.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from ..guests.megatron.plugin import add_model_config_to_megatron_parser as add_model_config_to_megatron_parser
from ..guests.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from ..nested import TensorInformation as TensorInformation
from ..plugins.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from ..plugins.fp8 import AORecipeKwargs as AORecipeKwargs, FP8RecipeKwargs as FP8RecipeKwargs
from ..plugins.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs, TERecipeKwargs as TERecipeKwargs
from ..plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from ..plugins.fsdp import get_module_class_from_name as get_module_class_from_name
from ..plugins.handlers import AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration
from ..plugins.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from ..plugins.handlers import GradScalerKwargs as GradScalerKwargs, InitProcessGroupKwargs as InitProcessGroupKwargs
from ..plugins.handlers import KwargsHandler as KwargsHandler, ProfileKwargs as ProfileKwargs
from ..plugins.handlers import ProjectConfiguration as ProjectConfiguration, TorchDynamoPlugin as TorchDynamoPlugin
from ..plugins.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from ..plugins.parallelism import ParallelismConfig as ParallelismConfig
from ..plugins.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from ..plugins.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from ..plugins.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from ..plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from ..settings.labels import BaseEnum as BaseEnum, ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype
from ..settings.labels import DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType
from ..settings.labels import DynamoBackend as DynamoBackend, FP8BackendType as FP8BackendType, LoggerType as LoggerType
from ..settings.labels import PrecisionType as PrecisionType, RNGType as RNGType
from ..settings.labels import SageMakerDistributedType as SageMakerDistributedType
