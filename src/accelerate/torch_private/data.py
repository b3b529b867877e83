"""Of torch.utils.data: whether workers run, how many samples were asked for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from .names import uses


@uses("torch.utils.data.dataloader:._iterator")
def has_running_iterator(loader: DataLoader[Any] | None) -> bool:
    """Whether ``loader`` keeps the iterator of a pass: torch's with the workers of an earlier one, torchdata's too."""
    return getattr(loader, "_iterator", None) is not None


@uses("torch.utils.data.sampler:._num_samples")
def asked_samples(sampler: RandomSampler) -> int | None:
    """The number of samples that ``sampler`` was told to draw; None where it draws all of its data."""
    return sampler._num_samples
