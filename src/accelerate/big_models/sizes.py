"""Sizes, names and ties of a model's tensors, and their devices in a device map. Internal."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..devices.table import CPU, available_kind
from ..errors import SettingError
from ..settings.labels import CustomDtype
from ..torch_private.modules import non_persistent_buffers
from ..torch_private.tracing import storage_key

ByteDtype = str | torch.dtype | CustomDtype
Device = int | str | torch.device
SizedModules = Sequence[tuple[str, nn.Module | torch.Tensor]]
TiedNames = Sequence[Sequence[str]]

DISK = "disk"

_log = logging.getLogger(__name__)

_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> int | float:
    """Return the bytes of one element: less than one for bool, int2 and int4."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if dtype is torch.bool:
        return 1 / 8
    bits = str(dtype).rpartition("int")[2]
    if bits.isdigit() and int(bits) < 8:
        return int(bits) / 8
    return dtype.itemsize


def _get_proper_dtype(dtype: ByteDtype | None) -> torch.dtype | CustomDtype | None:
    """Return the torch dtype for text such as ``"float16"``; return everything else unchanged."""
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
    """Return the bytes of every module and every tensor by name; the whole model is ``""``.

    Floating-point tensors are counted in ``dtype`` if that is smaller, and single tensors in their dtype in
    ``special_dtypes`` in any case. A tensor with several names counts once, under the first.
    """
    wanted = _get_proper_dtype(dtype)
    special = {name: _get_proper_dtype(each) for name, each in (special_dtypes or {}).items()}
    tensors: Iterable[tuple[str, torch.Tensor]]
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        size = _tensor_bytes(tensor, special.get(name), wanted)
        for each in reversed(with_parents(name)):
            sizes[each] += size
    return sizes


def _tensor_bytes(
    tensor: torch.Tensor, special: torch.dtype | CustomDtype | None, wanted: torch.dtype | CustomDtype | None
) -> int:
    per_element: int | float = tensor.element_size()
    if special is not None:
        per_element = dtype_byte_size(special)
    elif wanted is not None and (tensor.is_floating_point() or tensor.is_complex()):
        per_element = min(per_element, dtype_byte_size(wanted))
    return -int(-tensor.numel() * per_element // 1)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: ByteDtype | None = None, special_dtypes: Mapping[str, ByteDtype] | None = None
) -> int:
    """Return the bytes of all buffers of the model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names without other names below them."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


def no_split_classes(given: str | Iterable[str] | None) -> frozenset[str]:
    """Return the names of the classes that are never split, as a set."""
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, str) else given)


def own_parts(module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return the parts of a module by name: its own parameters, its children, its own buffers."""
    return [*module.named_parameters(recurse=False), *module.named_children(), *module.named_buffers(recurse=False)]


def layers_in(modules: SizedModules, no_split: frozenset[str]) -> Iterable[str]:
    """Yield the names of the layers: modules that have to be on one device as a whole when they run."""
    pending = list(reversed(modules))
    while pending:
        name, part = pending.pop()
        children = [] if isinstance(part, torch.Tensor) else list(part.named_children())
        if not children or type(part).__name__ in no_split:
            yield name
            continue
        pending += reversed([(f"{name}.{own}" if name else own, each) for own, each in children])


