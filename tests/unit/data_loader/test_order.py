"""Entering an order in the middle gives what going there gives, and leaves the generators where that leaves them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate.data_loader import SeedableRandomSampler
from accelerate.data_loader.sampling import (
    BEGINNING,
    ResumePosition,
    SkipBatchSampler,
    batches_from,
    order_fingerprint,
    same_order,
    unskipped,
)

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
def test_resuming_at_a_sample_equals_reading_up_to_it(name: str, own_generator: bool, drop_last: bool) -> None:
    def begin() -> tuple[BatchSampler, torch.Generator]:
        torch.manual_seed(4)
        generator = torch.Generator().manual_seed(9)
        return BatchSampler(samplers(generator if own_generator else None)[name], 4, drop_last), generator

    batch_sampler, generator = begin()
    whole = list(batch_sampler)
    drawn_after = (torch.rand(()).item(), torch.rand((), generator=generator).item())
    for num_batches in range(1, len(whole) + 1):
        batch_sampler, generator = begin()
        remaining = batches_from(batch_sampler, ResumePosition(0, num_batches, 4 * num_batches), num_first=2)
        assert list(remaining.batches) == whole[num_batches:]
        assert remaining.first_batches == whole[:2]
        assert same_order(remaining.fingerprint, order_fingerprint(whole[num_batches - 1])) and remaining.fingerprint
        assert (torch.rand(()).item(), torch.rand((), generator=generator).item()) == drawn_after


def test_other_batch_samplers_are_resumed_at_the_batch() -> None:
    groups = [[0, 1, 2], [3], [4, 5]]
    remaining = batches_from(groups, ResumePosition(0, 2, 4), num_first=1)
    assert (list(remaining.batches), remaining.first_batches) == ([[4, 5]], [[0, 1, 2]])
    assert remaining.fingerprint == order_fingerprint([3])
    assert list(batches_from(groups, BEGINNING, num_first=2).batches) == groups


def test_fingerprints_tell_orders_apart() -> None:
    assert same_order(order_fingerprint([1, 2, 3]), order_fingerprint([9, 2, 3])) is False
    assert same_order(order_fingerprint([1, 2, 3]), order_fingerprint([2, 3]))
    assert same_order([], order_fingerprint([1]))
    assert order_fingerprint(5) == order_fingerprint([5])


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
