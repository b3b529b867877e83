"""The cost of a whole checkpoint over writing and reading the same bytes with plain safetensors.

    python benchmarks/checkpoint.py [--gigabytes 1] [--rounds 5] [--folder DIR]
    PEER_PYTHON=/path/to/python python benchmarks/checkpoint.py       and another installation of `accelerate`

The yardstick writes one safetensors file, flushes it to disk and sums it with CRC-32; and reads it back, summed.
Variants take turns, and the best round of each counts: the machine's other work only ever slows a round down. Each
measurement is printed when it is made, and the best ones at the end. Where other programs use the cores, set
OMP_NUM_THREADS=1: threads that wait for one that isn't scheduled make small loads ten times slower.

An asynchronous save is measured by how long the loop stands still; the next one begins when it is committed. The very
first one also has to make the memory that it copies into, and is printed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NUM_LAYERS = 16
HERE = str(Path(__file__).resolve().parent)


def build(num_bytes: int, *, has_stepped: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its AdamW, whose weights and state take about ``num_bytes`` once it has stepped."""
    width = int((num_bytes / 3 / 4 / NUM_LAYERS) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    if not has_stepped:
        return model, optimizer
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return everything that both ways save, in one flat dict."""
    state = dict(model.state_dict())
    for number, entry in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{number}.{name}": value for name, value in entry.items()}
    return state


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    total, buffer = 0, bytearray(8 << 20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total = zlib.crc32(memoryview(buffer)[:count], total)
    return total


def plain_save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Save with plain safetensors, as the baseline."""
    folder.mkdir()
    save_file(tensors, folder / "all.safetensors")
    checksum(folder / "all.safetensors")
    with open(folder / "all.safetensors", "rb") as file:
        os.fsync(file.fileno())


def plain_load(folder: Path) -> None:
    """Load with plain safetensors, as the baseline: every byte checksummed, and in new memory."""
    checksum(folder / "all.safetensors")
    for tensor in load_file(folder / "all.safetensors").values():
        tensor.clone()


def seconds(function: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


LOAD = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from checkpoint import anonymous_bytes, build
from accelerate.checkpointing import read_checkpoint
model, optimizer = build(int(sys.argv[2]), has_stepped=False)
peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous_bytes())
watcher = threading.Thread(target=watch)
watcher.start()
read_checkpoint(sys.argv[3], models=[model], optimizers=[optimizer])
done.set()
watcher.join()
print(max(0, peak[0] - anonymous_bytes()))
"""


def memory_of_a_load(folder: Path, num_bytes: int) -> int:
    """Return the peak memory of a fresh process that resumes, beyond what the resumed run then holds.

    A fork of this process would do the same and hang: torch's OpenMP threads aren't in it, and it waits for them.
    """
    return int(last_line([sys.executable, "-c", LOAD, HERE, str(num_bytes), str(folder)]))


def last_line(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return the last line that a program prints; its errors go to this one's stderr."""
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return output.splitlines()[-1]


def measure(num_bytes: int, rounds: int, root: Path) -> dict[str, float]:
    """Return the best time of each variant, in seconds, and the memory of a load, in bytes."""
    from accelerate.checkpointing import Background, read_checkpoint, write_checkpoint

    background = Background()
    model, optimizer = build(num_bytes)
    tensors = tensors_of(model, optimizer)
    best: dict[str, float] = {"bytes": sum(t.numel() * t.element_size() for t in tensors.values())}

    def note(name: str, value: float) -> None:
        best[name] = min(value, best.get(name, value))
        print(f"  {name} {value:.3f} s", end="", flush=True)

    def save() -> None:
        write_checkpoint(root / "ours", weights=[model.state_dict()], optimizers=[optimizer])

    def save_in_background() -> None:
        weights = [model.state_dict()]
        write_checkpoint(
            root / "later", weights=weights, optimizers=[optimizer], background=background, asynchronous=True
        )

    def load() -> None:
        read_checkpoint(root / "ours", models=[model], optimizers=[optimizer])

    for number in range(rounds):
        print(f"round {number + 1}:", end="", flush=True)
        for folder in ("plain", "ours", "later"):
            shutil.rmtree(root / folder, ignore_errors=True)
        # Each variant flushes what it wrote, so nothing of one is left for the next one's disk.
        note("plain save", seconds(lambda: plain_save(root / "plain", tensors)))
        note("our save", seconds(save))
        note("blocked" if number else "first blocked", seconds(save_in_background))
        background.wait()
        note("plain load", seconds(lambda: plain_load(root / "plain")))
        note("our load", seconds(load))
        print()
    files = [{path.name: path.read_bytes() for path in (root / name).iterdir()} for name in ("ours", "later")]
    assert all(files[0][name] == files[1][name] for name in files[0] if name != "manifest.json")
    background.release_memory()
    best["load memory"] = memory_of_a_load(root / "ours", num_bytes)
    best["largest tensor"] = max(t.numel() * t.element_size() for t in tensors.values())
    return best


PEER = """
import json, sys, time, shutil, os
sys.path.insert(0, sys.argv[1])
from checkpoint import build, seconds
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(*build(int(sys.argv[2])))
best = {}
for _ in range(int(sys.argv[3])):
    shutil.rmtree(sys.argv[4], ignore_errors=True)
    os.sync()
    for name, call in (("save", accelerator.save_state), ("load", accelerator.load_state)):
        best[name] = min(best.get(name, 1e9), seconds(lambda: call(sys.argv[4])))
print(json.dumps(best))
"""


def measure_peer(python: str, num_bytes: int, rounds: int, root: Path) -> dict[str, float]:
    """Measure the same save and load by another installation (it neither flushes nor checksums)."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return json.loads(
        last_line([python, "-c", PEER, HERE, str(num_bytes), str(rounds), str(root / "peer")], environment)
    )


def main() -> None:
    """Print one line per measurement, and the two main ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    num_bytes = int(arguments.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        best = measure(num_bytes, arguments.rounds, root)
        for name in ("plain save", "our save", "plain load", "our load"):
            print(f"{name:12} {best[name]:7.2f} s  {best['bytes'] / best[name] / 1e9:6.2f} GB/s")
        print(f"save: {best['plain save'] / best['our save']:.2f} of the plain rate")
        print(f"load: {best['plain load'] / best['our load']:.2f} of the plain rate")
        blocked = best.get("blocked", best["first blocked"])
        print(
            f"in the background: the loop stands still for {blocked:.3f} s, {100 * blocked / best['our save']:.0f}% of "
            f"a save (the first time {best['first blocked']:.3f} s); same files"
        )
        print(
            f"memory of a load: {best['load memory'] / 1e6:.0f} MB beyond the state "
            f"(largest tensor {best['largest tensor'] / 1e6:.0f} MB)"
        )
        if "PEER_PYTHON" in os.environ:
            peer = measure_peer(os.environ["PEER_PYTHON"], num_bytes, arguments.rounds, root)
            print(f"peer: save {peer['save']:.2f} s, load {peer['load']:.2f} s (not flushed, not summed)")


if __name__ == "__main__":
    sys.exit(main())
