"""One rank alone reads a prepared loader whose order is a function of seed and epoch, as programs do for a sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks


def read_alone_between_epochs(options: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """(what this rank is given in each epoch, what the main process reads between them)."""
    # Seeds that differ at first: the ranks agree on rank 0's once, in the first epoch.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=2, shuffle=True))
    epochs, alone = [], []
    for _ in range(3):
        epochs.append([value for batch in loader for value in batch.tolist()])
        if accelerator.is_main_process:
            alone += next(iter(loader)).tolist()
        accelerator.wait_for_everyone()
    return epochs, alone


@pytest.mark.parametrize("option", ["use_seedable_sampler", "index_free_shuffle"])
def test_the_main_process_alone_reads_a_seeded_order(option: str) -> None:
    ranks = run_on_ranks(read_alone_between_epochs, 2, {option: True})
    for epoch in range(3):
        assert sorted(value for epochs, _ in ranks for value in epochs[epoch]) == list(range(12))
    epochs, alone = ranks[0]
    assert alone[:4] == [*epochs[1][:2], *epochs[2][:2]]  # an epoch that was left begins again
    assert epochs[0] != epochs[1] != epochs[2]


def read_alone_inside_a_pass(option: str, num_rounds: int) -> list[int]:
    """What this rank is given in three epochs, while the main process looks at a batch after every ``num_rounds``."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{option: True}))
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=2, shuffle=True))

    def cycle() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    given: list[int] = []
    batches = cycle()
    for number in range(1, 3 * 6 // accelerator.num_processes + 1):
        given += next(batches).tolist()
        if number % num_rounds == 0 and accelerator.is_main_process:
            next(iter(loader))
        accelerator.wait_for_everyone()
    return given


@cache
def undisturbed_epochs(option: str, num_processes: int) -> list[list[int]]:
    return run_on_ranks(read_alone_inside_a_pass, num_processes, option, 1000)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
@pytest.mark.parametrize("option", ["use_seedable_sampler", "index_free_shuffle"])
def test_a_look_at_a_batch_inside_a_pass_leaves_the_epochs_as_they_are(
    option: str, num_rounds: int, num_processes: int
) -> None:
    undisturbed = undisturbed_epochs(option, num_processes)
    assert run_on_ranks(read_alone_inside_a_pass, num_processes, option, num_rounds) == undisturbed
    share = 12 // num_processes
    for epoch in range(3):
        seen = [value for given in undisturbed for value in given[epoch * share : (epoch + 1) * share]]
        assert sorted(seen) == list(range(12))


def epochs_left_early(num_batches: int) -> list[list[int]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=2, shuffle=True))
    return [[value for batch in islice(loader, num_batches) for value in batch.tolist()] for _ in range(3)]


@pytest.mark.parametrize("num_batches", [1, 4, 5])
def test_an_epoch_that_was_left_begins_again_wherever_it_was_left(num_batches: int) -> None:
    (epochs,) = run_on_ranks(epochs_left_early, 1, num_batches)
    assert epochs[0] == epochs[1] == epochs[2]
