"""Means that every rank keeps as two numbers: equal to the mean over the bare loader, whatever reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.errors import PreparationError
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(11))


def means(kind: str) -> tuple[float, float, float]:
    config = DataLoaderConfiguration(dispatch_batches="dispatched" in kind, even_batches="uneven" not in kind)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(Stream() if "stream" in kind else range(11), batch_size=2)
    loader = accelerator.prepare_data_loader(loader)
    seen, rows = accelerator.streaming_mean(), accelerator.streaming_mean()
    for samples in loader:
        seen.update(samples)
        rows.update(samples.repeat_interleave(3).float())
    total, count = seen.sum_and_count()
    return total, count, rows.mean()


@pytest.mark.parametrize("kind", ["map", "stream", "dispatched map", "dispatched stream", "uneven map"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_sample_counts_once(kind: str, num_ranks: int) -> None:
    assert run_on_ranks(means, num_ranks, kind) == [(55.0, 11.0, 5.0)] * num_ranks


def test_sums_with_weights_give_the_mean_over_items_and_large_sums_stay_exact() -> None:
    def ragged() -> tuple[float, float]:
        accelerator = Accelerator(cpu=True)
        mean = accelerator.streaming_mean()
        mean.update(torch.tensor(2.0**30), weight=accelerator.process_index + 1)
        mean.update(1.0, weight=torch.tensor(1))
        result = mean.sum(), mean.mean()
        mean.reset()
        assert mean.mean() != mean.mean()  # nothing seen: NaN
        return result

    assert run_on_ranks(ragged, 2) == [(2.0**31 + 2, (2.0**31 + 2) / 5)] * 2


def test_a_skipped_loader_and_a_single_number() -> None:
    def skipped() -> float:
        accelerator = Accelerator(cpu=True)
        loader: Any = skip_first_batches(accelerator.prepare_data_loader(DataLoader(range(11), batch_size=2)), 1)
        mean = accelerator.streaming_mean()
        for samples in loader:
            mean.update(samples)
        with pytest.raises(PreparationError, match="one value per sample"):
            mean.update(torch.tensor(1.0))
        return mean.sum()

    assert run_on_ranks(skipped, 2) == [float(sum(range(4, 11)))] * 2
