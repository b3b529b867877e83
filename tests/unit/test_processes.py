"""Guards and parts, over pretended worlds."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate.distributed import process_control as processes
from accelerate.distributed.process_control import (
    in_order,
    local_main_process_first,
    main_process_first,
    only_when,
    part_of,
    split_between_processes,
    wait_for_everyone,
)
from accelerate.distributed.world import World
from accelerate.errors import CollectiveError, PreparationError


class Guards(processes.ProcessGuards):
    """The guards of a world."""

    def __init__(self, world: World) -> None:
        self.is_main_process, self.is_local_main_process = world.is_main, world.is_local_main
        self.is_last_process, self.num_processes = world.is_last, world.size
        self.process_index, self.local_process_index = world.rank, world.local_rank


def parts(inputs: Any, size: int, apply_padding: bool = False) -> list[Any]:
    return [part_of(inputs, World.pretend(rank, size), apply_padding) for rank in range(size)]


@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_parts_put_together_are_the_whole_in_order_and_differ_by_one_at_most(items: list[int], size: int) -> None:
    found = parts(items, size)
    assert [item for part in found for item in part] == items
    lengths = [len(part) for part in found]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(
    st.lists(st.integers(-99, 99), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from([list, tuple, torch.tensor]),
)
def test_padded_parts_have_one_length_and_repeat_the_last_element(items: list[int], size: int, container: Any) -> None:
    found = parts(container(items), size, apply_padding=True)
    bare = parts(items, size)
    longest = -(-len(items) // size)
    for part, without in zip(found, bare, strict=True):
        values = part.tolist() if isinstance(part, torch.Tensor) else list(part)
        assert isinstance(part, torch.Tensor if container is torch.tensor else container)
        assert len(values) == longest
        assert values[: len(without)] == without
        assert set(values[len(without) :]) <= {without[-1] if without else items[-1]}


def test_a_world_of_one_gives_the_inputs_themselves() -> None:
    inputs = {"a": [1, 2]}
    with split_between_processes(inputs) as part:
        assert part is inputs


def test_a_dict_is_split_by_value_and_not_changed() -> None:
    inputs = {"ids": [1, 2, 3], "rows": torch.arange(3)}
    first, second = parts(inputs, 2)
    assert first["ids"] == [1, 2]
    assert second["ids"] == [3]
    assert second["rows"].tolist() == [2]
    assert inputs["ids"] == [1, 2, 3]
    assert inputs["rows"].tolist() == [0, 1, 2]


def test_a_dict_of_different_lengths_is_refused() -> None:
    with pytest.raises(PreparationError, match=r"same length, got \{'a': 1, 'b': 2\}"):
        parts({"a": [1], "b": [1, 2]}, 2)
    with pytest.raises(ValueError, match="same length"):
        parts({"a": [1], "b": [1, 2]}, 2)


def test_surplus_ranks_get_nothing_and_other_types_are_given_whole() -> None:
    assert parts([1], 3) == [[1], [], []]
    assert parts([], 2, apply_padding=True) == [[], []]
    assert parts("word", 2) == ["word", "word"]
    assert parts(7, 2) == [7, 7]


def test_a_datasets_dataset_is_selected_from() -> None:
    class Dataset:
        __module__ = "datasets.arrow_dataset"

        def __init__(self, rows: list[int]) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def select(self, indices: list[int]) -> list[int]:
            return [self.rows[index] for index in indices]

    assert parts(Dataset([5, 6, 7]), 2) == [[5, 6], [7]]
    assert parts(Dataset([5, 6, 7]), 2, apply_padding=True) == [[5, 6], [7, 7]]
    assert parts(Dataset([5]), 2, apply_padding=True) == [[5], [5]]


def test_a_namedtuple_is_a_tuple() -> None:
    pair = namedtuple("pair", ["a", "b"])
    assert parts(pair(1, 2), 2) == [(1,), (2,)]


@pytest.mark.parametrize(
    ("decorate", "chosen"),
    [
        (lambda f, on: on.on_main_process(f), [0]),
        (lambda f, on: on.on_local_main_process(f), [0, 2]),
        (lambda f, on: on.on_last_process(f), [3]),
        (lambda f, on: on.on_process(f, process_index=1), [1]),
        (lambda f, on: on.on_local_process(f, local_process_index=1), [1, 3]),
        (lambda f, on: on.on_process(process_index=2)(f), [2]),
    ],
)
def test_guarded_functions_run_where_they_should(decorate: Any, chosen: list[int]) -> None:
    def work() -> str:
        """Does it."""
        return "done"

    ran = []
    for rank in range(4):
        world = World.pretend(rank, 4, local_rank=rank % 2, local_size=2)
        guarded = decorate(work, Guards(world))
        assert guarded.__doc__ == "Does it."
        if guarded() == "done":
            ran.append(rank)
    assert ran == chosen


def test_in_a_world_of_one_a_guard_for_any_index_runs() -> None:
    guards = Guards(World.pretend(0, 1))
    assert guards.on_process(lambda: "done", process_index=5)() == "done"
    assert guards.on_local_process(lambda: "done", local_process_index=5)() == "done"


def test_a_guard_decides_when_it_is_called() -> None:
    answers = iter([True, False])
    guarded = only_when(lambda: next(answers), lambda: "ran")
    assert [guarded(), guarded()] == ["ran", None]


def test_waiting_in_a_world_of_one_is_no_waiting() -> None:
    wait_for_everyone()
    for section in (main_process_first, local_main_process_first, in_order):
        with section():
            pass


def test_a_pretended_world_is_not_waited_for() -> None:
    world = World.pretend(1, 2)
    with pytest.raises(CollectiveError, match="simulated"):
        wait_for_everyone(world)
    for section in (main_process_first, local_main_process_first, in_order):
        with pytest.raises(CollectiveError, match="simulated"), section(world):
            pass


def test_labels_of_accelerator_worlds() -> None:
    assert "MULTI_GPU" in processes.MULTI_DEVICE_LABELS
    assert "MULTI_CPU" not in processes.MULTI_DEVICE_LABELS
