"""Collectives between two and three gloo processes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections import UserDict, namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.distributed.collectives import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)
from accelerate.distributed.process_control import wait_for_everyone
from accelerate.distributed.world import World, join_world, set_debug
from accelerate.errors import CollectiveError, DistributedOperationException
from tests.ranks import _environment as rank_environment
from tests.ranks import free_port, run_on_ranks

Pair = namedtuple("Pair", ["first", "second"])
ROW = torch.ones(1)

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
        assert "Process 1: `reduce` (mean) at" in message


def uneven(world: World, *sizes: int) -> torch.Tensor:
    """A tensor of as many rows as this rank's number says."""
    return torch.ones(sizes[world.rank], 2)


#: By name: a call in which the ranks disagree, and what the error says on every one of them.
DISAGREEMENTS: dict[str, tuple[Callable[[World], object], list[str]]] = {
    "gather": (lambda world: gather(uneven(world, 1, 2)), ["gather`", "Process 0: [1, 2]", "Process 1: [2, 2]"]),
    "gather of large tensors": (
        lambda world: gather(uneven(world, 600_000, 600_001)),
        ["gather`", "[600000, 2]", "[600001, 2]"],
    ),
    "gather of a short and a large one": (
        lambda world: gather([uneven(world, 1, 600_000)]),
        ["gather`", "[1, 2]", "[600000, 2]"],
    ),
    "gather of differently many": (
        lambda world: gather([torch.ones(2)] * (world.rank + 1)),
        ["gather`", "Process 0: [[2]]", "Process 1: [[2], [2]]"],
    ),
    "gather of complex ones": (
        lambda world: gather(uneven(world, 1, 2).to(torch.complex64)),
        ["gather`", "Process 1: [2, 2]"],
    ),
    "gather of other dtypes": (
        lambda world: gather(torch.ones(2, dtype=[torch.float32, torch.int32][world.rank])),
        ["dtype mismatches", "float32", "int32"],
    ),
    "gather to one": (lambda world: gather(uneven(world, 1, 2), to=0), ["gather`", "Process 1: [2, 2]"]),
    "reduce": (lambda world: reduce({"a": uneven(world, 1, 2)}), ["reduce`", "Process 1: {'a': [2, 2]}"]),
    "reduce of large tensors": (lambda world: reduce(uneven(world, 30_000, 3)), ["reduce`", "[30000, 2]", "[3, 2]"]),
    "reductions": (
        lambda world: reduce(torch.ones(1), ["sum", "mean"][world.rank]),
        ["arguments that have to be the same", "`reduce` (sum)", "`reduce` (mean)"],
    ),
    "broadcast": (lambda world: broadcast(uneven(world, 1, 2)), ["broadcast`", "Process 1: [2, 2]"]),
    "broadcast of large tensors": (
        lambda world: broadcast(uneven(world, 30_000, 30_001)),
        ["broadcast`", "[30000, 2]", "[30001, 2]"],
    ),
    "sources": (
        lambda world: broadcast(torch.ones(1), from_process=world.rank),
        [
            "`broadcast` with arguments that have to be the same",
            "`broadcast` (from_process=0)",
            "`broadcast` (from_process=1)",
        ],
    ),
    "lists of objects": (
        lambda world: broadcast_object_list([None] * (3 * world.rank)),
        ["arguments that have to be the same", "(0 objects, from_process=0)", "(3 objects, from_process=0)"],
    ),
    "operations": (
        lambda world: gather(torch.ones(2)) if world.rank else gather_object([1]),
        ["different operations", "Process 0: `gather_object`", "Process 1: `gather`"],
    ),
    "padding": (
        lambda world: pad_across_processes([torch.ones(2)] * (world.rank + 1)),
        ["pad_across_processes`", "Process 0: [[2]]", "Process 1: [[2], [2]]"],
    ),
    "padding of other dimensions": (
        lambda world: pad_across_processes(torch.ones([2] * (world.rank + 1))),
        ["pad_across_processes`", "Process 0: [1]", "Process 1: [2]"],
    ),
}