def get_max_layer_size(
    modules: SizedModules, module_sizes: Mapping[str, int], no_split_module_classes: str | Iterable[str] | None
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, and the names of all layers of that size.

    A layer is a module without children, or of a class that is never split. A tensor beside a module's children counts
    only if it is named in ``modules``.
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
    """Return the bytes of the model, and those of its largest layer with all layer names of that size."""
    sizes = compute_module_sizes(model)
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    return sizes.get("", 0), get_max_layer_size(own_parts(model), sizes, no_split)


# --------------------------------------------------------------------------------------------------
# Tied parameters


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Return the groups of names of the same parameter, each group sorted."""
    del kwargs  # older callers pass arguments of their own recursion
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def check_tied_parameters_in_config(model: object) -> bool:
    """Return whether the config of a transformers model ties weights."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    read_text = getattr(config, "get_text_config", None)
    text_config = read_text() if callable(read_text) else config
    output = getattr(model, "get_output_embeddings", None)
    ties_embeddings = bool(getattr(text_config, "tie_word_embeddings", False)) and (
        callable(output) and output() is not None
    )
    ties_coders = bool(getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    ties_itself = isinstance(model, nn.Module) and any(
        callable(getattr(module, "_tie_weights", None)) for module in model.modules()
    )
    return ties_embeddings or ties_coders or ties_itself


def with_parents(name: str) -> list[str]:
    """Return a dotted name and the names of all modules around it, innermost first; the whole model is ``""``."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def is_inside(name: str, module_name: str) -> bool:
    """Return whether ``name`` is that of the module or of a part of it; the whole model is ``""``."""
    return not module_name or name == module_name or name.startswith(f"{module_name}.")


def device_of(name: str, device_map: Mapping[str, object]) -> Any:
    """Return the device of a tensor or module in the map, by its longest prefix; None if there is none."""
    return next((device_map[each] for each in with_parents(name) if each in device_map), None)


def check_tied_parameters_on_same_device(tied_params: TiedNames, device_map: Mapping[str, object]) -> None:
    """Log a warning for each group of tied names that the map puts on different devices."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            _log.warning(
                "These names are one parameter, and the device map puts them on different devices: %s. Each device "
                "will hold its own copy.",
                devices,
            )


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the tensor with a dotted name, and its name in it."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def retie_parameters(model: nn.Module, tied_params: TiedNames) -> None:
    """Tie each group of names to one parameter: the first one with values."""
    for group in tied_params:
        owners = [owner_of(model, name) for name in group]
        found = [owner._parameters.get(own) for owner, own in owners]
        with_values = next((each for each in found if each is not None and not each.is_meta), None)
        if with_values is None:
            continue
        for owner, own in owners:
            owner._parameters[own] = with_values


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module | torch.Tensor]],
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """Return the bytes of a module and the pending modules tied to it, the names of these, and these modules.

    ``tied_params`` are the names of the partners. A tied weight is in ``module_sizes`` once, so nothing counts twice.
    """
    partners = partners_in(tied_params, modules_to_treat)
    names = [modules_to_treat[index][0] for index in partners]
    size = module_size + sum(module_sizes.get(name, 0) for name in names)
    return size, names, [modules_to_treat[index][1] for index in partners]


def partners_in(tied_params: Iterable[str], pending: Sequence[tuple[str, object]]) -> list[int]:
    """Return the indices of the pending parts that are, or contain, one of the names, in order."""
    wanted = list(tied_params)
    return [index for index, (name, _item) in enumerate(pending) if any(is_inside(each, name) for each in wanted)]


# --------------------------------------------------------------------------------------------------
# The tensors of a module by name, and device names


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's parameters by name, then its buffers; with ``recurse``, also those of submodules.

    A tensor with several names is yielded under the first one.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else ()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers outside the state dict; dotted names with ``fqns``."""
    if not recurse:
        return non_persistent_buffers(module)
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, submodule in module.named_modules()
        for name in non_persistent_buffers(submodule)
    }


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return a key shared by tensors over the same memory: device, identity and size in bytes of the storage."""
    storage = tensor.untyped_storage()
    # Tensors on the meta device have no address, so there the storage object itself is the identity.
    identity = storage_key(storage) if tensor.is_meta else storage.data_ptr()
    return tensor.device, identity, storage.nbytes()


def as_device(device: Device) -> torch.device:
    """Return the torch device; an integer is the index of an accelerator.

    Raises:
        SettingError: an integer was given, and this machine has no accelerator.
    """
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        kind = available_kind()
        if kind is CPU:
            raise SettingError(
                f"Device {device} was asked for, an integer names an accelerator, and this machine has none that torch "
                'can use. Use "cpu" or "disk".'
            )
        return kind.device(device)
    return torch.device(device)


def check_device_same(first_device: Device, second_device: Device) -> bool:
    """Return whether both are the same device; an accelerator without an index is the one with index 0."""
    first, second = as_device(first_device), as_device(second_device)
    if first.type != second.type:
        return False
    return first.type == CPU.name or (first.index or 0) == (second.index or 0)
