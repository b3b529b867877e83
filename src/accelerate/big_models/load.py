"""Loading checkpoints: every weight is read once, directly to its device. Internal.

All headers are read first, so a checkpoint that doesn't fit the model raises before memory is allocated. Then every
tensor is copied from the mapped file to its device and dtype, several at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from ..checkpointing.codec import read_pickle
from ..checkpointing.weights import shards_of
from ..devices.memory import convert_bytes
from ..devices.table import CPU
from ..distributed.world import current_world
from ..errors import CheckpointError, CheckpointNotFound, SettingError
from ..modules import model_has_dtensor
from ..names import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from ..optional import is_installed
from ..progress import tqdm
from .budget import free_memory_on
from .offload import Entry, MappedFile, OffloadedWeightsLoader, offload_weight, save_offload_index
from .placement import is_quantised_on_move, owner_and_name, quantize_and_offload_8bit, set_module_tensor_to_device
from .sizes import (
    DISK,
    ByteDtype,
    Device,
    _get_proper_dtype,
    as_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)

_log = logging.getLogger(__name__)

#: The number of tensors copied in parallel.
NUM_READERS: Final = 4
#: The maximum number of tensors that are being read, or not yet in the model.
MAX_IN_FLIGHT: Final = 2 * NUM_READERS
#: Checkpoints of at least this size are loaded with a progress bar.
SHOW_PROGRESS_FROM_BYTES: Final = 1 << 30


class CheckpointMismatch(CheckpointError, ValueError):
    """The error for a checkpoint whose names or shapes differ from the model's."""


def load_state_dict(
    checkpoint_file: str | PathLike[str], device_map: Mapping[str, Device] | None = None
) -> dict[str, torch.Tensor]:
    """Read the tensors of one weight file by name, each to its device in the map (default: cpu).

    Raises:
        CheckpointError: the file is broken or contains code.
    """
    (path,) = find_files(checkpoint_file)
    weight_file = open_weight_file(path)

    def read(name: str) -> torch.Tensor:
        device = CPU.name if device_map is None else device_of(name, device_map)
        target = as_device(CPU.name if device in (None, DISK) else device)
        tensor = weight_file.tensor(name).to(target, copy=True)
        weight_file.release(name)
        return tensor

    names = list(weight_file.names())
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return dict(zip(names, readers.map(read, names), strict=True))


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Entry] | None, offload_folder: str | PathLike[str]
) -> None:
    """Load the weights of an offload folder into the model, in host memory."""
    if not index:
        return
    weights = OffloadedWeightsLoader(index=index, save_folder=offload_folder)
    for name in index:
        set_module_tensor_to_device(model, name, CPU.name, value=weights[name].clone(), clear_cache=False)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Mapping[str, object] | None = None,
    offload_folder: str | PathLike[str] | None = None,
    dtype: ByteDtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    loaded: Callable[[str], None] | None = None,
) -> None:
    """Load a checkpoint into the model, each weight on its device; offload those for disk to ``offload_folder``.

    Without a device map, a tensor that already has values is filled in place and keeps its dtype; one on the meta
    device gets ``dtype``. A weight that is offloaded unchanged stays in its safetensors file, and the folder's index
    refers to that file. ``offload_state_dict`` has no effect, because weights are never in memory twice. With
    ``offload_8bit_bnb``, bitsandbytes weights are written to disk in 8 bits. ``loaded`` is called with the name of
    each tensor once it is on its device.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckpointMismatch: shapes differ, or names with ``strict``; the model is unchanged then.
        CheckpointError: a file is broken.
        SettingError: weights are offloaded to disk, and no folder was given.
    """
    del offload_state_dict
    if device_map is not None and DISK in device_map.values() and offload_folder is None:
        raise SettingError(
            "The device map sends parts of the model to disk: give `offload_folder`, where their index is to be."
        )
    index = load_onto_devices(
        model,
        checkpoint,
        device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        keep_in_fp32_modules=keep_in_fp32_modules,
        offload_8bit_bnb=offload_8bit_bnb,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        loaded=loaded,
    )
    if offload_folder is not None:
        save_offload_index(index, offload_folder)


