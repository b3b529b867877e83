"""A window of weighted losses is divided by its total weight, by whatever object ``accumulate`` names the models."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.errors import PreparationError
from accelerate.utils import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks

STEPS, UPDATES = 3, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(rows).tanh())


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inside(rows)


def compiled(model: nn.Module, _: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


#: From the prepared and the given model to what `accumulate` is given; called once a run, or in every micro-batch.
NAMES: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "the prepared model": lambda model, given: model,
    "the given model": lambda model, given: given,
    "compiled afterwards": compiled,
    "inside a wrapper": lambda model, given: Wrapper(model),
    "in a list": lambda model, given: nn.ModuleList([model]),
    "a part": lambda model, given: given.encoder,
    "a list of a part": lambda model, given: nn.ModuleList([given.get_submodule("head")]),
    "nothing": lambda model, given: (),
}


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def data_of(ranks: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    sizes = [[1 + (3 * rank + 5 * number) % 4 for number in range(STEPS * UPDATES)] for rank in range(ranks)]
    return [[torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in row] for row in sizes]


def expected(data: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights of a plain torch loop over whole windows."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, STEPS * UPDATES, STEPS):
        (model(torch.cat([part for row in data for part in row[start : start + STEPS]])) ** 2).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def prepared(kind: str, given: nn.Module, steps: int = STEPS) -> tuple[Accelerator, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "shards" else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=0.5))


def trained(kind: str, name: str, is_fresh: bool, data: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    given = make()
    accelerator, model, optimizer = prepared(kind, given)
    named = NAMES[name](model, given)
    for rows in data[accelerator.process_index]:
        if is_fresh:
            named = NAMES[name](model, given)
        with accelerator.accumulate(*(() if named == () else (named,))):
            accelerator.backward((model(rows) ** 2).sum(), weight=len(rows))
            optimizer.step()
            optimizer.zero_grad()
    full = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return full


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(kind: str, ranks: int) -> dict[tuple[str, bool], float]:
    data = data_of(ranks)
    reference = expected(data)
    found = {}
    for name in NAMES:
        for is_fresh in (False, True):
            ours = trained(kind, name, is_fresh, data)
            if ours:  # on the main process
                found[name, is_fresh] = max(
                    (whole(ours[key]) - value).abs().max().item() for key, value in reference.items()
                )
    accelerator, model, _ = prepared(kind, make())
    for named in ([model], None, iter([model])):
        with pytest.raises(PreparationError, match="Give accumulate"):
            backward(accelerator, model, (named,))
    return found


@pytest.mark.parametrize("kind", ["replicas", "shards"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_is_divided_whatever_object_names_its_model(kind: str, ranks: int) -> None:
    found = run_on_ranks(differences, ranks, kind, ranks)[0]
    assert set(found) == {(name, is_fresh) for name in NAMES for is_fresh in (False, True)}
    assert {key: value for key, value in found.items() if value > 1e-12} == {}


def two_models(names_both: bool, ranks: int) -> tuple[list[Any], list[Any]]:
    """Gradients of two models in a chain, of which `accumulate` names one or both; ours, and the plain loop's."""
    first, second = make(0).encoder, make(1).head
    chain = copy.deepcopy(nn.Sequential(first, second))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, two = accelerator.prepare(first, second)
    data = data_of(ranks)
    for rows in data[accelerator.process_index][:2]:
        with accelerator.accumulate(*((two, one) if names_both else (one,))):
            accelerator.backward((two(one(rows)) ** 2).sum(), weight=len(rows))
    (chain(torch.cat([part for row in data for part in row[:2]])) ** 2).sum(1).mean().backward()
    return [p.grad for m in (first, second) for p in m.parameters()], [p.grad for p in chain.parameters()]


@pytest.mark.parametrize("names_both", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_no_window_names_is_divided_with_the_one_that_trains_it(names_both: bool, ranks: int) -> None:
    for ours, plain in run_on_ranks(two_models, ranks, names_both, ranks):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_parts_of_one_model_that_take_turns_have_their_own_counts() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make())
    seen = []
    for _ in range(2):
        for part in (model.encoder, model.head):
            with accelerator.accumulate(part):
                seen.append(accelerator.sync_gradients)
    assert seen == [False, False, True, True]


def backward(accelerator: Accelerator, model: nn.Module, named: tuple[Any, ...]) -> None:
    with accelerator.accumulate(*named):
        accelerator.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum(), weight=1)


def test_windows_that_cannot_be_told_apart_are_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, two = accelerator.prepare(make(0), make(1))
    with pytest.raises(PreparationError, match=re.escape("inside accumulate(Model): not all of them contain")):
        backward(accelerator, one, (make(2),))
    with pytest.raises(PreparationError, match=re.escape("inside accumulate(Model, list)")):
        backward(accelerator, one, (one, [one]))
    backward(accelerator, one, (one,))
    with pytest.raises(PreparationError, match="share a model"):
        backward(accelerator, two, (two, one))
    with pytest.raises(PreparationError, match="without a weight"), accelerator.accumulate(two, one):
        accelerator.backward(two(torch.ones(1, 4, dtype=torch.float64)).sum())
    backward(accelerator, two, (two,))  # windows of their own


def test_gradients_between_two_open_windows_are_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, two, loose = accelerator.prepare(make(0), make(1), make(2))
    backward(accelerator, two, (two,))
    backward(accelerator, one, (one,))
    with accelerator.accumulate(one), pytest.raises(PreparationError, match="no accumulate\\(\\) names Model"):
        rows = torch.ones(1, 4, dtype=torch.float64)
        accelerator.backward((one(rows) + loose(rows)).sum(), weight=1)


@pytest.mark.parametrize("part", [True, False])
def test_a_window_that_was_saved_open_goes_on_under_another_name(part: bool, tmp_path: Path) -> None:
    def run(save: bool) -> torch.Tensor:
        given = make()
        accelerator, model, _ = prepared("replicas", given, steps=2)
        named = given.encoder if part else model
        if save:
            with accelerator.accumulate(named):
                accelerator.backward(model(torch.ones(3, 4).double()).sum(), weight=3)
            accelerator.save_state(tmp_path / "saved")
        else:
            accelerator.load_state(tmp_path / "saved")
            with accelerator.accumulate(named if part else Wrapper(model)):
                accelerator.backward(model(torch.ones(2, 4).double()).sum(), weight=2)
        return torch.cat([p.grad.reshape(-1) for p in given.parameters() if p.grad is not None])

    first, complete = run(True), run(False)
    torch.testing.assert_close(complete, first / 3, rtol=1e-12, atol=1e-12)  # the mean of equal rows


def prepared_twice(kind: str) -> tuple[bool, int]:
    accelerator, model, _ = prepared(kind, make())
    again = compiled(model, model)
    return accelerator.prepare_model(again) is again, len(accelerator._models)


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_prepared_model_that_was_compiled_is_not_wrapped_again(kind: str) -> None:
    assert run_on_ranks(prepared_twice, 2, kind) == [(True, 1)] * 2
