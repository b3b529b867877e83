"""A run saved on four ranks goes on with 1, 2, 3 and 8: real processes, every sample of the epoch exactly once."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.errors import CheckpointError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, set_seed
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW, slow

NUM_SAMPLES = 61
SAVED_AFTER = 3


class Notes(logging.Handler):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def objects(steps: int = 1) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    set_seed(11)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(range(NUM_SAMPLES), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def step(accelerator: Any, model: Any, optimizer: Any, samples: torch.Tensor) -> None:
    with accelerator.accumulate(model):
        accelerator.backward((model(samples[:, None] / NUM_SAMPLES) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: str, steps: int = 1) -> tuple[list[int], list[Any]]:
    """Trains a little, saves in mid-epoch; the real samples of this rank, and the optimizer's state."""
    accelerator, model, optimizer, loader = objects(steps)
    seen: list[int] = []
    for number, samples in enumerate(loader, 1):
        step(accelerator, model, optimizer, samples)
        seen += samples[: loader.coverage.valid[accelerator.process_index]].tolist()
        if number == SAVED_AFTER * steps:
            accelerator.save_state(folder)
            break
    return seen, state_of(optimizer)


def state_of(optimizer: Any) -> list[Any]:
    return [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for _, moments in sorted(optimizer.state_dict()["state"].items())
        for _, value in sorted(moments.items())
    ]


