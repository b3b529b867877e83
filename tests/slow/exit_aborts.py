"""How often do two processes that train with DDP over gloo abort at exit?

`python tests/slow/exit_aborts.py --runs 200`

The user's variables keep model, optimizer and loss until the interpreter ends. Prints one line per kind
of script and exits with 1 if any process ended badly.

Kinds: `silent` never says that it is done, `ending` calls `destroy_process_group` of the state, `raising` ends by
SystemExit, `ended` calls `end_training` and gathers after it, `destroyed` destroys torch's group itself after that,
`bare` is torch alone without any of us (for comparison; its aborts don't count).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
TIMEOUT_SECONDS = 120

BODY = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
JOIN = "from accelerate.state import PartialState\nstate = PartialState()\n"
ENDED = (
    "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    + BODY.replace("DistributedDataParallel(\n", "accelerator.prepare(\n")
    + "accelerator.end_training()\naccelerator.gather(loss)\n"
)
SCRIPTS = {
    "silent": JOIN + BODY,
    "ending": JOIN + BODY + "state.destroy_process_group()\n",
    "raising": JOIN + BODY + "raise SystemExit\n",
    "ended": ENDED,
    "destroyed": ENDED + "torch.distributed.destroy_process_group()\n",
    "bare": "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + BODY,
}
COUNTED = tuple(kind for kind in SCRIPTS if kind != "bare")


def run_pair(script: str) -> list[tuple[int, str]]:
    """(exit code, last line of stderr) of both ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends: list[tuple[int, str]] = []
    for rank in ranks:
        try:
            _, errors = rank.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            rank.kill()
            _, errors = rank.communicate()
        ends.append((rank.returncode, (errors.strip().splitlines() or [""])[-1][:160]))
    return ends


def main() -> int:
    """The exit status of this program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="pairs of processes per kind")
    parser.add_argument("--kinds", nargs="+", choices=list(SCRIPTS), default=list(COUNTED))
    arguments = parser.parse_args()
    num_bad = 0
    for kind in arguments.kinds:
        start, ends = time.monotonic(), Counter[tuple[int, str]]()
        for _ in range(arguments.runs):
            ends.update(end for end in run_pair(SCRIPTS[kind]) if end[0] != 0)
        seconds = time.monotonic() - start
        print(
            f"{kind}: {ends.total()} bad ends in {arguments.runs} runs of 2, {seconds:.0f} s {dict(ends) or ''}",
            flush=True,
        )
        num_bad += ends.total() if kind in COUNTED else 0
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
