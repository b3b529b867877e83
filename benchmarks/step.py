"""The cost of a prepared training step over the bare one, on a model so small that only the overhead shows.

    python benchmarks/step.py                                   ours against bare torch
    python benchmarks/step.py --calls                           our Python calls per step, by name
    PEER_PYTHON=/path/to/python python benchmarks/step.py       and another installation of `accelerate`, same run

CPU time, not wall time: each loop and its bare one take turns, round by round, and the least of each counts, so that
a machine whose speed drifts, or that others use too, slows both. Calls are exact on any machine.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS = 1000
LOOPS = ("plain", "accumulating", "bf16", "scheduled")
Round = Callable[[], None]


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a linear model of five parameters, SGD, a constant schedule, and batches of one sample in memory."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(1, 4), torch.randn(1, 1)) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), batches


def bare(loop: str) -> Round:
    """Return the loop in plain torch."""
    model, optimizer, scheduler, batches = build()
    is_scheduled = loop == "scheduled"

    def run() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if is_scheduled:
                scheduler.step()

    def run_in_bf16() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            loss.backward()
            optimizer.step()

    return run_in_bf16 if loop == "bf16" else run


def prepared(loop: str) -> Round:
    """Return the same loop after `prepare`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # each loop has a precision of its own
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if loop == "bf16" else "no")
    model, optimizer, scheduler, batches = build()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    is_scheduled = loop == "scheduled"

    def run() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if is_scheduled:
                scheduler.step()

    def run_accumulating() -> None:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()

    return run_accumulating if loop == "accumulating" else run


def seconds(run: Round) -> float:
    """Return the CPU seconds of one round."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Return by loop the least CPU microseconds of a step, bare and prepared; the two take turns."""
    figures: dict[str, tuple[float, float]] = {}
    for loop in LOOPS:
        pair = (bare(loop), prepared(loop))
        for run in pair:
            run()  # warm up
        turns = [[seconds(run) for run in pair] for _ in range(rounds)]
        least, ours = (min(times) / STEPS * 1e6 for times in zip(*turns, strict=True))
        figures[loop] = (least, ours)
    return figures


def calls(loop: str) -> dict[str, float]:
    """Return the Python functions of `accelerate` that one step calls, with the number of calls."""
    import accelerate

    home = os.path.dirname(accelerate.__file__) + os.sep
    run = prepared(loop)
    run()  # what happens once has happened
    counted: collections.Counter[str] = collections.Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home):
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            counted[f"{code.co_filename.removeprefix(home)} {name}"] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {name: number / STEPS for name, number in counted.items()}


def show(label: str, figures: dict[str, tuple[float, float]]) -> None:
    """Print one line per loop, with its ratio to its bare loop."""
    for loop, (least, prepared_least) in figures.items():
        ratio = prepared_least / least
        print(f"{label:<6} {loop:<13} {prepared_least:8.1f} us/step   bare {least:8.1f}   {ratio:.3f}x bare")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--calls", action="store_true", help="count our calls instead of measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.calls:
        for loop in LOOPS:
            counted = calls(loop)
            print(f"{loop}: {sum(counted.values()):g} calls per step")
            for name, number in counted.items():
                print(f"    {number:4g} {name}")
        return
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
