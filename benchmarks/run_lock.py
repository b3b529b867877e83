"""The cost of a run's record (run.lock.json): its part of the CPU time of a loop.

    python benchmarks/run_lock.py

The time of the recorder's calls and that of the loop around them come from one run. A fingerprint is recorded at each
hundredth update and at powers of two; those of the first updates aren't counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.guests.reproduce.chain import LOCK, read_chain
from accelerate.guests.reproduce.recording import Recorder

#: The width and the number of layers, and the rows of a batch: a step of some 20 ms on one core, and a short one.
SIZES = {"long": (512, 4, 200), "short": (64, 50, 16)}
FIRST = 130  # the next points are 200, 256 and 300


def measure(width: int, num_layers: int, rows: int, updates: int) -> str:
    """Train, and return the recorder's part of the CPU time in words."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, project_dir=folder)
        inner = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
        model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.001))
        batch, spent = torch.randn(rows, width), 0.0

        def train(count: int) -> float:
            began = time.process_time()
            for _ in range(count):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return time.process_time() - began

        train(1)
        (recorder,) = accelerator.gradient_state.hooks.of(Recorder)
        record: Any = recorder.record_point

        def timed(kind: str) -> None:
            nonlocal spent
            began = time.process_time()
            record(kind)
            spent += time.process_time() - began

        recorder.updates, recorder._next = FIRST, 200  # the denser points of the first updates are done
        setattr(recorder, "record_point", timed)  # noqa: B010
        seconds = train(updates)
        counting = timeit.timeit(lambda: recorder.after_step(None), number=10_000) / 10_000
        points = [entry["updates"] for entry in read_chain(Path(folder, LOCK)).entries if entry["kind"] == "update"]
    num_parameters = sum(parameter.numel() for parameter in inner.parameters())
    part = (spent + counting * updates) / seconds
    each, step = 1e3 * spent / len(points[1:]), 1e3 * seconds / updates
    return (
        f"step of {step:.2f} ms, {num_parameters / 1e6:.2f} M parameters in {2 * num_layers} tensors: "
        f"{100 * part:.3f} % ({each:.2f} ms for each of {len(points[1:])} points, {1e6 * counting:.2f} us for a count)"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, (width, num_layers, rows) in SIZES.items():
        print(f"{name}: {measure(width, num_layers, rows, arguments.updates)}", flush=True)


if __name__ == "__main__":
    main()
