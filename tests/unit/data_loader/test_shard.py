"""The sharding rules, compared with an oracle that builds all ranks' batches at once, without the package's code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.data_loader.sampling import BEGINNING
from accelerate.errors import PreparationError

SHARES = range(1, 9)
SIZES = range(61)


def batch_sampler(size: int, batch: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(size)), batch, drop_last)


def groups_of(size: int, batch: int, drop_last: bool) -> list[list[int]]:
    groups = [list(range(start, min(start + batch, size))) for start in range(0, size, batch)]
    return [group for group in groups if not drop_last or len(group) == batch]


def cycle_from_start(samples: list[int]):
    return itertools.cycle(samples)


def oracle(size: int, batch: int, count: int, drop_last: bool, split: bool, even: bool) -> list[list[list[int]]]:
    """What each share gets, by the documented rules; completion samples are negative: -1 - sample."""
    groups = groups_of(size, batch, drop_last)
    assigned: list[list[list[int]]] = [[] for _ in range(count)]
    if split:
        part = batch // count
        for group in groups:
            if len(group) < batch and even:
                filler = cycle_from_start(groups[0])
                group = group + [-1 - next(filler) for _ in range(batch - len(group))]
            for share in range(count):
                piece = group[share * part : (share + 1) * part]
                if piece:
                    assigned[share].append(piece)
        return assigned
    beginning = [sample for group in groups[:count] for sample in group]
    while groups:
        step_batches, groups = groups[:count], groups[count:]
        is_whole = len(step_batches) == count and len(step_batches[-1]) == batch
        if not is_whole and drop_last:
            continue
        if not is_whole and even:
            filler = cycle_from_start(beginning)
            step_batches = step_batches + [[] for _ in range(count - len(step_batches))]
            step_batches = [group + [-1 - next(filler) for _ in range(batch - len(group))] for group in step_batches]
        for share, group in enumerate(step_batches):
            assigned[share].append(group)
    return assigned


def actual(size: int, batch: int, count: int, drop_last: bool, split: bool, even: bool) -> list[list[list[int]]]:
    """What the shards give, in the oracle's notation: padding rows, by the coverage, are negative."""
    assigned = []
    for share in range(count):
        shard = BatchSamplerShard(batch_sampler(size, batch, drop_last), count, share, split, even)
        batch_infos = list(shard.draw(BEGINNING))
        assert [one.indices for one in batch_infos] == list(shard)
        assert [one.is_last for one in batch_infos] == [False] * (len(batch_infos) - 1) + [True] * bool(batch_infos)
        rows = []
        for one in batch_infos:
            assert one.coverage.size[share] == len(one.indices)
            real = one.coverage.valid[share]
            rows.append(one.indices[:real] + [-1 - sample for sample in one.indices[real:]])
        assigned.append(rows)
    return assigned


@pytest.mark.parametrize("count", SHARES)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [True, False])
def test_batches_are_sharded_by_the_rules(count: int, drop_last: bool, even: bool) -> None:
    for size in SIZES:
        for batch in (1, 2, 4, 5):
            case = (size, batch, count, drop_last, False, even)
            assert actual(*case) == oracle(*case), case


@pytest.mark.parametrize("count", SHARES)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [True, False])
def test_batches_are_split_by_the_rules(count: int, drop_last: bool, even: bool) -> None:
    for size in SIZES:
        for parts in (1, 2):
            case = (size, parts * count, count, drop_last, True, even)
            assert actual(*case) == oracle(*case), case


@pytest.mark.parametrize("count", SHARES)
@pytest.mark.parametrize("split", [False, True])
def test_the_coverage_is_the_same_on_all_ranks_and_true(count: int, split: bool) -> None:
    for size, batch, even in itertools.product(SIZES, (count, 2 * count), (True, False)):
        shards = [BatchSamplerShard(batch_sampler(size, batch, False), count, r, split, even) for r in range(count)]
        global_batches: dict[int, set] = {}
        for shard in shards:
            for one in shard.draw(BEGINNING):
                global_batches.setdefault(one.steps, set()).add((one.coverage, one.batches, one.samples))
        assert all(len(coverages) == 1 for coverages in global_batches.values())
        assert sum(next(iter(coverages))[0].num_samples for coverages in global_batches.values()) == size


@pytest.mark.parametrize("count", SHARES)
def test_length_is_the_number_of_batches_where_it_is_promised(count: int) -> None:
    for size, batch, drop_last, even in itertools.product(SIZES, (1, 3, 4), (False, True), (True, False)):
        for share in range(count):
            shard = BatchSamplerShard(batch_sampler(size, batch, drop_last), count, share, False, even)
            assert len(shard) == len(list(shard)), (size, batch, drop_last, even, share)


# -- measured values of the documentation ------------------------------------------------------------------


