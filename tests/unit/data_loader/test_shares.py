"""The batches of one process out of very many: looked up alone, they are the same as dealt out one by one."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accelerate.data_loader import SeedableRandomSampler
from accelerate.data_loader.sampling import (
    BEGINNING,
    BatchInfo,
    IndexFreeSampler,
    KnownOrder,
    RemainingBatches,
    ResumePosition,
    batches_from,
    order_fingerprint,
    same_order,
)
from accelerate.data_loader.sharding import BatchSamplerShard
from tests.slow import IS_SLOW, slow


class DealtOut(BatchSampler):
    """Torch's batch sampler under another name: its batches are dealt out one by one."""


def sampler_of(name: str, size: int) -> tuple[Sampler[int], torch.Generator]:
    generator = torch.Generator().manual_seed(9)
    match name:
        case "sequential":
            return SequentialSampler(range(size)), generator
        case "random":
            return RandomSampler(range(size), generator=generator), generator
        case "seedable":
            return SeedableRandomSampler(range(size), generator=generator, data_seed=5), generator
        case _:
            return IndexFreeSampler(range(size), 7), generator


def comparable(info: BatchInfo) -> tuple[object, ...]:
    return (*info[:-2], order_fingerprint(info.last_batch))


SIZES = (1, 12, 23, 36) if IS_SLOW else (1, 12, 23)


@pytest.mark.parametrize("name", ["sequential", "random", "seedable", "index-free"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("drop_last", "even"), [(False, True), (False, False), (True, True)])
def test_a_share_is_the_same_found_and_dealt_out(name: str, split: bool, drop_last: bool, even: bool) -> None:
    num_compared = 0
    for size, count, per_batch in product(SIZES, (1, 2, 3), (1, 2, 6)):
        if split and per_batch % count:
            continue

        def shares(kind: type[BatchSampler], rank: int, size: int = size, count: int = count, n: int = per_batch):
            torch.manual_seed(4)
            sampler, generator = sampler_of(name, size)
            return BatchSamplerShard(kind(sampler, n, drop_last), count, rank, split, even), generator

        for rank in range(count):
            dealt, generator = shares(DealtOut, rank)
            expected = [comparable(info) for info in dealt.draw(BEGINNING)]
            drawn_after = torch.rand(3, generator=generator)
            positions = [BEGINNING, *(ResumePosition(*info[3:6]) for info in expected)]  # type: ignore[arg-type]
            for number, position in enumerate(positions):
                found, generator = shares(BatchSampler, rank)
                assert [comparable(info) for info in found.draw(position)] == expected[number:], (size, count, rank)
                assert torch.equal(torch.rand(3, generator=generator), drawn_after)
                num_compared += 1
    assert num_compared > 100


class Positions:
    """Stands for the indices at the positions that were asked for, which nobody needs here."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.num_rows = len(positions)

    def tolist(self) -> list[list[int]]:
        return [[]] * self.num_rows


@pytest.mark.parametrize(
    ("num_samples", "count", "per_rank"),
    [
        (100_003, 257, 3),
        (100_003, 1_000, 120),
        pytest.param(10**9, 16_384, 500, marks=slow),
    ],
)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.timeout(600)
def test_the_shares_of_very_many_ranks_are_disjoint_and_complete(
    num_samples: int, count: int, per_rank: int, split: bool
) -> None:
    # The code that reads is asked; an order that counts instead of answering stands in for the dataset's. As many
    # positions are taken as there are samples, so that one taken twice leaves another one out.
    num_taken, taken = 0, np.zeros(num_samples, dtype=np.uint8)
    for rank in range(count):
        asked: list[torch.Tensor] = []

        def at(positions: torch.Tensor, asked: list[torch.Tensor] = asked) -> Any:
            asked.append(positions)
            return Positions(positions)

        batch_sampler = BatchSampler(SequentialSampler(range(num_samples)), per_rank * (count if split else 1), False)
        order = KnownOrder(num_samples, at, lambda: None)
        share = BatchSamplerShard(batch_sampler, count, rank, split)
        infos = list(share.assign(RemainingBatches(iter(()), list, BEGINNING, order=order)))
        for positions in asked:
            if positions.dim() == 2:  # of whole steps, followed by those that the fingerprint asks for
                taken[positions[:, :per_rank].numpy()] += 1
        assert infos[-1].coverage is not None
        taken[asked[-1][: infos[-1].coverage.valid[rank]].numpy()] += 1
        num_taken += sum(len(one) * per_rank for one in asked if one.dim() == 2) + infos[-1].coverage.valid[rank]
    assert num_taken == num_samples
    assert bool((taken == 1).all())


def test_a_step_looks_up_no_more_for_16384_ranks_than_for_two() -> None:
    def asked_by(count: int) -> list[int]:
        sizes: list[int] = []
        order = KnownOrder(10**9, lambda positions: (sizes.append(positions.numel()), positions)[1], lambda: None)
        share = BatchSamplerShard(BatchSampler(SequentialSampler(range(10**9)), 8, False), count, count - 1)
        list(islice(share.assign(RemainingBatches(iter(()), list, BEGINNING, order=order)), 100))
        return sizes

    assert asked_by(16_384) == asked_by(2)
    assert sum(asked_by(16_384)) <= 4096


def test_a_batch_sampler_that_was_changed_since_is_read_as_it_is() -> None:
    batch_sampler = BatchSampler(SequentialSampler(range(16)), 2, False)
    share = BatchSamplerShard(batch_sampler, 2, 0)
    assert next(iter(share)) == [0, 1]
    batch_sampler.batch_size = 4
    assert next(iter(share)) == [0, 1, 2, 3] and len(list(share)) == len(share) == 2


def test_a_position_beyond_a_shorter_order_is_noticed() -> None:
    batch_sampler = BatchSampler(SequentialSampler(range(10)), 5, False)
    remaining = batches_from(batch_sampler, ResumePosition(5, 10, 50))
    assert remaining.fingerprint == order_fingerprint([5, 6, 7, 8, 9])
    assert not same_order(remaining.fingerprint, order_fingerprint([46, 47, 48, 49]))
