"""The public option classes that users pass to the Accelerator, based on the options in ``settings``."""

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
    """The options of an engine (such as DeepSpeed) that trains instead of torch."""

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The mesh axes along which the engine itself splits the model."""
        ...


@final
@dataclass
class Plugins:
    """The plugins of a run, None if unused; settings and strategies share these objects.

    ``deepspeed`` may be several plugins by name; one of them is selected.
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
        """The options of the engine in use; if there are several, the selected ones."""
        found = self.deepspeed or self.megatron
        if isinstance(found, Mapping):
            found = next(one for one in found.values() if getattr(one, "selected", False))
        return cast("Engine | None", found)
