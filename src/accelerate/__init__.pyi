"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from .accelerator import Accelerator as Accelerator
from .big_modeling import cpu_offload as cpu_offload, cpu_offload_with_hook as cpu_offload_with_hook
from .big_modeling import disk_offload as disk_offload, dispatch_model as dispatch_model
from .big_modeling import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from .big_modeling import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from .big_models.device_map import infer_auto_device_map as infer_auto_device_map
from .big_models.load import load_checkpoint_in_model as load_checkpoint_in_model
from .data_loader import skip_first_batches as skip_first_batches
from .devices.memory import find_executable_batch_size as find_executable_batch_size
from .distributed.random import synchronize_rng_states as synchronize_rng_states
from .guests.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from .guests.diloco.diloco import DiLoCo as DiLoCo
from .inference import prepare_pippy as prepare_pippy
from .launchers import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
from .optional import is_rich_available as is_rich_available
from .plugins.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from .plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from .plugins.handlers import ActivationCheckpointing as ActivationCheckpointing
from .plugins.handlers import AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration
from .plugins.handlers import GradScalerKwargs as GradScalerKwargs
from .plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs, ProfileKwargs as ProfileKwargs
from .plugins.parallelism import ParallelismConfig as ParallelismConfig
from .plugins.parallelism import PipelineParallelConfig as PipelineParallelConfig
from .settings.labels import DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType
from .state import PartialState as PartialState
from . import accelerator as accelerator, big_modeling as big_modeling, checkpointing as checkpointing
from . import commands as commands, data_loader as data_loader, hooks as hooks, inference as inference
from . import launchers as launchers, local_sgd as local_sgd, logging as logging, optimizer as optimizer
from . import parallelism_config as parallelism_config, scheduler as scheduler, state as state, test_utils as test_utils
from . import tracking as tracking, utils as utils

__version__: str
