"""Checkpoints of sharded runs that Hugging Face accelerate 1.15.0 has written (two gloo ranks) go on here.

``data/fsdp_folders.tar.xz`` holds what its ``save_state`` made after two updates of :class:`Small`, and the losses of
the next two.
"""

from __future__ import annotations

import ast
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW
from tests.torch_needed import FSDP2_ON_CPU

ARCHIVE = Path(__file__).parent / "data" / "fsdp_folders.tar.xz"
UNITS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
READERS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one process": (1, None),
    "ddp": (2, None),
    "fsdp2": (2, {"fsdp_version": 2, **UNITS}),
    "fsdp1": (2, {"fsdp_version": 1, "use_orig_params": True, **UNITS}),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next hidden state."""
        return x + self.down(torch.relu(self.up(x)))


class Small(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of three classes."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def go_on(folder: str, fsdp: dict[str, Any] | None) -> list[float]:
    """The losses of the two updates after the checkpoint."""
    plugin = None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp)
    run = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 4, generator=generator)
    classes = torch.randint(0, 3, (32,), generator=generator)
    model, optimizer = run.prepare(model, optimizer)
    run.load_state(folder)
    size = 8 // run.num_processes
    losses: list[float] = []
    for update in (2, 3):
        own = slice(update * 8 + run.process_index * size, update * 8 + (run.process_index + 1) * size)
        loss = nn.functional.cross_entropy(model(inputs[own]), classes[own])
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "mean").item())
    return losses


@FSDP2_ON_CPU
@pytest.mark.parametrize("saved", ["fsdp1_sharded", "fsdp2_full", "fsdp2_sharded"])
def test_sharded_runs_of_the_documented_interface_go_on(saved: str, tmp_path: Path) -> None:
    """Under any strategy and number of ranks."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # the first releases of 3.10 have none
        archive.extractall(tmp_path)
    folder = tmp_path / saved
    expected = ast.literal_eval((folder / "losses.txt").read_text())[1]
    for name, (ranks, fsdp) in READERS.items():
        if name not in ("one process", "fsdp2") and not IS_SLOW:
            continue
        found = run_on_ranks(lambda fsdp=fsdp: go_on(str(folder), fsdp), ranks)[0]
        assert found == pytest.approx(expected, rel=1e-6)
