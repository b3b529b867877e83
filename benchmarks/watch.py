"""The cost of hang detection per step: two gloo ranks, a step of about 5 ms, CPU time.

    python benchmarks/watch.py

The watch looks once a second, which is far too seldom to be seen beside a few hundred steps. So rounds without it take
turns with rounds in which it looks a hundred times as often, and a hundredth of the difference is what it costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

STEPS = 100
OFTEN = 100  # looks a second, where the watch itself makes one


def _rank(rank: int, port: int, rounds: int, answer: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", ACCELERATE_USE_CPU="true")
    os.environ["ACCELERATE_HANG_SECONDS"] = "0"  # the watch is made by hand
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from accelerate.distributed.watchdog import HangWatch

    accelerator = Accelerator(cpu=True)
    inner = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.01))
    rows = torch.randn(96, 512)
    coordinator = accelerator.world.coordinator
    assert coordinator is not None

    def seconds() -> float:
        accelerator.wait_for_everyone()
        start = time.process_time()
        for _ in range(STEPS):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - start

    def watched() -> float:
        watch = HangWatch(coordinator, 300.0, threading.get_ident())
        watch._tick_seconds = 1 / OFTEN
        watch.counters.add(accelerator.gradient_state)
        watch.start()
        try:
            return seconds()
        finally:
            watch.stop()

    seconds()  # warms up
    pairs = [(seconds(), watched()) for _ in range(rounds)]
    accelerator.wait_for_everyone()
    answer.put(pairs)


def measure(rounds: int) -> tuple[float, float]:
    """Return the CPU milliseconds of a step, and the part of it that the watch adds."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, rounds, answer)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    pairs = [pair for _ in ranks for pair in answer.get(timeout=300)]
    for rank in ranks:
        rank.join()
    without = statistics.median(bare for bare, _ in pairs)
    added = statistics.median(watched / bare for bare, watched in pairs) - 1
    return without / STEPS * 1e3, added


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    milliseconds, added = measure(parser.parse_args().rounds)
    print(
        f"ours   watch for hangs  {added / OFTEN:.4%} of a step of {milliseconds:.1f} ms   "
        f"({1 + added:.3f}x where it looks {OFTEN} times as often)"
    )


if __name__ == "__main__":
    sys.exit(main())
