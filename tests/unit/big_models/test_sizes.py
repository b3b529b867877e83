from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.big_models.sizes import (
    _get_proper_dtype,
    as_device,
    calculate_maximum_sizes,
    check_device_same,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
)
from accelerate.errors import SettingError
from accelerate.settings.labels import CustomDtype


def small_model() -> nn.Module:
    """Return a model with these bytes: first 4*(12+4)=64, norm 4*4*4+8=72, last 4*(20+5)=100."""
    return nn.ModuleDict(
        {"first": nn.Linear(3, 4), "inner": nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), "last": nn.Linear(4, 5)}
    )


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.int64, 8),
        (torch.bool, 1 / 8),
        (torch.uint4, 1 / 2),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 1 / 2),
        (CustomDtype.INT2, 1 / 4),
    ],
)
def test_an_element_counts_as_documented(dtype: torch.dtype | CustomDtype, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_every_module_and_tensor_has_a_size() -> None:
    sizes = compute_module_sizes(small_model())
    assert sizes == {
        "": 236, "first": 64, "first.weight": 48, "first.bias": 16, "inner": 72, "inner.0": 72, "inner.0.weight": 16,
        "inner.0.bias": 16, "inner.0.running_mean": 16, "inner.0.running_var": 16, "inner.0.num_batches_tracked": 8,
        "last": 100, "last.weight": 80, "last.bias": 20,
    }  # fmt: skip


def test_a_dtype_caps_floats_and_leaves_integers() -> None:
    sizes = compute_module_sizes(small_model(), dtype=torch.float16)
    assert sizes["first"] == 32
    assert sizes["inner.0.num_batches_tracked"] == 8
    assert compute_module_sizes(small_model().half(), dtype="float32")["first"] == 32, "never larger than it is"


def test_a_special_dtype_is_for_one_tensor_and_may_be_larger() -> None:
    sizes = compute_module_sizes(small_model(), dtype="float16", special_dtypes={"first.weight": torch.float64})
    assert (sizes["first.weight"], sizes["first.bias"]) == (96, 8)


def test_a_tied_weight_counts_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert compute_module_sizes(model)[""] == 64


def test_buffers_only() -> None:
    assert compute_module_total_buffer_size(small_model()) == 40
    assert compute_module_total_buffer_size(nn.Linear(2, 2)) == 0


def test_bool_tensors_take_a_byte_an_element() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(10, dtype=torch.bool))
    assert compute_module_sizes(model)[""] == 10


def test_the_leaves_of_sizes_are_tensors_and_then_modules() -> None:
    sizes = compute_module_sizes(small_model())
    tensors = get_module_leaves(sizes)
    assert set(tensors) == {name for name in sizes if name.count(".") and name != "inner.0"}
    assert get_module_leaves({name: 0 for name in sizes if name not in tensors}) == ["first", "inner.0", "last"]


def test_the_largest_layer_is_a_leaf_or_a_class_that_is_not_split() -> None:
    model = small_model()
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    assert get_max_layer_size(children, sizes, []) == (100, ["last"])
    both = [("x", nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})), ("y", nn.Linear(3, 3))]
    sizes = compute_module_sizes(nn.ModuleDict(dict(both)))
    assert get_max_layer_size(both, sizes, []) == (48, ["x.a", "x.b", "y"])
    assert get_max_layer_size(both, sizes, "ModuleDict") == (96, ["x"])
    both[0][1].register_parameter("scale", nn.Parameter(torch.ones(100)))
    sizes = compute_module_sizes(nn.ModuleDict(dict(both)))
    assert get_max_layer_size(both, sizes, []) == (48, ["x.a", "x.b", "y"]), "a tensor beside children is no layer"


def test_maximum_sizes_of_a_model() -> None:
    assert calculate_maximum_sizes(small_model()) == (236, (100, ["last"]))


def test_dtypes_as_text() -> None:
    assert _get_proper_dtype("float16") is torch.float16
    assert _get_proper_dtype("torch.bfloat16") is torch.bfloat16
    assert _get_proper_dtype(CustomDtype.INT4) is CustomDtype.INT4
    with pytest.raises(SettingError, match="float61"):
        _get_proper_dtype("float61")


def test_tensors_of_a_module_by_name() -> None:
    model = small_model()
    model.register_buffer("lost", torch.zeros(1), persistent=False)
    assert [name for name, _ in named_module_tensors(model)] == ["lost"]
    assert [name for name, _ in named_module_tensors(model, remove_non_persistent=True)] == []
    assert "first.weight" in dict(named_module_tensors(model, recurse=True))
    assert "inner.0.running_mean" not in dict(named_module_tensors(model, include_buffers=False, recurse=True))


def test_non_persistent_buffers() -> None:
    model = small_model()
    model["inner"].register_buffer("lost", torch.zeros(1), persistent=False)
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"lost"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"inner.lost"}


def test_tensors_over_the_same_memory_are_recognised() -> None:
    whole = torch.zeros(4)
    assert id_tensor_storage(whole) == id_tensor_storage(whole[1:])
    assert id_tensor_storage(whole) != id_tensor_storage(torch.zeros(4))
    meta = torch.zeros(4, device="meta")
    assert id_tensor_storage(meta) == id_tensor_storage(meta[2:]) != id_tensor_storage(torch.zeros(4, device="meta"))


def test_devices_are_compared_with_index_zero_as_the_default() -> None:
    assert check_device_same("cuda", "cuda:0")
    assert not check_device_same("cuda:1", "cuda:0")
    assert not check_device_same("cpu", "cuda")
    assert check_device_same(torch.device("cpu"), "cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_an_integer_without_an_accelerator_is_refused_with_the_way_out() -> None:
    with pytest.raises(SettingError, match=r"Device 0 .* none that torch can use"):
        as_device(0)
