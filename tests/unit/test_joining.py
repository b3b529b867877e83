"""What ranks computed is joined leaf by leaf, into what one process with all their samples would have computed."""

from __future__ import annotations

import collections
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from accelerate.data_loader import BatchCoverage
from accelerate.data_loader.gathering import Joiner, is_of_tensors, tensors_of, with_tensors
from accelerate.errors import CollectiveError

#: Two ranks with batches of three, the last row of which completes the second one.
TAIL = BatchCoverage(valid=(3, 2), size=(3, 3))
WHOLE = BatchCoverage(valid=(3, 3), size=(3, 3))
UNEVEN = BatchCoverage(valid=(3, 1), size=(3, 1))


def joined(*parts: Any, coverage: BatchCoverage | None = TAIL, as_objects: bool = False) -> Any:
    """The parts of all ranks, joined on each of them, which have to agree."""
    results = [Joiner(lambda _: coverage, own, as_objects=as_objects).join(parts) for own in range(len(parts))]
    assert all(repr(result) == repr(results[0]) for result in results)
    return results[0]


class Pair(NamedTuple):
    ids: Any
    names: Any


@dataclass(frozen=True)
class Outputs:
    ids: Any
    names: Any = None
    hidden: Any = field(default=None, init=False)


def test_tensors_and_arrays_are_joined_along_the_rows() -> None:
    first, second = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 0])
    assert joined(first, second).tolist() == [0, 1, 2, 3, 4]
    found = joined(first.numpy(), second.numpy())
    assert isinstance(found, np.ndarray) and found.tolist() == [0, 1, 2, 3, 4]
    assert joined(np.array(["a", "b", "c"]), np.array(["d", "e", "a"])).tolist() == ["a", "b", "c", "d", "e"]
    assert joined(torch.tensor(1.0), torch.tensor(2.0)).tolist() == [1.0, 2.0]
    assert joined(torch.tensor(1.0), torch.tensor(2.0), coverage=BatchCoverage((3, 0), (3, 3))).tolist() == [1.0]


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, UserDict])
def test_mappings_keep_their_type_and_are_joined_key_by_key(make: Any) -> None:
    parts = [
        make(ids=torch.tensor([0, 1, 2]), names=["a", "b", "c"], loss=None, meta={"lang": "en"}),
        make(ids=torch.tensor([3, 4, 0]), names=["d", "e", "a"], loss=None, meta={"lang": "de"}),
    ]
    found = joined(*parts)
    assert type(found) is make
    assert found["ids"].tolist() == [0, 1, 2, 3, 4] and found["names"] == ["a", "b", "c", "d", "e"]
    assert found["loss"] is None and found["meta"] == {"lang": ["en", "de"]}


def test_namedtuples_and_dataclasses_keep_their_type() -> None:
    pair = joined(Pair(torch.tensor([0, 1, 2]), ["a", "b", "c"]), Pair(torch.tensor([3, 4, 0]), ["d", "e", "a"]))
    assert isinstance(pair, Pair) and pair.ids.tolist() == [0, 1, 2, 3, 4] and pair.names == ["a", "b", "c", "d", "e"]
    outputs = joined(Outputs(torch.tensor([0, 1, 2]), ("x", None)), Outputs(torch.tensor([3, 4, 0]), ("y", None)))
    assert isinstance(outputs, Outputs) and outputs.ids.tolist() == [0, 1, 2, 3, 4]
    assert outputs.names == (["x", "y"], None) and outputs.hidden is None


def test_lists_of_objects_are_joined_end_to_end_and_cut_like_rows() -> None:
    assert joined([0, None, 2], [3, 4, 0]) == [0, None, 2, 3, 4]
    tokens = [["a"], ["b", "c"], ["d"]], [["e"], ["f"], ["a"]]
    assert joined(*tokens) == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]
    boxes = (
        [{"id": i, "boxes": torch.ones(i, 4)} for i in (0, 1, 2)],
        [{"id": i, "boxes": torch.ones(i, 4)} for i in (3, 4, 0)],
    )
    assert [record["id"] for record in joined(*boxes)] == [0, 1, 2, 3, 4]
    assert joined([], ["a", "b", "c"], coverage=None) == ["a", "b", "c"]
    assert joined({1, 2, 3}, {4, 5, 6}, coverage=None) == [1, 2, 3, 4, 5, 6]


