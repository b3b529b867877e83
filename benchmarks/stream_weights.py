"""Weights that leave a sharded run: streamed in buckets, beside the whole state dict.

    python benchmarks/stream_weights.py [--ranks 2] [--megabytes 512] [--bucket 64] [--rounds 3]

Gloo ranks on this machine; rank 0 receives, and reads each weight once, as a send would. For each strategy and way the
seconds of the best round (the two take turns), and the peak of live bytes beside the rank's own shards, on the receiver
and on the rank that needs most of the others. Bytes are counted by every tensor that torch makes, in a round by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.live_bytes import LiveBytes
from tests.ranks import run_on_ranks

WIDTH, MB = 1024, 1 << 20


class Block(nn.Module):
    """Weights of 16 MB, in two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)


def shards_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the memory of the parameters on this rank."""
    return [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]


def measure(version: Literal[1, 2], megabytes: int, bucket: int, rounds: int) -> dict[str, tuple[float, int]]:
    """Return by way its seconds and its peak bytes, on this rank."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
    )
    run = Accelerator(cpu=True, fsdp_plugin=plugin)
    own: Any = nn.Sequential(*(Block() for _ in range(megabytes // 16)))
    model, _ = run.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))

    def stream() -> None:
        weights = run.stream_weights(model, bucket_bytes=bucket * MB)
        while (item := next(weights, None)) is not None:
            item[1].sum()
            del item

    def whole() -> None:
        for tensor in run.get_state_dict(model).values():
            tensor.sum()

    ways: dict[str, Callable[[], None]] = {"stream_weights": stream, "get_state_dict": whole}
    seconds = dict.fromkeys(ways, float("inf"))
    peaks: dict[str, int] = {}
    for name, way in ways.items():
        with LiveBytes(shards_of(model)) as live:
            way()
        peaks[name] = live.peak
    for _ in range(rounds):
        for name, way in ways.items():
            run.wait_for_everyone()
            start = time.perf_counter()
            way()
            run.wait_for_everyone()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return {name: (seconds[name], peaks[name]) for name in ways}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--bucket", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{given.megabytes} MB of weights on {given.ranks} ranks, buckets of {given.bucket} MB")
    print(f"{'strategy':<10}{'way':<18}{'seconds':>9}{'peak MB, receiver':>20}{'peak MB, others':>18}")
    versions: tuple[Literal[1, 2], ...] = (1, 2)
    for version in versions:
        arguments = (version, given.megabytes, given.bucket, given.rounds)
        ranks = run_on_ranks(measure, given.ranks, *arguments, timeout_seconds=600)
        for name, (seconds, peak) in ranks[0].items():
            others = max(rank[name][1] for rank in ranks[1:])
            print(f"FSDP {version:<5}{name:<18}{seconds:>9.2f}{peak / MB:>20.0f}{others / MB:>18.0f}")


if __name__ == "__main__":
    main()
