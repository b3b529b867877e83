"""The cost of checking the hardware, beside a training step, in one run.

    python benchmarks/sdc.py --rounds 40
    python benchmarks/sdc.py --strategy fsdp2

One process, or each of two gloo ranks, with one thread trains two stacks of linear layers by AdamW in turns, one with
``sdc_check=20``. Printed are medians of the first rank's CPU time of an update without it, of one between two checks,
and of what a check adds (the update that is checked, the one before, which notes what lies in memory, and the one
after, which compares that), with its share where each 100th and 1000th is checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from time import process_time

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks

EVERY = 20


def measure(strategy: str, width: int, layers: int, batch: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    inputs = torch.randn(batch, width)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)

    def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        start = process_time()
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        return process_time() - start

    checked = prepared()
    accelerator.watch_run(log=False, rules=None, sdc_check=EVERY)
    bare = prepared()  # after the watch: not checked
    found: dict[str, list[float]] = {"without": [], "between": [], "added": []}
    for _ in range(rounds):
        round_of: list[float] = []
        for number in range(EVERY):
            if number % 2:  # what runs second finds other things in the processor's caches
                found["without"].append(update(*bare))
            round_of.append(update(*checked))
            if not number % 2:
                found["without"].append(update(*bare))
        between = statistics.median(round_of)
        found["between"].append(between)
        found["added"].append(round_of[-2] + round_of[-1] + round_of[0] - 3 * between)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("one process", "ddp", "fsdp2"), default="one process")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    ranks = 1 if given.strategy == "one process" else 2
    found = run_on_ranks(lambda: measure(**vars(given)), ranks, timeout_seconds=600)[0]
    for name, seconds in found.items():
        print(f"{name}: {seconds * 1e3:.2f} ms")
    print(f"an update between two checks: {found['between'] / found['without']:.3f}x of one without")
    for every in (100, 1000):
        print(f"sdc_check={every}: {100 * found['added'] / every / found['without']:.2f} % of the updates' time")


if __name__ == "__main__":
    main()