def test_the_documented_examples_hold() -> None:
    def assigned(size: int, split: bool = False, even: bool = True) -> list[list[list[int]]]:
        return [list(BatchSamplerShard(batch_sampler(size, 4, False), 2, share, split, even)) for share in range(2)]

    assert assigned(11) == [[[0, 1, 2, 3], [8, 9, 10, 0]], [[4, 5, 6, 7], [1, 2, 3, 4]]]
    assert assigned(3) == [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]
    assert assigned(11, even=False) == [[[0, 1, 2, 3], [8, 9, 10]], [[4, 5, 6, 7]]]
    assert assigned(3, even=False) == [[[0, 1, 2]], []]
    assert assigned(11, split=True) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]
    assert assigned(11, split=True, even=False)[1][-1] == [10]


# -- batch samplers of the user's --------------------------------------------------------------------------


class Groups:
    def __init__(self, groups: list[list[int]], **attributes: object) -> None:
        self.groups = groups
        self.__dict__.update(attributes)

    def __iter__(self):
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


def test_batches_without_a_common_size_are_followed_by_copies_of_the_first_ones() -> None:
    groups = [[10 * i + j for j in range(i + 1)] for i in range(5)]
    assigned = [list(BatchSamplerShard(Groups(groups), 4, share).draw(BEGINNING)) for share in range(4)]
    assert [[one.indices for one in batch_infos] for batch_infos in assigned] == [
        [groups[0], groups[4]],
        [groups[1], groups[0]],
        [groups[2], groups[1]],
        [groups[3], groups[2]],
    ]
    assert assigned[0][1].coverage.valid == (5, 0, 0, 0)
    assert assigned[0][1].coverage.size == (5, 1, 2, 3)


def test_a_short_batch_in_the_middle_loses_no_sample() -> None:
    groups = [[0, 1], [2], [3, 4], [5, 6]]
    assigned = [list(BatchSamplerShard(Groups(groups, batch_size=2), 2, share)) for share in range(2)]
    assert assigned == [[[0, 1], [3, 4]], [[2], [5, 6]]]


def test_counts_and_completion_can_be_changed_between_passes() -> None:
    shard = BatchSamplerShard(batch_sampler(5, 2, False), 2, 1)
    assert list(shard) == [[2, 3], [1, 2]]
    shard.even_batches = False
    assert list(shard) == [[2, 3]]
    shard.num_processes, shard.process_index = 1, 0
    assert list(shard) == [[0, 1], [2, 3], [4]]
    assert shard.total_length == 3


@pytest.mark.parametrize("inner", [Groups([[0, 1]]), batch_sampler(9, 3, False)])
def test_batches_that_cant_be_cut_are_refused(inner: object) -> None:
    with pytest.raises(PreparationError, match="split_batches=True"):
        BatchSamplerShard(inner, 2, 0, split_batches=True)


# -- streams -----------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("count", SHARES)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_streams_are_sharded_by_the_rules(count: int, drop_last: bool, split: bool) -> None:
    for size in SIZES:
        for part in (1, 3):
            batch = part * count if split else part
            total = part * count
            global_batches = [list(range(start, min(start + total, size))) for start in range(0, size, total)]
            expected: list[list[int]] = [[] for _ in range(count)]
            for samples in global_batches:
                if len(samples) < total:
                    if drop_last:
                        continue
                    filler = itertools.cycle(global_batches[0])
                    samples = samples + [next(filler) for _ in range(total - len(samples))]
                for share in range(count):
                    expected[share] += samples[share * part : (share + 1) * part]
            shards = [IterableDatasetShard(Stream(size), batch, drop_last, count, r, split) for r in range(count)]
            assert [list(shard) for shard in shards] == expected, (size, batch, count)
            if not split:
                assert len(shards[0]) == len(expected[0])


def test_the_last_item_of_a_padded_global_batch_has_its_coverage() -> None:
    shard = IterableDatasetShard(Stream(5), 2, False, 2, 1)
    *plain, last = shard.draw([])
    assert plain == [2, 3, 1]
    assert (last.item, last.coverage.valid, last.coverage.size) == (2, (1, 0), (2, 2))


def test_a_generator_of_the_stream_is_seeded_by_the_epoch() -> None:
    class Shuffled(IterableDataset):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(6, generator=self.generator).tolist())

    orders = []
    for epoch in (0, 1, 0):
        shard = IterableDatasetShard(Shuffled(), 3, False, 2, 0)
        shard.set_epoch(epoch)
        orders.append(list(shard))
    assert orders[0] == orders[2] != orders[1]


def test_a_short_batch_in_the_middle_is_cut_into_shares_too() -> None:
    class Bucketed:
        """Batches by length, of which any may be short."""

        batch_size, drop_last = 4, False

        def __iter__(self):
            return iter([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10]])

        def __len__(self) -> int:
            return 3

    first, second = (list(BatchSamplerShard(Bucketed(), 2, rank, split_batches=True)) for rank in range(2))  # type: ignore[arg-type]
    assert first == [[0, 1], [4, 5], [7, 8]]
    assert second == [[2, 3], [6, 0], [9, 10]]
