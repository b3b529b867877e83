"""The public option classes that users pass to the Accelerator, based on the options in ``settings``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, final

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallelPlugin
    from .handlers import ActivationCheckpointing, TorchDynamoPlugin
    from .parallelism import ParallelismConfig, TorchTensorParallelPlugin


class Engine(Protocol):
    """The options of an engine (such as DeepSpeed) that trains instead of torch."""

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The mesh axes along which the engine itself splits the model."""
        ...


class Placeholder:
    """An argument of ``prepare`` that its engine replaces; every other strategy raises."""

    #: The role in ``prepare``, a value of `parallel.base.Role`.
    role: ClassVar[str]
    #: The name of the engine.
    engine: ClassVar[str]
    #: The stem of the Accelerator's argument and of the launch flag that ask for it.
    asked_by: ClassVar[str]


@final
@dataclass
class Plugins:
    """The plugins of a run, None if unused; settings and strategies share these objects.

    ``engines`` are by the names of their groups of settings; one may be several plugins by name, of which one is
    selected.
    """

    fsdp: FullyShardedDataParallelPlugin | None = None
    engines: dict[str, Engine | Mapping[str, Engine]] = field(
        default_factory=dict[str, "Engine | Mapping[str, Engine]"]
    )
    parallelism: ParallelismConfig | None = None
    dynamo: TorchDynamoPlugin | None = None
    torch_tp: TorchTensorParallelPlugin | None = None
    recompute: ActivationCheckpointing | None = None

    def has(self, name: str) -> bool:
        """Return whether the run uses the plugin of the group of settings ``name``."""
        return name in self.engines or getattr(self, name, None) is not None

    @property
    def engine(self) -> Engine | None:
        """The options of the engine in use; if there are several, the selected ones."""
        found = next(iter(self.engines.values()), None)
        if isinstance(found, Mapping):
            return next(one for one in found.values() if getattr(one, "selected", False))
        return found
