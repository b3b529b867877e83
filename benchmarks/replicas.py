"""The cost of comparing what replicas hold, beside a training step, in one run.

    python benchmarks/replicas.py --width 1024 --rounds 30

Two gloo ranks with one thread each train a stack of linear layers by AdamW under DDP. Printed are the CPU seconds of a
step and of a comparison (parameters and both moments), medians, and the share of it where each 100th step compares.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import Accelerator
from tests.ranks import run_on_ranks


def measure(width: int, layers: int, batch: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inputs = torch.randn(batch, width)
    found: dict[str, list[float]] = {"step": [], "step (clock)": [], "comparison": [], "comparison (clock)": []}
    for _ in range(rounds):
        cpu, clock = process_time(), perf_counter()
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        found["step"].append(process_time() - cpu)
        found["step (clock)"].append(perf_counter() - clock)
        cpu, clock = process_time(), perf_counter()
        accelerator.compare_replicas()
        found["comparison"].append(process_time() - cpu)
        found["comparison (clock)"].append(perf_counter() - clock)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    parameters = given.layers * (given.width + 1) * given.width
    print(f"{parameters / 1e6:.2f} million parameters, batches of {given.batch}, 2 ranks")
    found = run_on_ranks(lambda: measure(**vars(given)), 2, timeout_seconds=300)[0]
    for name, seconds in found.items():
        print(f"{name}: {seconds * 1e3:.2f} ms")
    for kind in ("", " (clock)"):
        share = found[f"comparison{kind}"] / found[f"step{kind}"]
        print(f"each 100th step{kind}: {share:.2f} % of the time of the steps")


if __name__ == "__main__":
    main()
