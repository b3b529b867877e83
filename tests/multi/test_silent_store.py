"""Ranks whose store has gone silent (its host is frozen, or cut off) still get away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.ranks import _environment, free_port

PROGRAM = """
import os, signal, sys, time
import torch
from accelerate.distributed import collectives
from accelerate.errors import CollectiveError
from accelerate.distributed import store_client
from accelerate.distributed.world import join_world, leave_world

store_client._STORE_TIMEOUT_SECONDS = 1.0
world = join_world(cpu=True)
number = torch.tensor([os.getpid()])
keeper = int(collectives.gather(number)[0])
if world.rank == 0:
    time.sleep(60)
os.kill(keeper, signal.SIGSTOP)
try:
    collectives.gather(number)
except CollectiveError as error:
    print(error)
leave_world()
print("left")
"""


def test_a_rank_whose_store_is_silent_says_so_leaves_and_ends() -> None:
    port = free_port()
    command = [sys.executable, "-c", PROGRAM]
    environments = [{**os.environ, **_environment(rank, 2, port, None)} for rank in range(2)]
    keeper = subprocess.Popen(command, env=environments[0], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        survivor = subprocess.run(command, env=environments[1], capture_output=True, text=True, timeout=90)
        assert survivor.returncode == 0, survivor.stderr
        said, left = survivor.stdout.splitlines()
        assert "hasn't answered for 1 s" in said and left == "left"
    finally:
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()
