"""The public option classes: what users pass to the Accelerator, over the options of ``settings``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, final

if TYPE_CHECKING:
    from ..settings.deepspeed import DeepSpeedOptions
    from ..settings.megatron import MegatronOptions
    from .fsdp import FullyShardedDataParallelPlugin
    from .handlers import TorchDynamoPlugin
    from .parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from .recompute import ActivationCheckpointing


class Engine(Protocol):
    """The options of an engine that trains in the core's place."""

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The axes of the mesh along which the engine itself cuts the model."""
        ...


@final
@dataclass
class Plugins:
    """The plugins of a run, None where one isn't in use; the settings hold the same objects, and strategies read them.

    ``deepspeed`` may be several by name, of which one is selected.
    """

    fsdp: FullyShardedDataParallelPlugin | None = None
    deepspeed: DeepSpeedOptions | Mapping[str, DeepSpeedOptions] | None = None
    megatron: MegatronOptions | None = None
    parallelism: ParallelismConfig | None = None
    dynamo: TorchDynamoPlugin | None = None
    torch_tp: TorchTensorParallelPlugin | None = None
    recompute: ActivationCheckpointing | None = None

    @property
    def engine(self) -> Engine | None:
        """The options of the engine in use; of several, the selected ones."""
        found = self.deepspeed or self.megatron
        if isinstance(found, Mapping):
            found = next(one for one in found.values() if getattr(one, "selected", False))
        return cast("Engine | None", found)