def continued(folder: str, keep: bool = False, steps: int = 1) -> tuple[Any, ...]:
    """Goes on to the end of the epoch; samples, optimizer as loaded, the next epoch's samples, what was said, steps."""
    notes = Notes()
    logging.getLogger("accelerate.training.open_window").addHandler(notes)
    accelerator, model, optimizer, loader = objects(steps)
    set_seed(accelerator.process_index + 100)  # nothing but the checkpoint is known
    accelerator.load_state(folder, keep_global_batch=keep)
    loaded = state_of(optimizer)
    rank = accelerator.process_index
    seen, following = [], []
    for samples in loader:
        step(accelerator, model, optimizer, samples)
        seen += samples[: loader.coverage.valid[rank]].tolist()
    for samples in loader:
        following += samples[: loader.coverage.valid[rank]].tolist()
    return seen, loaded, following, notes.lines, accelerator.gradient_accumulation_steps


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=slow), 3, pytest.param(8, marks=slow)])
def test_every_sample_comes_once_and_the_optimizer_is_the_saved_one(num_ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    before = run_on_ranks(saved, 4, folder)
    after = run_on_ranks(continued, num_ranks, folder, timeout_seconds=120)
    first = [sample for seen, _ in before for sample in seen]
    rest = [sample for seen, *_ in after for sample in seen]
    assert sorted(first + rest) == list(range(NUM_SAMPLES))
    assert all(loaded == before[0][1] for _, loaded, *_ in after)
    assert sorted(sample for _, _, following, *_ in after for sample in following) == list(range(NUM_SAMPLES))
    said = after[0][3]
    assert len(said) == 1
    assert f"ranks: 4 -> {num_ranks}" in said[0]
    assert f"global batch (samples per update): 8 -> {2 * num_ranks}" in said[0]
    assert all(not lines for *_, lines, _ in after[1:])


@pytest.mark.parametrize(("saved_on", "steps", "num_ranks", "expected"), [(4, 1, 2, 2), (4, 1, 1, 4), (2, 2, 4, 1)])
def test_the_global_batch_is_kept_by_other_accumulation(
    saved_on: int, steps: int, num_ranks: int, expected: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    run_on_ranks(saved, saved_on, folder, steps)
    after = run_on_ranks(continued, num_ranks, folder, True, steps)
    assert all(now == expected for *_, now in after)
    assert "which keeps the global batch" in after[0][3][0]


def weights_after(folder: str, keep: bool, steps: int, num_updates: int) -> list[float]:
    accelerator, model, optimizer, loader = objects(steps)
    accelerator.load_state(folder, keep_global_batch=keep)
    batches = iter(loader)
    for _ in range(num_updates * accelerator.gradient_accumulation_steps):
        step(accelerator, model, optimizer, next(batches))
    return [parameter.item() for parameter in model.parameters()]


def test_updates_are_the_same_where_the_global_batch_is_kept(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run_on_ranks(saved, 4, folder)
    expected = run_on_ranks(weights_after, 4, folder, False, 1, 3)[0]
    for num_ranks in (1, 2):
        found = run_on_ranks(weights_after, num_ranks, folder, True, 1, 3)
        assert all(torch.allclose(torch.tensor(one), torch.tensor(expected), atol=1e-6) for one in found)


def test_a_global_batch_that_cant_be_kept_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run_on_ranks(saved, 4, folder)

    def refused() -> str:
        accelerator = objects()[0]
        with pytest.raises(CheckpointError, match="whole number of micro-batches") as failure:
            accelerator.load_state(folder, keep_global_batch=True)
        return str(failure.value)

    assert "3 ranks take 6 samples" in run_on_ranks(refused, 3)[0]


# -- sharded -------------------------------------------------------------------------------------------------


BLOCKED = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}
SHARDED: dict[str, dict[str, Any]] = {
    "FSDP1": {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT", "use_orig_params": True, **BLOCKED},
    "FSDP2": {"fsdp_version": 2, **BLOCKED},
    "HSDP": {"fsdp_version": 2, **BLOCKED},
}
PAIRS = [(kind, count) for kind in SHARDED for count in (1, 2, 3, 8)] if IS_SLOW else [("FSDP1", 3), ("HSDP", 2)]


def sharded_objects(kind: str) -> tuple[Any, ...]:
    plugin = FullyShardedDataParallelPlugin(**SHARDED[kind])
    mesh = {}
    if kind == "HSDP" and int(os.environ.get("WORLD_SIZE", 1)) % 2 == 0:
        num_ranks = int(os.environ["WORLD_SIZE"])
        mesh = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=num_ranks // 2)}
        if num_ranks == 2:
            mesh = {"parallelism_config": ParallelismConfig(dp_shard_size=2)}
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **mesh)
    set_seed(11)
    model = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(range(NUM_SAMPLES), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def whole_state(accelerator: Any, model: Any, optimizer: Any) -> Any:
    """Weights and moments with the pieces of all ranks together."""
    inner = getattr(optimizer, "optimizer", optimizer)
    access = accelerator.strategy.state.access
    weights = access.full_model_state(
        accelerator.unwrap_model(model) if accelerator.num_processes == 1 else model, True
    )
    moments = access.full_optimizer_state(inner, [model], True)["state"]
    values = [value for entries in moments.values() for _, value in sorted(entries.items())]
    return [value.tolist() for value in [*weights.values(), *map(torch.as_tensor, values)]]


def sharded_saved(kind: str, folder: str) -> tuple[list[int], Any]:
    accelerator, model, optimizer, loader = sharded_objects(kind)
    seen: list[int] = []
    for number, samples in enumerate(loader, 1):
        step(accelerator, model, optimizer, samples)
        seen += samples[: loader.coverage.valid[accelerator.process_index]].tolist()
        if number == SAVED_AFTER:
            accelerator.save_state(folder)
            break
    return seen, whole_state(accelerator, model, optimizer)


def sharded_continued(kind: str, folder: str) -> tuple[list[int], Any]:
    accelerator, model, optimizer, loader = sharded_objects(kind)
    set_seed(accelerator.process_index + 100)
    accelerator.load_state(folder)
    loaded = whole_state(accelerator, model, optimizer)
    seen: list[int] = []
    for samples in loader:
        step(accelerator, model, optimizer, samples)
        seen += samples[: loader.coverage.valid[accelerator.process_index]].tolist()
    return seen, loaded


@pytest.mark.parametrize(("kind", "num_ranks"), PAIRS)
def test_shards_of_four_ranks_go_on_on_any_other_number(kind: str, num_ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    before = run_on_ranks(sharded_saved, 4, kind, folder, timeout_seconds=120)
    after = run_on_ranks(sharded_continued, num_ranks, kind, folder, timeout_seconds=120)
    first = [sample for seen, _ in before for sample in seen]
    rest = [sample for seen, _ in after for sample in seen]
    assert sorted(first + rest) == list(range(NUM_SAMPLES))
    assert all(loaded == before[0][1] for _, loaded in after)
