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
from accelerate.utils import set_seed


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


def orders(
    folder: Path, saved_after: tuple[int, int] | None, resumes: bool, generator: bool, **options: Any
) -> list[Any]:
    """Read three shuffled epochs, drawing numbers in between; save after an epoch or a batch of it, and end."""
    accelerator = Accelerator(cpu=True)
    set_seed(2)
    own = torch.Generator().manual_seed(3) if generator else None
    loader: Any = DataLoader(torch.arange(10), 3, shuffle=True, generator=own, **options)
    loader = accelerator.prepare(loader)
    if resumes:
        accelerator.load_state(str(folder))
    found = []
    for epoch in range(loader.iteration, 3):
        for number, batch in enumerate(loader):
            found.append(batch.tolist())
            torch.rand(3)
            if (epoch, number) == saved_after:
                accelerator.save_state(str(folder))
                return found
        if (epoch, -1) == saved_after:
            accelerator.save_state(str(folder))
            return found
    return found


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("saved_after", [(0, -1), (1, -1), (0, 1), (0, 3), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}],
    ids=["no workers", "workers", "persistent workers"],
)
def test_the_order_goes_on_wherever_it_was_saved(
    tmp_path: Path, options: dict[str, Any], saved_after: tuple[int, int], generator: bool
) -> None:
    whole = orders(tmp_path, None, False, generator, **options)
    begun = orders(tmp_path, saved_after, False, generator, **options)
    assert begun + orders(tmp_path, None, True, generator, **options) == whole
