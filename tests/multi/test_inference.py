"""Inference through a pipeline of real processes gives what one process gives."""

from __future__ import annotations

import copy
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


def _answer(
    build: Any, size: int, gather: bool, by_name: bool, options: dict[str, Any]
) -> tuple[Any, Any, list[str], int]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = build()
    several = {"x": torch.randn(size, 4), "mask": torch.rand(size)}
    inputs = several if build is Skipping else {"inputs": torch.randn(size, 8)}
    expected = _leaves(model(**inputs))
    example = {name: value[:2] for name, value in inputs.items()}
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
    assert whole is model and torch.equal(_leaves(whole(**inputs))[0], expected[0])
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
    ],
    ids=["split evenly", "a batch that has to be filled up", "values that pass a stage by", "one sample"],
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


def _in_and_out_of_autocast(_: int) -> list[float]:
    """The largest difference from the whole model, outside of autocast and inside of it, in turns."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
    inputs, reference = torch.randn(4, 8).to(accelerator.device), copy.deepcopy(model).to(accelerator.device)
    piped = prepare_pippy(model, example_args=(inputs,), split_points=["2"], gather_output=True)
    errors: list[float] = []
    for enabled in (False, True, False):
        with torch.no_grad(), torch.autocast(accelerator.device.type, torch.bfloat16, enabled=enabled):
            errors.append((piped(inputs) - reference(inputs)).abs().max().item())
    return errors


def test_a_batch_is_computed_in_and_out_of_autocast() -> None:
    for errors in run_on_ranks(_in_and_out_of_autocast, 2, 0):
        assert errors == [0.0, 0.0, 0.0]
