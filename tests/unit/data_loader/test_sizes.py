"""Parts of a global batch with different sizes: together they are the batches of equal parts, from any position on."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.data import BatchSampler, Sampler

from accelerate.data_loader.sampling import BEGINNING, BatchInfo, IndexFreeSampler, ResumePosition, order_fingerprint
from accelerate.data_loader.sharding import BatchSamplerShard


class DealtOut(BatchSampler):
    """Torch's batch sampler under another name, whose order has no random access."""


class Shuffled(Sampler[int]):
    """A sampler without random access."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(3)).tolist())


def shard(
    size: int, sizes: tuple[int, ...], rank: int, kind: type[BatchSampler], *, split: bool, drop_last: bool, equal: bool
) -> BatchSamplerShard:
    per_batch = sum(sizes) if split else sum(sizes) // len(sizes)
    sampler = Shuffled(size) if kind is DealtOut else IndexFreeSampler(range(size), 7)
    made = BatchSamplerShard(kind(sampler, per_batch, drop_last), len(sizes), rank, split)
    made.sizes = () if equal else sizes
    return made


def global_batches(shards: list[BatchSamplerShard], position: ResumePosition) -> list[list[tuple[int, bool]]]:
    """The rows of all ranks in their order, each with whether it is valid."""
    steps = zip(*(one.draw(position) for one in shards), strict=True)
    return [[*rows_of(infos)] for infos in steps]


def rows_of(infos: tuple[BatchInfo, ...]):
    for rank, info in enumerate(infos):
        assert info.coverage is not None and len(info.indices) == info.coverage.size[rank]
        assert info[1:6] == infos[0][1:6] and order_fingerprint(info.last_batch) == order_fingerprint(
            infos[0].last_batch
        )
        yield from ((index, number < info.coverage.valid[rank]) for number, index in enumerate(info.indices))


@pytest.mark.parametrize("kind", [BatchSampler, DealtOut])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 5), (2, 5, 2), (1, 1, 1, 9)])
def test_parts_of_any_sizes_make_the_same_global_batches(
    kind: type[BatchSampler], split: bool, drop_last: bool, sizes: tuple[int, ...]
) -> None:
    num_short = 0
    for size in (1, 11, 12, 13, 25):

        def shards(is_equal: bool, size: int = size) -> list[BatchSamplerShard]:
            ranks = range(len(sizes))
            return [shard(size, sizes, rank, kind, split=split, drop_last=drop_last, equal=is_equal) for rank in ranks]

        expected = global_batches(shards(True), BEGINNING)
        assert global_batches(shards(False), BEGINNING) == expected
        assert [len(one) for one in shards(False)] == [len(expected)] * len(sizes)
        for number, info in enumerate(shards(False)[0].draw(BEGINNING), 1):
            position = ResumePosition(info.steps, info.batches, info.samples)
            assert global_batches(shards(False), position) == expected[number:], (size, number)
        num_short += any(not is_valid for batch in expected for _, is_valid in batch)
        seen = sorted(index for batch in expected for index, is_valid in batch if is_valid)
        assert drop_last or seen == list(range(size))
    assert drop_last or num_short


def test_equal_and_given_sizes_are_the_same_if_they_are_equal() -> None:
    for kind, split in product((BatchSampler, DealtOut), (False, True)):
        equal, given = (
            [shard(13, (4, 4), rank, kind, split=split, drop_last=False, equal=one) for rank in range(2)]
            for one in (True, False)
        )
        assert [list(one.draw(BEGINNING)) for one in equal] == [list(one.draw(BEGINNING)) for one in given]


def test_samples_have_the_numbers_of_the_epoch() -> None:
    """Augmentation by sample doesn't depend on the sizes."""
    shards = [shard(11, (3, 1), rank, BatchSampler, split=False, drop_last=False, equal=False) for rank in range(2)]
    samples, firsts = 0, []
    for infos in zip(*(one.draw(BEGINNING) for one in shards), strict=True):
        firsts.append([one.first_sample(samples, info) for one, info in zip(shards, infos, strict=True)])
        samples = infos[0].samples
    assert firsts == [[(0, 1), (3, 1)], [(4, 1), (7, 1)], [(8, 1), (11, 1)]]
