"""Weighted losses: gradients of the mean over all items of ranks and micro-batches of different sizes.

A mean of means is wrong if micro-batches differ in size. Given the sum and its number of items (tokens, samples), the
whole window is divided once, by its total weight over all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from ..devices.table import widest_float
from ..distributed.collectives import reduce
from ..distributed.mesh import TOKEN_AXES, Mesh
from ..errors import PreparationError
from ..logging import MultiProcessAdapter, get_logger
from ..torch_private.modules import scale_each
from .accumulation import GradientState, NamedWindows, WindowKey, overlap

logger: MultiProcessAdapter = get_logger(__name__)

Backward = Callable[..., None]


@final
class Reduction(NamedTuple):
    """How the backward passes of a strategy reduce gradients over the ranks.

    Attributes:
        one_backward: why an update can't consist of several backward passes; empty if it can.
        is_sum: a backward pass without ``num_steps`` sums the gradients of all ranks, instead of averaging them.
        divides_by_weights: a backward pass takes the ``weight`` of a summed loss, and divides the gradients by the sum
            of weights.
    """

    one_backward: str = ""
    is_sum: bool = False
    divides_by_weights: bool = False


@final
class WindowWeights:
    """The total weights of the open accumulation windows so far, by the models of the window."""

    def __init__(self, mesh: Mesh, gradient_state: GradientState, windows: NamedWindows) -> None:
        self._mesh, self._gradient_state, self._windows = mesh, gradient_state, windows
        #: The weight so far of every window with weighted micro-batches.
        self.pending: dict[WindowKey, Any] = {}
        self._has_warned = False  # a warning that the device has no float64
        self._has_windows = False  # with several micro-batches, so far

    def refuse_unweighted(self) -> None:
        """Raise if the current window already has weighted micro-batches.

        Raises:
            PreparationError: ``backward(loss)`` after ``backward(loss, weight=...)`` in one window.
        """
        if any(overlap(self._windows.current.key, other) for other in self.pending):
            raise PreparationError(
                "backward(loss) without a weight, in a window whose earlier micro-batches had one: the two can't be "
                "averaged together. Pass weight= in every micro-batch of the window, or in none."
            )

    def backward(
        self,
        loss: torch.Tensor,
        weight: torch.Tensor | float,
        *,
        models: Callable[[], Sequence[torch.nn.Module]],
        backward: Backward,
        reduction: Reduction,
    ) -> None:
        """Run ``backward(loss)``; if it completes the window, scale the gradients to those of the weighted mean.

        Args:
            models: returns the prepared models.
            reduction: how ``backward`` reduces gradients.

        Raises:
            PreparationError: the window has several micro-batches, which the strategy can't weight.
        """
        if reduction.divides_by_weights:
            return backward(loss, weight=weight)
        one_backward, is_sum = reduction.one_backward, reduction.is_sum
        completes_window = self._gradient_state.sync_gradients
        if one_backward and (self.pending or not completes_window):
            raise PreparationError(
                f"backward(loss, weight=...) over several micro-batches: {one_backward}, before their total weight can "
                "be divided out. Use gradient_accumulation_steps=1, FSDP or DDP, or a mean loss without weight=."
            )
        # Whether windows have several micro-batches on some rank; at the end of unequal data, this rank's window may
        # have one. All ranks have to scale at the same point: either the loss or the reduced gradients.
        accumulates = is_sum or (not one_backward and (self._gradient_state.num_steps != 1 or self._has_windows))
        window = self._windows.current
        key = window.key
        if window.models is None and (accumulates or not completes_window):
            window.refuse_weight()
        if self.pending and any(other != key and overlap(key, other) for other in self.pending):
            raise PreparationError(
                "backward(loss, weight=...) in two windows of accumulate() that share a model, and are open at once: "
                "their total weights can't be divided out of one gradient. Name the same models in both."
            )
        earlier = self.pending.pop(key, None)
        total = weight if earlier is None else wide(earlier) + wide(weight)
        if not completes_window:
            self.pending[key] = total
            self._has_windows = True
            backward(loss)
            return
        factor = self._factor(total, loss, 1 if is_sum else self._mesh.size(*TOKEN_AXES))
        if not accumulates:  # windows of one: scale the loss instead of the gradients
            backward(loss * factor)
            return
        backward(loss)
        parameters = self._windows.parameters(models(), self._gradient_state.windows, self.pending)
        gradients = [_own_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            scale_each(gradients, factor)

    def _factor(self, total: object, loss: torch.Tensor, divided_by: int) -> torch.Tensor:
        """Return ``divided_by`` divided by the total weight, to the precision of ``loss``.

        The strategy divides by the number of ranks (along TOKEN_AXES), but the mean has to divide by the weight.
        Weights are summed in float64, because float32 can't count more than 2^24 tokens.
        """
        dtype = widest_float(loss.device)
        if dtype != torch.float64 and not self._has_warned:
            self._has_warned = True
            logger.warning_once(
                "backward(loss, weight=...): %s has no float64, so weights are added up, and losses scaled, in "
                "float32: exact to 1e-7, for up to 16777216 tokens in a window.",
                loss.device,
            )
        weight = torch.as_tensor(total, dtype=dtype, device=loss.device).detach()
        weight = reduce(weight, "sum", world=self._mesh.within(*TOKEN_AXES), same_shapes=True)
        factor = torch.where(weight == 0, weight, divided_by / weight)
        factor = factor.masked_fill((weight < 0) | ~weight.isfinite(), torch.nan)  # no number of items
        # A factor in a wider dtype than the loss would widen the loss, and all that is computed from it.
        return factor.to(torch.promote_types(loss.dtype, torch.float32))


def wide(weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return a weight in a dtype that can be summed without rounding; bfloat16 can't count above 256."""
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.detach().to(widest_float(weight.device))
    return weight


def _own_piece(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's local part of ``gradient``, because torch can't scale different placements together."""
    local = getattr(gradient, "to_local", None)
    return gradient if local is None else local()
