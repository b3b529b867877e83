"""DiLoCo beside DDP: loss at equal tokens, bytes on the wire, a fine-tuning probe, and throughput over a slow link.

    python benchmarks/diloco.py loss --islands 2       # a language model of 1.3 M parameters, on Python's sources
    python benchmarks/diloco.py link --rate 100mbit    # updates per second, with and without the limit

Each island is one process in a network namespace of its own (needs root, `ip` and `tc`), so the kernel counts what
leaves it. All methods read the same samples. The probe trains a classifier on top of each model: from which of eight
modules of the standard library a piece of source text is, held-out accuracy over five seeds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

METHODS: Final[dict[str, dict[str, Any] | None]] = {
    "DDP": None,
    "DiLoCo, float32": {"compression": "none"},
    "DiLoCo, int8": {"compression": "int8"},
    "DiLoCo, 2 bits": {"compression": "2bit"},
}
MODULES: Final = ("argparse", "inspect", "typing", "turtle", "tarfile", "doctest", "pickletools", "_pydecimal")
CONTEXT, SEEDS = 64, 5


class Block(nn.Module):
    """Attention and two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden states of each position, from those before it."""
        batch, length, width = x.shape
        heads = self.attention(self.norm(x)).view(batch, length, 12, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """A decoder over bytes; with ``classes``, the mean of the hidden states is classified."""

    def __init__(self, width: int, depth: int, classes: int = 0) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        self.classifier = nn.Linear(width, classes) if classes else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte at each position, or of the classes."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.norm(self.blocks(x))
        return self.head(x) if self.classifier is None else self.classifier(x.mean(1))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Python's documentation and standard library as bytes: what is trained on, and every tenth text, held out."""
    from pydoc_data.topics import topics

    modules = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stem not in MODULES)
    texts = [topics[name].encode() for name in sorted(topics)] + [path.read_bytes() for path in modules]
    parts = [[text for number, text in enumerate(texts) if (number % 10 == 9) == held] for held in (False, True)]
    training, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8).long() for part in parts)
    return training, held_out


def windows(data: torch.Tensor, count: int, generator: torch.Generator, length: int) -> torch.Tensor:
    """Pieces of ``data`` from random positions."""
    starts = torch.randint(0, len(data) - length, (count,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts.tolist()])


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of the next byte."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# ------------------------------------------------------------------------------------------ a rank


