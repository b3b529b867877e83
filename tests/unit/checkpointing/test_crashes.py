"""Processes are killed inside saving; what was committed must load, and be what it was taken from."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accelerate.checkpointing import LoadedCheckpoint, read_checkpoint, write_checkpoint
from accelerate.settings.project import ProjectOptions

NUM_KILLS = 30
NUM_KILLS_SLOW = 200
SHAPE = (64, 64)


def project(folder: Path) -> ProjectOptions:
    return ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)


class Momentum:
    """An optimizer as far as a checkpoint is concerned: its state tells the step at which it was taken."""

    def __init__(self, step: int = -1) -> None:
        self.state = {"step": step, "buffers": [torch.full(SHAPE, float(step)) for _ in range(4)]}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


def model() -> torch.nn.Module:
    made = torch.nn.Module()
    made.w = torch.nn.Parameter(torch.zeros(SHAPE))
    return made


def save_numbered(folder: Path, step: int) -> None:
    weights = [{"w": torch.full(SHAPE, float(step))}]
    write_checkpoint(project=project(folder), weights=weights, optimizers=[Momentum(step)], step=step)


def save_in_place(folder: Path, step: int) -> None:
    weights = [{"w": torch.full(SHAPE, float(step))}]
    write_checkpoint(folder / "ck", weights=weights, optimizers=[Momentum(step)], step=step)


def load_numbered(folder: Path) -> tuple[LoadedCheckpoint, torch.nn.Module, Momentum]:
    loaded, optimizer = model(), Momentum()
    return read_checkpoint(project=project(folder), models=[loaded], optimizers=[optimizer]), loaded, optimizer


def load_in_place(folder: Path) -> tuple[LoadedCheckpoint, torch.nn.Module, Momentum]:
    loaded, optimizer = model(), Momentum()
    return read_checkpoint(folder / "ck", models=[loaded], optimizers=[optimizer]), loaded, optimizer


def save_until_killed(save: Callable[[Path, int], None], folder: Path, first: int, after_seconds: float) -> int:
    """The last step that a child, killed in the midst of saving, had reported as committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            step = first
            while True:
                save(folder, step)
                os.write(writer, f"{step}\n".encode())
                step += 1
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        last = int(pipe.readline())  # the clock starts when the loop runs
        time.sleep(after_seconds)
        os.kill(child, signal.SIGKILL)
        for line in pipe.read().splitlines():
            last = int(line)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return last


@pytest.mark.parametrize(
    ("save", "load"),
    [(save_numbered, load_numbered), (save_in_place, load_in_place)],
    ids=["numbered", "in-place"],
)
@pytest.mark.parametrize(
    "num_kills",
    [
        NUM_KILLS // 2,
        pytest.param(
            NUM_KILLS_SLOW // 2,
            marks=[
                pytest.mark.skipif("RUN_SLOW" not in os.environ, reason="RUN_SLOW is not set"),
                pytest.mark.timeout(900),
            ],
        ),
    ],
)
def test_a_kill_at_any_instant_loses_nothing_that_was_committed(
    num_kills: int,
    save: Callable[[Path, int], None],
    load: Callable[[Path], tuple[LoadedCheckpoint, torch.nn.Module, Momentum]],
    tmp_path: Path,
) -> None:
    instants = random.Random(0)
    step = 0
    for _ in range(num_kills):
        committed = save_until_killed(save, tmp_path, step, instants.uniform(0.0, 0.05))
        found, loaded, optimizer = load(tmp_path)
        assert found.step is not None
        assert found.step >= committed
        expected = torch.full(SHAPE, float(found.step))
        assert torch.equal(loaded.w, expected)
        assert optimizer.state["step"] == found.step
        assert all(torch.equal(buffer, expected) for buffer in optimizer.state["buffers"])  # type: ignore[union-attr]
        step = found.step + 1
    save(tmp_path, step)  # what the kills left is cleared by the next save
    leftovers = [path for path in tmp_path.rglob(".*") if ".tmp-" in path.name or ".trash-" in path.name]
    assert leftovers == []
