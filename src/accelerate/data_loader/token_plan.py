"""Plan batches of equal tokens: assign the samples of a window to batches, and the batches to steps.

The batches of a window fit the budget and fill it as equally as the lengths allow. The batches of one step have similar
costs, including the attention over long samples. The steps come in random order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast, final

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The number of steps in a window, and the minimum number of batches: among many batches, a step finds similar ones.
STEPS_PER_WINDOW: Final = 32
MIN_WINDOW_BATCHES: Final = 1024
#: The batches of a window are grouped by the length of their samples, and within a group by their cost.
NUM_LENGTH_GROUPS: Final = 4
NUM_COST_CLASSES: Final = 50


@final
@dataclass(frozen=True)
class TokenPlan:
    """The rule that, with the order and the lengths of the samples, determines the batches of an epoch."""

    token_budget: int  # maximum number of tokens in a batch
    packed: bool  # the cost of a batch is the sum of its lengths; otherwise the longest one times their number
    num_ranks: int  # batches of one step

    def window_size(self, num_samples: int, mean_length: float) -> int:
        """Return the number of samples per window, for equal windows of an order of ``num_samples``."""
        num_batches = max(STEPS_PER_WINDOW * self.num_ranks, MIN_WINDOW_BATCHES)
        num_windows = max(round(num_samples * mean_length / (num_batches * self.token_budget)), 1)
        return max(-(-num_samples // num_windows), 1)

    def batches(self, lengths: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
        """Return the batches of a window with these ``lengths`` ``[samples]``, as positions in the window.

        Batch ``step * num_ranks + rank`` is for that step and rank. No length may be above the budget.
        """
        batch_of = self._packed(lengths) if self.packed else self._padded(lengths)
        positions = np.argsort(batch_of, kind="stable")
        starts = np.flatnonzero(np.diff(batch_of[positions], prepend=-1))
        parts = np.split(positions, starts[1:])
        return [parts[number] for number in self._arranged(lengths[positions], starts, seed).tolist()]

    def cost(self, lengths: NDArray[np.int64]) -> int:
        """Return the cost in tokens of a batch with these ``lengths``."""
        return int(lengths.sum() if self.packed else lengths.max(initial=0) * len(lengths))

    # -- batches ---------------------------------------------------------------------------------------

    def _whole_steps(self, num_batches: int, num_samples: int) -> int:
        return min(-(-num_batches // self.num_ranks) * self.num_ranks, num_samples)

    def _packed(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the batch of each sample: as few batches as possible, the longest sample first into the emptiest."""
        by_length = np.argsort(-lengths, kind="stable")
        descending, budget = lengths[by_length], self.token_budget
        num_batches = self._whole_steps(-(-int(lengths.sum()) // budget), len(lengths))
        batches, fullest = _into_emptiest(descending, num_batches)
        while fullest > budget:
            more = max(int(num_batches * (fullest / budget - 1) / 4), 1)
            num_batches = self._whole_steps(num_batches + more, len(lengths))
            batches, fullest = _into_emptiest(descending, num_batches)
        batch_of = np.empty_like(batches)
        batch_of[by_length] = batches
        return batch_of

    def _padded(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the batch of each sample: samples of similar length together, to minimise padding."""
        by_length = np.argsort(-lengths, kind="stable")
        descending = cast("list[int]", lengths[by_length].tolist())
        sizes: list[int] = []
        start = 0
        while start < len(descending):
            sizes.append(min(self.token_budget // descending[start], len(descending) - start))
            start += sizes[-1]
        missing = self._whole_steps(len(sizes), len(lengths)) - len(sizes)
        while missing:  # split the batches with the most samples to complete the last step
            largest = sorted(range(len(sizes)), key=sizes.__getitem__)[-missing:]
            for number in sorted((number for number in largest if sizes[number] > 1), reverse=True):
                half = sizes[number] // 2
                sizes[number : number + 1] = [half, sizes[number] - half]
                missing -= 1
        batch_of = np.empty(len(lengths), dtype=np.int64)
        batch_of[by_length] = np.repeat(np.arange(len(sizes)), sizes)
        return batch_of

    # -- steps -----------------------------------------------------------------------------------------

    def _arranged(self, lengths: NDArray[np.int64], starts: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the order of the batches, with those of one step next to each other.

        Args:
            lengths: of all samples, batch by batch.
            starts: where each batch begins.
        """
        costs, squares = np.add.reduceat(lengths, starts), np.add.reduceat(lengths.astype(np.float64) ** 2, starts)
        if not self.packed:
            longest = np.maximum.reduceat(lengths, starts)
            costs = longest * np.diff(starts, append=len(lengths))
            squares = longest.astype(np.float64)
        num_batches = len(starts)
        group = np.empty(num_batches, dtype=np.int64)
        group[np.argsort(squares, kind="stable")] = np.arange(num_batches) * NUM_LENGTH_GROUPS // num_batches
        order = np.lexsort((squares, costs * NUM_COST_CLASSES // self.token_budget, group))
        num_steps = num_batches // self.num_ranks
        shuffled = torch.randperm(num_steps, generator=torch.Generator().manual_seed(seed)).numpy()
        whole, rest = np.split(order, [num_steps * self.num_ranks])
        return np.concatenate([whole.reshape(num_steps, self.num_ranks)[shuffled].ravel(), rest])


def _into_emptiest(descending: NDArray[np.int64], num_batches: int) -> tuple[NDArray[np.int64], int]:
    """Assign each sample to the emptiest batch; return the batch of each sample and the tokens of the fullest batch.

    This is longest-processing-time-first scheduling; samples that can't share a batch are assigned at once.
    """
    loads = np.zeros(num_batches, dtype=np.int64)
    batch_of = np.empty(len(descending), dtype=np.int64)
    start = 0
    while start < len(descending):
        emptiest = np.argsort(loads, kind="stable")
        shortest = descending[min(start + num_batches, len(descending)) - 1]
        # A batch that gets a sample is then fuller than these, so each of them gets one before any gets two.
        num_at_once = int(np.searchsorted(loads[emptiest], loads[emptiest[0]] + shortest))
        stop = min(start + num_at_once, len(descending))
        taken = emptiest[: stop - start]
        batch_of[start:stop] = taken
        loads[taken] += descending[start:stop]
        start = stop
    return batch_of, int(loads.max(initial=0))