def load_onto_devices(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Mapping[str, object] | None = None,
    *,
    offload_folder: str | PathLike[str] | None = None,
    dtype: ByteDtype | None = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    loaded: Callable[[str], None] | None = None,
    dispatches: bool = False,
) -> dict[str, Entry]:
    """Load like :func:`load_checkpoint_in_model`, and return the index of the offloaded weights.

    Args:
        dispatches: the model is dispatched next, so each of its parameters needs values.

    Raises:
        CheckpointMismatch: the checkpoint has other names or shapes than the model needs.
    """
    wanted: Any = _get_proper_dtype(dtype)
    world = current_world()
    if world is not None and world.is_distributed and (broadcast_from_rank0 or model_has_dtensor(model)):
        _load_over_ranks(model, checkpoint, wanted, strict, full_state_dict, broadcast_from_rank0)
        return {}
    weight_files = [open_weight_file(path) for path in find_files(checkpoint)]
    loading = _CheckpointLoader(model, weight_files, device_map, offload_buffers, offload_8bit_bnb, loaded)
    loading.check(strict, checkpoint, dispatches=dispatches)
    kept = tuple(keep_in_fp32_modules or ()) if wanted is torch.float16 else ()

    def target_dtype(name: str, found: torch.dtype) -> torch.dtype:
        old = loading.targets[name].dtype
        if not found.is_floating_point:
            return found if old.is_floating_point else old  # quantised values stay what they are
        if wanted is None:
            return old
        return torch.float32 if any(_is_in(name, part) for part in kept) else wanted

    return loading.run(target_dtype, offload_folder)


def _is_in(name: str, part: str) -> bool:
    """Return whether ``part`` is one or several whole components of a dotted name."""
    return f".{part}." in f".{name}."


def _load_over_ranks(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load a sharded model, on each rank its shards; with ``broadcast_from_rank0`` only rank 0 reads the files."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    world = current_world()
    state: dict[str, Any] = {}
    if not broadcast_from_rank0 or world is None or world.is_main:
        for path in find_files(checkpoint):
            state |= load_state_dict(path)
        if dtype is not None:
            state = {name: each.to(dtype) if each.is_floating_point() else each for name, each in state.items()}
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, state, options=options)


#: (name of a tensor, its dtype in the file) -> its dtype in the model.
DtypeOf = Callable[[str, torch.dtype], torch.dtype]


@final
@dataclass(frozen=True)
class _Item:
    """One tensor to load: its names, its file and its device."""

    name: str  # in the model
    weight_file: WeightFile
    stored: str  # in the file
    device: Any  # a device, or disk


