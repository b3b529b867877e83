"""Metrics that are sums, kept as two numbers per rank instead of every prediction on every rank."""

from __future__ import annotations

from typing import Any, final

import torch

from .collectives import reduce
from .errors import PreparationError
from .gradients import GradientState
from .mesh import TOKEN_AXES, Mesh


@final
class StreamingMean:
    """The sum, the count and the mean of what all ranks saw, each sample once.

    Rows that complete the last batch of a loader are left out, by the account that the running loader gives of the
    batch in hand. Sums are kept in float64 on the device (float32 where it has none), and ranks talk only when asked.

        loss = accelerator.streaming_mean()
        for batch in evaluation_loader:
            loss.update(per_sample_losses)
        print(loss.mean())
    """

    def __init__(self, mesh: Mesh, clock: GradientState) -> None:
        self._mesh, self._clock = mesh, clock
        self.reset()

    def reset(self) -> None:
        """Nothing has been seen."""
        try:
            self._kept = torch.zeros(2, dtype=torch.float64, device=self._mesh.world.device)
        except (TypeError, RuntimeError):  # a device without float64
            self._kept = torch.zeros(2, device=self._mesh.world.device)

    def update(self, values: Any, weight: Any = None) -> None:
        """The samples of the batch in hand are in.

        Args:
            values: one number per sample, or several (all samples equally many): shape ``[samples, ...]``; or, with
                ``weight``, a sum over the batch: a number, or a tensor of one element.
            weight: how many items such a sum is over (tokens, for example). Only what is real may be in it: rows that
                complete a batch can't be taken out of a sum (``real_rows`` of the loader says how many are real).
        """
        values = torch.as_tensor(values, device=self._kept.device).detach()
        if weight is not None:
            total, count = values.sum(dtype=self._kept.dtype), weight
        else:
            values = self._real(values)
            # Ranks that share the work on a sample all speak for it.
            speakers = self._mesh.size("cp", "sp")
            total, count = values.sum(dtype=self._kept.dtype) / speakers, values.numel() / speakers
        self._kept[0] += total
        self._kept[1] += count

    def _real(self, values: torch.Tensor) -> torch.Tensor:
        if values.ndim == 0:
            raise PreparationError(
                "StreamingMean.update() was given a single number. Give one value per sample, so that rows that "
                "complete a batch can be left out; or the sum over the batch, with weight=."
            )
        loader = self._clock.active_dataloader
        own = None if loader is None else loader.own_rows
        if own is None or own[0] == own[1] or values.shape[0] % own[1]:
            return values
        real, size = own
        return values[: real * (values.shape[0] // size)]

    def sum_and_count(self) -> tuple[float, float]:
        """The sum and the count over all ranks, on every rank; a collective."""
        total, count = reduce(self._kept, "sum", world=self._mesh.within(*TOKEN_AXES)).tolist()
        return total, count

    def sum(self) -> float:
        """The sum over all ranks, on every rank; a collective."""
        return self.sum_and_count()[0]

    def mean(self) -> float:
        """The mean over all ranks, on every rank, NaN before any sample; a collective."""
        total, count = self.sum_and_count()
        return total / count if count else float("nan")
