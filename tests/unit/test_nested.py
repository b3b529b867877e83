"""Containers keep their type, leaves are mapped, nothing is guessed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from accelerate import nested

Pair = namedtuple("Pair", "left right")


class Encoding(dict):
    """A mapping with its own ``to`` and a constructor that takes a dict, like tokenizers return."""


def test_containers_of_every_kind_come_back_as_themselves() -> None:
    data = Pair([torch.ones(2)], {"a": (torch.zeros(1), "text"), "b": OrderedDict(c=torch.ones(1))})
    result = nested.recursively_apply(lambda tensor: tensor + 1, data)
    assert type(result) is Pair and type(result.right["a"]) is tuple and type(result.right["b"]) is OrderedDict
    assert torch.equal(result.left[0], torch.full((2,), 2.0)) and result.right["a"][1] == "text"
    assert torch.equal(data.left[0], torch.ones(2)), "the caller's data is untouched"


def test_a_defaultdict_keeps_its_factory() -> None:
    batch = defaultdict(list, ids=torch.ones(2))
    for mapped in (
        nested.send_to_device(batch, "meta"),
        nested.slice_tensors(batch, slice(0, 1)),
        nested.concatenate([batch, batch]),
    ):
        assert type(mapped) is defaultdict
        assert mapped["absent"] == []


def test_a_leaf_of_another_type_is_refused_when_asked() -> None:
    with pytest.raises(TypeError, match="str"):
        nested.recursively_apply(lambda tensor: tensor, ["x"], error_on_other_type=True)


def test_send_to_device_moves_mappings_and_keeps_their_class() -> None:
    batch = Encoding(ids=torch.ones(2), text=["a"], keep=torch.ones(1))
    moved = nested.send_to_device(batch, torch.device("meta"), skip_keys="keep")
    assert type(moved) is Encoding and moved["ids"].device.type == "meta" and moved["keep"].device.type == "cpu"
    assert moved["text"] == ["a"]


class Packed(Pair):
    """A container that knows which of its parts move, as torch's PackedSequence does."""

    def to(self, device: torch.device) -> Packed:
        """Only the left part is there."""
        return Packed(self.left.to(device), self.right)


def test_a_container_that_knows_how_to_move_is_asked() -> None:
    moved = nested.send_to_device([Packed(torch.ones(2), torch.ones(1))], torch.device("meta"))[0]
    assert type(moved) is Packed and moved.left.device.type == "meta" and moved.right.device.type == "cpu"


def test_send_to_device_works_for_a_batch_type_that_knows_no_non_blocking() -> None:
    class Batch:
        def __init__(self, device: str = "cpu") -> None:
            self.device = device

        def to(self, device: object) -> Batch:
            return Batch(str(device))

    assert nested.send_to_device([Batch()], "meta", non_blocking=True)[0].device == "meta"


def test_batch_size_is_that_of_the_first_tensor() -> None:
    assert nested.find_batch_size({"a": [torch.ones(3, 2)], "b": torch.ones(9)}) == 3
    assert nested.find_batch_size(torch.tensor(1.0)) is None
    with pytest.raises(ValueError, match="empty"):
        nested.find_batch_size([])
    with pytest.raises(TypeError):
        nested.find_batch_size(["text"])
    assert nested.ignorant_find_batch_size(["text"]) is None


def test_slices_and_concatenations_are_inverse() -> None:
    data = {"a": torch.arange(5), "b": (torch.arange(10).view(5, 2),)}
    parts = [nested.slice_tensors(data, slice(0, 2)), nested.slice_tensors(data, slice(2, 5))]
    joined = nested.concatenate(parts)
    assert torch.equal(joined["a"], data["a"]) and torch.equal(joined["b"][0], data["b"][0])
    with pytest.raises(TypeError):
        nested.concatenate(["a", "b"])


def test_structure_can_be_sent_ahead_of_the_tensors() -> None:
    data = [torch.ones(2, 3, dtype=torch.float16), {"x": torch.zeros(1, dtype=torch.long)}]
    empty = nested.initialize_tensors(nested.get_data_structure(data))
    assert empty[0].shape == (2, 3) and empty[0].dtype == torch.float16 and empty[1]["x"].dtype == torch.long
    assert nested.get_shape(data) == [[2, 3], {"x": [1]}]


def test_listify_gives_plain_numbers_also_for_bfloat16() -> None:
    assert nested.listify({"a": torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "b": 3}) == {"a": [1.5, 2.0], "b": 3}


def test_only_half_precision_becomes_fp32() -> None:
    half, double, ints = torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float64), torch.ones(1).long()
    result = nested.convert_to_fp32([half, double, ints])
    assert [tensor.dtype for tensor in result] == [torch.float32, torch.float64, torch.int64]


def test_find_device_looks_into_every_container() -> None:
    assert nested.find_device({"a": ["x", torch.ones(1, device="meta")]}) == torch.device("meta")
    assert nested.find_device({"a": []}) is None


@pytest.mark.parametrize(("rows", "processes", "expected"), [(5, 2, 6), (4, 2, 4), (1, 4, 4)])
def test_padding_repeats_the_last_row(rows: int, processes: int, expected: int) -> None:
    padded = nested.pad_input_tensors(torch.arange(rows), rows, processes)
    assert len(padded) == expected and set(padded[rows:].tolist()) <= {rows - 1}


@pytest.mark.parametrize("leaf", ["x", None, 3])
def test_concatenate_returns_a_single_leaf_that_it_cannot_join(leaf: object) -> None:
    assert nested.concatenate([leaf]) is leaf
    assert nested.concatenate([{"a": leaf}]) == {"a": leaf}
    with pytest.raises(TypeError, match="Can only concatenate tensors"):
        nested.concatenate([leaf, leaf])
