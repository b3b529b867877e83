"""The weights of a checkpoint, each read once and straight to where it belongs.

All headers are read first: what doesn't fit the model is refused before a byte is allocated. Then every tensor is
copied from the mapped file to its device and dtype, several at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any, Final, final

import torch
from torch import nn

from ..devices import CPU
from ..errors import CheckpointError, SettingError
from ..memory import convert_bytes
from ..modules import model_has_dtensor
from ..offload.folder import Entry, offload_weight, save_offload_index
from ..offload.weights import OffloadedWeightsLoader
from ..optional import is_installed
from ..progress import tqdm
from ..world import current_world
from .budget import free_on
from .int8 import is_quantised_on_the_way, quantize_and_offload_8bit
from .place import owner_and_name, set_module_tensor_to_device
from .sizes import ByteDtype, _get_proper_dtype
from .sources import Source, find_files, open_source
from .tensors import DISK, Device, as_device
from .tied import device_of, find_tied_parameters, retie_parameters

_log = logging.getLogger(__name__)

#: Tensors that are copied side by side.
NUM_READERS: Final = 4
#: Tensors that are read and aren't in the model yet.
MOST_ON_THE_WAY: Final = 2 * NUM_READERS
#: Checkpoints from this size on show how far they are.
SHOW_PROGRESS_FROM_BYTES: Final = 1 << 30


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint that isn't one of this model."""


def load_state_dict(
    checkpoint_file: str | PathLike[str], device_map: Mapping[str, Device] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of one weight file by name, each on its device of the map (cpu where there is none).

    Raises:
        CheckpointError: the file is broken, or holds code.
    """
    (path,) = find_files(checkpoint_file)
    source = open_source(path)

    def read(name: str) -> torch.Tensor:
        device = CPU.name if device_map is None else device_of(name, device_map)
        target = as_device(CPU.name if device in (None, DISK) else device)
        tensor = source.tensor(name).to(target, copy=True)
        source.done_with([name])
        return tensor

    names = list(source.names())
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return dict(zip(names, readers.map(read, names), strict=True))


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Entry] | None, offload_folder: str | PathLike[str]
) -> None:
    """The weights that an offload folder holds are in the model, in host memory."""
    if not index:
        return
    weights = OffloadedWeightsLoader(index=index, save_folder=offload_folder)
    for name in index:
        set_module_tensor_to_device(model, name, CPU.name, value=weights[name].clone(), clear_cache=False)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Mapping[str, Any] | None = None,
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
    """The model has the weights of the checkpoint, each on its device; those on disk are in ``offload_folder``.

    Without a device map, a tensor that has values already is filled in place and keeps its dtype, whatever ``dtype``
    says; one on the meta device takes it.
    A weight that goes to disk as it is stays in its safetensors file: the folder's index then points there.
    ``offload_state_dict`` is accepted and changes nothing: weights are never held twice. With ``offload_8bit_bnb``,
    weights of bitsandbytes that go to disk are there in 8 bits. ``loaded`` is told of each tensor that the model has
    got on a device, by name.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckpointMismatch: shapes differ, or with ``strict`` names; nothing has been changed then.
        CheckpointError: a file is broken.
        SettingError: weights go to disk, and no folder was given.
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
    device_map: Mapping[str, Any] | None = None,
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
) -> dict[str, Entry]:
    """What :func:`load_checkpoint_in_model` does; the index of the weights on disk is handed back."""
    wanted: Any = _get_proper_dtype(dtype)
    world = current_world()
    if world is not None and world.is_distributed and (broadcast_from_rank0 or model_has_dtensor(model)):
        _load_over_ranks(model, checkpoint, wanted, strict, full_state_dict, broadcast_from_rank0)
        return {}
    sources = [open_source(path) for path in find_files(checkpoint)]
    loading = _Loading(model, sources, device_map, offload_buffers, offload_8bit_bnb, loaded)
    loading.check(strict, checkpoint)
    kept = tuple(keep_in_fp32_modules or ()) if wanted is torch.float16 else ()

    def target_dtype(name: str, found: torch.dtype) -> torch.dtype:
        old = loading.here[name].dtype
        if not found.is_floating_point:
            return found if old.is_floating_point else old  # quantised values stay what they are
        if wanted is None:
            return old
        return torch.float32 if any(_is_in(name, part) for part in kept) else wanted

    return loading.run(target_dtype, offload_folder)


def _is_in(name: str, part: str) -> bool:
    """Whether ``part`` is one or several whole steps of a dotted name."""
    return f".{part}." in f".{name}."


