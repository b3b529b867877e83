"""Collectives between two and three gloo processes."""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from accelerate.collectives import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)
from accelerate.errors import CollectiveError
from accelerate.world import World, join_world
from tests.ranks import run_on_ranks

Pair = namedtuple("Pair", ["first", "second"])

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def on_ranks(function: Callable[[World], Any], num_processes: int = 2, **environment: str) -> list[Any]:
    """What `function(world)` returned on every rank."""
    return run_on_ranks(lambda: function(join_world()), num_processes, environment=environment)


def test_gather_joins_along_the_first_dimension_and_keeps_containers() -> None:
    def work(world: World) -> Any:
        data = {"a": Pair(torch.tensor([[world.rank]]), [torch.tensor(float(world.rank))]), "b": (torch.ones(0, 2),)}
        gathered = gather(data)
        assert isinstance(gathered["a"], Pair)
        assert gathered["b"][0].shape == (0, 2)
        return gathered["a"].first.tolist(), gathered["a"].second[0].tolist()

    assert on_ranks(work, 3) == [([[0], [1], [2]], [0.0, 1.0, 2.0])] * 3


def test_every_dtype_and_layout_travels() -> None:
    def work(world: World) -> None:
        for dtype in DTYPES:
            tensor = (torch.arange(6).reshape(2, 3) % 2 == world.rank).to(dtype)
            gathered = gather(tensor.t())  # not contiguous
            assert gathered.dtype == dtype
            assert gathered.shape == (6, 2)
            mine = gathered[3 * world.rank : 3 * world.rank + 3]
            assert torch.equal(mine.to(torch.complex64), tensor.t().to(torch.complex64))
            sent = broadcast(tensor.clone(), from_process=1)
            assert torch.equal(sent.to(torch.complex64), (torch.arange(6).reshape(2, 3) % 2 == 1).to(torch.complex64))
        assert gather(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j] * 2

    on_ranks(work)


def test_gather_to_one_rank_gives_the_others_nothing() -> None:
    def work(world: World) -> Any:
        gathered = gather([torch.tensor([world.rank])], to=1)
        assert gather([torch.ones(0)], to=1) is None or world.rank == 1
        return None if gathered is None else gathered[0].tolist()

    assert on_ranks(work) == [None, [0, 1]]


def test_results_carry_no_gradient_and_inputs_stay() -> None:
    def work(world: World) -> None:
        tensor = torch.tensor([float(world.rank + 1)], requires_grad=True)
        for result in (gather(tensor), reduce(tensor, "sum"), reduce(tensor, "mean"), reduce(tensor, "max")):
            assert not result.requires_grad
        assert tensor.tolist() == [world.rank + 1.0]

    on_ranks(work)


def test_reductions_do_what_their_name_says() -> None:
    def work(world: World) -> Any:
        tensor = torch.tensor([1.0, 4.0]) * (world.rank + 1)
        flags = torch.tensor([True, world.rank == 0])
        small = torch.tensor([100], dtype=torch.int16)
        return {
            "sum": reduce(tensor, "sum").tolist(),
            "mean": reduce(tensor).tolist(),
            "max": reduce(tensor, "max").tolist(),
            "none": reduce(tensor, "none").tolist() == tensor.tolist(),
            "scaled": reduce(tensor, "sum", 0.5).tolist(),
            "scalar": reduce(torch.tensor(2.0), "sum").item(),
            "counted": reduce(flags, "sum").tolist(),
            "any": reduce(flags, "max").tolist(),
            "int16": (reduce(small, "sum").tolist(), str(reduce(small, "sum").dtype)),
            "complex": reduce(torch.tensor([1j]), "sum").tolist(),
            "nested": reduce({"a": [tensor]}, "sum")["a"][0].tolist(),
        }

    expected = {
        "sum": [3.0, 12.0],
        "mean": [1.5, 6.0],
        "max": [2.0, 8.0],
        "none": True,
        "scaled": [1.5, 6.0],
        "scalar": 4.0,
        "counted": [2, 1],
        "any": [True, True],
        "int16": ([200], "torch.int16"),
        "complex": [2j],
        "nested": [3.0, 12.0],
    }
    assert on_ranks(work) == [expected, expected]


def test_the_mean_of_integers_is_a_clear_error_on_every_rank() -> None:
    def work(world: World) -> float:
        with pytest.raises(CollectiveError, match=r"int64 has no exact answer.*float"):
            reduce(torch.tensor([1]), "mean")
        return reduce(torch.tensor([1.0]), "sum").item()  # the ranks are still in step

    assert on_ranks(work) == [2.0, 2.0]


def test_objects_are_flattened_by_one_level() -> None:
    def work(world: World) -> Any:
        with pytest.raises(TypeError):
            gather_object(3)
        return (
            gather_object([world.rank, {"rank": world.rank}]),
            gather_object("ab"),
            gather_object({"key": 1}),
            broadcast_object_list([world.rank, "x" * world.rank], from_process=1),
        )

    expected = ([0, {"rank": 0}, 1, {"rank": 1}], list("abab"), ["key", "key"], [1, "x"])
    assert on_ranks(work) == [expected, expected]


