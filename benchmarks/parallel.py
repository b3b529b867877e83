"""The cost of parallel training over the same model written by hand in raw torch.

    python benchmarks/parallel.py                               2 gloo ranks: DDP, FSDP2, TP; and, where there is a GPU,
                                                                a Llama-shaped model on one of them
    PEER_PYTHON=/path/to/python python benchmarks/parallel.py   on the GPU, another installation of `accelerate` too

On the ranks: CPU time of a step of about 5 ms, in rounds in which both variants take turns inside the same processes,
so that a machine whose speed drifts slows both. On the GPU: tokens per second, every variant in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.gpu.models import LARGE, LlamaShaped
from benchmarks.gpu.workers import check_import, environment_of

STEPS, RANKS, WIDTH, BATCH = 20, 2, 128, 32
Step = Callable[[], None]


# ------------------------------------------------------------------------------------------------ the ranks


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with the block's output added."""
        return x + self.down(torch.relu(self.up(x)))


PLAN = {f"{number}.{name}": kind for number in range(3) for name, kind in (("up", "colwise"), ("down", "rowwise"))}


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a model, AdamW, and a batch that is already in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randn(BATCH, WIDTH)


def by_hand(strategy: str, clips: bool) -> Step:
    """Return the step written in raw torch."""
    from torch.distributed.device_mesh import init_device_mesh

    model, optimizer, batch = build()
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan = {name: styles[kind]() for name, kind in PLAN.items()}
        model = parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared(strategy: str, clips: bool) -> Step:
    """Return the same step after `prepare`."""
    from accelerate import Accelerator
    from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
    from accelerate.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    options: dict[str, Any] = {}
    if strategy == "fsdp2":
        blocks: dict[str, Any] = {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": "Block",
        }
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **blocks)
    elif strategy == "tp":
        handler = TorchTensorParallelConfig(plan=PLAN)
        options["parallelism_config"] = ParallelismConfig(tp_size=RANKS, tp_handler=handler)
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, batch = build()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if clips and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def _rank(rank: int, port: int, strategy: str, clips: bool, rounds: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    ours = prepared(strategy, clips)  # first: it forms the group that both use
    variants = {"raw": by_hand(strategy, clips), "ours": ours}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):
        order = list(variants) if number % 2 else list(reversed(variants))
        for name in order:
            torch.distributed.barrier()
            before = time.process_time()
            for _ in range(STEPS):
                variants[name]()
            if number >= 2:  # the first rounds build buckets and meet caches
                times[name].append((time.process_time() - before) / STEPS * 1000)
    pipe.send(times)
    pipe.close()
    os._exit(0)  # nothing to tidy up


def on_ranks(strategy: str, clips: bool, rounds: int) -> dict[str, float]:
    """Return the CPU milliseconds of one step on rank 0, and the median ratio of neighbouring rounds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    receivers = []
    for rank in range(RANKS):
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=_rank, args=(rank, port, strategy, clips, rounds, sender), daemon=True).start()
        sender.close()
        receivers.append(receiver)
    times = [receiver.recv() for receiver in receivers]
    raw, ours = ([sum(pair) / RANKS for pair in zip(*(each[name] for each in times), strict=True)] for name in times[0])
    ratio = statistics.median(own / bare for own, bare in zip(ours, raw, strict=True))
    return {"raw_ms": statistics.median(raw), "ours_ms": statistics.median(ours), "ratio": ratio}


# -------------------------------------------------------------------------------------------------- the GPU


def gpu_worker(variant: str, precision: str, steps: int) -> None:
    """Print the tokens per second of one variant."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model: nn.Module = LlamaShaped(LARGE)
    tokens = torch.randint(LARGE.vocabulary, (LARGE.samples, LARGE.sequence), device=device)

    def loss_of(scores: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())

    if variant == "raw":
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                scores = model(tokens)
            loss_of(scores.float()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    else:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision=precision)
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(tokens)))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - before
    print(json.dumps({"tokens_per_second": steps * tokens.numel() / seconds}), flush=True)


def _ask(who: str, python: str, variant: str, precision: str, steps: int) -> dict[str, Any]:
    words = [python, os.path.abspath(__file__), "--worker", variant, "--precision", precision, "--steps", str(steps)]
    words += ["--who", who]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment_of(who))
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def on_gpu(rounds: int, steps: int) -> dict[str, Any]:
    """Return the tokens per second of every variant; a sentence for those that can't be measured here."""
    if not torch.cuda.is_available():
        return {"skipped": "no GPU here"}
    variants: dict[str, tuple[str, str, str, str]] = {
        "raw bf16": ("none", sys.executable, "raw", "bf16"),
        "ours bf16": ("ours", sys.executable, "accelerate", "bf16"),
    }
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "parameters": 0}
    found["parameters"] = sum(p.numel() for p in _on_meta().parameters())
    peer = os.environ.get("PEER_PYTHON")
    if peer:
        variants["peer bf16"] = ("peer", peer, "accelerate", "bf16")
    else:
        found["peer bf16"] = "skipped: PEER_PYTHON is not set"
    if torch.cuda.get_device_capability() >= (8, 9):
        variants["ours fp8"] = ("ours", sys.executable, "accelerate", "fp8")
    else:
        found["ours fp8"] = "skipped: this GPU has no fp8"
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (who, python, variant, precision) in variants.items():
            answer = _ask(who, python, variant, precision, steps)
            if "failed" in answer:
                found[name] = f"failed: {' '.join(answer['failed'])}"
            else:
                rates[name].append(answer["tokens_per_second"])
    found.update({name: statistics.median(rate) for name, rate in rates.items() if rate})
    return found


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return LlamaShaped(LARGE)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="Rounds of 20 steps on the ranks.")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2", "tp"], choices=["ddp", "fsdp2", "tp"])
    parser.add_argument("--gpu_rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="Steps of a round on the GPU.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["raw", "accelerate"], help=argparse.SUPPRESS)
    parser.add_argument("--who", choices=["ours", "peer", "none"], help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="bf16", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        check_import(args.who)
        gpu_worker(args.worker, args.precision, args.steps)
        return
    found: dict[str, Any] = {"load": os.getloadavg()[0], "ranks": {}}
    for strategy in args.strategies:
        for clips in (False, True):
            figures = on_ranks(strategy, clips, args.rounds)
            found["ranks"][f"{strategy}{', clipping' if clips else ''}"] = figures
            if not args.json:
                print(
                    f"{strategy:<6}{'clipping' if clips else '':<10}raw {figures['raw_ms']:6.2f} ms   "
                    f"ours {figures['ours_ms']:6.2f} ms   {figures['ratio']:.3f}x",
                    flush=True,
                )
    found["gpu"] = on_gpu(args.gpu_rounds, args.steps)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found["gpu"].items():
        print(f"{name:<12}{value:,.0f}" if isinstance(value, (int, float)) else f"{name:<12}{value}")


if __name__ == "__main__":
    main()
