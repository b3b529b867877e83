"""A batch sampler with equal numbers of tokens per batch, which can resume at any position.

The batches of an epoch depend only on the order, the lengths and the plan, so every rank computes the same ones. A
saved position has the plan with which the epoch began.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ..distributed.random import capture_host_streams, host_streams
from ..errors import PreparationError, ResumeWarning
from .random_streams import derived_seed
from .sampling import (
    BEGINNING,
    UNKNOWN,
    KnownOrder,
    Permutation,
    PositionedBatchSampler,
    RemainingBatches,
    ResumePosition,
    known_order,
    order_fingerprint,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A function from a sample to its length, the lengths of all samples, or the name of the dataset's column with them.
LengthOf = Callable[[Any], int] | Sized | str

#: How many windows are planned to estimate the number of batches; without shuffling, up to how many are counted.
_NUM_ESTIMATED: Final = 2
_NUM_COUNTED: Final = 64


@final
class TokenBatchSampler(PositionedBatchSampler):
    """A sampler of batches with about the same number of tokens, at most ``token_budget``.

    Each sample of ``sampler`` comes once, in another order: within windows of some thousand samples, samples that fill
    a batch are combined. ``len`` is an estimate; an epoch may have a percent more or fewer batches.

    Args:
        sampler: the order of the samples' indices.
        lengths: the number of tokens of each sample, by index. An empty sample counts as one token.
        token_budget: the maximum number of tokens in a batch.
        packed: the samples of a batch are concatenated, so their lengths add up; otherwise they are padded, and the
            tokens of a batch are the longest length times the number of samples.

    Raises:
        PreparationError: a sample is longer than the budget, or the lengths aren't whole numbers.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self, sampler: Iterable[int], lengths: Sized, token_budget: int, packed: bool = False
    ) -> None:
        self.sampler: Any = sampler
        self.lengths: NDArray[np.int64] = _checked(lengths, token_budget)
        self.plan: TokenPlan = TokenPlan(token_budget, packed, 1)
        self.batch_size: Any = None
        self.drop_last: bool = False
        self._saved_plan: TokenPlan | None = None  # of the resumed epoch

    @property
    def mean_batch_size(self) -> int:
        """The number of samples of mean length that fill a batch."""
        return max(round(self.plan.token_budget / self._mean_length), 1)

    def __len__(self) -> int:
        return self._num_batches(len(self.sampler))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.remaining(BEGINNING, 0).batches)

    # -- positions -------------------------------------------------------------------------------------

    def remaining(self, position: ResumePosition, num_first: int) -> RemainingBatches:
        """Return the batches from ``position`` on; planning starts at the window of that position."""
        order, plan = self._order(), self._saved_plan or self.plan
        if self._saved_plan is not None and replace(plan, num_ranks=self.plan.num_ranks) != self.plan:
            warnings.warn(
                f"token_budget={self.plan.token_budget}, packed={self.plan.packed} count from the next epoch on: this "
                f"one continues with token_budget={plan.token_budget}, packed={plan.packed}.",
                ResumeWarning,
                stacklevel=2,
            )
        longest = int(max(self.lengths, default=0)) if self._saved_plan is not None else 0
        if longest > plan.token_budget:
            raise PreparationError(
                f"this epoch began with token_budget={plan.token_budget}, and a sample has {longest} tokens now: the "
                "data are others than those of the checkpoint. Begin a new epoch, or give the data of then."
            )
        # The window of the sample before the position, because the fingerprint is that of its batch.
        window = max(position.samples - 1, 0) // self._window_size(order, plan)
        num_samples, num_batches, last = window * self._window_size(order, plan), 0, None
        batches = self._batches(order, plan, window)
        while num_batches < position.batches if position.samples == UNKNOWN else num_samples < position.samples:
            batch = next(batches, None)
            if batch is None:
                break
            last, num_samples, num_batches = batch, num_samples + len(batch), num_batches + 1

        def to_the_end() -> Iterator[list[int]]:
            try:
                yield from batches
                order.finish()
            finally:
                self._saved_plan = None

        return RemainingBatches(
            to_the_end(),
            lambda: list(islice(self._batches(order, plan, 0), num_first)),
            replace(position, samples=num_samples),
            order_fingerprint(last),
        )

    def for_ranks(self, num_ranks: int) -> TokenBatchSampler:
        """Return a sampler with the same order that plans its batches for ``num_ranks`` ranks."""
        sampler = copy(self)  # the user's own object keeps its plan
        sampler.plan = replace(self.plan, num_ranks=num_ranks)
        return sampler

    def plan_state(self) -> list[int]:
        """Return the plan with which the epoch begins, for a checkpoint."""
        return [self.plan.token_budget, int(self.plan.packed), self.plan.num_ranks]

    def continue_plan(self, state: Sequence[int]) -> None:
        """Use the saved plan ``state`` for the resumed epoch, and this sampler's own plan from the next epoch on."""
        token_budget, packed, num_ranks = state
        self._saved_plan = TokenPlan(token_budget, bool(packed), num_ranks)

    # -- batches ---------------------------------------------------------------------------------------

    def _order(self) -> KnownOrder:
        """Return the order that the sampler begins now; draw all of it if the sampler is unknown."""
        order = known_order(self.sampler)
        if order is not None:
            return order
        indices = torch.tensor(list(self.sampler), dtype=torch.int64, device="cpu")
        return KnownOrder(len(indices), lambda positions: indices[positions], lambda: None)

    def _window_size(self, order: KnownOrder, plan: TokenPlan) -> int:
        return plan.window_size(order.length, self._mean_length)

    @cached_property
    def _mean_length(self) -> float:
        return float(self.lengths.mean()) if len(self.lengths) else 1.0

    def _batches(self, order: KnownOrder, plan: TokenPlan, window: int) -> Iterator[list[int]]:
        size = self._window_size(order, plan)
        for number, start in enumerate(range(window * size, order.length, size), window):
            indices = order.at(torch.arange(start, min(start + size, order.length), device="cpu")).numpy()
            # The seed is the same on every rank, and differs in every shuffled epoch.
            seed = derived_seed(int(indices[0]), int(indices[-1]), number)
            for positions in plan.batches(self.lengths[indices], seed):
                yield cast("list[int]", indices[positions].tolist())

    def _num_batches(self, num_samples: int) -> int:
        """Estimate the number of batches of ``num_samples`` samples, from windows of the order or of a shuffled one."""
        key = (num_samples, self.plan)
        if self._estimate is None or self._estimate[0] != key:
            self._estimate = (key, self._estimated(num_samples))
        return self._estimate[1]

    _estimate: tuple[object, int] | None = None

    def _estimated(self, num_samples: int) -> int:
        size, num_lengths = self.plan.window_size(num_samples, self._mean_length), len(self.lengths)
        num_windows = -(-num_samples // size)
        is_known = type(self.sampler) is SequentialSampler and num_windows <= _NUM_COUNTED
        shuffled = None if is_known else Permutation(num_lengths, 0)
        num_planned = num_windows if is_known else min(num_windows, _NUM_ESTIMATED)
        planned = 0
        for start in range(0, num_planned * size, size):
            indices = torch.arange(start, min(start + size, num_samples), device="cpu")
            if shuffled is not None:
                indices = shuffled.at(indices % num_lengths)
            planned += len(self.plan.batches(self.lengths[indices.numpy()], 0))
        return math.ceil(planned * num_samples / max(min(num_planned * size, num_samples), 1))


def with_token_budget(
    dataloader: DataLoader[object],
    sampler: Iterable[object] | None,
    token_budget: int,
    length_of: LengthOf | None,
    packed: bool,
) -> TokenBatchSampler:
    """Return a token batch sampler with the order of the loader, or of the batch sampler ``sampler``.

    Raises:
        PreparationError: the loader has its own batches, or the lengths don't fit the dataset or the budget.
    """
    dataset, batch_sampler = (
        dataloader.dataset,
        cast("Any", sampler if sampler is not None else dataloader.batch_sampler),
    )
    advice = (
        "For one loader of several, give that one a batch sampler instead: DataLoader(dataset, batch_sampler="
        "TokenBatchSampler(sampler, lengths, token_budget)), from accelerate.data_loader."
    )
    asked = f"DataLoaderConfiguration(token_budget={token_budget})"
    if isinstance(dataset, IterableDataset):
        raise PreparationError(
            f"{asked} makes batches of a known number of tokens, but {type(dataset).__name__} is a stream: the "
            f"length of its next sample is unknown. {advice}"
        )
    if type(batch_sampler) is not BatchSampler:
        made_by = "doesn't batch (batch_size=None)" if batch_sampler is None else f"has {type(batch_sampler).__name__}"
        raise PreparationError(f"{asked} makes the batches, but this loader {made_by}. {advice}")
    if length_of is None:
        raise PreparationError(
            f"{asked} needs length_of: a function of a sample, all lengths, or the name of a column."
        )
    lengths = lengths_of(dataset, length_of)
    made = TokenBatchSampler(batch_sampler.sampler, lengths, token_budget, packed)
    made.drop_last = batch_sampler.drop_last
    return made


def lengths_of(dataset: object, length_of: LengthOf) -> Sized:
    """Return the number of tokens of every sample of ``dataset``.

    Raises:
        PreparationError: the number of lengths differs from that of samples, or there is no such column.
    """
    num_samples = len(cast("Sized", dataset))
    if isinstance(length_of, str):
        try:
            found: Any = cast("Any", dataset)[length_of]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise PreparationError(
                f"length_of={length_of!r} is the name of a column of lengths, but {type(dataset).__name__} has none "
                f"({type(error).__name__}: {error}). Give the lengths themselves, or a function of a sample."
            ) from error
    elif callable(length_of):
        with host_streams(capture_host_streams()):  # measuring samples leaves the random streams unchanged
            found = [length_of(cast("Any", dataset)[index]) for index in range(num_samples)]
    else:
        found = length_of
    if len(found) != num_samples:
        raise PreparationError(
            f"length_of gives {len(found):,} lengths, but {type(dataset).__name__} has {num_samples:,} samples. Give "
            "one length for each sample, by its index; a function of a sample serves several datasets."
        )
    return found


def _checked(lengths: Sized, token_budget: int) -> NDArray[np.int64]:
    """Return the lengths as an array, at least 1 each; raise PreparationError for any outside 0 to the budget."""
    found = np.asarray(lengths.numpy(force=True) if isinstance(lengths, torch.Tensor) else lengths)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise PreparationError(
            f"The lengths of samples are whole numbers, one for each; these are {found.dtype} of shape {found.shape}."
        )
    if not found.size:
        return found.astype(np.int64)
    if (shortest := int(found.min())) < 0:
        raise PreparationError(
            f"Sample {int(found.argmin())} has a length of {shortest}; give the number of its tokens."
        )
    if (longest := int(found.max())) > token_budget:
        too_long = int((found > token_budget).sum())
        raise PreparationError(
            f"Sample {int(found.argmax())} has {longest:,} tokens, more than token_budget={token_budget:,} lets a "
            f"batch hold ({too_long:,} of {len(found):,} samples are too long). Cut or leave out such samples, or "
            "raise the budget."
        )
    return np.maximum(found, 1).astype(np.int64, copy=False) if shortest < 1 else found.astype(np.int64, copy=False)


# --------------------------------------------------------------------------------------------------
# The plan of a window: assign its samples to batches, and the batches to steps
#
# The batches of a window fit the budget and fill it as equally as the lengths allow. The batches of one step have
# similar costs, including the attention over long samples. The steps come in random order.

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