def sent() -> int:
    """The bytes that have left this network namespace."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def train(options: argparse.Namespace) -> None:
    """Train as one rank, and write what was measured."""
    from accelerate import Accelerator, DiLoCo

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(options.seed)
    training, held_out = text()
    model = LanguageModel(options.width, options.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    warmup = max(options.steps // 20, 1)
    shape = lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps))  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, arguments = accelerator.process_index, METHODS[options.method]
    stream = torch.Generator().manual_seed(options.seed * 1000 + rank)
    context: Any = nullcontext()
    if arguments is not None:
        context = DiLoCo(accelerator, model, inner_steps=options.inner_steps, fragments=options.fragments, **arguments)
    accelerator.wait_for_everyone()
    before, began = sent(), time.perf_counter()
    with context as diloco:
        for _ in range(options.steps):
            accelerator.backward(loss_of(model, windows(training, options.batch, stream, CONTEXT + 1)))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if diloco is not None:
                diloco.step()
    accelerator.wait_for_everyone()
    measured = {"seconds": time.perf_counter() - began, "wire_bytes": sent() - before}
    if accelerator.is_main_process:
        inner = accelerator.unwrap_model(model).eval()
        batch = windows(held_out, 2048, torch.Generator().manual_seed(1), CONTEXT + 1)
        with torch.no_grad():
            measured["loss"] = statistics.mean(float(loss_of(inner, part)) for part in batch.split(256))
        measured["handed_bytes"] = 0 if diloco is None else diloco.bytes_sent
        measured["parameters"] = sum(parameter.numel() for parameter in inner.parameters())
        torch.save(inner.state_dict(), options.output.with_suffix(".pt"))
        options.output.write_text(json.dumps(measured))
    accelerator.end_training()


# ------------------------------------------------------------------------------------------ namespaces


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def network(islands: int, rate: str | None) -> Iterator[list[str]]:
    """Make one namespace for each island, joined by a bridge; return their names."""
    names = [f"island{os.getpid()}n{number}" for number in range(islands)]
    bridge = f"br{os.getpid()}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            outside = f"v{os.getpid()}n{number}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(_ip, "link", "del", outside)  # the namespace may end later
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit], check=True)
        yield names


def run(options: argparse.Namespace, method: str, rate: str | None, folder: Path) -> dict[str, Any]:
    """Run one method on all islands; return what the first rank measured."""
    output = folder / f"{method} {rate} {options.seed}.json"
    with network(options.islands, rate) as names:
        processes: list[subprocess.Popen[bytes]] = []
        for rank, name in enumerate(names):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(options.islands),
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555",
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
            }  # fmt: skip
            words = [f"--{n.replace('_', '-')}={v}" for n, v in vars(options).items() if n not in ("mode", "output")]
            words += [f"--method={method}", f"--output={output}"]
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "rank", *words]
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{method} failed")
    return json.loads(output.read_text()) | {"weights": output.with_suffix(".pt")}


# ------------------------------------------------------------------------------------------ what is compared


def probe(weights: Path, options: argparse.Namespace, seed: int) -> float:
    """The held-out accuracy of a classifier fine-tuned from ``weights``."""
    sources = [torch.tensor(list(inspect.getsource(import_module(name)).encode())) for name in MODULES]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(options.width, options.depth, len(MODULES))
    model.load_state_dict(torch.load(weights, weights_only=True), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def batch(count: int, begin: float, end: float) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, len(MODULES), (count,), generator=generator)
        pieces = [sources[label][int(begin * len(sources[label])) : int(end * len(sources[label]))] for label in labels]
        return torch.cat([windows(piece, 1, generator, CONTEXT) for piece in pieces]).long(), labels

    for _ in range(options.probe_steps):
        tokens, labels = batch(32, 0.0, 0.8)
        functional.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens, labels = batch(400, 0.8, 1.0)
    with torch.no_grad():
        return float((model(tokens).argmax(1) == labels).float().mean())


def compare_losses(options: argparse.Namespace, folder: Path) -> None:
    """Print loss, bytes and accuracy of each method."""
    print(f"{options.islands} islands, {options.steps} updates, inner_steps={options.inner_steps}")
    print("| method | held-out loss | beside DDP | bytes on the wire, per island | DDP's / its | probe accuracy |")
    print("|---|---|---|---|---|---|")
    first: dict[str, Any] = {}
    for method in options.methods.split(";"):
        found = run(options, method, None, folder)
        first = first or found
        accuracies = [probe(found["weights"], options, seed) for seed in range(SEEDS)]
        spread = statistics.stdev(accuracies)
        print(
            f"| {method} | {found['loss']:.4f} | {100 * (found['loss'] / first['loss'] - 1):+.2f} % "
            f"| {found['wire_bytes']:,} | {first['wire_bytes'] / found['wire_bytes']:.0f} "
            f"| {statistics.mean(accuracies):.3f} ± {spread:.3f} |",
            flush=True,
        )
    print(f"{first['parameters']:,} parameters")


def compare_links(options: argparse.Namespace, folder: Path) -> None:
    """Print the updates per second of each method, without a limit and with one."""
    print(f"| method | updates/s without a limit | over {options.rate} | share |\n|---|---|---|---|")
    for method in options.methods.split(";"):
        free, slow = (options.steps / run(options, method, rate, folder)["seconds"] for rate in (None, options.rate))
        print(f"| {method} | {free:.2f} | {slow:.2f} | {100 * slow / free:.0f} % |", flush=True)


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("loss", "link", "rank"))
    for name, default in (("islands", 2), ("steps", 4000), ("inner-steps", 50), ("fragments", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("width", 160), ("depth", 4), ("batch", 8), ("probe-steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--method", default="DDP")
    parser.add_argument("--output", type=Path, default=Path("result.json"))
    options = parser.parse_args()
    if options.mode == "rank":
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        (compare_losses if options.mode == "loss" else compare_links)(options, Path(folder))


if __name__ == "__main__":
    main()
