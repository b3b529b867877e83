"""A resumed run has new workers: those of before, if persistent, had read the iterable dataset already."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.errors import ResumeWarning


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(4.0))


class OfEpoch(Numbers):
    def set_epoch(self, epoch: int) -> None:
        pass


def saved_and_loaded(
    folder: Path, dataset: IterableDataset, *, num_epochs: int, num_more: int, persistent: bool
) -> list[str]:
    """Return the warnings of a run that is resumed after so many epochs and batches."""

    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(dataset, 2, num_workers=1, persistent_workers=persistent)
        return accelerator, accelerator.prepare(loader)

    accelerator, loader = prepared()
    for _ in range(num_epochs):
        list(loader)
    batches = iter(loader)
    for _ in range(num_more):
        next(batches)
    accelerator.save_state(str(folder / "saved"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        accelerator, loader = prepared()
        accelerator.load_state(str(folder / "saved"))
        list(loader)
    return [str(warning.message) for warning in heard if warning.category is ResumeWarning]


@pytest.mark.parametrize("num_more", [0, 1])
@pytest.mark.parametrize("num_epochs", [0, 2])
def test_new_persistent_workers_begin_a_stream_anew(tmp_path: Path, num_epochs: int, num_more: int) -> None:
    heard = saved_and_loaded(tmp_path, Numbers(), num_epochs=num_epochs, num_more=num_more, persistent=True)
    assert len(heard) == (num_epochs > 0)
    assert all(f"persistent workers had read it {num_epochs} time(s)" in text for text in heard)


def test_a_stream_with_epochs_and_workers_of_one_epoch_resume_exactly(tmp_path: Path) -> None:
    assert not saved_and_loaded(tmp_path / "1", OfEpoch(), num_epochs=2, num_more=1, persistent=True)
    assert not saved_and_loaded(tmp_path / "2", Numbers(), num_epochs=2, num_more=1, persistent=False)
