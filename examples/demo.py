"""Train the same loop on one, two and four processes: the same bits, in less time.

python examples/demo.py --output_dir demo_output
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GLOBAL_BATCH_SIZE = 128
# Each update is computed in so many parts, by 1, 2 or 4 processes.
NUM_PARTS = 4
# Wide enough that an update computes for many times as long as Python's calls and the exchange of gradients take.
WIDTH = 64


def run(num_processes: int, num_epochs: int, report: Path, *, is_watched: bool = False) -> tuple[list[Any], float]:
    """The history of one launched run, and the seconds from the command to its end."""
    options = ["--cpu", "--num_processes", str(num_processes), "--batch_parts", str(NUM_PARTS)]
    script = [
        "--batch_size", str(GLOBAL_BATCH_SIZE // NUM_PARTS),
        "--num_epochs", str(num_epochs), "--width", str(WIDTH), "--learning_rate", "2e-3",
        "--report", str(report), "--project_dir", str(report.with_suffix("")),
        *(["--watch", str(report.with_suffix(""))] if is_watched else []),
    ]  # fmt: skip
    print(f"\n$ accelerate launch {' '.join(options)} examples/digits.py {' '.join(script)}", flush=True)
    # One thread a process: the runs differ in nothing but the number of processes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(HERE / "digits.py"), *script]
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment)
    return json.loads(report.read_text()), time.perf_counter() - started


def show(one: list[Any], two: list[Any]) -> None:
    """Prints both histories side by side."""
    print(f"\n{'':8}{'loss':^30}{'held-out accuracy':^24}{'samples/s':^18}")
    print(f"{'epoch':8}{'1 process':>13}{'2 processes':>15}{'1 process':>12}{'2 processes':>13}{'1':>9}{'2':>9}")
    for left, right in zip(one, two, strict=True):
        print(
            f"{left['epoch']:<8}{left['loss']:13.6f}{right['loss']:15.6f}"
            f"{left['accuracy']:10.2f} %{right['accuracy']:11.2f} %"
            f"{left['samples_per_second']:9.0f}{right['samples_per_second']:9.0f}"
        )


def are_equal(histories: dict[str, list[Any]]) -> bool:
    """Prints the hash of each trained run; true if all epochs' losses, accuracies and hashes are equal."""
    print("\nSHA-256 of weights, optimizer state and random numbers after training:")
    for name, history in histories.items():
        print(f"{name:>13}  {history[-1]['fingerprint']}")
    results = [
        [(epoch["loss"], epoch["accuracy"], epoch["fingerprint"]) for epoch in history]
        for history in histories.values()
    ]
    equal = all(result == results[0] for result in results)
    print(f"losses, accuracies and hashes equal in every bit: {'yes' if equal else 'NO'}")
    return equal


def speed(one: list[Any], two: list[Any]) -> str:
    """The samples per second of both runs, and the likely reason where two processes are hardly faster."""
    # The fastest epoch of each run: other work on the machine only slows them.
    first, second = (max(epoch["samples_per_second"] for epoch in run) for run in (one, two))
    text = f"{first:.0f} samples/s on 1 process, {second:.0f} on 2: {second / first:.2f} times as many"
    if second > 1.5 * first:
        return text
    load = f" and a load average of {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    return f"{text}\nTwo processes need two free cores. This machine has {os.cpu_count()}{load}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("demo_output"))
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--watch", action="store_true", help="keep the runs' numbers: accelerate monitor OUTPUT_DIR")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)

    histories: dict[str, list[Any]] = {}
    seconds: list[str] = []
    for num_processes, name in ((1, "1 process"), (2, "2 processes"), (4, "4 processes")):
        report = arguments.output_dir / f"{name.replace(' ', '_')}.json"
        histories[name], took = run(num_processes, arguments.num_epochs, report, is_watched=arguments.watch)
        seconds.append(f"{took:.1f} s on {num_processes}")
    one, two, _ = histories.values()
    show(one, two)
    equal = are_equal(histories)
    print(f"from command to end: {', '.join(seconds)}")
    print(speed(one, two))

    sys.path.insert(0, str(HERE))
    from curves import plot_curves

    plot = plot_curves(
        {"1 process": one, "2 processes": two},
        arguments.output_dir / "curves.png",
        f"Handwritten digits, a CNN, global batch {GLOBAL_BATCH_SIZE}\n{speed(one, two)}",
    )
    print(f"curves: {plot}")
    print(f"compute a run again, and compare the bits: accelerate reproduce {arguments.output_dir / '2_processes'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
