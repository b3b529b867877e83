"""The public option classes: what users pass to the Accelerator, over the options of ``settings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ..guests.deepspeed.plugin import DeepSpeedPlugin
    from ..settings.megatron import MegatronOptions
    from .fsdp import FullyShardedDataParallelPlugin
    from .handlers import TorchDynamoPlugin
    from .parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from .recompute import ActivationCheckpointing


@final
@dataclass
class Plugins:
    """The plugins of a run, None where one isn't in use; the settings hold the same objects, and strategies read them.

    ``deepspeed`` may be several by name, of which one is selected.
    """

    fsdp: FullyShardedDataParallelPlugin | None = None
    deepspeed: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None
    megatron: MegatronOptions | None = None
    parallelism: ParallelismConfig | None = None
    dynamo: TorchDynamoPlugin | None = None
    torch_tp: TorchTensorParallelPlugin | None = None
    recompute: ActivationCheckpointing | None = None
