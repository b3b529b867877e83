"""The cost of being ready for preemption: of a point between two batches, and of the threads that listen; CPU time.

    python benchmarks/preemption.py

Two gloo ranks. The threads are measured while their process sleeps; their share is that of the time of a step.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from typing import Any

STEP_SECONDS = 0.005
POINTS = 200_000
SLEEP_SECONDS = 10.0
LIMIT = 0.001


def _rank(rank: int, port: int, folder: str, answer: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", ACCELERATE_USE_CPU="true")
    os.environ["ACCELERATE_HANG_SECONDS"] = "0"
    from torch.utils.data import DataLoader

    from accelerate import Accelerator
    from accelerate.utils import PreemptionPolicy

    accelerator = Accelerator(cpu=True, project_dir=folder, preemption=PreemptionPolicy())
    loader = accelerator.prepare(DataLoader([0.0] * 4))
    state = accelerator.gradient_state
    (pass_point,) = state.hooks.between_batches
    accelerator.wait_for_everyone()
    costs: list[float] = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(POINTS):
            state.note_backward()
        counted = time.process_time()
        for _ in range(POINTS):
            state.note_backward()
            pass_point(loader)
        costs.append((time.process_time() - counted - (counted - start)) / POINTS)
    before = _other_threads()
    time.sleep(SLEEP_SECONDS)
    idle = (_other_threads() - before) / SLEEP_SECONDS
    accelerator.wait_for_everyone()
    answer.put((min(costs), idle))
    accelerator.end_training()


def _other_threads() -> float:
    """Return the CPU time of Python's threads but this one."""
    others = [thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in others if ident is not None)


def main() -> None:
    """Measure and print the table."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, port, folder, answer)) for rank in range(2)]
        for process in ranks:
            process.start()
        found = [answer.get() for _ in ranks]
        for process in ranks:
            process.join()
    point, idle = (max(values) for values in zip(*found, strict=True))
    share = point / STEP_SECONDS + idle
    print(f"a point between two batches: {point * 1e6:.2f} us")
    print(f"the listening threads: {idle:.4%} of a core")
    print(f"both, of a step of {STEP_SECONDS * 1e3:.0f} ms: {share:.4%} (limit {LIMIT:.1%})")


if __name__ == "__main__":
    main()