@final
class _CheckpointLoader:
    """A loader of one checkpoint's files into one model."""

    def __init__(
        self,
        model: nn.Module,
        weight_files: list[WeightFile],
        device_map: Mapping[str, object] | None,
        offload_buffers: bool,
        offload_8bit: bool = False,
        loaded: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.offload_8bit = offload_8bit
        self.loaded = loaded
        self.device_map = device_map
        self.stored: dict[str, WeightFile] = {
            name: weight_file for weight_file in weight_files for name in weight_file.names()
        }
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.targets: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.targets |= {
            name: buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name in self.stored or name in model.state_dict()
        }
        self.ties = find_tied_parameters(model)
        self.offload_buffers = offload_buffers
        self.stored_names = {name: self._stored_name(name) for name in self.targets}

    def _stored_name(self, name: str) -> str | None:
        """Return the name of a tensor in the files: its own, or one the model ties to it; None if there is none."""
        if name in self.stored:
            return name
        group = next((group for group in self.ties if name in group), ())
        return next((other for other in group if other in self.stored), None)

    def check(self, strict: bool, checkpoint: object, *, dispatches: bool) -> None:
        """Raise unless the names and shapes of the checkpoint are those of the model.

        Raises:
            CheckpointMismatch: they differ; the message lists the differences.
        """
        wrong: list[str] = []
        for name, stored in self.stored_names.items():
            if stored is None:
                continue
            shape, plain = tuple(self.targets[name].shape), type(self.targets[name]) in (nn.Parameter, torch.Tensor)
            found = self.stored[stored].describe(stored)[1]
            if plain and found != shape:
                wrong.append(f"{name} is {found} there and {shape} here")
        if wrong:
            raise CheckpointMismatch(
                f"{checkpoint} isn't a checkpoint of this {type(self.model).__name__}: {len(wrong)} of "
                f"{len(self.targets)} tensors have another shape: {_first_few(wrong)}"
            )
        missing = [name for name, stored in self.stored_names.items() if stored is None]
        unexpected = [name for name in self.stored if name not in self.targets and not name.endswith("SCB")]
        if not missing and not unexpected:
            return
        text = "; ".join(
            f"{what} {len(names)}: {_first_few(names)}"
            for what, names in (("the model has and the file lacks", missing), ("only the file has", unexpected))
            if names
        )
        if strict:
            raise CheckpointMismatch(f"{checkpoint} doesn't fit this {type(self.model).__name__} (strict=True): {text}")
        if dispatches and any(self.targets[name].is_meta and name not in self.buffers for name in missing):
            raise CheckpointMismatch(
                f"{checkpoint} doesn't fit this {type(self.model).__name__}, whose parameters on the meta device get "
                f"their values from it: {text}. Load this model's own checkpoint, or give the others values first "
                "(set_module_tensor_to_device)."
            )
        _log.warning("%s: %s. These are left as they are; strict=True makes this an error.", checkpoint, text)

    def _device_for(self, name: str) -> torch.device | str:
        if self.device_map is None:
            device = self.targets[name].device
            return torch.device(CPU.name) if device.type == "meta" else device
        device = device_of(name, self.device_map)
        if device is None:
            raise SettingError(f"The device map gives no device to {name}. Name it, or a module that holds it.")
        if device == DISK:
            return torch.device(CPU.name) if name in self.buffers and not self.offload_buffers else DISK
        return as_device(device)

    def run(self, target_dtype: DtypeOf, folder: str | PathLike[str] | None) -> dict[str, Entry]:
        """Load every tensor onto its device; return the index of the offloaded ones."""
        items = [
            _Item(name, self.stored[stored], stored, self._device_for(name))
            for name, stored in self.stored_names.items()
            if stored is not None
        ]
        shared = self._shared(items)
        self._check_free_memory([item for item in items if item.name not in shared], target_dtype)
        pending = [item for item in items if item.device != DISK and item.name not in shared]
        pending.sort(key=lambda item: (str(item.weight_file.path), item.weight_file.position(item.stored)))
        self._copy(pending, target_dtype)
        by_name = {item.name: item for item in items}
        for name, first in shared.items():
            if by_name[name].device != DISK:
                retie_parameters(self.model, [[first, name]])
        return self._offload([item for item in items if item.device == DISK], target_dtype, folder)

    def _check_free_memory(self, items: list[_Item], target_dtype: DtypeOf) -> None:
        """Raise unless every device has enough free memory for the tensors to allocate there.

        Raises:
            SettingError: a device has too little; nothing has been allocated.
        """
        needed: dict[torch.device, dict[str, int]] = {}
        for item in items:
            if item.device != DISK and (self.device_map is not None or self.targets[item.name].is_meta):
                dtype, shape = item.weight_file.describe(item.stored)
                size = torch.Size(shape).numel() * target_dtype(item.name, dtype).itemsize
                needed.setdefault(item.device, {})[item.name] = size
        for device, sizes in needed.items():
            free = free_memory_on(device)
            if free is not None and sum(sizes.values()) > free:
                names = sorted(sizes, key=lambda name: -sizes[name])[:3]
                largest = ", ".join(f"{name} ({convert_bytes(sizes[name])})" for name in names)
                raise SettingError(
                    f"{type(self.model).__name__} takes {convert_bytes(sum(sizes.values()))} on {device}, where "
                    f"{convert_bytes(free)} are free; the largest are {largest}. Give a device map that "
                    'puts parts of it on other devices or on "disk" (device_map="auto" makes one), or a smaller dtype.'
                )

    def _shared(self, items: list[_Item]) -> dict[str, str]:
        """Return, for each further name of a tied tensor on one device, the first name, which is loaded."""
        devices = {item.name: item.device for item in items}
        shared: dict[str, str] = {}
        for group in self.ties:
            first: dict[torch.device | str, str] = {}
            for name in group:
                if name in devices and first.setdefault(devices[name], name) != name:
                    shared[name] = first[devices[name]]
        return shared

    def _copy(self, items: list[_Item], target_dtype: DtypeOf) -> None:
        total = sum(item.weight_file.num_bytes(item.stored) for item in items)

        def read(item: _Item) -> torch.Tensor | None:
            value = item.weight_file.tensor(item.stored)
            dtype = target_dtype(item.name, value.dtype)
            old = self.targets[item.name]
            if self.device_map is None and not old.is_meta:
                with torch.no_grad():
                    old.copy_(value)
                new = None
            else:
                new = value.to(device=item.device, dtype=dtype, copy=True)
            item.weight_file.release(item.stored)
            return new

        with _progress(total) as bar, ThreadPoolExecutor(NUM_READERS) as readers:
            # Read a bounded number at a time, in order, so that tensors not yet in the model take little memory.
            in_flight = deque(readers.submit(read, item) for item in items[:MAX_IN_FLIGHT])
            following = iter(items[MAX_IN_FLIGHT:])
            try:
                for item in items:
                    value = in_flight.popleft().result()
                    if value is not None:
                        self._assign(item, value)
                    del value
                    in_flight.extend(readers.submit(read, each) for each in islice(following, 1))
                    if bar is not None:
                        bar.update(item.weight_file.num_bytes(item.stored))
            finally:
                for left in in_flight:
                    left.cancel()

    def _assign(self, item: _Item, value: torch.Tensor) -> None:
        set_module_tensor_to_device(
            self.model,
            item.name,
            item.device,
            value=value,
            dtype=value.dtype,
            fp16_statistics=self._scales(item, value),
            clear_cache=False,
        )
        if self.loaded is not None:
            self.loaded(item.name)

    def _offload(
        self, items: list[_Item], target_dtype: DtypeOf, folder: str | PathLike[str] | None
    ) -> dict[str, Entry]:
        index: dict[str, Entry] = {}
        for item in items:
            dtype = target_dtype(item.name, item.weight_file.describe(item.stored)[0])
            if self.offload_8bit and folder is not None and is_quantised_on_move(self.targets[item.name]):
                self._offload_in_8bit(item, dtype, folder, index)
                continue
            entry = item.weight_file.entry(item.stored)
            converts = entry is not None and dtype != item.weight_file.describe(item.stored)[0]
            if entry is not None and not (converts and folder is not None):
                index[item.name] = entry | {"dtype": str(dtype).removeprefix("torch.")}
            elif folder is not None:
                offload_weight(item.weight_file.tensor(item.stored).to(dtype), item.name, folder, index)
            else:
                raise SettingError(
                    f"{item.weight_file.path} can't be read in place, and parts of it go to disk: give "
                    "`offload_folder`, where they are to be written."
                )
            item.weight_file.release(item.stored)
            self._move_to_meta(item.name, dtype)
        return index

    def _offload_in_8bit(
        self, item: _Item, dtype: torch.dtype, folder: str | PathLike[str], index: dict[str, Entry]
    ) -> None:
        value = item.weight_file.tensor(item.stored)
        scales = self._scales(item, value)
        quantize_and_offload_8bit(self.model, value, item.name, dtype, folder, index, fp16_statistics=scales)
        item.weight_file.release(item.stored)

    def _scales(self, item: _Item, value: torch.Tensor) -> torch.Tensor | None:
        """Return the scale of each row if the file has the weight in 8 bits; else None."""
        if value.dtype is not torch.int8 or "weight" not in item.stored:
            return None
        name = item.stored.replace("weight", "SCB")
        return self.stored[name].tensor(name) if name in self.stored else None

    def _move_to_meta(self, name: str, dtype: torch.dtype) -> None:
        owner, own = owner_and_name(self.model, name)
        old = owner._parameters.get(own)
        if old is not None and old.is_meta and old.dtype == dtype:
            return
        empty = torch.empty_like(self.targets[name], device="meta", dtype=dtype)
        set_module_tensor_to_device(self.model, name, "meta", value=empty, dtype=dtype, clear_cache=False)


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "")


