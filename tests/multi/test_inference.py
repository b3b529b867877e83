"""Inference through a pipeline of real processes gives what one process gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, prepare_pippy
from accelerate.inference import find_pippy_batch_size, generate_device_map
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import Network
from tests.unit.parallel.test_stages import Skipping


class Turning(nn.Module):
    """Stages that hand on a transposed tensor, and take inputs that aren't rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, plain: bool) -> dict[str, Any]:
        """Return the rows, in a structure."""
        turned = self.first(x.unflatten(0, (-1, 1)).expand(-1, 3, -1) + bias).transpose(1, 2)
        return {"rows": self.second(turned) * scale, "more": (turned,)} if plain else {}


class Asking(nn.Module):
    """A block whose forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the values of the layer, unless it was given a large one."""
        return self.linear(inputs) if float(inputs.detach().abs().max()) < 1e6 else inputs


def _asking() -> nn.Module:
    return nn.Sequential(Asking(), Asking())


def _answer(
    build: Any, size: int, gather: bool, by_name: bool, options: dict[str, Any]
) -> tuple[Any, Any, list[str], int]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = build()
    inputs: dict[str, Any] = {"inputs": torch.randn(size, 8)}
    if build is Skipping:
        inputs = {"x": torch.randn(size, 4), "mask": torch.rand(size)}
    elif build is Turning:
        inputs = {"x": torch.randn(size, 4), "bias": torch.randn(1, 4), "scale": torch.tensor(2.0), "plain": True}
    expected = _leaves(model(*inputs.values()))
    rows = {name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.shape[:1] == (size,)}
    example = {name: value[:2] if name in rows else value for name, value in inputs.items()}
    given: dict[str, Any] = {"example_kwargs": example} if by_name else {"example_args": tuple(example.values())}
    prepared: Any = prepare_pippy(model, gather_output=gather, **given, **options)
    assert prepared is model
    output = None
    for _ in range(2):
        if not accelerator.is_main_process:
            output = prepared()
        else:
            output = prepared(**inputs) if by_name else prepared(*inputs.values())
    chunks = prepared.pippy_stage.num_chunks
    whole = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert whole is model and torch.equal(_leaves(whole(*inputs.values()))[0], expected[0])
    found = None if output is None else [leaf.tolist() for leaf in _leaves(output)]
    return found, [leaf.tolist() for leaf in expected], list(prepared.hf_split_points), chunks


def _leaves(output: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_flatten

    return [leaf.detach() for leaf in tree_flatten(output)[0]]


@pytest.mark.parametrize(
    ("build", "num_ranks", "size", "by_name", "options"),
    [
        (Network, 2, 4, False, {}),
        (Network, 2, 5, True, {"num_chunks": 3}),
        (Skipping, 3, 6, True, {"split_points": ["layers.1", "layers.3"]}),
        (Skipping, 2, 1, False, {"no_split_module_classes": ["Linear"]}),
        (Turning, 2, 4, True, {"split_points": ["second"]}),
        (_asking, 2, 4, False, {"split_points": ["1"]}),
    ],
    ids=[
        "split evenly",
        "a batch that has to be filled up",
        "values that pass a stage by",
        "one sample",
        "transposed values, and inputs of all rows",
        "a forward that depends on values",
    ],
)
def test_the_last_process_has_the_output_of_the_whole_model(
    build: Any, num_ranks: int, size: int, by_name: bool, options: dict[str, Any]
) -> None:
    ranks = run_on_ranks(functools.partial(_answer, build, size, False, by_name, options), num_ranks)
    for output, _, _, chunks in ranks[:-1]:
        assert output is None and chunks == options.get("num_chunks", num_ranks)
    output, expected, points, _ = ranks[-1]
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    assert len(points) == num_ranks - 1


def test_all_processes_have_the_output_where_it_is_gathered() -> None:
    for output, expected, _, _ in run_on_ranks(functools.partial(_answer, Skipping, 3, True, True, {}), 2):
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


def test_one_process_computes_all() -> None:
    output, expected, points, chunks = run_on_ranks(functools.partial(_answer, Network, 4, False, False, {}), 1)[0]
    assert output == expected and points == [] and chunks == 1


def _refused(options: dict[str, Any]) -> None:
    prepare_pippy(Network(), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"give example_args="),
        (
            {"split_points": ["layers.0", "head"], "example_args": (torch.zeros(2, 8),)},
            r"make 3 stages for 2 processes",
        ),
        ({"split_points": "nowhere", "example_args": (torch.zeros(2, 8),)}, r"no module 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RankFailed, match=text):
        run_on_ranks(functools.partial(_refused, options), 2)


def _uneven() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return prepare_pippy(model, example_args=(torch.zeros(2, 8),)).hf_split_points  # pyright: ignore[reportReturnType]


def test_no_process_is_left_without_layers() -> None:
    points = run_on_ranks(_uneven, 2)[0]
    assert len(points) == 1 and points != ["0"]


def test_parts_of_the_documented_functions() -> None:
    assert find_pippy_batch_size((), {"a": 1, "b": torch.zeros(3, 1)}) == 3
    assert find_pippy_batch_size(None, None) is None
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert set(generate_device_map(model, 2).values()) == {0, 1}
