"""How many bytes the parts of a model take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import SettingError
from ..settings.labels import CustomDtype
from .tensors import named_module_tensors

ByteDtype = str | torch.dtype | CustomDtype
SizedModules = Sequence[tuple[str, nn.Module | torch.Tensor]]

_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> int | float:
    """The bytes that one element is counted as: less than one for bool, int2 and int4."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if dtype is torch.bool:
        return 1 / 8
    bits = str(dtype).rpartition("int")[2]
    if bits.isdigit() and int(bits) < 8:
        return int(bits) / 8
    return dtype.itemsize


def _get_proper_dtype(dtype: ByteDtype | None) -> Any:
    """The torch dtype for text such as ``"float16"``; everything else comes back as it is."""
    if not isinstance(dtype, str) or isinstance(dtype, CustomDtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise SettingError(f"dtype={dtype!r} is no dtype of torch. Use for example torch.float16 or 'float16'.")
    return found


def compute_module_sizes(
    model: nn.Module,
    dtype: ByteDtype | None = None,
    special_dtypes: Mapping[str, ByteDtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes by name, for every module and every tensor; the whole model is ``""``.

    ``dtype`` is what floating-point tensors will be converted to where that makes them smaller, ``special_dtypes`` the
    same for single tensors by name, in either direction. A tensor with several names counts once, under the first.
    """
    wanted = _get_proper_dtype(dtype)
    special = {name: _get_proper_dtype(each) for name, each in (special_dtypes or {}).items()}
    tensors: Iterable[tuple[str, torch.Tensor]]
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        size = _tensor_bytes(tensor, special.get(name), wanted)
        sizes[""] += size
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def _tensor_bytes(tensor: torch.Tensor, special: Any, wanted: Any) -> int:
    per_element: int | float = tensor.element_size()
    if special is not None:
        per_element = dtype_byte_size(special)
    elif wanted is not None and (tensor.is_floating_point() or tensor.is_complex()):
        per_element = min(per_element, dtype_byte_size(wanted))
    return -int(-tensor.numel() * per_element // 1)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: ByteDtype | None = None, special_dtypes: Mapping[str, ByteDtype] | None = None
) -> int:
    """The bytes of all buffers of the model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that have no other name below them."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


def no_split_classes(given: str | Iterable[str] | None) -> frozenset[str]:
    """The names of the classes that are never split."""
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, str) else given)


def own_parts(module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """What a module is split into: its own parameters, its children, its own buffers."""
    return [
        *module.named_parameters(recurse=False),
        *module.named_children(),
        *module.named_buffers(recurse=False),
    ]


def layers_in(modules: SizedModules, no_split: frozenset[str]) -> Iterable[str]:
    """The names of the pieces that have to be on one device as a whole when they run."""
    waiting = list(reversed(modules))
    while waiting:
        name, part = waiting.pop()
        children = [] if isinstance(part, torch.Tensor) else list(part.named_children())
        if not children or type(part).__name__ in no_split:
            yield name
            continue
        waiting += reversed([(f"{name}.{own}" if name else own, each) for own, each in children])


def get_max_layer_size(
    modules: SizedModules, module_sizes: Mapping[str, int], no_split_module_classes: str | Iterable[str] | None
) -> tuple[int, list[str]]:
    """The bytes of the largest layer, and the names of all layers of that size.

    A layer is a module without children, or one whose class is never split; a tensor that a module holds beside its
    children is none, unless it is named in ``modules``.
    """
    largest, names = 0, list[str]()
    for name in layers_in(modules, no_split_classes(no_split_module_classes)):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """The bytes of the model, and those of its largest layer with the names of the layers of that size."""
    sizes = compute_module_sizes(model)
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    return sizes.get("", 0), get_max_layer_size(own_parts(model), sizes, no_split)
