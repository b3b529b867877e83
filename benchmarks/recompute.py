"""What activation checkpointing saves, and what it costs: none, all blocks, and all but what some operators computed.

    python benchmarks/recompute.py

One process, a decoder of eight blocks, no optimizer. Bytes are those of all tensors
that operations have made: those that wait for the backward pass when the forward has ended, and the most there are at
once, gradients included; parameters and inputs aren't counted. Time is of forward and backward, the median
of rounds in which the ways take turns, as a ratio to the way that recomputes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerate import Accelerator, ActivationCheckpointing

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 128, 4, 8, 4, 256
WAYS: dict[str, ActivationCheckpointing | None] = {
    "none": None,
    "all blocks": ActivationCheckpointing(),
    'blocks, save_ops=("mm",)': ActivationCheckpointing(save_ops=("mm",)),
    'blocks, save_ops=("sdpa",)': ActivationCheckpointing(save_ops=("sdpa",)),
    "every other block": ActivationCheckpointing(modules=r"blocks\.[0246]"),
}


class Block(nn.Module):
    """Attention and a layer of four times the width, with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block."""
        batch, length, width = hidden.shape
        parts = self.mix(self.first(hidden)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(nn.functional.gelu(self.up(self.second(hidden))))


class Decoder(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last block's hidden state."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that operations have made in its context and that are still there, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: int = 0
        self._live: dict[StorageWeakRef, int] = {}

    @property
    def now(self) -> int:
        """The bytes that are there now."""
        self._live = {reference: size for reference, size in self._live.items() if not reference.expired()}
        return sum(self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and count what it returns."""
        given = {
            StorageWeakRef(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in given:
                    self._live[reference] = storage.nbytes()
        self.peak = max(self.peak, self.now)
        return results


def step(model: nn.Module, inputs: torch.Tensor, counter: LiveBytes | None = None) -> tuple[float, int]:
    """Run forward and backward; return the CPU seconds, and the bytes that are there between them."""
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(inputs).square().mean()
    kept = 0 if counter is None else counter.now
    loss.backward()
    return time.process_time() - start, kept


def main() -> None:
    """Measure each way, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    inputs = torch.randn(BATCH, LENGTH, WIDTH)
    models: dict[str, nn.Module] = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[] if way is None else [way])
        models[name] = accelerator.prepare(Decoder())
        step(models[name], inputs)
    results: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        with LiveBytes() as counter:
            _, kept = step(model, inputs, counter)
        results[name] = {"kept_mib": kept / 2**20, "peak_mib": counter.peak / 2**20}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            seconds[name].append(step(model, inputs)[0])
    for name in models:
        pairs = zip(seconds[name], seconds["none"], strict=True)
        results[name]["time"] = statistics.median(own / none for own, none in pairs)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'way':28}  kept MiB  peak MiB  time")
    for name, found in results.items():
        print(f"{name:28}  {found['kept_mib']:8.1f}  {found['peak_mib']:8.1f}  {found['time']:.2f}x")


if __name__ == "__main__":
    main()
