"""Collectives in a world of one: what would come back from many, without torch.distributed."""

from __future__ import annotations

import pytest
import torch

from accelerate.distributed import collectives
from accelerate.distributed.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    chained_operation,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)
from accelerate.distributed.world import World, current_world
from accelerate.errors import CollectiveError, SettingError


def test_everything_comes_back_as_it_is() -> None:
    tensor = torch.ones(2)
    assert gather(tensor) is tensor
    assert gather(torch.tensor(3.0)).ndim == 0
    assert broadcast(tensor) is tensor
    assert pad_across_processes(tensor) is tensor
    assert gather_object("word") == "word"
    objects = [1, "two"]
    assert broadcast_object_list(objects) is objects
    assert not torch.distributed.is_initialized()
    assert current_world() is not None  # the functions join when nobody has


def test_a_scale_is_applied() -> None:
    assert reduce({"a": torch.tensor([2.0])}, "sum", 0.5)["a"].tolist() == [1.0]


def test_what_reduce_returns_can_be_changed_without_changing_what_it_was_given() -> None:
    tensor = torch.ones(2)
    reduce({"a": tensor}, "sum")["a"].mul_(3)
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("stranger", ["word", 3, None, [torch.ones(1), None]])
def test_reduce_refuses_on_one_process_what_it_refuses_on_many(stranger: object) -> None:
    with pytest.raises(TypeError, match="passed to reduce: only nested"):
        reduce(stranger)


@pytest.mark.parametrize("index", [-1, 1])
def test_a_source_that_is_not_there_is_refused(index: int) -> None:
    for operation in (broadcast, broadcast_object_list):
        with pytest.raises(SettingError, match=rf"from_process={index}: .* a number from 0 to 0"):
            operation([torch.ones(1)], from_process=index)


def test_none_is_a_copy_and_an_unknown_reduction_is_refused() -> None:
    tensor = torch.ones(2)
    kept = reduce([tensor], "none")[0]
    assert kept.tolist() == [1.0, 1.0]
    assert kept is not tensor
    with pytest.raises(SettingError, match="reduction='median': choose one of 'sum', 'mean', 'max', 'none'"):
        reduce(tensor, "median")


def test_a_tensor_that_only_one_rank_has() -> None:
    assert gather_tensor_shape(torch.ones(2, 3)).tolist() == [2, 3]
    assert copy_tensor_to_devices(torch.ones(2, dtype=torch.int16)).dtype == torch.int16
    with pytest.raises(CollectiveError, match="no rank has a tensor"):
        copy_tensor_to_devices(None)
    with pytest.raises(CollectiveError, match="no rank has a tensor"):
        gather_tensor_shape(None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_left_alone_with_a_warning() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.warns(CannotPadNestedTensorWarning, match="CannotPadNestedTensorWarning"):
        assert pad_across_processes(nested) is nested


def test_padding_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"Unsupported type .* passed to pad_across_processes"):
        pad_across_processes([1])


def test_a_pretended_world_has_nobody_to_talk_to() -> None:
    pretended = World.pretend(rank=1, size=2)
    for operation in (gather, reduce, broadcast, gather_object, pad_across_processes):
        with pytest.raises(CollectiveError, match="simulated world of 2"):
            operation(torch.ones(1), world=pretended)


def test_a_chained_operation_reports_under_its_own_name() -> None:
    @chained_operation
    def outer() -> None:
        raise CollectiveError("inner went wrong")

    with pytest.raises(
        CollectiveError, match=r"while calling `accelerate\.utils\.operations\.outer`: inner went wrong"
    ):
        outer()


def test_a_mismatch_names_operation_shapes_and_processes() -> None:
    same = ['["gather", ["[2, 3]", ["float32"], [""]]]'] * 2
    assert collectives._mismatch(same, ["a.py:1", "a.py:1"]) is None
    shapes = [same[0], '["gather", ["[2, 4]", ["float32"], [""]]]']
    message = collectives._mismatch(shapes, ["a.py:1", "b.py:2"])
    assert message is not None
    assert "Operation: `accelerate.utils.operations.gather`" in message
    assert "- Process 0: [2, 3] at a.py:1" in message
    assert "- Process 1: [2, 4] at b.py:2" in message
    dtypes = collectives._mismatch([same[0], '["gather", ["[2, 3]", ["int64"], [""]]]'], ["", ""])
    assert dtypes is not None
    assert "dtype mismatches" in dtypes
    calls = collectives._mismatch([same[0], '["reduce", ["[2, 3]", ["float32"], [""]]]'], ["a.py:1", "b.py:2"])
    assert calls is not None
    assert "`reduce` at b.py:2" in calls


def test_the_labels_of_worlds_that_talk_through_torch() -> None:
    assert "MULTI_GPU" in collectives.TORCH_DISTRIBUTED_OPERATION_TYPES
    assert "NO" not in collectives.TORCH_DISTRIBUTED_OPERATION_TYPES
    assert "XLA" not in collectives.TORCH_DISTRIBUTED_OPERATION_TYPES
