"""Replicas that survive lost ranks: gradients are summed without a process group.

As in torchft, the update in which a replica is lost misses its samples; the run loses nothing else.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, final

import torch

from ...distributed.world import World
from ...errors import PreparationError
from ...parallel.base import PreparedArguments, Reduction, Role, Strategy, StrategyOptions, refuse_device_map
from ...settings.labels import DistributedType
from ...settings.tree import ROWS
from .membership import Membership
from .shared_epoch import position_of, record_update, running_loaders

#: The groups of settings that select another strategy; the plugins have the same names.
_REFUSED: Final = tuple(row.name for row in ROWS if row.condition and row.arguments)


class Kept(Strategy, ABC):
    """A strategy that averages gradients over the samples of all replicas with a contribution."""

    reduction: ClassVar[Reduction] = Reduction(
        one_backward="under --keep_replicas the ranks add up their gradients in the last backward of an update",
        divides_by_weights=True,
    )

    def __init__(self, world: World, options: StrategyOptions) -> None:
        assert isinstance(world.members, Membership), "chosen only then"
        self._membership: Membership = world.members
        super().__init__(world.members.replica or world, options)
        self._trained: list[torch.nn.Module] = []
        self._weight = 0.0  # samples of the open window, or the weights that the script gave
        self._is_weighted: bool | None = None  # whether the open window has such weights
        self._step_calls = -1  # at the last sum of gradients
        self._is_averaged = False  # whether the gradients are those of all replicas

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hook that refuses a step with the gradients of this rank alone."""
        super().register_step_hooks(optimizer)

        def require_average(stepped: torch.optim.Optimizer, *_: object) -> None:
            grads = (p.grad for group in stepped.param_groups for p in group["params"])
            if not self._is_averaged and any(grad is not None for grad in grads):
                raise PreparationError(
                    "optimizer.step() under `accelerate launch --keep_replicas`, with gradients of this rank alone: "
                    "`loss.backward()` doesn't average them. Call `accelerator.backward(loss)` in its place."
                )

        optimizer.register_step_pre_hook(require_average)

    def release(self) -> None:
        """Drop all references to prepared models."""
        super().release()
        self._trained.clear()

    def _begin(self, model: torch.nn.Module) -> None:
        """Train ``model`` with the values of the lowest member."""
        self._trained.append(model)
        if not self._membership.is_behind:
            own = self.unwrap(model)
            state = self._membership.share_state("prepare", own.state_dict)
            if state is not None:
                own.load_state_dict(state)

    def backward(
        self,
        loss: torch.Tensor,
        scaler: torch.amp.GradScaler | None,
        num_steps: float = 1,
        weight: torch.Tensor | float | None = None,
        **kwargs: Any,
    ) -> None:
        """Accumulate the gradients of ``loss``; at the end of the window, average them over all its samples.

        With a gradient scaler, an infinite gradient of one rank is infinite in the sum, so all ranks skip the update.

        Args:
            weight: the number of items in the sum ``loss``; None if ``loss`` is a mean over the batch.
        """
        with self._micro_batch(weight, has_scaler=scaler is not None) as factor:
            super().backward(loss * factor, scaler, **kwargs)

    @contextmanager
    def _micro_batch(self, weight: torch.Tensor | float | None, *, has_scaler: bool) -> Iterator[float]:
        """Enter a context for the backward pass of a loss times the returned factor; end its window if it is the last.

        Raises:
            PreparationError: the gradients of this update were added up already, or only some losses have a weight.
        """
        state = self.options.gradient_state
        assert state is not None, "the Accelerator gives it"
        if self._is_weighted not in (None, weight is not None):
            raise PreparationError(
                "backward() with weight= in only some micro-batches of one update: sums and means can't be averaged "
                "together. Give weight= in all of them, or in none."
            )
        is_added_up = self._step_calls == state.num_step_calls  # no optimizer has stepped since the last sum
        if is_added_up and any(p.grad is not None for model in self._trained for p in model.parameters()):
            raise PreparationError(
                "backward() after the gradients of this update were added up, under --keep_replicas: give one "
                "backward the sum of the losses, or put micro-batches under accelerator.accumulate(model)."
            )
        loaders = running_loaders(state)
        # Those whose batches no update contains yet; after one, another model may train with the newest batch.
        current = [loader for loader in loaders if loader.epoch_shared.has_open] or loaders[:1]
        num_samples = next((n for n in (one.num_own_samples for one in current) if n), 0) if loaders else 1
        items = num_samples if weight is None else float(weight) * bool(num_samples)
        self._is_averaged = False
        yield items if weight is None else bool(num_samples)  # a rank without samples reads an extra one
        self._weight, self._is_weighted = self._weight + items, weight is not None
        for loader in current:
            loader.has_backward = True
        if not state.sync_gradients:
            return
        if self._membership.trains_apart:
            self._average_own()
        else:
            contribution = [self._weight, *position_of(loaders, self._membership.count_steps())]
            contributions = self._average(contribution, has_scaler=has_scaler)
            record_update(loaders, {rank: position for rank, (_, *position) in contributions.items()})
        for loader in current:
            loader.is_trained = True
        self._weight, self._is_weighted, self._step_calls = 0.0, None, state.num_step_calls
        self._is_averaged = True

    def _own_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's values of a parameter or gradient."""
        return tensor

    def _replica_weight(self) -> float:
        """Return the number of items of the open window, as a mean over the ranks of this replica."""
        return self._weight

    def _average_own(self) -> None:
        """Make the gradients the mean over the items of this replica alone."""
        weight = self._replica_weight()
        for parameter in (p for model in self._trained for p in model.parameters()):
            if parameter.grad is not None and weight:
                self._own_values(parameter.grad).div_(weight)
            else:
                parameter.grad = None

    def _average(self, contribution: list[float], *, has_scaler: bool = False) -> dict[int, list[float]]:
        """Average the gradients over the samples of all contributors; return their contributions by rank."""
        parameters = [p for model in self._trained for p in model.parameters() if p.requires_grad]
        values_of = [self._own_values(parameter) for parameter in parameters]
        buffers = [b for model in self._trained for b in model.buffers() if b.is_floating_point()]
        is_wide = any(tensor.dtype == torch.float64 for tensor in (*parameters, *buffers))
        dtype = torch.float64 if is_wide else torch.float32
        with torch.no_grad():
            grads = [
                torch.zeros_like(own) if parameter.grad is None else self._own_values(parameter.grad)
                for own, parameter in zip(values_of, parameters, strict=True)
            ]
            used = torch.tensor([p.grad is not None for p in parameters], dtype=dtype)
            pieces = [torch.cat([grad.reshape(-1).to("cpu", dtype) for grad in grads]), used]
            pieces += [buffer.reshape(-1).to("cpu", dtype) for buffer in buffers]
            flat = torch.cat(pieces)
            total, given = self._membership.add_up(flat, contribution)
            # The ranks of a replica have averaged their gradients already.
            weights = sum(weight for weight, *_ in given.values()) / self._membership.replica_size
            start, num_values = 0, sum(own.numel() for own in values_of)
            used = total[num_values : num_values + len(parameters)]
            for parameter, own, is_used in zip(parameters, values_of, used, strict=True):
                values = total[start : start + own.numel()].view_as(own)
                start += own.numel()
                if not weights and not has_scaler:  # no contributing rank had a sample: there is no update
                    parameter.grad = None
                elif is_used or not weights:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    # A scaler needs a gradient, and leaves out the update of an infinite one.
                    self._own_values(parameter.grad).copy_(
                        values / weights if weights else torch.full_like(own, torch.inf)
                    )
            if buffers:  # as DDP does: those of the lowest rank
                lowest = self._membership.counterparts(given)[0]
                first = self._membership.piece_of(lowest, flat, num_values + len(parameters))
                start = 0
                for buffer in buffers:
                    buffer.copy_(first[start : start + buffer.numel()].view_as(buffer))
                    start += buffer.numel()
        return dict(sorted(given.items()))


@final
class KeptReplicas(Kept):
    """One replica per process."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        refuse(
            options,
            "only plain replicas survive the loss of a rank, and those that `accelerate launch --use_fsdp` shards",
        )

    @property
    def label(self) -> DistributedType:
        """The distributed type of this kind of device: MULTI_CPU, MULTI_GPU, ...."""
        return DistributedType(self.world.kind.label)

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if a model can't be replicated."""
        super().check(arguments)
        for argument in arguments.of(Role.MODEL):
            refuse_device_map(argument.current)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model`` with the values of the lowest member."""
        self._begin(model)
        return model


def refuse(options: StrategyOptions, why: str, *allowed: str) -> None:
    """Raise if settings select a strategy that isn't ``allowed``.

    Raises:
        PreparationError: names them, and says ``why``.
    """
    asked = [name for name in _REFUSED if options.plugins.has(name) and name not in allowed]
    asked += ["DistributedDataParallelKwargs"] if options.ddp_handler is not None else []
    if asked:
        raise PreparationError(
            f"{', '.join(asked)} under `accelerate launch --keep_replicas`: {why}. Leave that out, or --keep_replicas."
        )