def test_broadcast_fills_in_place() -> None:
    def work(world: World) -> Any:
        scalar, strided = torch.tensor(world.rank), torch.full((2, 2), float(world.rank)).t()[:, :1]
        data = broadcast({"scalar": scalar, "strided": strided}, from_process=1)
        assert data["scalar"] is scalar
        return scalar.item(), strided.tolist()

    assert on_ranks(work) == [(1, [[1.0], [1.0]])] * 2


def test_padding_reaches_the_longest_rank() -> None:
    def work(world: World) -> Any:
        tensor = torch.full((world.rank + 1, 2), float(world.rank))
        padded = pad_across_processes({"a": tensor, "b": (torch.tensor(1.0), torch.ones(2, world.rank + 2))}, dim=0)
        first = pad_across_processes(tensor, dim=0, pad_index=9, pad_first=True)
        last = pad_across_processes(torch.ones(2, world.rank + 2), dim=-1, pad_index=-1)
        assert tensor.shape == (world.rank + 1, 2)
        assert padded["b"][0].ndim == 0
        assert pad_across_processes(tensor, dim=5) is tensor
        return padded["a"].tolist(), padded["b"][1].shape[1], first.tolist(), last.tolist()

    zero, one = on_ranks(work)
    assert zero == ([[0.0, 0.0], [0.0, 0.0]], 2, [[9.0, 9.0], [0.0, 0.0]], [[1, 1, -1], [1, 1, -1]])
    assert one == ([[1.0, 1.0], [1.0, 1.0]], 3, [[1.0, 1.0], [1.0, 1.0]], [[1, 1, 1], [1, 1, 1]])


def test_a_tensor_of_one_rank_reaches_all() -> None:
    def work(world: World) -> Any:
        tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3) if world.rank == 1 else None
        copied = copy_tensor_to_devices(tensor)
        return gather_tensor_shape(tensor).tolist(), copied.tolist(), str(copied.dtype)

    assert on_ranks(work) == [([2, 3], [[0, 1, 2], [3, 4, 5]], "torch.int16")] * 2


def test_debug_mode_compares_shapes_before_the_collective() -> None:
    def work(world: World) -> list[str]:
        messages = []
        for operation in (gather, lambda t: reduce(t, "sum"), broadcast):
            with pytest.raises(CollectiveError) as caught:
                operation({"rows": torch.ones(world.rank + 1, 2)})
            messages.append(str(caught.value))
        with pytest.raises(CollectiveError) as caught:
            gather(torch.ones(2, dtype=[torch.float32, torch.float64][world.rank]))
        messages.append(str(caught.value))
        assert gather(torch.ones(1)).shape == (2,)  # and goes on
        assert gather_object(["a"] * (world.rank + 1)) == ["a"] * 3  # objects may differ
        assert pad_across_processes(torch.ones(world.rank + 1)).shape == (2,)
        return messages

    for messages in on_ranks(work, ACCELERATE_DEBUG_MODE="true"):
        for name, message in zip(("gather", "reduce", "broadcast"), messages, strict=False):
            assert f"Operation: `accelerate.utils.operations.{name}`" in message
            assert "- Process 0: {'rows': [1, 2]}" in message
            assert "- Process 1: {'rows': [2, 2]}" in message
            assert "test_collectives.py:" in message
        assert "float64" in messages[3]


def test_debug_mode_names_ranks_that_are_in_different_operations() -> None:
    def work(world: World) -> str:
        with pytest.raises(CollectiveError) as caught:
            gather(torch.ones(1)) if world.rank == 0 else reduce(torch.ones(1))
        return str(caught.value)

    for message in on_ranks(work, ACCELERATE_DEBUG_MODE="true"):
        assert "Process 0: `gather` at" in message
        assert "Process 1: `reduce` at" in message


def test_different_operations_end_in_an_error_without_debug_mode_too() -> None:
    def work(world: World) -> tuple[str, float]:
        start = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            if world.rank == 0:
                gather(torch.ones(1))
            else:
                assert world.meeting is not None
                world.meeting.wait_for_everyone()
        return str(caught.value), time.monotonic() - start

    (zero, seconds), (one, _) = on_ranks(work)
    assert "`gather`" in zero
    assert "`wait_for_everyone`" in zero
    assert "rank 0 is in `gather`" in one
    assert seconds < 20


def test_a_collective_without_the_others_times_out_and_names_them() -> None:
    def work() -> str:
        world = join_world(timeout=timedelta(seconds=3))
        if world.rank == 1:
            time.sleep(5)
            return ""
        with pytest.raises(CollectiveError) as caught:
            gather(torch.ones(1))
        return str(caught.value)

    message = run_on_ranks(work)[0]
    assert "`gather`" in message
    assert "rank 1" in message or "imed out" in message
