"""Entering an order in the middle gives what going there gives, and leaves the generators where that leaves them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate.data_loader import SeedableRandomSampler
from accelerate.data_loader.order import BEGINNING, Place, SkipBatchSampler, agree, enter, unskipped, witnesses_of

SIZE = 23


def samplers(generator: torch.Generator | None):
    return {
        "sequential": SequentialSampler(range(SIZE)),
        "random": RandomSampler(range(SIZE), generator=generator),
        "longer": RandomSampler(range(SIZE), num_samples=SIZE + 5, generator=generator),
        "shorter": RandomSampler(range(SIZE), num_samples=SIZE - 5, generator=generator),
        "replacement": RandomSampler(range(SIZE), replacement=True, generator=generator),
        "seedable": SeedableRandomSampler(range(SIZE), generator=generator, data_seed=5),
    }


@pytest.mark.parametrize("name", samplers(None))
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_entering_at_a_sample_equals_going_there(name: str, own_generator: bool, drop_last: bool) -> None:
    def begin() -> tuple[BatchSampler, torch.Generator]:
        torch.manual_seed(4)
        generator = torch.Generator().manual_seed(9)
        return BatchSampler(samplers(generator if own_generator else None)[name], 4, drop_last), generator

    batch_sampler, generator = begin()
    whole = list(batch_sampler)
    drawn_after = (torch.rand(()).item(), torch.rand((), generator=generator).item())
    for num_groups in range(1, len(whole) + 1):
        batch_sampler, generator = begin()
        entered = enter(batch_sampler, Place(0, num_groups, 4 * num_groups), num_head=2)
        assert list(entered.groups) == whole[num_groups:]
        assert entered.head == whole[:2]
        assert agree(entered.before, witnesses_of(whole[num_groups - 1])) and entered.before
        assert (torch.rand(()).item(), torch.rand((), generator=generator).item()) == drawn_after


def test_other_batch_samplers_are_entered_at_the_batch() -> None:
    groups = [[0, 1, 2], [3], [4, 5]]
    entered = enter(groups, Place(0, 2, 4), num_head=1)
    assert (list(entered.groups), entered.head) == ([[4, 5]], [[0, 1, 2]])
    assert entered.before == witnesses_of([3])
    assert list(enter(groups, BEGINNING, num_head=2).groups) == groups


def test_witnesses_tell_orders_apart() -> None:
    assert agree(witnesses_of([1, 2, 3]), witnesses_of([9, 2, 3])) is False
    assert agree(witnesses_of([1, 2, 3]), witnesses_of([2, 3]))
    assert agree([], witnesses_of([1]))
    assert witnesses_of(5) == witnesses_of([5])


def test_skips_inside_skips_add_up() -> None:
    inner = [1, 2, 3, 4]
    assert unskipped(SkipBatchSampler(SkipBatchSampler(inner, 1), 2)) == (inner, 3)


def test_the_seedable_sampler_counts_its_passes() -> None:
    sampler = SeedableRandomSampler(range(SIZE), data_seed=0)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2 and first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    half = iter(sampler)
    next(half)
    half.close()
    assert sampler.epoch == 1
