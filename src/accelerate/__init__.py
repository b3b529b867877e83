"""Raw PyTorch training loops on one process or many, any device, any precision.

The names of this page are the public ones. Each is found when it is first used, so that
`import accelerate` itself is quick and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.14.0"

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .data_loader import skip_first_batches
    from .launchers import debug_launcher, notebook_launcher
    from .memory import find_executable_batch_size
    from .optional import is_rich_available
    from .plugins.data import DataLoaderConfiguration
    from .plugins.ddp import DistributedDataParallelKwargs
    from .plugins.deepspeed import DeepSpeedPlugin
    from .plugins.fsdp import FullyShardedDataParallelPlugin
    from .plugins.parallelism import ParallelismConfig
    from .plugins.precision import AutocastKwargs, GradScalerKwargs
    from .plugins.process_group import InitProcessGroupKwargs
    from .plugins.profile import ProfileKwargs
    from .seeding import synchronize_rng_states
    from .settings.labels import DDPCommunicationHookType, DistributedType
    from .state import PartialState

# Name -> the room where the one real object lives.
_HOMES = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "plugins.precision",
    "DDPCommunicationHookType": "settings.labels",
    "DataLoaderConfiguration": "plugins.data",
    "DeepSpeedPlugin": "plugins.deepspeed",
    "DistributedDataParallelKwargs": "plugins.ddp",
    "DistributedType": "settings.labels",
    "FullyShardedDataParallelPlugin": "plugins.fsdp",
    "GradScalerKwargs": "plugins.precision",
    "InitProcessGroupKwargs": "plugins.process_group",
    "ParallelismConfig": "plugins.parallelism",
    "PartialState": "state",
    "ProfileKwargs": "plugins.profile",
    "debug_launcher": "launchers",
    "find_executable_batch_size": "memory",
    "is_rich_available": "optional",
    "notebook_launcher": "launchers",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "seeding",
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
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "__version__",
    "debug_launcher",
    "find_executable_batch_size",
    "is_rich_available",
    "notebook_launcher",
    "skip_first_batches",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
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
    return sorted({*globals(), *_HOMES, *_MODULES})
