"""The cost of a prepared loader over the bare one, of resuming far inside an epoch, and of gathering metrics.

    python benchmarks/data.py                                   ours against bare torch
    PEER_PYTHON=/path/to/python python benchmarks/data.py       and another installation of `accelerate`, same run

Loaders: batches of 32 rows of 128 floats, no workers. Metrics: a dict of 4 tensors (32 rows of 1000 scores, labels,
numbers, losses) on 2 gloo ranks, against one hand-written all_gather of as many bytes; a small forward pass runs
before each, as in an evaluation, and is subtracted. CPU time: medians over rounds in which the variants take turns.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

NUM_BATCHES = 1000
BATCH = 32
FAR = 100_000


class Rows(Dataset[torch.Tensor]):
    """A dataset of rows that are already in memory."""

    def __init__(self) -> None:
        self.rows = torch.randn(NUM_BATCHES * BATCH, 128)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def loaders() -> dict[str, Any]:
    """Return the same loader bare, prepared for one process, as one of two (each reads half), and by sample."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    Accelerator(cpu=True)
    rows, device = Rows(), torch.device("cpu")

    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(rows, batch_size=BATCH, shuffle=True)

    return {
        "bare": loader(),
        "prepared": prepare_data_loader(loader(), device, 1, 0, put_on_device=True),
        "one of two": prepare_data_loader(loader(), device, 2, 0, put_on_device=True),
        **_by_sample(loader(), device),
    }


def _by_sample(loader: Any, device: torch.device) -> dict[str, Any]:
    """Return the loader that seeds the random streams for every sample, where this installation has it."""
    from accelerate.data_loader import prepare_data_loader

    if "augment_by_sample" not in inspect.signature(prepare_data_loader).parameters:
        return {}
    return {"by sample": prepare_data_loader(loader, device, 1, 0, put_on_device=True, augment_by_sample=True)}


def microseconds_per_batch(loader: Any) -> float:
    """Return the CPU time of one pass per batch, in microseconds."""
    start, count = time.process_time(), 0
    for _ in loader:
        count += 1
    return (time.process_time() - start) / count * 1e6


def measure(rounds: int) -> dict[str, float]:
    """Return the median CPU microseconds per batch, by variant; the variants take turns."""
    variants = loaders()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, loader in variants.items():
            times[name].append(microseconds_per_batch(loader))
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up


def first_batch_milliseconds(position: int) -> float:
    """Return the CPU time until the first batch of a shuffled epoch of 3.3 million rows, resumed at ``position``."""
    from accelerate.data_loader import prepare_data_loader

    def loader() -> Any:
        return prepare_data_loader(DataLoader(range((FAR + 3000) * BATCH), batch_size=BATCH, shuffle=True))  # pyright: ignore[reportArgumentType]

    source = loader()
    next(iter(source))
    state = source.state_dict()
    state.update(rounds=position, groups=position, samples=position * BATCH, witnesses=[])
    continued = loader()
    if position:
        continued.load_state_dict(state)
    start = time.process_time()
    next(iter(continued))
    return (time.process_time() - start) * 1e3


# -- metrics of two ranks ----------------------------------------------------------------------------------


def _rank(rank: int, port: int, rounds: int, answer: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    import torch.distributed as dist

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(1000), batch_size=BATCH))  # pyright: ignore[reportArgumentType]
    running = iter(loader)
    next(running)
    outputs = {
        "scores": torch.randn(BATCH, 1000),
        "labels": torch.randint(9, (BATCH,)),
        "ids": torch.arange(BATCH),
        "losses": torch.randn(BATCH),
    }
    mine = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in outputs.values()])
    joined = torch.empty(2 * len(mine), dtype=torch.uint8)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch >= 2.13 renamed it
    model, rows = torch.nn.Linear(128, 128), torch.randn(BATCH, 128)

    def bare() -> None:
        model(rows)

    def by_hand() -> None:
        model(rows)
        all_gather(joined, mine)

    def by_us() -> None:
        model(rows)
        accelerator.gather_for_metrics(outputs)

    times: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, function in (("bare", bare), ("all_gather", by_hand), ("gather_for_metrics", by_us)):
            dist.barrier()
            start = time.process_time()
            for _ in range(100):
                function()
            times.setdefault(name, []).append((time.process_time() - start) / 100 * 1e6)
    dist.barrier()
    answer.put({name: statistics.median(values[1:]) for name, values in times.items()})


def gathering(rounds: int) -> dict[str, float]:
    """Return the median CPU microseconds of a gather, both ranks together, without the forward pass."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, rounds, answer)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [answer.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    return {name: sum(one[name] - one["bare"] for one in found) for name in ("all_gather", "gather_for_metrics")}


def show_gathering(label: str, figures: dict[str, float]) -> None:
    """Print one line: the gather, and its ratio to one all_gather."""
    ours, hand = figures["gather_for_metrics"], figures["all_gather"]
    print(f"{label:<6} metrics      {ours:8.1f} us/gather  {ours / hand:.3f}x one all_gather ({hand:.1f} us)")


# -- a billion samples -------------------------------------------------------------------------------------


class Billion(Dataset[int]):
    """A dataset of 10^9 samples, none of which is stored."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def index_megabytes() -> tuple[float, float]:
    """Return the memory that 2000 batches of a shuffled billion add on one of 8 ranks; and ms to the first."""
    from accelerate.data_loader import prepare_data_loader

    def loader(size: int) -> Any:
        source = DataLoader(Billion(), batch_size=size, shuffle=True)
        return prepare_data_loader(source, torch.device("cpu"), 8, 3, index_free_shuffle=True)

    next(iter(loader(2)))  # what is imported and allocated once is not the index's
    before, start, first = _peak_megabytes(), time.process_time(), 0.0
    for number, _ in enumerate(loader(BATCH)):
        if number == 0:
            first = (time.process_time() - start) * 1e3
        if number == 2000:
            break
    return _peak_megabytes() - before, first


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(label: str, figures: dict[str, float]) -> None:
    """Print one line per variant, with its ratio to the bare loader."""
    for name, microseconds in figures.items():
        print(f"{label:<6} {name:<12} {microseconds:8.1f} us/batch   {microseconds / figures['bare']:.3f}x bare")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    metrics = gathering(
        arguments.rounds
    )  # first: a fork of a process that has joined a world would take it for its own
    if arguments.json:
        print(json.dumps([measure(arguments.rounds), metrics]))
        return
    megabytes, milliseconds = index_megabytes()
    figures = measure(arguments.rounds)
    print(f"ours   10^9 samples  index {megabytes:.1f} MB, first batch {milliseconds:.1f} ms")
    show("ours", figures)
    show_gathering("ours", metrics)
    begun = statistics.median(first_batch_milliseconds(0) for _ in range(3))
    continued = statistics.median(first_batch_milliseconds(FAR) for _ in range(3))
    print(f"ours   first batch  {begun:8.1f} ms at batch 0, {continued:.1f} ms at batch {FAR}")
    peer = os.environ.get("PEER_PYTHON")
    if peer:
        command = [peer, __file__, "--json", "--rounds", str(arguments.rounds)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        loading, metrics = json.loads(output.splitlines()[-1])
        show("peer", loading)
        show_gathering("peer", metrics)


if __name__ == "__main__":
    sys.exit(main())
