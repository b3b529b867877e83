"""Losses that are sums: gradients of the true mean over ranks, micro-batches and ragged tails.

A mean of means is wrong as soon as micro-batches differ in size. Given the sum and what it is a sum over
(tokens, samples), the whole window is divided once, by its total weight over all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, final

import torch

from .collectives import reduce
from .devices import widest_float
from .errors import PreparationError
from .logging import get_logger
from .mesh import TOKEN_AXES, Mesh
from .torch_private.optim import scale_each

logger = get_logger(__name__)

Backward = Callable[[torch.Tensor], None]


@final
class WindowWeights:
    """The weights of the windows that are open, by the models of the window."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        #: The weight so far of every window that has weighted micro-batches behind it.
        self.pending: dict[Hashable, Any] = {}
        self._has_said = False  # that the device has no float64
        self._has_windows = False  # of several micro-batches, so far

    def refuse_unweighted(self, key: Hashable) -> None:
        """Raises if the window of ``key`` already has weighted micro-batches.

        Raises:
            PreparationError: ``backward(loss)`` after ``backward(loss, weight=...)`` in one window.
        """
        if key in self.pending:
            raise PreparationError(
                "backward(loss) without a weight, in a window whose earlier micro-batches had one: the two can't be "
                "averaged together. Pass weight= in every micro-batch of the window, or in none."
            )

    def refuse_open_window(self, *, completes_window: bool) -> None:
        """Raises unless a window is this one micro-batch: an engine that steps inside backward can't wait for more.

        Raises:
            PreparationError: gradients are accumulated.
        """
        if self.pending or not completes_window:
            raise PreparationError(
                "backward(loss, weight=...) over several micro-batches: DeepSpeed's engine updates the parameters "
                "inside the last backward, before their total weight can be divided out. Use "
                "gradient_accumulation_steps=1, FSDP or DDP, or a mean loss without weight=."
            )

    def backward(
        self,
        loss: torch.Tensor,
        weight: Any,
        *,
        key: Hashable,
        completes_window: bool,
        accumulates: bool,
        backward: Backward,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
    ) -> None:
        """Run ``backward(loss)``; if it completes the window, leave the gradients of the weighted mean.

        Args:
            accumulates: whether windows have several micro-batches, on some rank: this one's can be a single one all
                the same, at the end of unequal data. What is scaled before ranks reduce gradients has to be scaled
                on all of them.
        """
        earlier = self.pending.pop(key, None)
        total = weight if earlier is None else wide(earlier) + wide(weight)
        if not completes_window:
            self.pending[key] = total
            self._has_windows = True
            backward(loss)
            return
        factor = self._factor(total, loss)
        if not (accumulates or self._has_windows):  # windows of one: scale the loss, and touch no gradient twice
            backward(loss * factor)
            return
        backward(loss)
        gradients = [_own_piece(parameter.grad) for parameter in parameters() if parameter.grad is not None]
        if gradients:
            scale_each(gradients, factor)

    def _factor(self, total: Any, loss: torch.Tensor) -> torch.Tensor:
        """Ranks over total weight, exact to the precision of ``loss``.

        The strategy divides by the ranks that have tokens, the true mean divides by the weight. Weights are added up
        in float64: float32 can't count more than 2^24 tokens.
        """
        dtype = widest_float(loss.device)
        if dtype != torch.float64 and not self._has_said:
            self._has_said = True
            logger.warning_once(
                "backward(loss, weight=...): %s has no float64, so weights are added up, and losses scaled, in "
                "float32: exact to 1e-7, for up to 16777216 tokens in a window.",
                loss.device,
            )
        weight = torch.as_tensor(total, dtype=dtype, device=loss.device).detach()
        weight = reduce(weight, "sum", world=self._mesh.within(*TOKEN_AXES))
        factor = torch.where(weight > 0, self._mesh.size(*TOKEN_AXES) / weight, torch.zeros_like(weight))
        # A factor that is wider than the loss would widen it, and all that is computed from it.
        return factor.to(torch.promote_types(loss.dtype, torch.float32))


def wide(weight: Any) -> Any:
    """A weight that more can be added to without rounding: bfloat16 can't count further than 256."""
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.detach().to(widest_float(weight.device))
    return weight


def _own_piece(gradient: torch.Tensor) -> torch.Tensor:
    """What of ``gradient`` lies on this rank: gradients that are cut in different ways can't be scaled together."""
    local = getattr(gradient, "to_local", None)
    return gradient if local is None else local()
