"""The exponential moving average of a model's weights, for every strategy that keeps parameters on devices.

Each rank averages its local parts of the parameters elementwise, without communication: replicas average the same
values, shards their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..checkpointing.sharded import StateAccess
from ..errors import CheckpointError, PreparationError, SettingError
from ..torch_private.fsdp import reshard
from ..torch_private.modules import move_each
from .accumulation import GradientState


@final
class WeightAverage:
    """The exponential moving average of a model's weights, updated after optimizer updates.

    ``average = decay * average + (1 - decay) * weights``, at least in float32. ``Accelerator.average_weights`` makes
    it; ``save_state`` and ``load_state`` include it. Buffers are not averaged.

    Args:
        held: the model with the parameters and state as the strategy holds them.
        access: gathers and loads full tensors for the strategy.
        decay: the weight of the old average in an update, between 0 and 1.
        every: the number of optimizer updates per update of the average.
        warmup: begin with a smaller decay, ``(1 + n) / (10 + n)`` at the n-th update, up to ``decay``.
        is_writer: whether this rank writes the state that is common to all ranks.
        was_skipped: returns whether the optimizer skipped its step (fp16 overflow); None if it never does.
    """

    def __init__(
        self,
        held: torch.nn.Module,
        access: StateAccess,
        gradient_state: GradientState,
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
        self.decay: float = decay
        self.every: int = every
        self.warmup: bool = warmup
        self.num_updates: int = 0
        self._held, self._access, self._gradient_state, self._was_skipped = held, access, gradient_state, was_skipped
        reshard([held])
        named = [(name, p) for name, p in held.named_parameters() if p.is_floating_point()]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        is_flat = any(isinstance(module, FullyShardedDataParallel) for module in held.modules())
        self._is_sharded = is_flat or any(isinstance(p, DTensor) for p in self._parameters)
        # In float32, or in the parameter's own dtype if that is wider.
        self._averages = [
            local.to(torch.promote_types(local.dtype, torch.float32), copy=True) for local in self._local_parameters()
        ]
        self._is_writer = is_writer
        self._collected: dict[str, torch.Tensor] | None = None
        self._is_applied = False

    # -- averaging -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, if this micro-batch completed an optimizer update."""
        if not self._gradient_state.sync_gradients or (self._was_skipped is not None and self._was_skipped()):
            return
        if self._is_applied:
            raise PreparationError("WeightAverage.update() was called while the model has the averaged weights.")
        self.num_updates += 1
        if self.num_updates % self.every:
            return
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        current = [
            local.to(average.dtype) for local, average in zip(self._local_parameters(), self._averages, strict=True)
        ]
        move_each(self._averages, current, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enter a context in which the model has the averaged weights; restore its own weights exactly at the end.

        Use it for evaluation and for saving; optimizer updates inside it are lost.
        """
        if self._is_applied:
            raise PreparationError("The model has the averaged weights already: applied() was entered twice.")
        with torch.no_grad():
            reshard([self._held])
            own = [local.clone() for local in self._local_parameters()]
            self._put(self._averages)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            with torch.no_grad():
                reshard([self._held])
                self._put(own)

    def _local_parameters(self) -> list[torch.Tensor]:
        """Return this rank's local part of each parameter; writing to it changes the model."""
        return [p.to_local().detach() if isinstance(p, DTensor) else p.detach() for p in self._parameters]

    def _put(self, values: list[torch.Tensor]) -> None:
        for local, value in zip(self._local_parameters(), values, strict=True):
            local.copy_(value)

    # -- state ---------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the average as full tensors, by the names in the user's own model; a collective if it is sharded."""
        if not self._is_sharded:
            return {name: average.detach() for name, average in zip(self._names, self._averages, strict=True)}
        with self.applied():
            whole = self._access.full_model_state(self._held, True)
            # In CPU memory, an unsharded tensor is the model's own, whose values are restored at the end.
            own = {local.data_ptr() for local in self._local_parameters()}
            return {
                name: value.clone() if value.data_ptr() in own else value
                for name, value in whole.items()
                if value.is_floating_point()
            }

    def collect(self, *_: object) -> None:
        """Gather the average for :meth:`state_dict` on the ranks that write; every rank calls this before each save."""
        whole = self.weights()
        self._collected = whole if self._is_writer else None

    def state_dict(self) -> dict[str, Any]:
        """Return the average gathered by :meth:`collect`, and free it."""
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
        """Continue from an average that was saved by any number of ranks and any strategy.

        Raises:
            CheckpointError: it is another model's average.
        """
        saved = state_dict["average"]
        if not self._is_sharded:
            missing = [name for name in self._names if name not in saved]
            if missing:
                raise CheckpointError(f"The saved weight average is of another model: it has no {', '.join(missing)}.")
            for name, average in zip(self._names, self._averages, strict=True):
                average.copy_(saved[name])
        else:
            reshard([self._held])
            own = [local.clone() for local in self._local_parameters()]
            self._access.load_target(self._held).load_state_dict(saved, strict=False)
            for local, average in zip(self._local_parameters(), self._averages, strict=True):
                average.copy_(local)
            self._put(own)
        self.num_updates = int(state_dict["num_updates"])
