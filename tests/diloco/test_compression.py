"""Compressed changes: what decoding gives, what is left, and how many bytes leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.guests.diloco.compression import BLOCK, CODECS
from accelerate.guests.diloco.fragments import OuterWeight, divide

SIZES = [0, 1, 3, 4, BLOCK - 1, BLOCK, BLOCK + 1, 1000]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_decoding_gives_values_of_about_the_same_size(name: str, size: int) -> None:
    codec = CODECS[name]
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    encoded = codec.encode(values)
    decoded = codec.decode(encoded, size)
    assert encoded.dtype == torch.uint8 and decoded.shape == values.shape and decoded.dtype == torch.float32
    share = {"none": 0.0, "int8": 0.01, "2bit": 0.5}[name]
    assert float((decoded - values).norm()) <= share * float(values.norm())
    scales = 4 * -(-size // BLOCK)
    assert encoded.numel() == {"none": 4 * size, "int8": size + scales, "2bit": -(-size // 4) + scales}[name]


@pytest.mark.parametrize("name", CODECS)
def test_nothing_and_nan_arrive_as_they_are(name: str) -> None:
    codec = CODECS[name]
    assert torch.equal(codec.decode(codec.encode(torch.zeros(300)), 300), torch.zeros(300))
    broken = torch.zeros(300)
    broken[5] = torch.nan
    decoded = codec.decode(codec.encode(broken), 300)
    assert decoded[5].isnan() and torch.equal(decoded[BLOCK:], torch.zeros(300 - BLOCK))


@pytest.mark.parametrize("name", ["int8", "2bit"])
def test_what_is_left_is_sent_later(name: str) -> None:
    """The sum of what arrives and of what is left equals the sum of all changes."""
    codec = CODECS[name]
    parameter = torch.zeros(1000)
    weight = OuterWeight("weight", parameter, (0, 1))
    generator = torch.Generator().manual_seed(0)
    wanted, arrived = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    largest = 0.0
    for _ in range(50):
        step = torch.randn(1000, generator=generator)
        parameter.copy_(weight.outer.detach() - step)
        change = weight.change()
        decoded = codec.decode(codec.encode(change), 1000)
        weight.error = change - decoded
        wanted += step.double()
        arrived += decoded.double()
        largest = max(largest, float(weight.error.norm()))
    assert float((wanted - arrived - weight.error.double()).abs().max()) < 1e-4
    assert largest < 2 * 1000**0.5  # it doesn't grow with the rounds
    assert float((wanted - arrived).norm() / wanted.norm()) < 0.2


def test_parts_cover_a_parameter_once() -> None:
    parameter = torch.arange(10.0).view(2, 5)
    parts = [OuterWeight("weight", parameter, (index, 4)) for index in range(4)]
    for weight in parts:
        weight.outer.detach().add_(100)
    target = torch.zeros(2, 5)
    OuterWeight("target", target, (0, 4)).assign(torch.stack([weight.outer.detach() for weight in parts]), 0.0)
    assert torch.equal(target, parameter + 100)
    assert parts[3].change()[1:].tolist() == [0.0, 0.0]  # what only makes parts equal in size isn't sent


def test_fragments_are_of_about_equal_size_and_alternate() -> None:
    weights: list[Any] = [f"layer {number}" for number in range(12)]
    fragments = divide(weights, [100] * 12, 3)
    assert fragments == [weights[first::3] for first in range(3)]
    assert divide(weights[:2], [5, 5], 4) == [["layer 0"], ["layer 1"]]
