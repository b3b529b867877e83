"""The cost of the same bits on any number of ranks, beside ordinary replicas in the same run.

    python benchmarks/same_bits.py                  two gloo ranks, a step of about 20 ms
    python benchmarks/same_bits.py --num_ranks 4 --hidden 512

Each rank computes one part. Rounds of both take turns. "ratio" compares the least of each; "ratios" has the least, the
median and the largest ratio of a round to the one beside it, which show how much a loaded machine disturbs. The
processor's seconds are those of all threads of a rank, the bytes those that the loopback device has counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.ranks import run_on_ranks


def bytes_sent() -> int:
    """Return the bytes that the loopback device has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise OSError("there is no loopback device")


def prepared(num_parts: int | None, num_ranks: int, hidden: int, steps: int) -> tuple[Any, ...]:
    """Return an Accelerator with ``num_parts`` (None: ordinary replicas), a model, its optimizer and a loader."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True) if num_parts is None else Accelerator(cpu=True, batch_parts=num_parts)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(hidden, hidden), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(hidden, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(64 * num_ranks * steps, hidden)), batch_size=64)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def measured(num_ranks: int, hidden: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return seconds and bytes of a step of each mode, on this rank."""
    modes = {
        "ordinary": prepared(None, num_ranks, hidden, steps),
        "parts": prepared(num_ranks, num_ranks, hidden, steps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    processor = dict.fromkeys(modes, float("inf"))
    sent = dict.fromkeys(modes, 0)
    for _ in range(rounds):
        for name, (accelerator, model, optimizer, loader) in modes.items():
            accelerator.wait_for_everyone()
            before, began, used = bytes_sent(), time.perf_counter(), time.process_time()
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            seconds[name].append((time.perf_counter() - began) / steps)
            processor[name] = min(processor[name], (time.process_time() - used) / steps)
            accelerator.wait_for_everyone()
            sent[name] = (bytes_sent() - before) // steps
    ratios = sorted(parts / ordinary for parts, ordinary in zip(seconds["parts"], seconds["ordinary"], strict=True))
    return {
        "seconds": {name: min(of_rounds) for name, of_rounds in seconds.items()},
        "processor_seconds": processor,
        "bytes": sent,
        "ratios": [round(ratios[place], 3) for place in (0, len(ratios) // 2, -1)],
    }


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    first, *_ = run_on_ranks(
        measured, asked.num_ranks, asked.num_ranks, asked.hidden, asked.rounds, asked.steps, timeout_seconds=600
    )
    ratio = {
        name: round(first[name]["parts"] / first[name]["ordinary"], 3)
        for name in ("seconds", "processor_seconds", "bytes")
    }
    print(json.dumps({"ranks": asked.num_ranks, **first, "ratio": ratio}))


if __name__ == "__main__":
    main()
