"""Windows inside of windows, against a loop over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks

FEATURES = 3
Rows = list[list[torch.Tensor]]  # by rank and number of the backward


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def rows_of(ranks: int, is_ragged: bool = True) -> Rows:
    """Rows of every rank and backward: as many for all, or ragged, with ranks that have none."""
    generator = torch.Generator().manual_seed(5)
    sizes = [[(2 * rank + 3 * n + 1) % 4 if is_ragged else 2 for n in range(4)] for rank in range(ranks)]
    return [[torch.randn(size, FEATURES, generator=generator, dtype=torch.float64) for size in row] for row in sizes]


class Loop:
    """Two prepared models, and backwards over the rows of this rank by their number."""

    def __init__(self, kind: str, steps: int, rows: Rows, weighted: bool = True) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "shards" else None
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, fsdp_plugin=plugin)
        a, b = make(0), make(1)
        self.a, self.of_a = self.accelerator.prepare(a, torch.optim.SGD(a.parameters(), lr=0.5))
        self.b, self.of_b = self.accelerator.prepare(b, torch.optim.SGD(b.parameters(), lr=0.5))
        self.rows, self.weighted = rows[self.accelerator.process_index], weighted

    def backward(self, model: nn.Module, number: int) -> None:
        rows = self.rows[number]
        losses = (model(rows) ** 2).sum(1)
        if self.weighted:
            self.accelerator.backward(losses.sum(), weight=len(rows))
        else:
            self.accelerator.backward(losses.mean())

    def accumulate(self, *models: nn.Module) -> Any:
        return self.accelerator.accumulate(*models)


def gradient_over(seed: int, rows: Rows, numbers: Sequence[int], model: nn.Module | None = None) -> list[torch.Tensor]:
    """The gradients of the mean over all ranks' rows of these backwards, computed at once."""
    model = make(seed) if model is None else model
    (model(torch.cat([row[n] for row in rows for n in numbers])) ** 2).sum(1).mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def error_of(ours: nn.Module, expected: list[torch.Tensor]) -> float:
    found = [whole(parameter.grad) for parameter in ours.parameters()]
    return max((mine - other).abs().max().item() for mine, other in zip(found, expected, strict=True))


# -- windows inside of windows: the numbers of the backwards of each model -----------------------------------------


def with_the_inner_first(loop: Loop) -> tuple[list[int], list[int]]:
    for number in range(2):
        with loop.accumulate(loop.a):
            with loop.accumulate(loop.b):
                loop.backward(loop.b, number)
            loop.backward(loop.a, number + 2)
    return [2, 3], [0, 1]


def with_the_outer_first(loop: Loop) -> tuple[list[int], list[int]]:
    for number in range(2):
        with loop.accumulate(loop.a):
            loop.backward(loop.a, number + 2)
            with loop.accumulate(loop.b):
                loop.backward(loop.b, number)
    return [2, 3], [0, 1]


def with_the_inner_left_by_an_error(loop: Loop) -> tuple[list[int], list[int]]:
    for number in range(2):
        with loop.accumulate(loop.a):
            with suppress(KeyError), loop.accumulate(loop.b):
                loop.backward(loop.b, number)
                raise KeyError(number)
            loop.backward(loop.a, number + 2)
    return [2, 3], [0, 1]


def with_the_inner_twice_as_often(loop: Loop) -> tuple[list[int], list[int]]:
    for start in (0, 2):
        with loop.accumulate(loop.a):
            for number in (start, start + 1):
                with loop.accumulate(loop.b):
                    loop.backward(loop.b, number)
                    if start == 0:
                        loop.of_b.step()
                        loop.of_b.zero_grad()
            loop.backward(loop.a, start + 1)
    return [1, 3], [2, 3]


NESTS: dict[str, Callable[[Loop], tuple[list[int], list[int]]]] = {
    one.__name__: one
    for one in (
        with_the_inner_first,
        with_the_outer_first,
        with_the_inner_left_by_an_error,
        with_the_inner_twice_as_often,
    )
}


def errors_of_nests(kind: str, ranks: int, weighted: bool) -> dict[str, float]:
    rows, found = rows_of(ranks, is_ragged=weighted), {}
    for name, nest in NESTS.items():
        loop = Loop(kind, 2, rows, weighted=weighted)
        of_a, of_b = nest(loop)
        inner = make(1)
        if name == with_the_inner_twice_as_often.__name__:  # it has made an update
            for parameter, gradient in zip(inner.parameters(), gradient_over(1, rows, [0, 1]), strict=True):
                parameter.data -= 0.5 * gradient
        found[f"{name}: outer"] = error_of(loop.a, gradient_over(0, rows, of_a))
        found[f"{name}: inner"] = error_of(loop.b, gradient_over(1, rows, of_b, inner))
        loop.accelerator.free_memory()
    return found


@pytest.mark.parametrize("kind", ["replicas", "shards"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_inside_of_windows_are_divided_as_if_alone(kind: str, ranks: int) -> None:
    for weighted in (True, False):
        for found in run_on_ranks(errors_of_nests, ranks, kind, ranks, weighted):
            assert len(found) == 2 * len(NESTS)
            assert {name: error for name, error in found.items() if not error <= 1e-12} == {}


def states_in_nests(kind: str) -> list[tuple[bool, bool, bool]]:
    """Whether gradients are reduced before, inside of and after an inner window; and that optimizers act so."""
    loop = Loop(kind, 2, rows_of(2))
    seen = []
    for _ in range(2):
        with loop.accumulate(loop.a):
            outer = loop.accelerator.sync_gradients
            loop.backward(loop.a, 1)
            before = [whole(p.detach().clone()) for p in loop.a.parameters()]
            for _ in range(2):
                with loop.accumulate(loop.b):
                    inner = loop.accelerator.sync_gradients
                    loop.backward(loop.b, 1)
            seen.append((outer, inner, loop.accelerator.sync_gradients))
            loop.of_a.step()
            stepped = any((whole(p.detach()) != b).any() for p, b in zip(loop.a.parameters(), before, strict=True))
            assert stepped == outer
            loop.of_a.zero_grad()
    return seen


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_the_outer_window_decides_again_after_the_inner_one(kind: str) -> None:
    assert run_on_ranks(states_in_nests, 2, kind) == [[(False, True, False), (True, True, True)]] * 2


def reduced_after_no_sync(kind: str) -> bool:
    """Whether a backward in an open window reduces, after a `no_sync` of the same model inside of it."""
    loop = Loop(kind, 2, rows_of(2))
    with loop.accumulate(loop.a):
        with loop.accelerator.no_sync(loop.a):
            pass
        loop.accelerator.backward(loop.a(torch.ones(1, FEATURES).double() * (1 + loop.accelerator.process_index)).sum())
        if kind == "shards":  # a gradient that isn't reduced isn't sharded
            return any(p.grad is not None for p in loop.a.parameters())
        own = torch.cat([p.grad.reshape(-1) for p in loop.a.parameters()])
        return bool(torch.equal(loop.accelerator.reduce(own, reduction="mean"), own))


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_no_sync_inside_of_an_open_window_leaves_it_unreduced(kind: str) -> None:
    assert run_on_ranks(reduced_after_no_sync, 2, kind) == [False, False]
