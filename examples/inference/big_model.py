"""Run a model that is larger than the allowed memory: blocks that don't fit stay on disk until they are used.

python examples/inference/big_model.py --max_memory_mb 8
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch


class Block(nn.Module):
    """A residual layer; never divided between devices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[batch, width]`` to the same shape."""
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


def build(width: int = 256, depth: int = 8) -> nn.Sequential:
    """The model; under ``init_empty_weights`` it takes no memory."""
    return nn.Sequential(*[Block(width) for _ in range(depth)], nn.Linear(width, 10))


def inference_function(arguments: argparse.Namespace, folder: Path) -> float:
    """The largest difference between the offloaded model's outputs and the plain model's."""
    torch.manual_seed(0)
    plain = build().eval()
    Accelerator(cpu=True).save_model(plain, str(folder), max_shard_size="4MB")  # as a hub would hold it

    with init_empty_weights():
        model = build()
    budget = {"cpu": f"{arguments.max_memory_mb}MB"}
    device_map = infer_auto_device_map(model, max_memory=budget, no_split_module_classes=["Block"])
    model = load_checkpoint_and_dispatch(model, str(folder), device_map=device_map, offload_folder=str(folder)).eval()
    on_disk = sum(place == "disk" for place in device_map.values())
    inputs = torch.randn(4, 256)
    with torch.no_grad():
        difference = float((model(inputs) - plain(inputs)).abs().max())
    print(f"{on_disk} of {len(device_map)} parts wait on the disk; largest difference {difference}")
    return difference


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--max_memory_mb", type=int, default=8, help="how much the weights may take")
    return options


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        inference_function(parser().parse_args(), Path(scratch))
