"""Chains of runs that are killed and go on with other numbers of ranks are the undisturbed run, update by update.

A script that keeps its global batch (it gives the accumulation steps for the ranks that it has) trains in float64. Per
update, the sample numbers, the mean loss, the clipped norm and the learning rate are compared, and at the end the
weights. A few chains in every test run; ``RUN_SLOW=1 pytest tests/oracle/test_chains.py`` makes many more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, and not in every forked rank
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from accelerate import Accelerator
from accelerate.errors import CheckpointNotFound
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.oracle.test_resume import Lazy, Noted, Shuffled, Stateful
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

SIZE = 61
BATCH = 2  # per rank
MICRO_BATCHES = 12  # of all ranks, in one update
EPOCHS = 2
UPDATES = 6  # 24 + 24 + 13 samples, twice


class Rows(Dataset):
    def __init__(self, augment: bool = False) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return row_of(index) + (0.01 * torch.rand(2, dtype=torch.float64) if self.augment else 0) * (index > 0)


class Plain(IterableDataset):
    """A stream without length and state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([row_of(index) for index in range(SIZE)])


class Streamed(IterableDataset):
    """The rows whose numbers another stream gives; its state is that stream's."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers
        if hasattr(numbers, "generator"):
            self.generator = numbers.generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (row_of(int(item[0])) for item in iter(self.numbers))


class StatefulStream(Streamed):
    def state_dict(self) -> dict[str, Any]:
        return self.numbers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers.load_state_dict(state)


def row_of(index: int) -> torch.Tensor:
    """The number of a sample, and what the model sees of it."""
    return torch.tensor([float(index), (index * 37 % SIZE) / SIZE], dtype=torch.float64)


def loader_of(kind: str, num_ranks: int) -> tuple[DataLoader, dict[str, Any]]:
    """A loader, and how it is prepared."""
    base, _, settings = kind.partition(", ")
    chosen: dict[str, Any] = {"dispatch_batches": "dispatched" in settings}
    keep: dict[str, Any] = {"batch_size": BATCH}
    if "split" in settings:
        chosen["split_batches"], keep["batch_size"] = True, BATCH * num_ranks
    if "uneven" in settings:
        chosen["even_batches"] = False
    if "prefetch" in settings:
        chosen["prefetch_to_device"] = 2
    if "workers" in settings:
        keep["num_workers"] = 1 if "stream" in base else 2
    streams = {
        "stream": Plain,
        "shuffled stream": lambda: Streamed(Shuffled(SIZE)),
        "stateful stream": lambda: StatefulStream(Stateful(SIZE)),
        "noted stream": lambda: StatefulStream(Noted(SIZE)),
    }
    if base in streams:
        return DataLoader(streams[base](), **keep), chosen
    rows = Rows(augment=base == "augmented")
    if base == "augmented":
        chosen.update(augment_by_sample=True, use_seedable_sampler=True)
    elif base in ("seedable", "index-free"):
        chosen["use_seedable_sampler" if base == "seedable" else "index_free_shuffle"] = True
    samplers = {
        "sequential": lambda: SequentialSampler(rows),
        "generator": lambda: RandomSampler(rows, generator=torch.Generator().manual_seed(3)),
        "replacement": lambda: RandomSampler(rows, replacement=True, num_samples=SIZE),
        "lazy": lambda: Lazy(SIZE),
    }
    sampler = samplers.get(base, lambda: RandomSampler(rows))()
    if base == "batch sampler":
        cut = BatchSampler(sampler, keep.pop("batch_size"), False)
        return DataLoader(rows, batch_sampler=cut, **keep), chosen
    return DataLoader(rows, sampler=sampler, **keep), chosen


Note = tuple[tuple[int, int], list[int], float, float, float, float]


def train(kind: str, folder: str, stop_after: int | None, save_at: frozenset[int], keep: bool) -> dict[str, Any]:
    """Trains on from the newest checkpoint, until so many updates have been made in all; what was done by this rank."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    steps = MICRO_BATCHES // num_ranks
    loader, chosen = loader_of(kind, num_ranks)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=MICRO_BATCHES if keep else steps,
        scheduler_mode="updates",
        dataloader_config=DataLoaderConfiguration(**chosen),
    )
    set_seed(5)
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    checkpoints = sorted(Path(folder).glob("update_*"), key=lambda path: int(path.name.split("_")[1]))
    updates = 0
    if checkpoints:
        accelerator.load_state(str(checkpoints[-1]), keep_global_batch=keep)
        updates = int(checkpoints[-1].name.split("_")[1])
    elif keep:
        accelerator.gradient_accumulation_steps = steps
    notes: list[tuple[int, list[int], float, float, float, float]] = []
    ids: list[int] = []
    total = weight = 0.0
    while loader.iteration < EPOCHS:
        for rows in loader:
            with accelerator.accumulate(model):
                real = rows[: loader.own_rows[0]]
                loss = (model(real[:, 1:]) - 3 * real[:, 1:]).square().sum()
                accelerator.backward(loss, weight=len(real))
                ids += [int(number) for number in real[:, 0]]
                total, weight = total + loss.item(), weight + len(real)
                norm = 0.0
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates += 1
                notes.append((updates, ids, total, weight, norm, optimizer.param_groups[0]["lr"]))
                ids, total, weight = [], 0.0, 0.0
                if updates in save_at:
                    accelerator.save_state(f"{folder}/update_{updates}")
                if updates == stop_after:
                    return {"notes": notes, "weights": None}
        if -updates in save_at:  # between two epochs
            accelerator.save_state(f"{folder}/update_{updates}")
    return {"notes": notes, "weights": [value.tolist() for value in model.parameters()]}