def _load_over_ranks(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Every rank has its part; with ``broadcast_from_rank0`` only the first one reads."""
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


@final
@dataclass(frozen=True)
class _Item:
    """One tensor to be loaded."""

    name: str  # in the model
    source: Source
    stored: str  # in the file
    place: Any  # a device, or disk


@final
class _Loading:
    """The checkpoint and the model side by side."""

    def __init__(
        self,
        model: nn.Module,
        sources: list[Source],
        device_map: Mapping[str, Any] | None,
        offload_buffers: bool,
        offload_8bit: bool = False,
        loaded: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.offload_8bit = offload_8bit
        self.loaded = loaded
        self.device_map = device_map
        self.stored: dict[str, Source] = {name: source for source in sources for name in source.names()}
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.here: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.here |= {
            name: buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name in self.stored or name in model.state_dict()
        }
        self.ties = find_tied_parameters(model)
        self.offload_buffers = offload_buffers
        self.same = {name: self._stored_name(name) for name in self.here}

    def _stored_name(self, name: str) -> str | None:
        """Under which name the file has it: its own, else one that the model ties to it."""
        if name in self.stored:
            return name
        group = next((group for group in self.ties if name in group), ())
        return next((other for other in group if other in self.stored), None)

    def check(self, strict: bool, checkpoint: object) -> None:
        """The checkpoint fits the model.

        Raises:
            CheckpointMismatch: it doesn't; the text lists what differs.
        """
        wrong: list[str] = []
        for name, stored in self.same.items():
            if stored is None:
                continue
            shape, plain = tuple(self.here[name].shape), type(self.here[name]) in (nn.Parameter, torch.Tensor)
            found = self.stored[stored].describe(stored)[1]
            if plain and found != shape:
                wrong.append(f"{name} is {found} there and {shape} here")
        if wrong:
            raise CheckpointMismatch(
                f"{checkpoint} isn't a checkpoint of this {type(self.model).__name__}: {len(wrong)} of "
                f"{len(self.here)} tensors have another shape: {_few(wrong)}"
            )
        missing = [name for name, stored in self.same.items() if stored is None]
        unexpected = [name for name in self.stored if name not in self.here and not name.endswith("SCB")]
        if not missing and not unexpected:
            return
        text = "; ".join(
            f"{what} {len(names)}: {_few(names)}"
            for what, names in (("the model has and the file lacks", missing), ("only the file has", unexpected))
            if names
        )
        if strict:
            raise CheckpointMismatch(f"{checkpoint} doesn't fit this {type(self.model).__name__} (strict=True): {text}")
        _log.warning("%s: %s. These are left as they are; strict=True makes this an error.", checkpoint, text)

    def _place(self, name: str) -> Any:
        if self.device_map is None:
            device = self.here[name].device
            return torch.device(CPU.name) if device.type == "meta" else device
        place = device_of(name, self.device_map)
        if place is None:
            raise SettingError(f"The device map gives no device to {name}. Name it, or a module that holds it.")
        if place == DISK:
            return torch.device(CPU.name) if name in self.buffers and not self.offload_buffers else DISK
        return as_device(place)

    def run(self, target_dtype: Any, folder: str | PathLike[str] | None) -> dict[str, Entry]:
        """Every tensor is in its place; the index of those on disk is handed back."""
        items = [
            _Item(name, self.stored[stored], stored, self._place(name))
            for name, stored in self.same.items()
            if stored is not None
        ]
        shared = self._shared(items)
        self._check_room([item for item in items if item.name not in shared], target_dtype)
        waiting = [item for item in items if item.place != DISK and item.name not in shared]
        waiting.sort(key=lambda item: (str(item.source.path), item.source.position(item.stored)))
        self._copy(waiting, target_dtype)
        by_name = {item.name: item for item in items}
        for name, first in shared.items():
            if by_name[name].place != DISK:
                retie_parameters(self.model, [[first, name]])
        return self._to_disk([item for item in items if item.place == DISK], target_dtype, folder)

    def _check_room(self, items: list[_Item], target_dtype: Any) -> None:
        """Every device has room for what is to lie there.

        Raises:
            SettingError: one hasn't; nothing has been allocated.
        """
        needed: dict[torch.device, dict[str, int]] = {}
        for item in items:
            if item.place != DISK and (self.device_map is not None or self.here[item.name].is_meta):
                dtype, shape = item.source.describe(item.stored)
                size = torch.Size(shape).numel() * target_dtype(item.name, dtype).itemsize
                needed.setdefault(item.place, {})[item.name] = size
        for place, sizes in needed.items():
            free = free_on(place)
            if free is not None and sum(sizes.values()) > free:
                names = sorted(sizes, key=lambda name: -sizes[name])[:3]
                largest = ", ".join(f"{name} ({convert_bytes(sizes[name])})" for name in names)
                raise SettingError(
                    f"{type(self.model).__name__} takes {convert_bytes(sum(sizes.values()))} on {place}, where "
                    f"{convert_bytes(free)} are free; the largest are {largest}. Give a device map that "
                    'puts parts of it on other devices or on "disk" (device_map="auto" makes one), or a smaller dtype.'
                )

    def _shared(self, items: list[_Item]) -> dict[str, str]:
        """Names of one tensor on one device, with the first of them, which is the one that is loaded."""
        places = {item.name: item.place for item in items}
        shared: dict[str, str] = {}
        for group in self.ties:
            first: dict[Any, str] = {}
            for name in group:
                if name in places and first.setdefault(places[name], name) != name:
                    shared[name] = first[places[name]]
        return shared

    def _copy(self, items: list[_Item], target_dtype: Any) -> None:
        total = sum(item.source.num_bytes(item.stored) for item in items)

        def read(item: _Item) -> torch.Tensor | None:
            value = item.source.tensor(item.stored)
            dtype = target_dtype(item.name, value.dtype)
            old = self.here[item.name]
            if self.device_map is None and not old.is_meta:
                with torch.no_grad():
                    old.copy_(value)
                new = None
            else:
                new = value.to(device=item.place, dtype=dtype, copy=True)
            item.source.done_with([item.stored])
            return new

        with _progress(total) as bar, ThreadPoolExecutor(NUM_READERS) as readers:
            # So many at a time, in order: what has been read and isn't in the model yet is bounded.
            coming = deque(readers.submit(read, item) for item in items[:MOST_ON_THE_WAY])
            following = iter(items[MOST_ON_THE_WAY:])
            try:
                for item in items:
                    value = coming.popleft().result()
                    if value is not None:
                        self._assign(item, value)
                    del value
                    coming.extend(readers.submit(read, each) for each in islice(following, 1))
                    bar.update(item.source.num_bytes(item.stored))
            finally:
                for left in coming:
                    left.cancel()

    def _assign(self, item: _Item, value: torch.Tensor) -> None:
        set_module_tensor_to_device(
            self.model,
            item.name,
            item.place,
            value=value,
            dtype=value.dtype,
            fp16_statistics=self._scales(item, value),
            clear_cache=False,
        )
        if self.loaded is not None:
            self.loaded(item.name)

    def _to_disk(self, items: list[_Item], target_dtype: Any, folder: str | PathLike[str] | None) -> dict[str, Entry]:
        index: dict[str, Entry] = {}
        for item in items:
            dtype = target_dtype(item.name, item.source.describe(item.stored)[0])
            if self.offload_8bit and folder is not None and is_quantised_on_the_way(self.here[item.name]):
                self._to_disk_in_8bit(item, dtype, folder, index)
                continue
            entry = item.source.entry(item.stored)
            converts = entry is not None and dtype != item.source.describe(item.stored)[0]
            if entry is not None and not (converts and folder is not None):
                index[item.name] = entry | {"dtype": str(dtype).removeprefix("torch.")}
            elif folder is not None:
                offload_weight(item.source.tensor(item.stored).to(dtype), item.name, folder, index)
            else:
                raise SettingError(
                    f"{item.source.path} can't be read in place, and parts of it go to disk: give `offload_folder`, "
                    "where they are to be written."
                )
            item.source.done_with([item.stored])
            self._leave_without_values(item.name, dtype)
        return index

    def _to_disk_in_8bit(
        self, item: _Item, dtype: torch.dtype, folder: str | PathLike[str], index: dict[str, Entry]
    ) -> None:
        value = item.source.tensor(item.stored)
        scales = self._scales(item, value)
        quantize_and_offload_8bit(self.model, value, item.name, dtype, folder, index, fp16_statistics=scales)
        item.source.done_with([item.stored])

    def _scales(self, item: _Item, value: torch.Tensor) -> torch.Tensor | None:
        """The scale of each row, where the file has the weight in 8 bits."""
        if value.dtype is not torch.int8 or "weight" not in item.stored:
            return None
        name = item.stored.replace("weight", "SCB")
        return self.stored[name].tensor(name) if name in self.stored else None

    def _leave_without_values(self, name: str, dtype: torch.dtype) -> None:
        owner, own = owner_and_name(self.model, name)
        old = owner._parameters.get(own)
        if old is not None and old.is_meta and old.dtype == dtype:
            return
        empty = torch.empty_like(self.here[name], device="meta", dtype=dtype)
        set_module_tensor_to_device(self.model, name, "meta", value=empty, dtype=dtype, clear_cache=False)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "")


def _progress(total: int) -> Any:
    """A bar with bytes per second where it's worth one; it says nothing where nobody looks."""
    if total < SHOW_PROGRESS_FROM_BYTES or not is_installed("tqdm"):
        return _NoBar()
    return tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None)


@final
class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, num_bytes: int) -> None:
        """Nothing is shown."""
