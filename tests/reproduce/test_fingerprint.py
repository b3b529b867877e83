"""A fingerprint changes with any bit, shape, dtype, name or place of the tensors, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from accelerate.guests.reproduce.recording import fingerprint, weights_of
from accelerate.nested import named_tensors


def of(*tensors: torch.Tensor) -> str:
    return fingerprint((str(number), tensor) for number, tensor in enumerate(tensors))


def test_each_bit_counts() -> None:
    values = torch.randn(11, generator=torch.Generator().manual_seed(0))
    found = {of(values)}
    for place in range(11):
        for bit in range(32):
            changed = values.clone()
            changed.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            found.add(of(changed))
    assert len(found) == 1 + 11 * 32


def test_changes_do_not_cancel() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    found = {of(values), of(values.flip(0)), of(-values), of(values.roll(1)), of(values.roll(2))}
    for first in range(0, 64, 5):
        for second in range(first + 1, 64, 3):
            changed = values.clone()
            changed[[first, second]] *= -1  # the highest bit of two words
            found.add(of(changed))
            swapped = values.clone()
            swapped[[first, second]] = values[[second, first]]
            found.add(of(swapped))
    pairs = len([1 for first in range(0, 64, 5) for second in range(first + 1, 64, 3)])
    assert len(found) == 5 + 2 * pairs


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (3, 5), (0,), (2, 0, 3)])
def test_any_dtype_and_shape_has_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert len(of(tensor)) == 32 and of(tensor) == of(tensor.clone())
    assert of(tensor) != of(tensor[None]) and of(tensor) != of(tensor.to(torch.complex128))
    assert fingerprint([("a", tensor)]) != fingerprint([("b", tensor)])


def test_layout_in_memory_does_not_count() -> None:
    values = torch.randn(6, 10)
    assert of(values.t()) == of(values.t().contiguous())
    assert of(values.flatten()[1:]) == of(values.flatten()[1:].clone())


def test_large_tensors_are_read_whole() -> None:
    values = torch.zeros(5_000_003)
    found = {of(values)}
    for place in (0, 2_097_151, 2_097_152, 4_194_304, 5_000_002):
        changed = values.clone()
        changed[place] = 1.0
        found.add(of(changed))
    assert len(found) == 6


def test_threads_do_not_count() -> None:
    values, before = torch.randn(400_000), torch.get_num_threads()
    try:
        found = set()
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.add(of(values))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_what_has_no_bits_is_left_out() -> None:
    assert of(torch.empty(3, device="meta")) == ""
    assert of(torch.eye(3).to_sparse()) == ""
    plain = torch.ones(3)
    assert fingerprint([("a", torch.empty(3, device="meta")), ("b", plain)]) == fingerprint([("b", plain)])


def test_the_tensors_of_a_batch_and_a_model_are_found() -> None:
    batch = {"x": torch.ones(1), "more": [torch.ones(2), ("text", torch.ones(3))], "number": 3}
    assert [(name, len(tensor)) for name, tensor in named_tensors(batch)] == [
        (".x", 1),
        (".more.0", 2),
        (".more.1.1", 3),
    ]
    model = torch.nn.BatchNorm1d(2)
    before = fingerprint(weights_of([model]))
    assert model.running_mean is not None
    model.running_mean += 1  # a buffer
    assert fingerprint(weights_of([model])) != before
