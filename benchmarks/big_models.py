"""Loading, offloading and hooks: ours, another installation of `accelerate`, and plain safetensors.

    python benchmarks/big_models.py                                   ours
    PEER_PYTHON=/path/to/python python benchmarks/big_models.py       and another installation, same run

A checkpoint of `--gigabytes` (2) in five shards is written to a temporary folder. Every measurement is a process of its
own; ours and the other's take turns, and the best of `--rounds` counts, because a shared machine only ever adds time.

Limits: loading at least as fast as the peer and at least 0.8x the rate of reading the same files with safetensors; a
forward pass from disk copies nothing and needs at most two blocks and 200 MB over the process before it; a hook costs
at most a third of the peer's. Where there is a GPU: generation with the weights in host memory, at least 1.7x the peer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.gpu.workers import check_import, environment_of

WIDTH = 2048
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
NUM_SHARDS = 5
MB = 1 << 20
#: The columns, and whose `accelerate` their workers must have imported.
WHO = {"ours": "ours", "the peer": "peer", "safetensors": "none"}


class Stack(nn.Module):
    """A sequence of linear layers."""

    def __init__(self, depth: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after all layers."""
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return hidden


def write_checkpoint(folder: Path, depth: int) -> None:
    """Write random weights of a stack, in shards with an index."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for shard in range(NUM_SHARDS):
        name = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        state: dict[str, torch.Tensor] = {}
        for layer in range(shard * depth // NUM_SHARDS, (shard + 1) * depth // NUM_SHARDS):
            state[f"layers.{layer}.weight"] = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
            state[f"layers.{layer}.bias"] = torch.zeros(WIDTH)
        save_file(state, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(state, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def resident(field: str = "VmRSS") -> int:
    """Return this process's resident memory in bytes: now, or (VmHWM) its peak since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read every page of the tensors."""
    for tensor in tensors:
        tensor.view(-1)[::1024].sum()


def empty_stack(depth: int) -> Stack:
    """Return a stack without values."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return Stack(depth)


# --------------------------------------------------------------------------------- one process each


def raw(folder: Path, depth: int) -> dict[str, float]:
    """Measure reading the files with safetensors into new memory: `load_file` by itself only maps them."""
    from safetensors.torch import load_file

    start = time.perf_counter()
    state: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= {name: tensor.clone() for name, tensor in load_file(path).items()}
    touch(state.values())
    return {"seconds": time.perf_counter() - start}


def load(folder: Path, depth: int) -> dict[str, float]:
    """Measure loading into a model without values, in host memory."""
    from accelerate import load_checkpoint_and_dispatch

    model = empty_stack(depth)
    start = time.perf_counter()
    load_checkpoint_and_dispatch(model, str(folder), {"": "cpu"})
    touch(model.parameters())
    return {"seconds": time.perf_counter() - start}


def load_bf16(folder: Path, depth: int) -> dict[str, float]:
    """Measure loading into another dtype."""
    from accelerate import load_checkpoint_and_dispatch

    model = empty_stack(depth)
    start = time.perf_counter()
    load_checkpoint_and_dispatch(model, str(folder), {"": "cpu"}, dtype=torch.bfloat16)
    touch(model.parameters())
    return {"seconds": time.perf_counter() - start}


def disk(folder: Path, depth: int) -> dict[str, float]:
    """Measure forward passes with all layers but the first on disk."""
    from accelerate import load_checkpoint_and_dispatch

    model = empty_stack(depth)
    places = {f"layers.{layer}": "disk" if layer else "cpu" for layer in range(depth)}
    before = resident()
    with tempfile.TemporaryDirectory(dir=folder.parent) as offload:
        start = time.perf_counter()
        load_checkpoint_and_dispatch(model, str(folder), places, offload_folder=offload)
        loaded = time.perf_counter() - start
        copied = sum(path.stat().st_size for path in Path(offload).rglob("*") if path.is_file())
        inputs = torch.randn(8, WIDTH)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        seconds = []
        with torch.no_grad():
            for _ in range(3):
                start = time.perf_counter()
                model(inputs)
                seconds.append(time.perf_counter() - start)
        peak = resident("VmHWM")
    return {"seconds": min(seconds), "load": loaded, "copied": copied, "memory": peak - before}


class Returns(nn.Module):
    """A module with two weights whose forward returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the inputs."""
        return inputs


def hooks(folder: Path, depth: int) -> dict[str, float]:
    """Measure the time that a hook adds to a call, in microseconds."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    inputs = torch.ones(1, 8)
    many = {"mask": torch.ones(2, 2), "positions": (torch.ones(2), torch.ones(2)), "cache": None, "flag": True}

    def microseconds(call: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(1000):
                call()
            best = min(best, time.perf_counter() - start)
        return best * 1e3

    with torch.no_grad():
        plain = Returns()
        base, base_many = microseconds(lambda: plain(inputs)), microseconds(lambda: plain(inputs, **many))
        places = add_hook_to_module(Returns(), AlignDevicesHook("cpu"))
        same = add_hook_to_module(Returns(), AlignDevicesHook("cpu", io_same_device=True))
        away = add_hook_to_module(Returns(), AlignDevicesHook("cpu", offload=True))
        return {
            "execution device": microseconds(lambda: places(inputs)) - base,
            "seven arguments": microseconds(lambda: places(inputs, **many)) - base_many,
            "outputs back to the inputs' device": microseconds(lambda: same(inputs)) - base,
            "two offloaded weights": microseconds(lambda: away(inputs)) - base,
        }


def generation(folder: Path, depth: int) -> dict[str, float]:
    """Measure the tokens per second of a decoder offloaded to host memory, and the device's peak memory."""
    from accelerate import cpu_offload

    torch.manual_seed(0)
    width, batch, prompt, new = 4096, 4, 32, 8
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float16)
        block = nn.TransformerEncoderLayer(width, 32, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
        model = nn.TransformerEncoder(block, 8, enable_nested_tensor=False).eval()
        torch.set_default_dtype(torch.float32)
    cpu_offload(model, execution_device=0)
    hidden = torch.randn(batch, prompt, width, dtype=torch.float16, device=0)
    with torch.no_grad():
        model(hidden)  # the order of the layers is learnt here
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(new):
            hidden = torch.cat([hidden, model(hidden)[:, -1:]], 1)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return {"rate": batch * new / seconds, "memory": torch.cuda.max_memory_allocated(), "check": float(hidden.sum())}


MEASUREMENTS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "raw": raw,
    "load": load,
    "load_bf16": load_bf16,
    "disk": disk,
    "hooks": hooks,
    "generation": generation,
}


