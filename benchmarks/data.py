"""What a prepared loader costs over the bare one, per batch, and what continuing far inside an epoch costs.

    python benchmarks/data.py                                   ours against bare torch
    PEER_PYTHON=/path/to/python python benchmarks/data.py       and another installation of `accelerate`, same run

Batches of 32 rows of 128 floats, no workers. CPU time: medians over rounds in which the variants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

NUM_BATCHES = 1000
BATCH = 32
FAR = 100_000


class Rows(Dataset[torch.Tensor]):
    """Rows that are already in memory."""

    def __init__(self) -> None:
        self.rows = torch.randn(NUM_BATCHES * BATCH, 128)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def loaders() -> dict[str, Any]:
    """The same loader bare, prepared for one process, and prepared as one of two (each reads half of the batches)."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    Accelerator(cpu=True)
    rows, device = Rows(), torch.device("cpu")

    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(rows, batch_size=BATCH, shuffle=True)

    return {
        "bare": loader(),
        "prepared": prepare_data_loader(loader(), device, 1, 0, put_on_device=True),
        "one of two": prepare_data_loader(loader(), device, 2, 0, put_on_device=True),
    }


def microseconds_per_batch(loader: Any) -> float:
    """CPU time of one pass."""
    start, count = time.process_time(), 0
    for _ in loader:
        count += 1
    return (time.process_time() - start) / count * 1e6


def measure(rounds: int) -> dict[str, float]:
    """Median CPU microseconds per batch, by variant; the variants take turns."""
    variants = loaders()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, loader in variants.items():
            times[name].append(microseconds_per_batch(loader))
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up


def first_batch_milliseconds(position: int) -> float:
    """CPU time until the first batch of a shuffled epoch of 3.3 million rows, begun at batch ``position``."""
    from accelerate.data_loader import prepare_data_loader

    def loader() -> Any:
        return prepare_data_loader(DataLoader(range((FAR + 3000) * BATCH), batch_size=BATCH, shuffle=True))  # pyright: ignore[reportArgumentType]

    source = loader()
    next(iter(source))
    state = source.state_dict()
    state.update(rounds=position, groups=position, samples=position * BATCH, witnesses=[])
    continued = loader()
    if position:
        continued.load_state_dict(state)
    start = time.process_time()
    next(iter(continued))
    return (time.process_time() - start) * 1e3


def show(label: str, figures: dict[str, float]) -> None:
    """One line per variant, with its ratio to the bare loader."""
    for name, microseconds in figures.items():
        print(f"{label:<6} {name:<12} {microseconds:8.1f} us/batch   {microseconds / figures['bare']:.3f}x bare")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(figures))
        return
    show("ours", figures)
    begun = statistics.median(first_batch_milliseconds(0) for _ in range(3))
    continued = statistics.median(first_batch_milliseconds(FAR) for _ in range(3))
    print(f"ours   first batch  {begun:8.1f} ms at batch 0, {continued:.1f} ms at batch {FAR}")
    peer = os.environ.get("PEER_PYTHON")
    if peer:
        command = [peer, __file__, "--json", "--rounds", str(arguments.rounds)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        show("peer", json.loads(output.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