@pytest.mark.parametrize("debug", ["nowhere", "on one rank", "everywhere"])
def test_ranks_that_disagree_raise_on_every_rank_with_what_each_gave_and_where(debug: str) -> None:
    """Never an abort, never a wait for the timeout; and the ranks stay in step."""

    def work(world: World) -> dict[str, str]:
        set_debug(debug == "everywhere" or (debug == "on one rank" and world.rank == 1))
        messages = {}
        for name, (call, _) in DISAGREEMENTS.items():
            with pytest.raises(DistributedOperationException) as caught:
                call(world)
            messages[name] = str(caught.value)
            assert gather(torch.ones(1)).shape == (2,)
        return messages

    for messages in on_ranks(work):
        for name, (_, parts) in DISAGREEMENTS.items():
            for part in [*parts, "test_collectives.py:"]:
                assert part in messages[name], (name, messages[name])


#: By name: what ranks 0 and 1 give, and the part of the error that names the difference.
STRUCTURES: dict[str, tuple[Any, Any, str]] = {
    "other keys": ({"a": ROW, "b": ROW}, {"a": ROW, "c": ROW}, "process 0 has .b where process 1 has .c"),
    "another order": ({"a": ROW, "b": ROW}, {"b": ROW, "a": ROW}, "process 0 has .a where process 1 has .b"),
    "other keys inside": ([{"a": ROW}], [{"b": ROW}], "process 0 has .0.a where process 1 has .0.b"),
    "other lengths": ([ROW], [ROW, ROW], "process 0 has no tensor where process 1 has .1"),
    "no item": ([], [ROW], "process 0 has no tensor where process 1 has .0"),
    "other lengths inside": ([[ROW], [ROW] * 2], [[ROW] * 2, [ROW]], "process 0 has .1.0 where process 1 has .0.1"),
    "other nesting": ([ROW, ROW], [[ROW, ROW]], "process 0 has .0 where process 1 has .0.0"),
    "a tensor and a list": (ROW, [ROW], "process 0 has a tensor where process 1 has .0"),
    "a list and a mapping": ([ROW], {"a": ROW}, "process 0 has .0 where process 1 has .a"),
    "a shorter tuple": (Pair(ROW, ROW), (ROW,), "process 0 has .1 where process 1 has no tensor"),
    "keys of other types": ({torch.int8: ROW}, {None: ROW}, "process 0 has .dtype where process 1 has .NoneType"),
}

#: By name: a collective of containers.
OF_CONTAINERS: dict[str, Callable[[Any], object]] = {
    "gather": gather,
    "gather to one rank": lambda data: gather(data, to=1),
    "reduce": lambda data: reduce(data, "sum"),
    "reduce to the mean": reduce,
    "broadcast": broadcast,
    "pad_across_processes": pad_across_processes,
    "pad_across_processes of the first two": lambda data: pad_across_processes(data, num_present=2),
}


def test_containers_that_differ_between_ranks_are_refused_by_every_collective() -> None:
    """Tensors are combined in order: of other keys or nesting, they would give wrong values under right names."""

    def work(world: World) -> dict[tuple[str, str], str]:
        found = {}
        for (name, call), (kind, given) in itertools.product(OF_CONTAINERS.items(), STRUCTURES.items()):
            try:
                found[name, kind] = f"returned {call(given[world.rank])}"
            except Exception as error:  # whatever is raised, and on every rank, is compared below
                found[name, kind] = f"{type(error).__mro__} {error}"
            assert gather(torch.ones(1)).shape == (2,)
        return found

    results = on_ranks(work)
    wrong = [
        (cell, text)
        for result in results
        for cell, text in result.items()
        for part in ("CollectiveError", "test_collectives.py:", STRUCTURES[cell[1]][2])
        if part not in text
    ]
    assert not wrong, "\n".join(f"{cell}: {text}" for cell, text in wrong)


def test_lists_and_tuples_of_the_same_tensors_are_combined() -> None:
    """The kind of a sequence, or of a mapping, changes no value: every rank gets its own back."""

    def work(world: World) -> Any:
        sequence = ([ROW, ROW], (ROW, ROW))[world.rank]
        mapping: Any = ({"a": ROW, "b": []}, UserDict(a=ROW))[world.rank]  # what is empty has no tensors to combine
        key = object()  # its text differs between the ranks
        gathered = gather([sequence, mapping, {key: ROW}])
        assert type(gathered[0]) is type(sequence) and type(gathered[1]) is type(mapping) and key in gathered[2]
        return [len(tensor) for tensor in (*gathered[0], gathered[1]["a"], gathered[2][key])]

    assert on_ranks(work) == [[2, 2, 2, 2]] * 2


