"""What a prepared training step costs over the bare one, on a model so small that only the overhead shows.

    python benchmarks/step.py                                   ours against bare torch
    PEER_PYTHON=/path/to/python python benchmarks/step.py       and another installation of `accelerate`, same run

CPU time, not wall time: medians over rounds in which the variants take turns, so that a machine whose speed
drifts slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

STEPS = 1000
Round = Callable[[], None]


def build() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A linear model of five parameters, SGD, and batches of one sample that are already there."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(1, 4), torch.randn(1, 1)) for _ in range(STEPS)]
    return model, torch.optim.SGD(model.parameters(), lr=0.01), batches


def bare() -> Round:
    """The loop as torch has it."""
    model, optimizer, batches = build()

    def run() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return run


def prepared(accumulates: bool) -> Round:
    """The same loop after `prepare`, with or without `accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = build()
    model, optimizer = accelerator.prepare(model, optimizer)

    def run() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()

    def run_accumulating() -> None:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()

    return run_accumulating if accumulates else run


def seconds(run: Round) -> float:
    """CPU seconds of one round."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(rounds: int) -> dict[str, float]:
    """Median CPU microseconds per step, by variant; the variants take turns."""
    variants = {"bare": bare(), "prepared": prepared(False), "accumulate": prepared(True)}
    for run in variants.values():
        run()  # warm up
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(seconds(run))
    return {name: statistics.median(values) / STEPS * 1e6 for name, values in times.items()}


def show(label: str, figures: dict[str, float]) -> None:
    """One line per variant, with its ratio to the bare loop."""
    for name, microseconds in figures.items():
        print(f"{label:<12} {name:<12} {microseconds:8.1f} us/step   {microseconds / figures['bare']:.3f}x bare")


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
    peer = os.environ.get("PEER_PYTHON")
    if peer:
        command = [peer, __file__, "--json", "--rounds", str(arguments.rounds)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        show("peer", json.loads(output.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