# ------------------------------------------------------------------------------------------- the run


def measure(who: str, python: str, name: str, folder: Path, depth: int) -> dict[str, float]:
    """Run one measurement in a new process."""
    command = [python, __file__, "--measure", name, "--folder", str(folder), "--depth", str(depth), "--who", who]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(who))
    if done.returncode:
        raise SystemExit(f"{name} with {python} ({who}) failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def best(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the minimum of each figure; of rates the maximum."""
    return {key: (max if key == "rate" else min)(each[key] for each in results) for key in results[0]}


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=tuple(MEASUREMENTS))
    parser.add_argument("--who", choices=tuple(WHO.values()))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--depth", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        warnings.simplefilter("ignore")
        check_import(arguments.who)
        print(json.dumps(MEASUREMENTS[arguments.measure](arguments.folder, arguments.depth)))
        return
    pythons = {"ours": sys.executable}
    if os.environ.get("PEER_PYTHON"):
        pythons["the peer"] = os.environ["PEER_PYTHON"]
    depth = max(int(arguments.gigabytes * 1e9 / BLOCK_BYTES), NUM_SHARDS)
    work = Path(tempfile.mkdtemp())
    folder = work / "checkpoint"
    folder.mkdir()
    try:
        write_checkpoint(folder, depth)
        figures: dict[tuple[str, str], dict[str, float]] = {}
        names = [name for name in MEASUREMENTS if name != "generation" or torch.cuda.is_available()]
        for name in names:
            who = {"safetensors": sys.executable} if name == "raw" else pythons
            results: dict[str, list[dict[str, float]]] = {each: [] for each in who}
            for _ in range(arguments.rounds):
                for each, python in who.items():
                    results[each].append(measure(WHO[each], python, name, folder, depth))
            figures |= {(name, each): best(found) for each, found in results.items()}
        show(figures, depth, list(pythons))
    finally:
        shutil.rmtree(work)


def show(figures: dict[tuple[str, str], dict[str, float]], depth: int, who: list[str]) -> None:
    """Print the table, with a row for each figure."""
    total = depth * BLOCK_BYTES / 1e9
    print(f"{depth} blocks of {BLOCK_BYTES / MB:.0f} MB, {total:.2f} GB in {NUM_SHARDS} shards\n")
    print(f"| what | {' | '.join(who)} | safetensors alone |\n|---|{'---|' * (len(who) + 1)}")

    def row(what: str, name: str, text: Callable[[dict[str, float]], str], reference: str = "") -> None:
        print(f"| {what} | {' | '.join(text(figures[name, each]) for each in who)} | {reference} |")

    def rate(found: dict[str, float]) -> str:
        return f"{found['seconds']:.2f} s, {total / found['seconds']:.2f} GB/s"

    row("load", "load", rate, rate(figures["raw", "safetensors"]))
    row("load into bfloat16", "load_bf16", rate)
    row("load, layers on disk", "disk", lambda found: f"{found['load']:.2f} s")
    row("copied to the offload folder", "disk", lambda found: f"{found['copied'] / MB:.1f} MB")
    row("forward from disk", "disk", lambda found: f"{found['seconds']:.2f} s")
    row("memory of the forwards", "disk", lambda found: f"{found['memory'] / MB:.0f} MB")
    for key in figures["hooks", "ours"]:
        row(f"hook: {key}", "hooks", lambda found, key=key: f"{found[key]:.2f} us")
    if ("generation", "ours") in figures:
        row("generation, weights on the host", "generation", lambda found: f"{found['rate']:.1f} tokens/s")
        row("most on the device", "generation", lambda found: f"{found['memory'] / MB:.0f} MB")


if __name__ == "__main__":
    main()
