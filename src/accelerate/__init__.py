"""Run a PyTorch training loop on one process or many, on any device, in any precision.

These names are the public interface. Each is imported on first use, so that `import accelerate` itself is fast and
doesn't import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.15.0"

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .big_modeling import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
    )
    from .big_models.device_map import infer_auto_device_map
    from .big_models.load import load_checkpoint_in_model
    from .data_loader import skip_first_batches
    from .devices.memory import find_executable_batch_size
    from .distributed.random import synchronize_rng_states
    from .guests.deepspeed.plugin import DeepSpeedPlugin
    from .guests.diloco.diloco import DiLoCo
    from .inference import prepare_pippy
    from .launchers import debug_launcher, notebook_launcher
    from .optional import is_rich_available
    from .plugins.data import DataLoaderConfiguration
    from .plugins.ddp import DistributedDataParallelKwargs
    from .plugins.fsdp import FullyShardedDataParallelPlugin
    from .plugins.handlers import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs
    from .plugins.parallelism import ParallelismConfig, PipelineParallelConfig
    from .plugins.recompute import ActivationCheckpointing
    from .settings.labels import DDPCommunicationHookType, DistributedType
    from .state import PartialState

# Name -> the module that defines it.
_DEFINED_IN = {
    "Accelerator": "accelerator",
    "ActivationCheckpointing": "plugins.recompute",
    "AutocastKwargs": "plugins.handlers",
    "DDPCommunicationHookType": "settings.labels",
    "DataLoaderConfiguration": "plugins.data",
    "DeepSpeedPlugin": "guests.deepspeed.plugin",
    "DiLoCo": "guests.diloco.diloco",
    "DistributedDataParallelKwargs": "plugins.ddp",
    "DistributedType": "settings.labels",
    "FullyShardedDataParallelPlugin": "plugins.fsdp",
    "GradScalerKwargs": "plugins.handlers",
    "InitProcessGroupKwargs": "plugins.handlers",
    "ParallelismConfig": "plugins.parallelism",
    "PartialState": "state",
    "PipelineParallelConfig": "plugins.parallelism",
    "ProfileKwargs": "plugins.handlers",
    "cpu_offload": "big_modeling",
    "cpu_offload_with_hook": "big_modeling",
    "debug_launcher": "launchers",
    "disk_offload": "big_modeling",
    "dispatch_model": "big_modeling",
    "find_executable_batch_size": "devices.memory",
    "infer_auto_device_map": "big_models.device_map",
    "init_empty_weights": "big_modeling",
    "init_on_device": "big_modeling",
    "is_rich_available": "optional",
    "load_checkpoint_and_dispatch": "big_modeling",
    "load_checkpoint_in_model": "big_models.load",
    "notebook_launcher": "launchers",
    "prepare_pippy": "inference",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "distributed.random",
}

# Modules that libraries reach as attributes after a bare `import accelerate`.
_MODULES = (
    "accelerator",
    "big_modeling",
    "checkpointing",
    "commands",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "test_utils",
    "tracking",
    "utils",
)

__all__ = [
    "Accelerator",
    "ActivationCheckpointing",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DiLoCo",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "PipelineParallelConfig",
    "ProfileKwargs",
    "__version__",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "skip_first_batches",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f".{_DEFINED_IN[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"`{__name__}.{name}` isn't part of version {__version__} yet.") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_DEFINED_IN, *_MODULES})
