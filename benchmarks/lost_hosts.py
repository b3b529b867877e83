"""The cost of `--keep_replicas` while nothing is lost: one exchange of members on one machine and on two.

    python benchmarks/lost_hosts.py --rounds 500 --ranks 2 4

The two machines are two launchers on this one, so the network is the loopback interface. Printed are medians over the
exchanges of rank 0: the time until the answer, the processor time of the rank, and the share of a step of 20 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from accelerate.ports import get_free_port

STEP_SECONDS = 0.02
SCRIPT = """
import json, statistics, sys, time
import torch
from accelerate import Accelerator

rounds = int(sys.argv[1])
accelerator = Accelerator(cpu=True)
members = accelerator.world.members
accelerator.prepare(torch.nn.Linear(1, 1))
found = {"exchange": [], "processor": []}
for number in range(rounds):
    clock, processor = time.perf_counter(), time.process_time()
    members.exchange("update", {"turn": 0, "size": 1, "value": [4, 123456789]})
    found["exchange"].append(time.perf_counter() - clock)
    found["processor"].append(time.process_time() - processor)
if accelerator.is_main_process:
    print(json.dumps({name: statistics.median(values) for name, values in found.items()}))
accelerator.wait_for_everyone()
"""


def measure(num_machines: int, num_ranks: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            "--cpu",
            "--num_processes",
            str(num_ranks),
        ]
        command += ["--keep_replicas", "1", "--num_machines", str(num_machines), "--main_process_ip", "127.0.0.1"]
        command += ["--main_process_port", str(get_free_port())]
        running = [
            subprocess.Popen(
                [*command, "--machine_rank", str(machine), str(Path(folder) / "train.py"), str(rounds)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for machine in range(num_machines)
        ]
        outputs = [process.communicate(timeout=600)[0] for process in running]
        assert not any(process.returncode for process in running), outputs
        return json.loads(outputs[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="the members of all machines together")
    arguments = parser.parse_args()
    for num_ranks, num_machines in itertools.product(arguments.ranks, (1, 2)):
        found = measure(num_machines, num_ranks, arguments.rounds)
        share = found["exchange"] / STEP_SECONDS
        print(
            f"{num_machines} machine(s), {num_ranks} ranks: {found['exchange'] * 1e3:.3f} ms "
            f"({share:.1%} of a step of 20 ms), {found['processor'] * 1e3:.3f} ms of the rank's processor"
        )


if __name__ == "__main__":
    main()
