"""An order that is computed: each sample once, another order every epoch, any place at once, and no memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelerate.data_loader import BatchSamplerShard, IndexFreeSampler, prepare_data_loader
from accelerate.data_loader.sampling import SMALLEST_NETWORK, Permutation, ResumePosition
from accelerate.utils import DataLoaderConfiguration

BILLION = 10**9


class Endless:
    """A dataset whose samples are their numbers."""

    def __init__(self, size: int = BILLION) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000, SMALLEST_NETWORK - 1, SMALLEST_NETWORK, 65537, 100_003, 1 << 17])
def test_each_number_comes_once(size: int) -> None:
    found = Permutation(size, 5).at(torch.arange(size))
    assert torch.equal(found.sort().values, torch.arange(size))


@settings(max_examples=30, deadline=None)
@given(st.integers(SMALLEST_NETWORK, 300_000), st.integers(), st.data())
def test_any_part_is_the_part_of_the_whole(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, min(start + 500, size)))
    order = Permutation(size, seed)
    assert torch.equal(order.at(torch.arange(start, stop)), order.at(torch.arange(size))[start:stop])


def test_orders_look_random() -> None:
    places = torch.arange(1 << 17, dtype=torch.float64)
    orders = [Permutation(1 << 17, seed).at(torch.arange(1 << 17)).double() for seed in range(4)]
    for number, order in enumerate(orders):
        assert abs(torch.corrcoef(torch.stack([places, order]))[0, 1]) < 0.02
        steps = order.diff()  # neighbours aren't neighbours
        assert abs(torch.corrcoef(torch.stack([steps[1:], steps[:-1]]))[0, 1] + 0.5) < 0.02
        for other in orders[:number]:
            assert abs(torch.corrcoef(torch.stack([other, order]))[0, 1]) < 0.02
    # Every quarter of the order holds about a quarter of every sixteenth of the numbers.
    counts = torch.stack([torch.histc(part, 16, 0, 1 << 17) for part in orders[0].chunk(4)])
    assert (counts - 2048).abs().max() < 220


def test_epochs_have_orders_of_their_own_and_a_seed_has_its_order() -> None:
    sampler, again = IndexFreeSampler(range(100_000), 3), IndexFreeSampler(range(100_000), 3)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert list(again) == first
    again.set_epoch(1)
    assert list(again) == second


def test_a_billion_samples_are_sharded_and_resumed_anywhere_in_little_memory_and_time() -> None:
    sampler = torch.utils.data.BatchSampler(IndexFreeSampler(Endless(), 1), 32, False)
    shard = BatchSamplerShard(sampler, 8, 3)
    next(iter(shard.draw(ResumePosition())))
    tracemalloc.start()
    start = time.process_time()
    batches = shard.draw(ResumePosition(3_000_000, 24_000_000, 768_000_000))
    for _ in range(1000):
        next(batches)
    assert tracemalloc.get_traced_memory()[1] < 10e6  # what Python holds; tensors hold a chunk of 4096 numbers
    assert time.process_time() - start < 20
    tracemalloc.stop()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_prepared_loader_continues_in_the_middle_of_a_billion(num_workers: int) -> None:
    def loader() -> object:
        source = DataLoader(Endless(), batch_size=4, shuffle=True, num_workers=num_workers)
        return prepare_data_loader(source, index_free_shuffle=True, data_seed=7)

    running = loader()
    batches = iter(running)
    for _ in range(3):
        next(batches)
    state = running.state_dict()
    continued = loader()
    continued.load_state_dict(state)
    resumed = iter(continued)
    assert [next(resumed).tolist() for _ in range(5)] == [next(batches).tolist() for _ in range(5)]


def test_the_option_leaves_other_samplers_alone() -> None:
    in_order = prepare_data_loader(DataLoader(range(9), batch_size=3), index_free_shuffle=True)
    assert [batch.tolist() for batch in in_order] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    shuffled = prepare_data_loader(DataLoader(range(9), batch_size=3, shuffle=True), index_free_shuffle=True)
    assert isinstance(shuffled.get_sampler(), IndexFreeSampler)
    assert DataLoaderConfiguration(index_free_shuffle=True).index_free_shuffle