def _progress(total: int) -> AbstractContextManager[Any]:
    """Return a progress bar in bytes for a large checkpoint; a context with None for others."""
    if total < SHOW_PROGRESS_FROM_BYTES or not is_installed("tqdm"):
        return nullcontext()
    return tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None)


# --------------------------------------------------------------------------------------------------
# The files of a checkpoint, and the tensors in them

_SAFE_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".index.json"
#: In this order: formats without code first, a whole file before its shards.
_KNOWN: Final = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def find_files(checkpoint: str | PathLike[str]) -> list[Path]:
    """Return the weight files of a checkpoint: one file, the shards of an index, or those in a folder.

    Raises:
        CheckpointNotFound: there are none (also a ValueError).
        SettingError: the folder contains several checkpoints (a ValueError).
        CheckpointError: the index can't be read, or shards are missing.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return _files_in(path)
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: there is no such file or folder.")
    return shards_of(path) if path.suffix == ".json" else [path]


def _files_in(folder: Path) -> list[Path]:
    for name in _KNOWN:
        if (folder / name).is_file():
            return find_files(folder / name)
    found = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX_SUFFIX))
    found = found or sorted(path for path in folder.iterdir() if path.suffix == _SAFE_SUFFIX)
    if not found:
        raise CheckpointNotFound(
            f"{folder} holds no weights: looked for {', '.join(_KNOWN)}, a single *{_INDEX_SUFFIX} and a single "
            f"*{_SAFE_SUFFIX}."
        )
    if len(found) > 1:
        raise SettingError(
            f"{folder} holds several checkpoints: {', '.join(path.name for path in found)}. Give the path of one."
        )
    return find_files(found[0])


@final
class PickleFile:
    """A file of ``torch.save``, unpickled with an allow-list, and memory-mapped if its format allows it.

    It has the methods of :class:`MappedFile` that loading needs.
    """

    def __init__(self, path: Path) -> None:
        """Read the names, dtypes and shapes; the values of a mapped file are read on use.

        Raises:
            CheckpointError: it is broken, contains code, or isn't a dict of tensors.
        """
        self.path = path
        try:
            state = read_pickle(path, mmap=True)
        except CheckpointError:
            state = read_pickle(path)  # the format before torch 1.6 can't be mapped
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            state = state["state_dict"]
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state dict")
        self._state: dict[str, Any] = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}

    def names(self) -> Iterable[str]:
        """Return the names of the tensors in the file."""
        return self._state

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of a tensor, without reading it."""
        return self._state[name].dtype, tuple(self._state[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, which may share the file's memory."""
        return self._state[name].detach()

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self._state[name].numel() * self._state[name].element_size()

    def position(self, name: str) -> int:
        """Return 0, because the byte offset of a tensor in the file is unknown."""
        return 0

    def release(self, name: str) -> None:
        """Do nothing, because the kernel frees the pages of the file when it needs memory."""

    def entry(self, name: str) -> None:
        """Return None, because no entry of an offload index can refer to this file."""


WeightFile = MappedFile | PickleFile


def open_weight_file(path: Path) -> WeightFile:
    """Open a weight file.

    Raises:
        CheckpointError: it is broken, contains code, or has no torch tensors by name.
    """
    if path.suffix != _SAFE_SUFFIX:
        return PickleFile(path)
    file = MappedFile(path)
    written_by = file.metadata.get("format", "pt")
    if written_by != "pt":
        raise CheckpointError(f"{path}: written for {written_by!r}, not for torch. Convert it first.")
    return file