def test_a_mismatch_at_module_level_names_its_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch\nfrom accelerate.utils import gather\n"
        "from accelerate import PartialState\nPartialState(cpu=True)\n"
        "gather(torch.ones(1 + int(os.environ['RANK'])))\n"
    )
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **rank_environment(rank, 2, port, None), "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        _, output = process.communicate(timeout=120)
        assert process.returncode == 1  # an exception, no abort
        assert "accelerate.errors.UnequalTensors: Cannot apply desired operation due to shape mismatches" in output
        assert f"Process 0: [1] at {program}:5" in output
        assert f"Process 1: [2] at {program}:5" in output


def test_what_ranks_agree_on_is_exact_whatever_its_size_and_order() -> None:
    """Short, long and in between, in changing order: the message that begins an operation may be too short or long."""

    def work(world: World) -> None:
        draw = random.Random(0)
        for _ in range(60):
            size = draw.choice([1, 3, 100, 5_000, 20_000, 100_000])
            tensor = torch.arange(size, dtype=torch.float64) + world.rank
            others = [torch.arange(size, dtype=torch.float64) + rank for rank in range(world.size)]
            operation = draw.choice(["gather", "sum", "max", "mean", "broadcast", "objects"])
            if operation == "gather":
                joined = gather({"a": tensor, "b": [tensor[:1]]})
                assert torch.equal(joined["a"], torch.cat(others))
                assert torch.equal(joined["b"][0], torch.cat([other[:1] for other in others]))
            elif operation == "broadcast":
                assert torch.equal(broadcast(tensor, from_process=2), others[2])
            elif operation == "objects":
                assert gather_object([world.rank] * world.rank) == [1, 2, 2]
            else:
                whole = torch.stack(others)
                expected = whole.amax(0) if operation == "max" else getattr(whole, operation)(0)
                assert torch.allclose(reduce(tensor, operation), expected, rtol=1e-15, atol=0)

    on_ranks(work, 3)


def test_different_operations_end_in_an_error_without_debug_mode_too() -> None:
    def work(world: World) -> tuple[str, float]:
        start = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            if world.rank == 0:
                gather(torch.ones(1))
            else:
                assert world.coordinator is not None
                world.coordinator.wait_for_everyone()
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


@pytest.mark.parametrize("debug", ["0", "1"])
def test_arguments_refused_by_one_rank_leave_the_ranks_in_step(debug: str) -> None:
    """Such a call isn't an operation: what this rank calls next belongs to the others' next call."""
    refused: dict[str, Callable[[], object]] = {
        "gather": lambda: gather("text"),
        "gather to one rank": lambda: gather({"a": object()}, to=0),
        "reduce": lambda: reduce(torch.tensor([1]), "mean"),
        "reduction": lambda: reduce(torch.tensor([1.0]), "sun"),
        "broadcast": lambda: broadcast(object()),
    }

    def work(world: World) -> Any:
        found = []
        for call in refused.values():
            if world.rank == 0:
                with pytest.raises(Exception) as error:
                    call()
                assert "waits" not in str(error.value)
            wait_for_everyone(world)
            found.append(gather(torch.tensor([world.rank])).tolist())
        return found

    assert on_ranks(work, ACCELERATE_DEBUG_MODE=debug) == [[[0, 1]] * len(refused)] * 2


@pytest.mark.parametrize("collective", ["gather", "reduce", "broadcast", "gather_object"])
def test_no_collective_after_an_abandoned_one_gets_its_values(collective: str) -> None:
    """One rank is in a barrier, the other in a collective; both catch the error and go on."""
    calls: dict[str, Callable[[int], object]] = {
        "gather": lambda value: gather(torch.tensor([value])),
        "reduce": lambda value: reduce(torch.tensor([float(value)])),
        "broadcast": lambda value: broadcast(torch.tensor([value])),
        "gather_object": lambda value: gather_object([value]),
    }

    def work(world: World) -> Any:
        texts = []
        first = (lambda: wait_for_everyone(world)) if world.rank == 0 else (lambda: calls[collective](10))
        for call in (first, lambda: calls["gather"](world.rank), lambda: wait_for_everyone(world)):
            with pytest.raises(CollectiveError) as error:
                call()
            texts.append(str(error.value))
        return texts

    for texts in on_ranks(work):
        assert "would never meet" in texts[0] or "has failed" in texts[0], texts
        assert all("after an error that has left ranks in different torch collectives" in text for text in texts[1:])
