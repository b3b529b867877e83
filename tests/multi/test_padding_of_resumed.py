"""The rows that pad a short last global batch are those of the undisturbed run, whatever the run was resumed after.

They are copies of other samples, and a mean of losses holds them: with random augmentation a copy that is drawn anew is
another row, and every weight after it differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

NUM_ROWS = 7


class Augmented(Dataset[torch.Tensor]):
    """Rows of [number, a random draw]."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Stream(IterableDataset[torch.Tensor]):
    """The same rows one after the other, from the position that its state names."""

    position = 0

    def __iter__(self) -> Any:
        while self.position < NUM_ROWS:
            self.position += 1
            yield torch.stack([torch.tensor(float(self.position - 1)), torch.rand(())])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def rows(kind: str, num_workers: int, options: dict[str, Any], seed: int, folder: str, stop: int | None) -> list[Any]:
    """Read an epoch, and save after batch ``stop``; with None, go on from what was saved."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    set_seed(seed)
    data = Stream() if kind == "stream" else Augmented()
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=kind == "shuffled", num_workers=num_workers))
    found: list[Any] = []
    if stop is None:
        accelerator.load_state(folder)
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == stop:
            accelerator.save_state(folder)
    accelerator.free_memory()
    return found


def compare(kind: str, num_workers: int, options: dict[str, Any], folder: Path) -> list[str]:
    """Name the stops after which the rest of the epoch isn't that of the undisturbed run."""
    different = []
    for stop in range(1, 5):
        undisturbed = rows(kind, num_workers, options, 0, str(folder / str(stop)), stop)
        if stop > len(undisturbed):
            break
        resumed = rows(kind, num_workers, options, 99, str(folder / str(stop)), None)
        if stop < len(undisturbed) and resumed != undisturbed[stop:]:
            different.append(f"after batch {stop}: {undisturbed[stop:]}, resumed {resumed}")
    return different


@pytest.mark.parametrize("num_workers", [0, 2] if IS_SLOW else [0])
@pytest.mark.parametrize("kind", ["sequential", "shuffled", "stream"])
@pytest.mark.parametrize(
    "options",
    [{"dispatch_batches": True}, {"dispatch_batches": True, "split_batches": True}, {"dispatch_batches": False}],
    ids=["dispatched", "dispatched and split", "sharded"],
)
def test_padding_of_a_resumed_epoch_is_that_of_the_undisturbed_one(
    options: dict[str, Any], kind: str, num_workers: int, tmp_path: Path
) -> None:
    for different in run_on_ranks(compare, 2, kind, num_workers, options, tmp_path):
        assert different == []
