"""A model that keeps state in Python trains bit for bit the same with the check of hardware as without it."""

from __future__ import annotations

import array
import itertools
import random
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.errors import HardwareWarning, SettingError
from tests.ranks import run_on_ranks
from tests.slow import slow_for

TOTAL = 0
SEEN: list[float] = []


class Stateful(nn.Module):
    """Scales what it computes by a number that each call draws from a state, and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(inputs)).tanh()
        return self.last(hidden * (1 + self.draw(hidden)))

    def draw(self, hidden: torch.Tensor) -> Any:
        raise NotImplementedError


class Number(Stateful):
    calls = 0

    def draw(self, hidden: torch.Tensor) -> float:
        self.calls += 1
        return self.calls / 7


class DropoutByCalls(Stateful):
    calls = 0

    def draw(self, hidden: torch.Tensor) -> float:
        self.calls += 1
        self.drop.p = min(0.5, self.calls / 10)
        return 0.0


class OfItsClass(Stateful):
    total: int

    def draw(self, hidden: torch.Tensor) -> float:
        type(self).total += 1
        OfItsClass.newest = float(self.total)
        return self.total / 7


class List(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.past: list[torch.Tensor] = []

    def draw(self, hidden: torch.Tensor) -> torch.Tensor | float:
        self.past.append(hidden.detach().mean())
        return torch.stack(self.past).sum()


class Graph(Stateful):
    """Keeps an output with its graph, as models do with their attention or an auxiliary loss."""

    kept: torch.Tensor | None = None

    def draw(self, hidden: torch.Tensor) -> float:
        before, self.kept = self.kept, hidden.square()
        return 0.0 if before is None else float(before.detach().mean())


class Containers(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.counts, self.recent = defaultdict(list, {"calls": [0]}), deque([1.0, 2.0, 3.0], maxlen=3)
        self.order, self.kinds = OrderedDict(a=1.0, b=2.0, c=3.0), Counter()
        self.names, self.raw, self.numbers = {"x"}, bytearray(b"ab"), array.array("d", [1.0, 2.0])

    def draw(self, hidden: torch.Tensor) -> float:
        self.counts["calls"][0] += 1
        self.counts[f"new {len(self.counts)}"].append(0)
        self.recent.append(self.recent[0] + 0.5)
        self.order.move_to_end(next(iter(self.order)))
        self.kinds[len(self.names) % 3] += 1
        self.names.add(f"x{len(self.names)}")
        self.raw[0] = (self.raw[0] + 1) % 256
        self.numbers.append(self.numbers[-1] / 2)
        first = next(iter(self.order.values())) + self.recent[1] + len(self.names) + self.raw[0]
        return (first + sum(self.numbers) + self.counts["calls"][0] + len(self.counts) + self.kinds[1]) / 300


class Tensors(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.inside = {"of": [torch.zeros(3), None]}
        self.rebound = torch.ones(())

    def draw(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inside["of"][0].add_(0.1)
        self.inside["of"][1] = hidden.detach()[0]
        self.rebound = 0.9 * self.rebound + hidden.detach().mean()
        return self.inside["of"][0].mean() + self.rebound


class Arrays(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.objects = np.zeros(3), np.array([[1], "a"], dtype=object)

    def draw(self, hidden: torch.Tensor) -> float:
        self.table[1:] += 0.1
        self.objects[0].append(1)
        return float(self.table.sum()) + len(self.objects[0]) / 9


class Generators(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy, self.old = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)
        self.torch = torch.Generator().manual_seed(3)

    def draw(self, hidden: torch.Tensor) -> float:
        drawn = self.python.random() + self.numpy.random() + self.old.rand() + self.python.gauss(0, 1)
        return drawn + float(torch.rand((), generator=self.torch))


class Slots:
    __slots__ = ("_private", "later", "value")

    def __init__(self) -> None:
        self.value = self._private = 0

    def next(self) -> float:
        self.value += 1
        self._private += self.value
        if self.value == 3:
            self.later = 1.0
        return self._private / 50 + getattr(self, "later", 0.0)


class Nested:
    def __init__(self, inside: Any) -> None:
        self.inside, self.me = inside, self

    def next(self) -> float:
        return self.inside.next()


class Values(list):
    newest = 0.0

    def next(self) -> float:
        self.append(len(self))
        self.newest += 0.1
        return self.newest + len(self) / 20


class Objects(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.nested, self.values = Nested(Nested(Slots())), types.SimpleNamespace(here=(Values(), Values()))
        self.bound = partial(self.values.here[1].next)

    def draw(self, hidden: torch.Tensor) -> float:
        return self.nested.next() + self.values.here[0].next() + self.bound()


class Submodules(Stateful):
    """Of which one is hidden in a list, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Sequential(nn.Identity()))
        self.hidden = [nn.BatchNorm1d(6)]

    def draw(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: Any = self.deep[0][0]
        inner.calls = getattr(inner, "calls", 0) + 1
        self.hidden[0](hidden.detach())
        return inner.calls / 7 + self.hidden[0].running_mean.mean()


def counting() -> Callable[[], float]:
    calls = 0

    def count() -> float:
        nonlocal calls
        calls += 1
        return calls / 7

    return count


class Closures(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.outputs = counting(), []
        outputs: list[float] = []
        self.first.register_forward_hook(lambda _, __, output: outputs.append(float(output.detach().mean())))
        self.last.weight.register_hook(lambda _: outputs.append(0.25))
        self.sum = lambda: sum(outputs)

    def draw(self, hidden: torch.Tensor) -> float:
        return self.count() + self.sum()


def advance() -> float:
    global TOTAL
    TOTAL += 1
    SEEN.append(TOTAL / 9)
    return sum(SEEN[-2:])


class Globals(Stateful):
    def draw(self, hidden: torch.Tensor) -> float:
        return advance()


KINDS: list[type[Any]] = [
    Number, DropoutByCalls, OfItsClass, List, Graph, Containers, Tensors, Arrays, Generators, Objects, Submodules,
    Closures, Globals,
]  # fmt: skip


def trained(kind: type[Any], strategy: str, every: int) -> tuple[list[torch.Tensor], list[str]]:
    """Return the outputs and the weights of a short training, and what was warned of."""
    global TOTAL
    TOTAL, SEEN[:] = 0, []
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = kind()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    torch.manual_seed(accelerator.process_index)
    type(accelerator.unwrap_model(model)).total = 0  # of the class that FSDP2 makes
    found: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.watch_run(log=False, rules=None, sdc_check=every)
        for _ in range(8):
            with accelerator.accumulate(model):
                outputs = model(torch.randn(5, 4))
                found.append(outputs.detach())
                accelerator.backward(outputs.square().mean())
                optimizer.step()
                optimizer.zero_grad()
    found += [each.detach().to_local() if hasattr(each, "to_local") else each.detach() for each in model.parameters()]
    return found, [str(each.message) for each in said if each.category is HardwareWarning]


def compared(strategy: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind in KINDS:
        without, _ = trained(kind, strategy, 0)
        checked, said = trained(kind, strategy, 2)
        found[kind.__name__] = (all(map(torch.equal, without, checked)), said)
    return found


@pytest.mark.parametrize(
    "strategy", ["single", "ddp", pytest.param("fsdp2", marks=slow_for("of many models", "meshes"))]
)
def test_a_model_that_keeps_state_trains_the_same_with_the_check(strategy: str) -> None:
    for found in run_on_ranks(compared, 1 if strategy == "single" else 2, strategy):
        assert [name for name, (is_same, _) in found.items() if not is_same] == []
        said = {text for _, texts in found.values() for text in texts}
        if strategy == "ddp":  # its neighbour may keep another state
            assert said and all("on another rank, since it keeps Python state" in text for text in said), said
        else:
            assert said == set()


def by_attribute(name: str, value: Any) -> Stateful:
    model = Number()
    setattr(model, name, value)
    return model


class Foreign:
    """Stands for what isn't written in Python: neither attributes nor slots."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("numbers", itertools.count(), "itertools.count"),
        ("rows", {"train": [iter([1, 2])]}, "builtins.list_iterator"),
        ("words", (each for each in "ab"), "builtins.generator"),
        ("pool", Foreign(), "Foreign"),
    ],
)
def test_what_cant_be_put_back_is_refused_by_name(name: str, value: Any, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(by_attribute(name, value))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(SettingError, match=rf"sdc_check=5.*Sequential holds `0.{name}.*{kind}.*leave sdc_check out"):
        accelerator.watch_run(log=False, sdc_check=5)


class Momentum(Number):
    """Moves a parameter in its forward, as MoCo does with its second encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(4, 6), requires_grad=False)

    def draw(self, hidden: torch.Tensor) -> torch.Tensor:
        self.slow.data = 0.9 * self.slow.data + 0.1 * self.first.weight.detach().T
        return self.slow.mean()


class Late(Number):
    """Comes to something that can't be put back in its first call."""

    numbers: Iterator[int] | None = None

    def draw(self, hidden: torch.Tensor) -> float:
        self.numbers = self.numbers or itertools.count()
        return next(self.numbers) / 7


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Momentum, "`slow`, a parameter, is changed in forward"),
        (Late, "`numbers` (itertools.count), came into the model"),
    ],
)
def test_a_pass_that_changes_what_cant_be_put_back_is_not_computed_again(kind: type[Any], said: str) -> None:
    without, _ = trained(kind, "single", 0)
    checked, texts = trained(kind, "single", 1)
    assert all(map(torch.equal, without, checked))
    assert len(texts) <= 2 and said in texts[-1], texts
