"""Random nested models and budgets, the same for the same seed."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """A module whose class can be named as one that is never split."""


class Branch(nn.Module):
    """A module that is always split."""


def random_model(rng: random.Random, depth: int = 0) -> nn.Module:
    model: nn.Module = Block() if rng.random() < 0.4 else Branch()
    if rng.random() < 0.3:
        model.own = nn.Parameter(torch.empty(rng.randint(1, 40), device="meta"))
    if rng.random() < 0.1:
        model.register_buffer("table", torch.empty(rng.randint(1, 40), dtype=torch.int64, device="meta"))
    for index in range(rng.randint(1, 4)):
        kind = rng.random()
        if depth < 3 and kind < 0.5:
            child: nn.Module = random_model(rng, depth + 1)
        elif kind < 0.85:
            child = nn.Linear(rng.randint(1, 12), rng.randint(1, 12), device="meta")
        elif kind < 0.95:
            child = nn.BatchNorm1d(rng.randint(1, 20), device="meta")
        else:
            child = nn.ReLU()
        setattr(model, f"child{index}", child)
    return model


def tie_some(model: nn.Module, rng: random.Random) -> None:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(rng.randint(1, 3)):
        if len(layers) > 1:
            first, second = rng.sample(layers, 2)
            second.weight = first.weight


def random_case(seed: int) -> tuple[nn.Module, dict[Any, int], list[str] | None]:
    """Return a model, a budget that fits together with the disk, and the classes that aren't split."""
    rng = random.Random(seed)
    model = random_model(rng)
    if rng.random() < 0.4:
        tie_some(model, rng)
    total = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    budget: dict[Any, int] = {index: int(total * rng.uniform(0.05, 0.8)) for index in range(rng.randint(0, 3))}
    budget["cpu"] = int(total * rng.uniform(0.05, 1.2))
    return model, budget, rng.choice([None, ["Block"]])
