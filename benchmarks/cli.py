"""The cost of the command line: CPU seconds and memory of `accelerate --help`, `launch --help`, and launching.

    python benchmarks/cli.py                                # this package
    PEER_PYTHON=/path/to/python python benchmarks/cli.py    # and another environment's accelerate, in the same run

Every figure is the median of several runs, interleaved with those of bare `python`, children included. Ends
with code 1 when a bound of this package is broken.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 5
#: case -> (most CPU seconds over bare python, most MiB over bare python); None: not bounded.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "accelerate --help": (0.15, None),
    "accelerate launch --help": (0.15, None),
    "launch of one process": (0.15, 30.0),
    "launch of one process, with a file": (0.15, 30.0),
}
CASES = {
    "accelerate --help": ["--help"],
    "accelerate launch --help": ["launch", "--help"],
    "launch of one process": ["launch", "--cpu", "--num_processes", "1", "empty.py"],
    "launch of one process, with a file": ["launch", "--config_file", "config.yaml", "empty.py"],
    "launch of two processes": ["launch", "--cpu", "--num_processes", "2", "empty.py"],
}
CONFIGURATION = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nuse_cpu: true\n"
#: Runs a command and says what it and its children have cost; a process of its own, so that the counts are
#: its own.
METER = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
seconds = time.perf_counter() - started
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, seconds, code]))
"""


@dataclass(frozen=True)
class Cost:
    """One measurement, or the medians of several."""

    cpu_seconds: float
    peak_mib: float
    wall_seconds: float


def measure(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Cost:
    """Measure the cost of one run of the command."""
    meter = [sys.executable, "-I", "-S", "-c", METER, *command]
    done = subprocess.run(meter, capture_output=True, text=True, cwd=folder, env=environment, check=True)
    cpu, peak, wall, code = json.loads(done.stdout)
    if code not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with code {code}")
    return Cost(cpu, peak, wall)


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each column."""
    return Cost(
        statistics.median(cost.cpu_seconds for cost in costs),
        statistics.median(cost.peak_mib for cost in costs),
        statistics.median(cost.wall_seconds for cost in costs),
    )


def contenders() -> dict[str, tuple[str, dict[str, str]]]:
    """Return the interpreter and environment of each measured accelerate, by name."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    source = str(Path(__file__).resolve().parents[1] / "src")
    found = {"ours": (sys.executable, {**common, "PYTHONPATH": source})}
    peer = os.environ.get("PEER_PYTHON")
    if peer:
        without_path = {name: value for name, value in common.items() if name != "PYTHONPATH"}
        found["peer"] = (peer, without_path)
    return found


def entry(name: str) -> list[str]:
    """Return the command line that starts that accelerate."""
    if name == "ours":
        return ["-m", "accelerate.commands.main"]
    return ["-c", "import sys; from accelerate.commands.accelerate_cli import main; sys.exit(main())"]


def main() -> int:
    """Run the benchmark; return 1 when a bound is broken, else 0."""
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "empty.py").write_text("")
        (folder / "config.yaml").write_text(CONFIGURATION)
        print(f"{'':<43}{'CPU s':>8}{'over bare':>11}{'MiB':>8}{'over bare':>11}{'wall s':>8}")
        for case, words in CASES.items():
            for name, (python, environment) in contenders().items():
                environment = {**environment, "HF_HOME": home}
                bare: list[Cost] = []
                ours: list[Cost] = []
                for _ in range(ROUNDS):
                    bare.append(measure([python, "empty.py"], folder, environment))
                    ours.append(measure([python, *entry(name), *words], folder, environment))
                base, cost = median(bare), median(ours)
                cpu, memory = cost.cpu_seconds - base.cpu_seconds, cost.peak_mib - base.peak_mib
                print(
                    f"{name + ': ' + case:<43}{cost.cpu_seconds:>8.3f}{cpu:>+11.3f}{cost.peak_mib:>8.1f}"
                    f"{memory:>+11.1f}{cost.wall_seconds:>8.3f}"
                )
                most_cpu, most_memory = BOUNDS.get(case, (None, None)) if name == "ours" else (None, None)
                if most_cpu is not None and cpu > most_cpu:
                    broken.append(f"{case}: {cpu:.3f} CPU s over bare python, at most {most_cpu}")
                if most_memory is not None and memory > most_memory:
                    broken.append(f"{case}: {memory:.1f} MiB over bare python, at most {most_memory}")
    for line in broken:
        print(f"broken: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