def test_lists_of_columns_are_gone_through() -> None:
    mixed = [torch.tensor([0, 1, 2]), ["a", "b", "c"], None], [torch.tensor([3, 4, 0]), ["d", "e", "a"], None]
    ids, names, nothing = joined(*mixed)
    assert ids.tolist() == [0, 1, 2, 3, 4] and names == ["a", "b", "c", "d", "e"] and nothing is None
    columns = [["a", "b", "c"], ["x", "y", "z"]], [["d", "e", "a"], ["u", "v", "x"]]
    assert joined(*columns) == [["a", "b", "c", "d", "e"], ["x", "y", "z", "u", "v"]]
    layers = [torch.zeros(3, 2), torch.ones(3, 2)], [torch.zeros(3, 2), torch.ones(3, 2)]
    assert [layer.shape for layer in joined(*layers)] == [(5, 2), (5, 2)]


def test_one_tensor_per_sample_is_an_object() -> None:
    ragged = [torch.ones(n) for n in (1, 2, 4)], [torch.ones(n) for n in (5, 7, 1)]
    assert [len(one) for one in joined({"b": ragged[0], "n": ["x"] * 3}, {"b": ragged[1], "n": ["y"] * 3})["b"]] == [
        1,
        2,
        4,
        5,
        7,
    ]
    rows = [torch.ones(3)] * 3, [torch.zeros(3)] * 3
    assert len(joined(*rows, as_objects=True)) == 5, "as objects, whatever their shapes"


def test_a_single_object_becomes_a_list_with_one_of_each_rank() -> None:
    assert joined("a", "b") == ["a", "b"]
    assert joined("a", "b", coverage=BatchCoverage((3, 0), (3, 3))) == ["a"]
    assert joined(0.5, None) == [0.5, None]
    assert joined(None, None) is None


def test_mappings_of_samples_by_name_become_one() -> None:
    assert joined({"q0": "a", "q1": "b", "q2": "c"}, {"q3": "d", "q4": "e", "q0": "again"}) == dict(
        zip(("q0", "q1", "q2", "q3", "q4"), "abcde", strict=True)
    )


def test_batches_of_different_sizes_are_joined() -> None:
    found = joined({"x": torch.ones(3, 2), "n": ["a"] * 3}, {"x": torch.zeros(1, 2), "n": ["b"]}, coverage=UNEVEN)
    assert found["x"].shape == (4, 2) and found["n"] == ["a", "a", "a", "b"]
    assert joined(torch.ones(6), torch.ones(2), coverage=UNEVEN).shape == (8,)
    assert joined(torch.ones(3), torch.ones(3), coverage=UNEVEN).shape == (4,), "padded by the caller"


def test_shapes_that_cant_be_joined_are_named_with_what_to_do() -> None:
    with pytest.raises(CollectiveError, match=r"\[3, 2\].*rank 0, \[3, 5\].*rank 1.*pad_across_processes"):
        joined(torch.ones(3, 2), torch.ones(3, 5))
    found = joined(torch.ones(3, 2), torch.ones(3, 5), as_objects=True)
    assert [tuple(one.shape) for one in found] == [(3, 2), (3, 5)]


def test_rows_are_never_cut_by_their_values() -> None:
    for rows in (torch.zeros(6), torch.arange(6.0)):
        assert joined(rows, rows).shape == (10,)
        assert joined(rows, rows, coverage=WHOLE).shape == (12,)


def test_structures_of_tensors_are_taken_apart_and_put_together() -> None:
    data = {"a": Outputs(torch.ones(1), (torch.ones(2),)), "b": [torch.ones(3)]}
    assert not is_of_tensors(data) and is_of_tensors([data["b"]]) and not is_of_tensors([]) and not is_of_tensors("x")
    again = with_tensors(data, [tensor + 1 for tensor in tensors_of(data)])
    assert again["a"].names[0].tolist() == [2.0, 2.0] and again["b"][0].tolist() == [2.0] * 3
    assert data["b"][0].tolist() == [1.0] * 3
