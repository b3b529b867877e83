from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accelerate.big_models.sizes import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    get_module_size_with_ties,
    retie_parameters,
)


def tied_model(device: str = "cpu") -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "mid": nn.Linear(3, 3), "head": nn.Linear(3, 7, bias=False)})
    model.to(device)
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_of_one_parameter_are_found(device: str) -> None:
    assert find_tied_parameters(tied_model(device)) == [["embed.weight", "head.weight"]]


def test_equal_values_are_no_tie() -> None:
    assert find_tied_parameters(nn.ModuleDict({"a": nn.LayerNorm(3), "b": nn.LayerNorm(3)})) == []


def test_tying_again_takes_the_one_with_values() -> None:
    model = tied_model()
    model["embed"].weight = nn.Parameter(torch.empty(7, 3, device="meta"))
    retie_parameters(model, [["embed.weight", "head.weight"]])
    assert model["embed"].weight is model["head"].weight
    assert not model["embed"].weight.is_meta


def test_a_torn_tie_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ties = [["embed.weight", "head.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(ties, {"embed": 0, "mid": 0, "head": 0})
        assert not caplog.records
        check_tied_parameters_on_same_device(ties, {"embed": 0, "mid": 1, "head": 1})
    assert "'embed.weight': 0, 'head.weight': 1" in caplog.text


def test_the_longest_prefix_decides() -> None:
    device_map = {"": "cpu", "a": 0, "a.b": 1}
    assert [device_of(name, device_map) for name in ("a.b.c", "a.x", "z", "a.bc")] == [1, 0, "cpu", 0]


def test_the_size_with_ties_counts_the_shared_weight_once() -> None:
    model = tied_model()
    waiting = [("mid", model["mid"]), ("head", model["head"])]
    sizes = {"embed": 84, "mid": 48, "head": 0}
    assert get_module_size_with_ties(["head.weight"], 84, sizes, waiting) == (84, ["head"], [model["head"]])


def test_ties_in_a_configuration() -> None:
    class Config:
        tie_word_embeddings = True

    class Model(nn.Module):
        config = Config()

        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(1, 1)

    assert check_tied_parameters_in_config(Model())
    Config.tie_word_embeddings = False
    assert not check_tied_parameters_in_config(Model())
    assert not check_tied_parameters_in_config(nn.Linear(1, 1))
