"""Checks which samples each process gets, with even and uneven batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.plugins.handlers import DataLoaderConfiguration


class _Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


def _seen(accelerator: Accelerator, dataset_size: int, batch_size: int) -> list[int]:
    dataset = TensorDataset(torch.arange(dataset_size))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=batch_size))
    return [int(sample) for (batch,) in loader for sample in accelerator.gather_for_metrics(batch)]


def test_every_sample_once(accelerator: Accelerator) -> None:
    """Check that with even batches each sample is gathered for metrics exactly once, whatever the sizes."""
    count = accelerator.num_processes
    for dataset_size in (count, 3 * count, 3 * count + 1, 7 * count - 1):
        for batch_size in (1, 2, 3):
            seen = _seen(accelerator, dataset_size, batch_size)
            assert sorted(seen) == list(range(dataset_size)), (dataset_size, batch_size, seen)


def test_equal_number_of_batches(accelerator: Accelerator) -> None:
    """Check that with even batches every process gets as many batches of the same size."""
    dataset = TensorDataset(torch.arange(3 * accelerator.num_processes + 1))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    sizes = torch.tensor([len(batch) for (batch,) in loader], device=accelerator.device)
    everywhere = accelerator.gather(sizes[None])
    assert bool((everywhere == 2).all()), everywhere


def test_iterable_dataset(accelerator: Accelerator) -> None:
    """Check that the samples of an iterable dataset are sharded too, each once."""
    loader = accelerator.prepare(DataLoader(_Stream(5 * accelerator.num_processes), batch_size=2))
    seen = [int(sample) for batch in loader for sample in accelerator.gather_for_metrics(batch)]
    assert sorted(seen) == list(range(5 * accelerator.num_processes)), seen


def main() -> None:
    """Run all checks."""
    for split_batches in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split_batches))
        if not split_batches:  # one batch must be divisible by the processes otherwise
            accelerator.print("each sample exactly once")
            test_every_sample_once(accelerator)
            accelerator.print("as many batches everywhere")
            test_equal_number_of_batches(accelerator)
            accelerator.print("streams")
            test_iterable_dataset(accelerator)
        else:
            accelerator.print("split batches")
            seen = _seen(accelerator, 8 * accelerator.num_processes, 2 * accelerator.num_processes)
            assert sorted(seen) == list(range(8 * accelerator.num_processes)), seen
    accelerator.end_training()


if __name__ == "__main__":
    main()
