"""The steps of ``prepare`` that libraries replace or wrap on the Accelerator, by their names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..lazy import function_in_use
from ..logging import MultiProcessAdapter, get_logger

if TYPE_CHECKING:
    from ..distributed.mesh import Mesh
    from ..precision import Precision
    from .base import Strategy

logger: MultiProcessAdapter = get_logger(__name__)


class ReplaceableSteps:
    """The methods of the Accelerator that libraries replace for FSDP2 and for context parallelism."""

    mesh: Mesh
    strategy: Strategy
    precision: Precision
    #: A library's context for `maybe_context_parallel`, instead of ours.
    _cp_context: Callable[..., AbstractContextManager[None]] | None = None

    def _prepare_in_steps(self, args: tuple[object, ...], device_placement: Sequence[bool] | None) -> object:
        if self.mesh.active("cp"):
            self.strategy.shards_attention = False  # unless `_prepare_cp` is ours
            args = self._prepare_cp(*args)
        if not self.strategy.sharding_function:
            return self._prepare_all(args, device_placement)
        placements = {} if device_placement is None else {"device_placement": device_placement}
        prepared = self._prepare_fsdp2(*args, **placements)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_cp(self, *args: object) -> tuple[object, ...]:
        """Prepare for context parallelism, and return ``args``; a replacement may set ``_cp_context``."""
        self.strategy.shards_attention = True
        return args

    def _split_sequences(self, **buffers: Any) -> AbstractContextManager[None]:
        """Enter the context of :meth:`maybe_context_parallel`."""
        if self._cp_context is not None:
            return self._cp_context(**buffers)
        if self.mesh.active("cp", "sp"):
            from .context_parallel import split_sequences

            config = self.strategy.options.plugins.parallelism
            assert config is not None, "the mesh has these axes by it"
            return split_sequences(self.strategy.mesh, config, **buffers)
        logger.warning_once(
            "maybe_context_parallel() has no effect: no ParallelismConfig asks for context parallelism."
        )
        return nullcontext()

    def _prepare_fsdp2(self, *args: object, device_placement: Sequence[bool] | None = None) -> tuple[object, ...]:
        """Prepare ``args`` under FSDP2, and return as many objects."""
        prepared = self._prepare_all(args, device_placement)
        return prepared if isinstance(prepared, tuple) and len(args) > 1 else (prepared,)

    @abstractmethod
    def _prepare_all(self, args: Sequence[object], device_placement: Sequence[bool] | None) -> object:
        """Prepare ``args``; a single object is returned without a tuple."""

    @abstractmethod
    def _adopt(self, model: torch.nn.Module) -> None:
        """Adopt the mesh of ``model`` if it is sharded."""

    def _place_model(self, model: torch.nn.Module, placed: bool, evaluation_mode: bool) -> torch.nn.Module:
        """Distribute ``model`` over the processes; one that a library's function shards keeps its layout."""
        shard = self.strategy.sharding_function
        if shard and not evaluation_mode and not self.strategy.adopts(model):
            model = function_in_use(shard)(self, model)
            if self.strategy.has_sharded(model):
                return model
            self._adopt(model)
        return self.strategy.place_model(model, self.precision, placed, evaluation_mode)
