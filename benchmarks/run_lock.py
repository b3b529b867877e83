"""The cost of a run's record (run.lock.json) a step: the same loop with a project folder and without one, CPU time.

    python benchmarks/run_lock.py

Two equal models are trained in turns in one process, one of them with a record, so both sides of the ratio come from
one run. A round has 100 updates, of which one or two are recorded with a fingerprint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.guests.reproduce.chain import LOCK, read_chain

UPDATES = 100
#: The width and the number of rows of a batch: a step of about 20 ms on one core, and a short one.
SIZES = {"20 ms": (512, 512), "short": (128, 32)}


def round_of(folder: str | None, width: int, rows: int) -> tuple[Callable[[], float], int]:
    """Return a function that trains 100 updates and returns their CPU seconds, and the number of parameters."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=folder)
    inner = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.001))
    batch = torch.randn(rows, width)

    def train() -> float:
        began = time.process_time()
        for _ in range(UPDATES):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - began

    return train, sum(parameter.numel() for parameter in inner.parameters())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, (width, rows) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            bare, _ = round_of(None, width, rows)
            recorded, num_parameters = round_of(folder, width, rows)
            for _ in range(3):  # the launch's entry, and the points that are denser at first
                bare()
                recorded()
            pairs = []
            for number in range(arguments.rounds):
                pairs.append((bare(), recorded()) if number % 2 else (recorded(), bare())[::-1])
            kinds = [entry["kind"] for entry in read_chain(Path(folder, LOCK)).entries]
        step = statistics.median(one for one, _ in pairs) / UPDATES
        ratios = sorted(two / one for one, two in pairs)
        quarter = len(ratios) // 4
        print(
            f"{name:6} step of {1e3 * step:.2f} ms, {num_parameters / 1e6:.2f} M parameters, {kinds.count('update')} "
            f"fingerprints: {statistics.median(ratios):.4f}x with a record "
            f"({ratios[quarter]:.4f} to {ratios[-1 - quarter]:.4f})"
        )


if __name__ == "__main__":
    main()
