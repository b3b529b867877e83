"""A training run that saves and resumes by itself, run on real processes that can be killed at any instant.

Everything that a resume has to bring back takes part in it: shuffled order, augmentation drawn while reading, dropout,
an optimizer with moments, a schedule. Each rank notes what it did after every step, in a file that survives a SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.errors import CheckpointNotFound
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from tests import ranks

NUM_SAMPLES = 44
EPOCHS = 2
SAVE_EVERY = 3


class Augmented(Dataset):
    """Rows with noise from all three streams of the process that reads them."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return index, torch.full((4,), index / NUM_SAMPLES) + noise


def objects(accelerator: Accelerator, num_workers: int, batch_size: int) -> tuple[Any, ...]:
    """Model, optimizer, schedule and loader, prepared."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(Augmented(), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    return accelerator.prepare(model, optimizer, schedule, loader)


def train(folder: str, notes: str, num_workers: int, batch_size: int = 2, **loader_options: Any) -> None:
    """The run is at its end; it went on from the newest checkpoint, if there was one."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    config = DataLoaderConfiguration(**loader_options)
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=config)
    set_seed(5, device_specific=True)
    model, optimizer, schedule, loader = objects(accelerator, num_workers, batch_size)
    with suppress(CheckpointNotFound):  # the run is new
        accelerator.load_state()
    note = noter(f"{notes}.{accelerator.process_index}")
    while loader.iteration < EPOCHS:
        for ids, rows in loader:
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            place = loader.state_dict()
            step = f"{place['epoch']}/{place['rounds']}"
            note(step, [ids.tolist(), loss.item().hex(), optimizer.param_groups[0]["lr"], loader.coverage.valid])
            if place["rounds"] % SAVE_EVERY == 0 or loader.end_of_dataloader:
                accelerator.save_state()
    note("end", digest(model))


def noter(path: str) -> Callable[[str, Any], None]:
    """Writes one line per step with one system call, so that a killed process leaves whole lines."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return lambda step, what: (os.write(file, (json.dumps([step, what]) + "\n").encode()), None)[1]


def digest(model: nn.Module) -> str:
    """A hash of every bit of the weights."""
    weights = b"".join(value.detach().cpu().numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def read_notes(notes: Path, num_ranks: int) -> list[list[tuple[str, Any]]]:
    """Per rank, what was noted, in order; steps that were done again are there again."""
    files = [Path(f"{notes}.{rank}") for rank in range(num_ranks)]
    return [[tuple(json.loads(line)) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]


# -- real processes ----------------------------------------------------------------------------------------


def _exit_code_of(function: Callable[[], None]) -> int:
    try:
        function()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _child(function: Callable[[], None], environment: dict[str, str], log: str) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    ranks._forget_the_parents_world()
    code = 1
    with open(log, "a") as errors:
        os.dup2(errors.fileno(), 2)
        try:
            from accelerate.distributed.world import leave_world

            code = _exit_code_of(function)
            leave_world()
        except BaseException:
            code = 1
            traceback.print_exc(file=errors)
        finally:
            sys.stdout.flush()
            errors.flush()
            os._exit(code)  # the hooks of the test session are not ours to run


class Attempt:
    """One start of a run on ``num_ranks`` forked processes."""

    def __init__(self, function: Callable[[], None], num_ranks: int, log: Path) -> None:
        context = multiprocessing.get_context("fork")
        port = ranks.free_port()
        self.log = log
        self.processes = [
            context.Process(
                target=_child, args=(function, ranks._environment(rank, num_ranks, port, None), f"{log}.{rank}")
            )
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def is_over(self) -> bool:
        """Whether every rank has ended by itself."""
        return all(not process.is_alive() for process in self.processes)

    def wait(self, seconds: float) -> bool:
        """Whether the run ended within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.is_over():
                return True
            time.sleep(0.002)
        return self.is_over()

    def kill(self, first: int | None = None, lead_seconds: float = 0.0) -> int:
        """SIGKILL to every rank, to ``first`` a little earlier; returns how many were alive."""
        alive = [process for process in self.processes if process.is_alive()]
        if first is not None:
            self.processes[first].kill()
            time.sleep(lead_seconds)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return len(alive)

    def failures(self) -> str:
        """What the ranks wrote to standard error."""
        return "\n".join(Path(f"{self.log}.{rank}").read_text() for rank in range(len(self.processes)))
