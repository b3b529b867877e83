"""The cost of `accelerate launch --monitor` a step: two gloo ranks, an open page, CPU time.

    python benchmarks/watched_step.py

Each rank trains two equal models in turns, one with the watch of the launcher and one without, so both sides of the
ratio come from one run. The page is asked once a second, as a browser does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

STEPS = 100
WIDTHS = {"small": 8, "usual": 256}  # a step of less than 1 ms, and of some milliseconds


def _train(rounds: int, target: Path) -> None:
    """Measure, in a rank: CPU seconds of rounds with and without the watch, by the size of the model."""
    import torch
    from torch import nn

    from accelerate import Accelerator

    torch.set_num_threads(1)
    folder = os.environ.pop("ACCELERATE_MONITOR")
    bare = Accelerator(cpu=True)
    os.environ["ACCELERATE_MONITOR"] = folder
    watched = Accelerator(cpu=True)
    assert watched._loop is not None and bare._loop is None
    found: dict[str, list[tuple[float, float]]] = {}
    for name, width in WIDTHS.items():
        watched.free_memory()
        rows = torch.randn(96, width)
        loops = []
        for accelerator in (bare, watched):
            inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            loops.append((accelerator, *accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.01))))

        def seconds(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, rows=rows) -> float:
            accelerator.wait_for_everyone()
            start = time.process_time()
            for _ in range(STEPS):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return time.process_time() - start

        for loop in loops:
            seconds(*loop)  # warms up
        found[name] = [(seconds(*loops[0]), seconds(*loops[1])) for _ in range(rounds)]
    if bare.is_main_process:
        target.write_text(json.dumps(found))
    bare.end_training()


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU seconds of each pair of rounds on rank 0, without and with the watch."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "found.json"
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--monitor", "--cpu", "--num_processes", "2",
            "--main_process_port", "0", str(Path(__file__).resolve()), "--rank", str(target), "--rounds", str(rounds),
        ]  # fmt: skip
        program = subprocess.Popen(command, cwd=scratch, stderr=subprocess.PIPE, text=True)
        assert program.stderr is not None
        said = ""
        for line in program.stderr:
            said += line
            if found := re.search(r"shown at (\S+/),", line):
                threading.Thread(target=_look, args=(found[1], program), daemon=True).start()
        if program.wait():
            raise SystemExit(said)
        return json.loads(target.read_text())


def _look(address: str, program: subprocess.Popen[str]) -> None:
    """Ask for the page's data once a second."""
    while program.poll() is None:
        try:
            urllib.request.urlopen(f"{address}data?run=", timeout=10).read()
        except OSError:  # the launcher has ended
            return
        time.sleep(1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _train(arguments.rounds, arguments.rank)
        return
    for name, pairs in measure(arguments.rounds).items():
        bare = statistics.median(one for one, _ in pairs) / STEPS
        ratios = sorted(two / one for one, two in pairs)
        added = statistics.median(two - one for one, two in pairs) / STEPS
        print(
            f"{name:6} step of {1e3 * bare:.2f} ms: {statistics.median(ratios):.3f}x watched "
            f"({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}), {1e6 * added:+.0f} us"
        )


if __name__ == "__main__":
    main()
