"""The exponential moving average of a model's weights, under every strategy that keeps parameters on devices.

Each rank averages the pieces of the parameters that it holds, elementwise, so ranks have nothing to tell each other:
replicas average the same numbers, shards their own ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .checkpointing.sharded import StateAccess
from .errors import CheckpointError, PreparationError, SettingError
from .gradients import GradientState
from .torch_private.fsdp import free_gathered_flat
from .torch_private.optim import move_each


@final
class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after each optimizer update, in float32 at least.

    ``Accelerator.average_weights`` makes it; ``save_state`` and ``load_state`` include it. Buffers are not averaged.

    Args:
        held: the model through which parameters and state are seen as the strategy holds them.
        access: how the strategy gives and takes whole tensors.
        decay: how much of the average stays in an update; between 0 and 1.
        every: so many optimizer updates make one update of the average.
        warmup: begin with a small decay, ``(1 + n) / (10 + n)`` at the n-th update, up to ``decay``.
        is_writer: whether this rank writes what all have in common.
        was_skipped: whether the optimizer left the parameters alone (fp16), where that can happen.
    """

    def __init__(
        self,
        held: torch.nn.Module,
        access: StateAccess,
        clock: GradientState,
        *,
        decay: float,
        every: int,
        warmup: bool,
        was_skipped: Callable[[], bool] | None,
        is_writer: bool,
    ) -> None:
        if not 0 <= decay <= 1:
            raise SettingError(f"average_weights(decay={decay}): a decay is between 0 and 1, usually close to 1.")
        if every < 1:
            raise SettingError(f"average_weights(every={every}): at least one optimizer update.")
        self.decay, self.every, self.warmup = decay, every, warmup
        self.num_updates = 0
        self._held, self._access, self._clock, self._was_skipped = held, access, clock, was_skipped
        _free_gathered(held)
        named = [(name, p) for name, p in held.named_parameters() if p.is_floating_point()]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._is_sharded = any(isinstance(p, DTensor) for p in self._parameters) or _is_flat(held)
        self._averages = [_widened(piece) for piece in self._pieces()]
        self._is_writer = is_writer
        self._collected: dict[str, torch.Tensor] | None = None
        self._is_applied = False

    # -- averaging -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self) -> None:
        """The average has moved towards the weights, if the micro-batch in hand completed an optimizer update."""
        if not self._clock.sync_gradients or (self._was_skipped is not None and self._was_skipped()):
            return
        if self._is_applied:
            raise PreparationError("WeightAverage.update() was called while the model has the averaged weights.")
        self.num_updates += 1
        if self.num_updates % self.every:
            return
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        pieces = [piece.to(average.dtype) for piece, average in zip(self._pieces(), self._averages, strict=True)]
        move_each(self._averages, pieces, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model has the averaged weights; after it, it has its own again, exactly.

        For evaluating and for saving; what an optimizer does inside is lost.
        """
        if self._is_applied:
            raise PreparationError("The model has the averaged weights already: applied() was entered twice.")
        with torch.no_grad():
            _free_gathered(self._held)
            own = [piece.clone() for piece in self._pieces()]
            self._put(self._averages)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            with torch.no_grad():
                _free_gathered(self._held)
                self._put(own)

    def _pieces(self) -> list[torch.Tensor]:
        """What this rank holds of each parameter; writing to it changes the model."""
        return [p.to_local().detach() if isinstance(p, DTensor) else p.detach() for p in self._parameters]

    def _put(self, values: list[torch.Tensor]) -> None:
        for piece, value in zip(self._pieces(), values, strict=True):
            piece.copy_(value)

    # -- state ---------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """The average under the names of the user's own model, in whole tensors. A collective where it is in shards."""
        if not self._is_sharded:
            return {name: average.detach() for name, average in zip(self._names, self._averages, strict=True)}
        with self.applied():
            whole = self._access.whole_model(self._held, True)
        return {name: value for name, value in whole.items() if value.is_floating_point()}

    def collect(self, *_: Any) -> None:
        """A rank that writes can be asked for :meth:`state_dict`. Every rank makes this call, before each save."""
        whole = self.weights()
        self._collected = whole if self._is_writer else None

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`collect` has brought together, once."""
        if self._collected is None:
            if self._is_sharded:
                raise CheckpointError(
                    "WeightAverage.state_dict() needs collect() on every rank first; or use weights()."
                )
            self._collected = self.weights()
        whole, self._collected = self._collected, None
        return {"num_updates": self.num_updates, "average": whole}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The average continues from a saved one, of any number of ranks and any strategy.

        Raises:
            CheckpointError: it is the average of another model.
        """
        saved = state_dict["average"]
        if not self._is_sharded:
            missing = [name for name in self._names if name not in saved]
            if missing:
                raise CheckpointError(f"The saved weight average is of another model: it has no {', '.join(missing)}.")
            for name, average in zip(self._names, self._averages, strict=True):
                average.copy_(saved[name])
        else:
            _free_gathered(self._held)
            own = [piece.clone() for piece in self._pieces()]
            self._access.receiver(self._held).load_state_dict(saved, strict=False)
            for piece, average in zip(self._pieces(), self._averages, strict=True):
                average.copy_(piece)
            self._put(own)
        self.num_updates = int(state_dict["num_updates"])


def _widened(piece: torch.Tensor) -> torch.Tensor:
    """A copy in float32, or in the parameter's own type where that is wider."""
    return piece.to(torch.promote_types(piece.dtype, torch.float32), copy=True)


def _is_flat(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _free_gathered(model: torch.nn.Module) -> None:
    """Parameters lie in shards, also those that a forward has gathered and kept."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            free_gathered_flat(module)
