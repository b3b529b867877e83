"""A small model for fp8, and training it with torch and torchao alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn


def float8() -> Any:
    """``torchao.float8``."""
    return importlib.import_module("torchao.float8")


class Block(nn.Module):
    """A residual block."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=bias)
        self.down = nn.Linear(32, 16, bias=bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs, and what was learned about them."""
        return inputs + self.down(torch.relu(self.up(inputs)))


class Blocks(nn.Module):
    """Two blocks between an entrance and a head; without ``bias`` the blocks are nothing but matrices."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.entrance = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Block(bias), Block(bias)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Four numbers for each row."""
        hidden = self.entrance(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def batches(count: int, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of ``count`` batches of 32, always the same."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(32, 16, generator=generator)
        targets = torch.randn(32, 4, generator=generator)
        yield inputs.chunk(size)[rank], targets.chunk(size)[rank]


def _join() -> tuple[int, int]:
    import os

    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def _shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = dict.fromkeys(("param_dtype", "reduce_dtype"), torch.bfloat16)
    for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**low, output_dtype=torch.bfloat16))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**low))


def train_plainly(
    num_updates: int,
    wrap: Callable[[nn.Module], nn.Module] | str | None = None,
    *,
    gathers_in_fp8: bool = False,
    max_norm: float = 1.0,
) -> dict[str, Any]:
    """Losses, gradient norms and final weights of a loop that knows torch and torchao only."""
    rank, size = _join()
    torch.manual_seed(0)
    model: Any = Blocks()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    inner = float8().convert_to_float8_training(
        model,
        module_filter_fn=lambda _, name: name in linear[1:-1],
        config=float8().Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_in_fp8),
    )
    model = _shard(inner) if wrap == "fully_shard" else wrap(inner) if callable(wrap) else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    norms: list[float] = []
    for inputs, targets in batches(num_updates, rank, size):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        if gathers_in_fp8:
            float8().precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(float(mean / size))
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
        for name, value in inner.state_dict().items()
    }
    if size > 1:
        del model, optimizer
        dist.destroy_process_group()
    return {"losses": losses, "norms": norms, "weights": weights}
