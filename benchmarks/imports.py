"""The cost of a script's first line: CPU seconds of imports after `import torch`, and of the first Accelerator.

    python benchmarks/imports.py                                # this package
    PEER_PYTHON=/path/to/python python benchmarks/imports.py    # and another environment's accelerate, in the same run

Each figure is the least of several interpreters, in turns, with bytecode that is already there. Ends with code 1 when a
bound of this package is broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
#: What is measured -> the most CPU seconds.
CASES: dict[str, float] = {
    "from accelerate import Accelerator": 0.10,
    "from accelerate import PartialState": 0.10,
    "from accelerate import dispatch_model, init_empty_weights": 0.10,
    "from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin": 0.10,
    "from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin": 0.10,
    "from accelerate.utils import extract_model_from_parallel, infer_auto_device_map": 0.10,
    "from accelerate.utils import load_fsdp_model, save_fsdp_optimizer": 0.10,
    "from accelerate.utils.modeling import clean_device_map, get_max_layer_size": 0.10,
    "from accelerate import Accelerator; Accelerator(cpu=True)": 0.15,
}
PROGRAM = """
import sys, time
import torch
started = time.process_time()
exec(sys.argv[1])
print(time.process_time() - started)
"""


def seconds(python: str, statement: str, environment: dict[str, str]) -> float:
    """Return the CPU seconds of ``statement`` in an interpreter that has imported torch."""
    command = [python, "-c", PROGRAM, statement]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(done.stdout.splitlines()[-1])


def contenders(bytecode: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the interpreter and environment of each measured accelerate, by name."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": bytecode}
    common.pop("PYTHONDONTWRITEBYTECODE", None)
    source = str(Path(__file__).resolve().parents[1] / "src")
    found = {"ours": (sys.executable, {**common, "PYTHONPATH": source})}
    peer = os.environ.get("PEER_PYTHON")
    if peer:
        found["peer"] = (peer, {name: value for name, value in common.items() if name != "PYTHONPATH"})
    return found


def main() -> int:
    """Run the benchmark; return 1 when a bound is broken, else 0."""
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as bytecode:
        named = contenders(bytecode)
        print(f"{'CPU s after `import torch`':<86}" + "".join(f"{name:>8}" for name in named))
        for statement, most in CASES.items():
            for python, environment in named.values():
                seconds(python, statement, environment)  # writes the bytecode
            least = dict.fromkeys(named, float("inf"))
            for _ in range(ROUNDS):
                for name, (python, environment) in named.items():
                    least[name] = min(least[name], seconds(python, statement, environment))
            print(f"{statement:<86}" + "".join(f"{value:>8.3f}" for value in least.values()), flush=True)
            if least["ours"] > most:
                broken.append(f"{statement}: {least['ours']:.3f} CPU s, at most {most}")
    for line in broken:
        print(f"broken: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