def together(results: list[dict[str, Any]]) -> dict[int, tuple[list[int], float, float, float]]:
    """By update: the numbers of the samples of all ranks, the mean loss, the norm, the learning rate."""
    found = {}
    for notes in zip(*(result["notes"] for result in results), strict=True):
        (number,) = {note[0] for note in notes}
        ids = sorted(number for note in notes for number in note[1])
        mean = sum(note[2] for note in notes) / sum(note[3] for note in notes)
        assert len({note[4:] for note in notes}) == 1, "the ranks differ"
        found[number] = (ids, mean, notes[0][4], notes[0][5])
    return found


def run(kind: str, num_ranks: int, *arguments: Any) -> tuple[dict[int, Any], Any]:
    results = run_on_ranks(train, num_ranks, kind, *arguments, timeout_seconds=120)
    return together(results), results[0]["weights"]


@cache
def undisturbed(kind: str) -> tuple[dict[int, Any], Any]:
    """The run that nobody kills, of as few processes as the kind allows."""
    return run(kind, fewest_ranks(kind), "", None, frozenset(), False)


def fewest_ranks(kind: str) -> int:
    """Where ranks divide a stream, its generator starts from the epoch; one process leaves it alone."""
    return 2 if kind == "shuffled stream" else 1


def differences(found: dict[int, Any], expected: dict[int, Any]) -> list[str]:
    wrong = []
    for number, (ids, *values) in found.items():
        if number not in expected:
            wrong.append(f"update {number}: there is none")
        elif ids != expected[number][0]:
            wrong.append(f"update {number}: samples {ids}, not {expected[number][0]}")
        elif values != pytest.approx(expected[number][1:], rel=1e-9, abs=1e-12):
            wrong.append(f"update {number}: loss, norm, rate {values}, not {expected[number][1:]}")
    return wrong


MAPS = [
    "sequential",
    "random",
    "generator",
    "seedable",
    "index-free",
    "replacement",
    "lazy",
    "batch sampler",
    "augmented",
]
STREAMS = ["stream", "shuffled stream", "stateful stream", "noted stream"]
KINDS = [
    *MAPS,
    *(f"{kind}, workers" for kind in ("random", "generator", "augmented", "batch sampler")),
    *(f"{kind}, split" for kind in ("random", "stateful stream", "batch sampler")),
    *(f"{kind}, uneven" for kind in ("random", "batch sampler")),
    *(f"{kind}, dispatched" for kind in ("random", "generator", *STREAMS)),
    *(f"{kind}, dispatched and split" for kind in ("random", "noted stream")),
    *STREAMS,
    "stream, workers",
    "random, prefetch and workers",
]
QUICK = ["random", "noted stream, dispatched"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3) if IS_SLOW else range(1))
@pytest.mark.parametrize("kind", KINDS if IS_SLOW else QUICK)
def test_a_chain_of_kills_and_ranks_is_the_undisturbed_run(kind: str, seed: int, tmp_path: Path, cells: Any) -> None:
    chance = random.Random(f"{kind}/{seed}")
    expected, weights = undisturbed(kind)
    assert len(expected) == UPDATES or kind.startswith("lazy")
    compared, said, found_weights, updates = 0, [], None, 0
    keep = chance.random() < 0.3
    while found_weights is None:
        num_ranks = chance.randint(fewest_ranks(kind), 4)
        # Killed some updates later, of which the newest ones were not saved; three times on the average.
        stop_after = chance.randint(updates + 1, updates + 4)
        saves = frozenset(
            chance.choice((1, -1)) * n for n in range(updates + 1, stop_after + 1) if chance.random() < 0.5
        )
        found, found_weights = run(kind, num_ranks, str(tmp_path), stop_after, saves, keep)
        said.append(
            f"{num_ranks} ranks, updates {min(found, default=0)} to {max(found, default=0)}, saved {set(saves)}"
        )
        wrong = differences(found, expected)
        assert not wrong, "\n".join([*said, *wrong])
        compared += len(found)
        updates = max((int(path.name.split("_")[1]) for path in tmp_path.glob("update_*")), default=0)
    assert [value for row in found_weights for value in torch.tensor(row).flatten().tolist()] == pytest.approx(
        [value for row in weights for value in torch.tensor(row).flatten().tolist()], rel=1e-9, abs=1e-12
    ), said
    cells(f"updates of chains, {kind}", compared, compared)


def windows_after(folder: str, steps: int, saved_after: int | None) -> list[int]:
    """Micro-batches of each update, until the end of the epoch or up to the save."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(
        model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(range(36), batch_size=1)
    )
    with suppress(CheckpointNotFound):
        accelerator.load_state(folder)
    windows = [0]
    for number, rows in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows[:, None].float()).mean())
            optimizer.step()
            optimizer.zero_grad()
        windows[-1] += 1
        if accelerator.sync_gradients:
            windows.append(0)
        if number == saved_after:
            accelerator.save_state(folder)
            break
    return windows[:-1]


@pytest.mark.parametrize(
    ("ranks", "steps", "expected"), [(3, 4, [4, 4]), (1, 12, [12, 12]), (2, 6, [6, 6]), (4, 3, [3, 3])]
)
def test_the_window_begins_with_the_update_that_was_due(
    ranks: int, steps: int, expected: list[int], tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    assert run_on_ranks(windows_after, 2, folder, 6, 6) == [[6], [6]]
    assert run_on_ranks(windows_after, ranks, folder, steps, None) == [expected] * ranks
