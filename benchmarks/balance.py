"""Updates per second of two gloo ranks, one held to half its speed: equal parts of the global batch, and balance=True.

    python benchmarks/balance.py
    python benchmarks/balance.py --speed 0.25 --hold stop
    python benchmarks/balance.py --hold sleep            on a machine that computes something else

The slow rank is in a control group with a quota of CPU time, if this process may make one. Otherwise it is stopped and
continued in turn, 10 ms at a time. With ``--hold sleep`` the model is tiny, and both ranks sleep for each row, the slow
one longer.

The two kinds of run alternate, and the first epoch, in which ranks measure, doesn't count. The figure of a kind is its
fastest epoch, because other programs only make epochs slower.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROWS, WIDTH, DEPTH = 512, 512, 4
PERIOD_SECONDS = 0.02
SLEEP_SECONDS = 0.001  # for each row, at full speed
GOAL = 1.3


def _rank(rank: int, port: int, options: argparse.Namespace, is_balanced: bool, answer: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(balance=is_balanced))
    width = 8 if options.hold == "sleep" else WIDTH
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())]
    model: Any = nn.Sequential(*layers)
    data: Any = TensorDataset(torch.randn(ROWS * options.updates, width))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, ROWS // 2)
    )
    sleep_seconds = 0.0 if options.hold != "sleep" else SLEEP_SECONDS / (options.speed if rank else 1)
    answer.put((rank, os.getpid()))
    rates: list[float] = []
    sizes: list[int] = []
    for _ in range(options.epochs):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        for (values,) in loader:
            time.sleep(len(values) * sleep_seconds)
            accelerator.backward(model(values).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            sizes = accelerator.gather(torch.tensor([len(values)])).tolist() if loader.end_of_dataloader else sizes
        accelerator.wait_for_everyone()
        rates.append(options.updates / (time.perf_counter() - began))
    answer.put((rank, (rates, sizes)))
    accelerator.end_training()


@contextmanager
def _held(process: int, speed: float, how: str) -> Iterator[str]:
    """Enter a context in which ``process`` has ``speed`` of its speed; its value says how."""
    if how == "sleep":
        yield "sleeps for each row"
        return
    group = None if how == "stop" else _control_group(process, speed)
    if group is not None:
        try:
            yield f"control group {group.parent.name}"
        finally:
            with suppress(OSError):
                (group.parent / "cgroup.procs").write_text(str(process))
                group.rmdir()
        return
    if how == "group":
        raise SystemExit("This process may not make a control group with a quota of CPU time. Use --hold stop.")
    ended = threading.Event()

    def stop_in_turns() -> None:
        with suppress(ProcessLookupError):
            while speed < 1 and not ended.is_set():
                os.kill(process, signal.SIGSTOP)
                time.sleep(PERIOD_SECONDS * (1 - speed))
                os.kill(process, signal.SIGCONT)
                time.sleep(PERIOD_SECONDS * speed)

    thread = threading.Thread(target=stop_in_turns, daemon=True)
    thread.start()
    try:
        yield "stopped in turns"
    finally:
        ended.set()
        thread.join()


def _control_group(process: int, speed: float) -> Path | None:
    """Return a new control group with ``process`` in it, of version 2 or 1; None if that isn't allowed here."""
    period = int(PERIOD_SECONDS * 1e6)
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("cpu" if controllers else "")
        group = root / path.lstrip("/") / f"balance_{process}"
        try:
            group.mkdir()
            if controllers:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(int(period * speed)))
            else:
                (group / "cpu.max").write_text(f"{int(period * speed)} {period}")
            (group / "cgroup.procs").write_text(str(process))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


def run(options: argparse.Namespace, is_balanced: bool) -> tuple[float, list[int], str]:
    """Return the updates per second of the fastest epoch but the first, the ranks' rows, and how a rank was held."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, options, is_balanced, answer)) for rank in range(2)]
    for process in ranks:
        process.start()
    processes = dict(answer.get() for _ in ranks)
    # Rank 0 in a group too: the shares of a core are those of the groups.
    with _held(processes[0], 1, options.hold), _held(processes[1], options.speed, options.hold) as how:
        rates, sizes = dict(answer.get() for _ in ranks)[0]
    for process in ranks:
        process.join()
    return max(rates[1:]), sizes, how


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speed", type=float, default=0.5, help="of rank 1, of its own")
    parser.add_argument("--updates", type=int, default=150, help="in an epoch")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hold", choices=("auto", "group", "stop", "sleep"), default="auto")
    options = parser.parse_args()
    best: dict[bool, tuple[float, list[int], str]] = {}
    for _ in range(options.repeats):
        for is_balanced in (False, True):
            found = run(options, is_balanced)
            best[is_balanced] = max(best.get(is_balanced, found), found)
    print(f"rank 1 at {options.speed:.0%} of its speed ({best[True][2]})")
    for is_balanced, name in ((False, "equal parts"), (True, "balance=True")):
        rate, sizes, _ = best[is_balanced]
        print(f"{name:13} {rate:7.1f} updates/s, rows {sizes}")
    print(f"balance=True makes {best[True][0] / best[False][0]:.2f} times the updates (goal: at least {GOAL})")


if __name__ == "__main__":
    main()
