"""Train the same loop on one and on two processes with the same global batch: the same results, in less time.

python examples/demo.py --output_dir demo_output
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
GLOBAL_BATCH_SIZE = 64
# Wide enough that an update computes for many times as long as Python's calls and the exchange of gradients take.
WIDTH = 64
# fp32 sums in another order: the losses of two runs differ by rounding, not by more.
LOSS_TOLERANCE = 1e-4


def run(
    num_processes: int, num_epochs: int, report: Path, *, is_watched: bool = False
) -> tuple[list[dict[str, float]], float]:
    """The history of one launched run, and the seconds from the command to its end."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--cpu", "--num_processes", str(num_processes),
        str(HERE / "digits.py"),
        "--batch_size", str(GLOBAL_BATCH_SIZE // num_processes),
        "--num_epochs", str(num_epochs), "--width", str(WIDTH), "--learning_rate", "1e-3",
        "--report", str(report),
        *(["--watch", str(report.with_suffix(""))] if is_watched else []),
    ]  # fmt: skip
    print(
        f"\n$ accelerate launch {' '.join(command[3:6])} examples/digits.py {' '.join(command[7:])}",
        flush=True,
    )
    # One thread a process: the two runs differ in nothing but the number of processes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment)
    return json.loads(report.read_text()), time.perf_counter() - started


def compare(one: list[dict[str, float]], two: list[dict[str, float]]) -> bool:
    """Prints both histories side by side; true where evaluation is equal and the losses agree."""
    print(f"\n{'':8}{'loss':^30}{'held-out accuracy':^24}{'samples/s':^18}")
    print(f"{'epoch':8}{'1 process':>13}{'2 processes':>15}{'1 process':>12}{'2 processes':>13}{'1':>9}{'2':>9}")
    for left, right in zip(one, two, strict=True):
        print(
            f"{left['epoch']:<8}{left['loss']:13.6f}{right['loss']:15.6f}"
            f"{left['accuracy']:10.2f} %{right['accuracy']:11.2f} %"
            f"{left['samples_per_second']:9.0f}{right['samples_per_second']:9.0f}"
        )
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two, strict=True))
    same_accuracy = all(a["accuracy"] == b["accuracy"] for a, b in zip(one, two, strict=True))
    print(f"\nheld-out accuracy equal in every epoch: {'yes' if same_accuracy else 'NO'}")
    print(f"largest difference of training losses:  {difference:.1e} (tolerance {LOSS_TOLERANCE:.0e})")
    return same_accuracy and difference <= LOSS_TOLERANCE


def speed(one: list[dict[str, float]], two: list[dict[str, float]]) -> str:
    """The samples per second of both runs, and the likely reason where two processes are hardly faster."""
    first, second = (statistics.median(epoch["samples_per_second"] for epoch in run) for run in (one, two))
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

    one, seconds_one = run(
        1, arguments.num_epochs, arguments.output_dir / "one_process.json", is_watched=arguments.watch
    )
    two, seconds_two = run(
        2, arguments.num_epochs, arguments.output_dir / "two_processes.json", is_watched=arguments.watch
    )
    equal = compare(one, two)
    print(f"from command to end: {seconds_one:.1f} s on 1 process, {seconds_two:.1f} s on 2")
    print(speed(one, two))

    sys.path.insert(0, str(HERE))
    from curves import plot_curves

    plot = plot_curves(
        {"1 process": one, "2 processes": two},
        arguments.output_dir / "curves.png",
        f"Handwritten digits, a CNN, global batch {GLOBAL_BATCH_SIZE}\n{speed(one, two)}",
    )
    print(f"curves: {plot}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
