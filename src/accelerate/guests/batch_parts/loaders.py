"""The division of a loader's batches into the parts of updates, for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset

from ...data_loader.loader import PreparedLoader
from ...data_loader.sampling import (
    BatchCoverage,
    BatchInfo,
    RemainingBatches,
    SkipBatchSampler,
    num_samples_of,
    unskipped,
)
from ...data_loader.sharding import BatchSamplerShard, mark_last, padded_step
from ...errors import PreparationError
from .exchange import Division


@final
class PartsShard(BatchSamplerShard):
    """This rank's parts of ``batch_sampler``, whose batches P * u to P * u + P - 1 are the parts of update u.

    In training a rank computes consecutive parts. In evaluation all ranks together compute consecutive parts in each
    step, so that gathered rows come in the order of the samples. An incomplete last update is padded to P parts with
    samples from the beginning of the epoch, as P ranks would do.

    Args:
        is_training: returns whether the pass that begins trains a model.
    """

    def __init__(self, batch_sampler: Iterable[object], division: Division, is_training: Callable[[], bool]) -> None:
        super().__init__(batch_sampler, division.num_ranks, division.rank)
        self.division = division
        self._is_training = is_training
        self.trains: bool = True  # whether the pass that runs trains a model

    @property
    def num_first_batches(self) -> int:
        """The number of the epoch's first batches that pad the last update."""
        return self.division.count

    def __len__(self) -> int:
        updates, rest = divmod(len(self.batch_sampler), self.division.count)
        return (updates + bool(rest and not self.drop_last)) * self.division.per_rank

    def part_of(self, step: int, rank: int | None = None) -> int:
        """Return the number of the part that ``rank`` (default: this one) computes in ``step``, counted from 0."""
        place, rank = step % self.division.per_rank, self.division.rank if rank is None else rank
        if self.trains:
            return rank * self.division.per_rank + place
        return place * self.division.num_ranks + rank

    def number_of(self, step: int) -> int:
        """Return the number in the epoch of the part that this rank computes in ``step``."""
        return step // self.division.per_rank * self.division.count + self.part_of(step)

    def first_sample(self, samples: int, batch_info: BatchInfo) -> tuple[int, int]:
        """Return the number in the epoch of this rank's part, whose samples are read with one seed."""
        return self.number_of(batch_info.steps - 1), 0

    def assign(self, remaining: RemainingBatches) -> Iterator[BatchInfo]:
        """Yield the infos of this process's batches from the remaining batches of a batch sampler."""
        self.trains = self._is_training()
        return mark_last(self._assign_updates(remaining))

    def _assign_updates(self, remaining: RemainingBatches) -> Iterator[BatchInfo]:
        position, count, ranks = remaining.position, self.division.count, self.num_processes
        batches, samples = position.batches, position.samples
        upcoming = iter(remaining.batches)
        parts = list(islice(upcoming, count))
        updates, rest = divmod(batches, count)
        if rest and parts:
            raise PreparationError(
                f"The loop would begin at batch {position.steps} of the epoch, inside an update: with batch_parts="
                f"{count} on {ranks} processes an update has {self.division.per_rank} batches of each. Skip, or save "
                "after, a multiple of that."
            )
        steps = updates * self.division.per_rank
        while parts:
            following = list(islice(upcoming, count))
            sizes = [num_samples_of(part) for part in parts]
            is_short = not following and (len(parts) < count or (self.batch_size not in (None, sizes[-1])))
            if is_short and self.drop_last:
                return
            shown: Sequence[Sequence[object]] = parts
            if is_short:
                shown = padded_step(parts, remaining.first_batches, count, self.batch_size)
                sizes += [0] * (count - len(sizes))
            for _ in range(self.division.per_rank):
                numbers = [self.part_of(steps, rank) for rank in range(ranks)]
                coverage = BatchCoverage(
                    tuple(sizes[number] for number in numbers),
                    tuple(num_samples_of(shown[number]) for number in numbers),
                )
                steps += 1
                batches += sum(number < len(parts) for number in numbers)
                samples += coverage.num_samples
                yield BatchInfo(shown[numbers[self.process_index]], coverage, False, steps, batches, samples, parts[-1])
            parts = following


def parts_of(loader: PreparedLoader) -> PartsShard | None:
    """Return what divides the batches of ``loader`` into parts; None if nothing does."""
    root, _ = unskipped(loader.index_sampler)
    return root if isinstance(root, PartsShard) else None


def divide(loader: PreparedLoader, division: Division, is_training: Callable[[], bool]) -> None:
    """Let ``loader`` read the parts of this rank.

    Raises:
        PreparationError: its batches aren't drawn by index.
    """
    reason = ""
    if isinstance(loader.dataset, IterableDataset):
        reason = "an iterable dataset, whose batches have no numbers"
    elif loader.batch_sampler is None:
        reason = "batch_size=None"
    elif loader.planned_batches is not None:
        reason = "batches planned by token_budget for the number of ranks"
    elif loader.presharded_size > 1:
        reason = "a sampler that divides the data between ranks already"
    if reason:
        raise PreparationError(
            f"batch_parts={division.count} with a loader that has {reason}: which batches make an update has to be the "
            "same for any number of ranks. Give a map-style dataset with a plain sampler, or leave batch_parts out."
        )
    root, num_skipped = unskipped(loader.index_sampler)
    batches = root.batch_sampler if isinstance(root, BatchSamplerShard) else root
    shard: Any = PartsShard(batches, division, is_training)
    loader.show(batch_sampler=SkipBatchSampler(shard, num_skipped) if num_skipped else shard)
