"""The same short training run under any strategy, for tests that compare it with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin

NUM_UPDATES = 20
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block"}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 17)  # odd: no rank count divides it
        self.down = nn.Linear(17, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs, and what was learned about them."""
        return inputs + self.down(torch.relu(self.up(inputs)))


class Network(nn.Module):
    """A stack of blocks, with a buffer; ``tied`` makes the head the transposed use of the entrance."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.entrance = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((1,), 1.5))
        if tied:
            self.head.weight = self.entrance.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of eight classes."""
        hidden = self.entrance(inputs) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def samples(count: int = 16 * NUM_UPDATES) -> TensorDataset:
    """Inputs and classes, always the same."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 8, (count,), generator=generator))


def plugin_of(options: dict[str, Any] | None) -> FullyShardedDataParallelPlugin | None:
    """The plugin with ``options``; None stays None."""
    return None if options is None else FullyShardedDataParallelPlugin(**options)


def train(
    options: dict[str, Any] | None = None,
    *,
    precision: str = "no",
    change: Callable[[nn.Module], None] | None = None,
    tied: bool = False,
    weighted: bool = False,
    accelerator: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Twenty updates with accumulation, clipping and a schedule: losses, norms and the weights at the end."""
    run = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        fsdp_plugin=plugin_of(options),
        **(accelerator or {}),
    )
    torch.manual_seed(0)
    model = Network(tied)
    if change is not None:
        change(model)
    decayed = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(decayed, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95 ** (count // run.num_processes))
    loader = DataLoader(samples(), batch_size=8 // run.num_processes)
    model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader)
    losses: list[float] = []
    norms: list[float] = []
    for inputs, classes in loader:
        with run.accumulate(model):
            reduction = "sum" if weighted else "mean"
            loss = nn.functional.cross_entropy(model(inputs), classes, reduction=reduction)
            run.backward(loss, weight=len(inputs)) if weighted else run.backward(loss)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    weights = run.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": {name: value.tolist() for name, value in weights.items()}}


def assert_same_run(run: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Losses and norms of every step agree, and, in full precision, so do the weights at the end."""
    assert reference["norms"]
    for name in ("losses", "norms"):
        values, expected = (torch.tensor(of[name], dtype=torch.float64) for of in (run, reference))
        torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)
    if tolerance < 1e-3:
        assert list(run["weights"]) == list(reference["weights"])
        for name, value in reference["weights"].items():
            torch.testing.assert_close(
                torch.tensor(run["weights"][name]), torch.tensor(value), rtol=1e-4, atol=1e-4, msg=name
            )
