"""The cost of an update by Muon of sharded matrices, beside torch's own on DTensors.

    python benchmarks/muon.py

Four gloo ranks, six matrices, the gradients given: for each layout the collectives of an update, the bytes that a rank
receives in them, the CPU time of all ranks together, and how far the update is from that of one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig

RANKS, WIDTH, BLOCKS, UPDATES = 4, 256, 3, 5
LAYOUTS = ("fsdp2", "hsdp", "tp")


class Block(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)


class Traffic(TorchDispatchMode):
    """The number of collectives in its context, and the bytes that this rank receives in them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.count: int = 0
        self.received: float = 0.0
        self._rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` if it communicates; operations on DTensors come again as what they are made of."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            self.count += 1
            self.received += self._bytes(name, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, name: str, args: Any) -> float:
        tensor: Any = args[0]
        size = tensor.numel() * tensor.element_size()
        if name == "all_gather_into_tensor":
            return size * (args[1] - 1)
        if name == "all_reduce":
            return size * 2 * (RANKS - 1) / RANKS
        if name == "reduce_scatter_tensor":
            return size * (args[2] - 1) / args[2]
        if name == "all_to_all_single":
            return (sum(args[1]) - args[1][self._rank]) * size / max(sum(args[2]), 1)
        if name == "alltoall_base_":
            return size - args[3][self._rank] * tensor.element_size()
        raise AssertionError(f"how much {name} receives is to be written here")


def begin(layout: str, whole: bool) -> tuple[nn.Module, Any]:
    """Return the model and Muon, prepared; ``whole`` as this library steps, otherwise as torch does."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    options: dict[str, Any] = {}
    if layout in ("fsdp2", "hsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if layout == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=RANKS // 2)
    if layout == "tp":
        handler = TorchTensorParallelConfig(plan={"*.up": "colwise", "*.down": "rowwise"})
        options["parallelism_config"] = ParallelismConfig(tp_size=RANKS, tp_handler=handler)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer: Any = torch.optim.Muon(model.parameters(), lr=0.02)
    optimizer.needs_whole_matrices = whole
    return Accelerator(cpu=True, **options).prepare(model, optimizer)


def update(model: nn.Module, optimizer: Any, number: int) -> None:
    """Make an update with gradients that are the same however the matrices lie."""
    from accelerate.checkpointing.sharded import shard_like

    torch.manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = shard_like(torch.randn(parameter.shape), parameter)
    optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the matrices, whole."""
    from accelerate.checkpointing.sharded import gather_tensor

    return [gather_tensor(parameter).clone() for parameter in model.parameters()]


def measure(layout: str, whole: bool, rank: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one rank, and the matrices after the first updates."""
    model, optimizer = begin(layout, whole)
    for number in range(UPDATES):
        update(model, optimizer, number)
    found = weights(model)
    with Traffic(rank) as traffic:
        optimizer.step()
    times: list[float] = []
    for _ in range(rounds):
        torch.distributed.barrier()
        before = time.process_time()
        optimizer.step()
        times.append(time.process_time() - before)
    return {
        "collectives": traffic.count,
        "megabytes": traffic.received / 1e6,
        "seconds": statistics.median(times),
        "weights": [matrix.tolist() for matrix in found] if rank == 0 else None,
    }


def _rank(rank: int, size: int, port: int, layout: str, whole: bool, rounds: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    pipe.send(measure(layout, whole, rank, rounds))
    pipe.close()
    os._exit(0)  # nothing to tidy up


def on_ranks(layout: str, whole: bool, rounds: int) -> dict[str, Any]:
    """Return the figures: bytes of the rank that receives most, the CPU time of all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    receivers: list[Any] = []
    for rank in range(RANKS):
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=_rank, args=(rank, RANKS, port, layout, whole, rounds, sender)).start()
        receivers.append(receiver)
    found = [receiver.recv() for receiver in receivers]
    return {
        "collectives": found[0]["collectives"],
        "megabytes": max(one["megabytes"] for one in found),
        "seconds": sum(one["seconds"] for one in found),
        "weights": found[0]["weights"],
    }


def reference() -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Return the matrices before and after the updates of one process, and the CPU time of an update."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    before = weights(model)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for number in range(UPDATES):
        update(model, optimizer, number)
    found = weights(model)
    begin = time.process_time()
    optimizer.step()
    return before, found, time.process_time() - begin


def distance(found: list[Any], before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Return how far the updates are from those of one process, relative to their size: the worst matrix."""
    pairs = zip(map(torch.tensor, found), before, after, strict=True)
    return max(float((mine - one).norm() / (one - first).norm()) for mine, first, one in pairs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before, after, seconds = reference()
    found: dict[str, Any] = {"load": os.getloadavg()[0], "one process, seconds": seconds}
    for layout in args.layouts:
        for who, whole in (("torch", False), ("ours", True)):
            figures = on_ranks(layout, whole, args.rounds)
            figures["distance"] = distance(figures.pop("weights"), before, after)
            found[f"{layout}, {who}"] = figures
            if not args.json:
                print(
                    f"{layout:<6}{who:<6}{figures['collectives']:4d} collectives {figures['megabytes']:8.2f} MB "
                    f"received {figures['seconds'] * 1000:8.1f} ms CPU   {figures['distance']:.1e} of the update away",
                    flush=True,
                )
    print(json.dumps(found, indent=2) if args.json else f"one process: {seconds * 1000:.1f} ms CPU")


if __name__ == "__main__":
    main()
