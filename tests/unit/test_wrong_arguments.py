"""Arguments that people get wrong: the error is ours, a TypeError, and says what was probably meant."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.errors import AccelerateError
from accelerate.utils import set_seed


def refused(function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(TypeError) as caught:
        function(*arguments, **named)
    assert isinstance(caught.value, AccelerateError)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [name for name in inspect.signature(Accelerator).parameters if len(name) > 3] + ["logging_dir", "even_batches"],
)
def test_every_argument_of_the_accelerator_is_found_by_its_misspelling(name: str) -> None:
    swapped = name[:2] + name[3] + name[2] + name[4:]
    wrong = swapped if swapped != name else name[:2] + name[3:]
    if name != "old":
        assert f"argument {wrong!r}. Did you mean {name!r}?" in refused(Accelerator, cpu=True, **{wrong: None})


def test_the_reference_explains_every_argument_in_its_order() -> None:
    described = re.findall(r"^    (\w+): ", inspect.getdoc(Accelerator) or "", re.MULTILINE)
    assert described[: described.index("old") + 1] == list(inspect.signature(Accelerator).parameters)


def test_what_resembles_no_argument_is_refused_without_a_guess() -> None:
    said = refused(Accelerator, qqq=1)
    assert "'qqq'" in said and "mean" not in said


@pytest.mark.parametrize("seed", ["a", 1.5, None, torch.tensor(1.5)])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    assert type(seed).__name__ in refused(set_seed, seed)


def test_a_seed_as_text_is_meant_as_its_number() -> None:
    assert "Did you mean set_seed(42)?" in refused(set_seed, "42")


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_takes_parameters(name: str) -> None:
    clip, model = getattr(Accelerator(cpu=True), name), torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for wrong in (model, [model], optimizer, model.named_parameters(), model.state_dict(), 3, None):
        assert f"Did you mean {name}(model.parameters(), ...)?" in refused(clip, wrong, 1.0)
    model(torch.ones(1, 2)).sum().backward()
    for right in (model.parameters(), list(model.parameters()), model[0].weight):
        clip(right, 1.0)
