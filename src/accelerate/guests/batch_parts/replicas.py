"""Replicas that compute the parts of an update, and sum their gradients in one tree for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import torch

from ...distributed.world import World
from ...errors import PreparationError
from ...parallel.base import Clipping, PreparedArguments, Reduction, Role, Strategy, StrategyOptions, refuse_device_map
from ...parallel.gradient_norm import scale_to
from ...parallel.replicas import make_replicas_equal
from ...settings.tree import ROWS
from .exchange import Exchange
from .fixed_order import Node, PartialSums, total_norm
from .parts import Parts

if TYPE_CHECKING:
    from ...data_loader.loader import PreparedLoader

#: The groups of settings that select another strategy; the plugins have the same names.
_REFUSED: Final = tuple(row.name for row in ROWS if row.condition and row.arguments)


@final
@dataclass
class _Window:
    """The gradients of one open accumulation window on this rank."""

    sums: PartialSums = field(default_factory=PartialSums)
    num_parts: int = 0
    micro_batch: object = None  # the one whose gradients are in the parameters
    own: list[torch.Tensor | None] | None = None  # its gradients, if the parameters have those of the whole update


@final
class PartReplicas(Strategy):
    """One replica per process, each of which computes some of the parts."""

    can_repeat_passes = True
    reduction: ClassVar[Reduction] = Reduction(is_sum=True)

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        # One process without a group has nothing to shard over.
        asked = [name for name in _REFUSED if options.plugins.has(name) and (name != "fsdp" or world.size > 1)]
        asked += ["DistributedDataParallelKwargs"] if options.ddp_handler is not None else []
        asked += ["--keep_replicas"] if world.members is not None else []
        if asked:
            raise PreparationError(
                f"{', '.join(asked)} with batch_parts isn't built: only plain replicas and FSDP 2 sum gradients in the "
                "order of the parts. Leave that out, or batch_parts."
            )
        self.retry = None
        self.parts: Parts = Parts(world, world)
        self.parts.is_open = lambda: any(one.micro_batch and one.own is None for one in self._windows.values())
        self.parts.drop = self._drop
        self._windows: dict[object, _Window] = {}
        #: By the key of a window and the number of prepared models: the parameters of the window's models.
        self._parameters: dict[tuple[object, int], list[torch.nn.Parameter]] = {}
        self._exchanges: dict[object, Exchange] = {}  # by the key of a window

    @property
    def data_parallel_size(self) -> int:
        """The number of parts: as many ranks as that would get the same results."""
        return self.parts.division.count

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if a model can't be replicated."""
        super().check(arguments)
        for argument in arguments.of(Role.MODEL):
            refuse_device_map(argument.current)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model`` with the values of rank 0."""
        if self.world.size > 1:
            make_replicas_equal(model, self.mesh)
        self.parts.take_model(model)
        return model

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` waits for the gradients of all parts."""
        self.parts.check_optimizer(optimizer)

    def configure_loader(self, loader: PreparedLoader) -> None:
        """Let ``loader`` read this rank's parts."""
        self.parts.divide_loader(loader)

    def release(self) -> None:
        """Drop all references to prepared models."""
        super().release()
        self.parts.release()
        self._windows.clear()
        self._parameters.clear()
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()

    # -- a step --------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float | None = None, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss``; at the end of the window, sum those of all parts.

        Args:
            num_steps: the micro-batches of an update on this rank, if the loss is a mean; None if it is a sum.
        """
        self.parts.check_backward()
        window, parameters = self._open_window()
        num_parts = 1 if num_steps is None else num_steps * self.world.size
        if not self.parts.is_update_complete:
            super().backward(loss, scaler, num_parts, **kwargs)
            return
        exchange, num_rounds = self._exchange_of(parameters), self.parts.num_rounds(window.num_parts + 1)
        # The sums of the earlier parts are kept: another backward pass of this micro-batch may follow.
        with exchange.during_backward(loss, window.sums.nodes, self._part_of(window), num_rounds):
            super().backward(loss, scaler, num_parts, **kwargs)
        window.own = [parameter.grad for parameter in parameters]
        for parameter, total in zip(parameters, exchange.finish(), strict=True):
            parameter.grad = total
        self.parts.complete_update()

    def _open_window(self) -> tuple[_Window, list[torch.nn.Parameter]]:
        """Return the current window and its parameters, whose gradients are those of this part so far."""
        run = self.parts.run
        state, named, models = run.gradient_state, run._windows.current, run._wrapped_models
        known = self._parameters.get((named.key, len(models)))
        if known is None:
            numbers = named.models or range(len(models))
            found = {id(parameter): parameter for number in numbers for parameter in models[number].parameters()}
            known = self._parameters[named.key, len(models)] = list(found.values())
        parameters = [parameter for parameter in known if parameter.requires_grad]
        window = self._windows.setdefault(named.key, _Window())
        micro_batch = (state.windows.get(named.key), state.num_step_calls)
        if window.micro_batch is None:
            window.micro_batch = micro_batch
        elif window.micro_batch != micro_batch:
            if window.own is None:
                self._take_part(window, parameters)
            else:  # that of an update that no optimizer has used
                window = self._windows[named.key] = _Window()
            window.micro_batch = micro_batch
        elif window.own is not None:  # a further backward pass of the last micro-batch
            for parameter, gradient in zip(parameters, window.own, strict=True):
                parameter.grad = gradient
            window.own = None
        return window, parameters

    def _take_part(self, window: _Window, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Move the gradients of one part from the parameters to the sums."""
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        window.sums.add(Node(self._part_of(window), 1, gradients))
        window.num_parts += 1

    def _part_of(self, window: _Window) -> int:
        """Return the number in the update of the part whose gradients the parameters have or get."""
        return self.parts.division.part(self.world.rank, window.num_parts)

    def _exchange_of(self, parameters: Sequence[torch.nn.Parameter]) -> Exchange:
        """Return the exchange of the current window, a new one if other parameters are trained than before."""
        key = self.parts.run._windows.current.key
        known = self._exchanges.get(key)
        if known is not None:
            if len(known.parameters) == len(parameters) and all(map(is_, known.parameters, parameters)):
                return known
            known.close()
        exchange = self._exchanges[key] = Exchange(parameters, self.parts.division, self.world.group)
        return exchange

    def _drop(self) -> None:
        """Drop the sums of updates that an optimizer has used."""
        for key in [key for key, window in self._windows.items() if window.own is not None]:
            del self._windows[key]

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``clipping.max_norm``; return the norm before scaling.

        Inside an update the gradients of single parts aren't scaled: how many there are depends on the ranks.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.world.device)
        norm = total_norm(gradients, clipping.norm_type)
        if self.parts.is_update_complete:
            scale_to(gradients, norm, clipping.max_norm, clipping.error_if_nonfinite)
        return norm

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of the gradients to [-``clip_value``, ``clip_value``], at the end of an update."""
        if self.parts.is_update_complete:
            super().clip_grad_value(parameters, clip_value)
