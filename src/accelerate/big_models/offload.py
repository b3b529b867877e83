"""Offloaded weights: folders of ``{name}.dat`` files with an ``index.json``, and mapped safetensors files. Internal."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, final

import torch

from ..checkpointing.storage import inside
from ..checkpointing.tensor_files import SAFETENSORS_NAMES, raw_bytes
from ..devices.table import CPU
from ..errors import CheckpointError, CheckpointNotFound, SettingError
from .prefetch import MIN_UNIT_BYTES, WeightPrefetcher

if TYPE_CHECKING:
    from .sizes import Device

INDEX_NAME: Final = "index.json"

Entry = dict[str, Any]


def weight_path(folder: str | PathLike[str], name: str) -> Path:
    """Return the path of a weight's values in an offload folder."""
    return Path(folder) / f"{name}.dat"


def index_path(folder: str | PathLike[str]) -> Path:
    """Return the path of the index of an offload folder."""
    return Path(folder) / INDEX_NAME


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | PathLike[str], index: dict[str, Entry] | None = None
) -> dict[str, Entry]:
    """Write the values of ``weight`` into the folder; return ``index`` (by default a new one) with its entry.

    Raises:
        CheckpointError: the weight has no values, or its name, which a file may define, is a path outside the folder.
    """
    if weight.is_meta:
        raise CheckpointError(f"{weight_name} is on the meta device: there are no values to write to {offload_folder}.")
    index = {} if index is None else index
    file_name = weight_path("", weight_name).as_posix()
    path = inside(offload_folder, file_name, "a state dict", is_replaced=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw_bytes(weight))
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Read a weight from a file of an offload folder into new memory.

    Raises:
        CheckpointError: the file's size differs from the index.
    """
    dtype, shape = dtype_of(weight_info, weight_file), tuple(weight_info["shape"])
    tensor = torch.empty(shape, dtype=dtype)
    if not tensor.numel():
        return tensor
    expected = tensor.numel() * tensor.element_size()
    found = os.path.getsize(weight_file)
    if found != expected:
        raise CheckpointError(
            f"{weight_file} has {found} bytes, and its index says {dtype} of shape {shape}, which are {expected}. The "
            "folder is damaged, or belongs to another model: offload again."
        )
    with open(weight_file, "rb") as file:
        values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        file.readinto(values)
    return tensor


def dtype_of(info: Mapping[str, object], where: object) -> torch.dtype:
    """Return the dtype named in an index entry."""
    dtype = getattr(torch, str(info.get("dtype")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: the index names {info.get('dtype')!r}, which is no dtype of torch.")
    return dtype


def read_index(folder: str | PathLike[str]) -> dict[str, Entry]:
    """Read the index of an offload folder; return an empty one if there is none.

    Raises:
        CheckpointError: it can't be read.
    """
    path = index_path(folder)
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise CheckpointError(f"{path}: not an index of offloaded weights")
    return index


def save_offload_index(index: Mapping[str, Entry] | None, offload_folder: str | PathLike[str]) -> None:
    """Add these entries to the index of the folder."""
    if not index:
        return
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    merged = read_index(folder) | dict(index)
    beside = folder / f".{INDEX_NAME}.{os.getpid()}"
    beside.write_text(json.dumps(merged, indent=2), encoding="utf-8")
    os.replace(beside, folder / INDEX_NAME)


def offload_state_dict(save_dir: str | PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every weight of the state dict into the folder, and its index."""
    index: dict[str, Entry] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


# --------------------------------------------------------------------------------------------------
# Offloaded weights as one mapping from name to tensor


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The entries of ``dataset`` whose names begin with ``prefix``; their names omit the prefix."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name from a state dict, from the ``.dat`` files of a folder, or from mapped safetensors files.

    An entry of ``index`` is ``{"dtype", "shape"}`` for a file of ``save_folder``, or ``{"safetensors_file",
    "weight_name", "dtype"}``. A weight in a safetensors file is a view of the mapped file, and takes memory only while
    it is used.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | PathLike[str] | None = None,
        index: Mapping[str, Entry] | None = None,
        device: Device | None = None,
    ) -> None:
        """Collect the names of all weights, without reading any.

        Raises:
            SettingError: no source was given.
            CheckpointError: the index in the folder can't be read.
        """
        if state_dict is None and save_folder is None and index is None:
            raise SettingError(
                "OffloadedWeightsLoader needs a `state_dict`, a `save_folder` or an `index` with the offloaded weights."
            )
        self.state_dict: MutableMapping[str, torch.Tensor] = {} if state_dict is None else state_dict  # pyright: ignore[reportAttributeAccessIssue]
        if index is None and save_folder is not None:
            index = read_index(save_folder)
        self.index: dict[str, Entry] = dict(index or {})
        self.save_folder = save_folder
        self.device = device
        self.all_keys: list[str] = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._paths: dict[str, Path] = {}
        self._files = MappedFiles()
        self._prefetcher: WeightPrefetcher | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry, mapped = self.index[key], self._mapped(key)
        if mapped is not None:
            return self._from_safetensors(key, entry, *mapped)
        if self.save_folder is None:
            raise CheckpointError(f"{key} is in an offload folder, and no `save_folder` was given.")
        if key not in self._paths:
            self._paths[key] = inside(self.save_folder, weight_path("", key).as_posix(), index_path(self.save_folder))
        weight = load_offloaded_weight(self._paths[key], entry)
        return weight if self.device is None else weight.to(self.device)

    def _from_safetensors(self, key: str, entry: Entry, file: MappedFile, name: str) -> torch.Tensor:
        if name not in file.entries:
            raise CheckpointError(f"{file.path} has no tensor {name!r}, where the index looks for {key!r}.")
        tensor = file.tensor(name)
        dtype = dtype_of(entry, file.path) if "dtype" in entry else tensor.dtype
        if self.device is not None or dtype != tensor.dtype:
            tensor = tensor.to(device=self.device, dtype=dtype)
        return tensor

    def _mapped(self, key: str) -> tuple[MappedFile, str] | None:
        """Return the mapped safetensors file of a weight and its name in it; None for other weights."""
        entry = self.index.get(key) if key not in self.state_dict else None
        if entry is None or entry.get("safetensors_file") is None:
            return None
        return self._files[entry["safetensors_file"]], entry.get("weight_name", key)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def alias(self, name: str, known: str) -> None:
        """Add ``name`` as another name of the weight ``known``."""
        if name in self:
            return
        if known in self.state_dict:
            self.state_dict[name] = self.state_dict[known]
        elif self.index[known].get("safetensors_file") is not None:
            self.index[name] = {"weight_name": known, **self.index[known]}
        else:
            self.state_dict[name] = self[known]
        self.all_keys.append(name)

    def address(self, key: str) -> int | None:
        """Return the data pointer of a weight, valid as long as this mapping; None if each use reads it anew."""
        if key in self.state_dict:
            return None if self.state_dict[key].is_meta else self.state_dict[key].data_ptr()
        mapped = self._mapped(key)
        if mapped is None:
            return None
        values = self[key]
        return values.data_ptr() if mapped[0].holds(values) else None

    def num_bytes(self, key: str) -> int:
        """Return the bytes of a weight, without reading it."""
        if key in self.state_dict:
            return self.state_dict[key].numel() * self.state_dict[key].element_size()
        entry, mapped = self.index[key], self._mapped(key)
        if mapped is not None:
            return mapped[0].num_bytes(mapped[1])
        return torch.Size(entry["shape"]).numel() * dtype_of(entry, key).itemsize

    @property
    def prefetcher(self) -> WeightPrefetcher:
        """The prefetcher of these weights, created at the first use."""
        if self._prefetcher is None:
            self._prefetcher = WeightPrefetcher(self)
        return self._prefetcher

    def is_worth_prefetching(self, keys: Sequence[str], device: torch.device) -> bool:
        """Return whether these weights have to be read or copied for the device, and are large enough to prefetch."""
        needs_copy = device.type != CPU.name or any(key not in self.state_dict for key in keys)
        return needs_copy and device.type != "meta" and sum(map(self.num_bytes, keys)) >= MIN_UNIT_BYTES

    def will_need(self, keys: Sequence[str]) -> bool:
        """Tell the kernel to read these weights in the background; return whether it can for all of them."""
        unread = [key for key in keys if key not in self.state_dict]
        mapped = [each for each in map(self._mapped, unread) if each is not None]
        if len(mapped) < len(unread):
            return False
        for file, name in mapped:
            file.will_need(name)
        return True

    def release(self, keys: Sequence[str]) -> None:
        """Free the memory pages of these weights if they are in mapped safetensors files."""
        for mapped in map(self._mapped, keys):
            if mapped is not None:
                mapped[0].release(mapped[1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_prefetcher": None}  # a copy records its own order of modules


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the entries that are one of the named submodules, or are inside one."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}.") for name in submodule_names)
    }


# --------------------------------------------------------------------------------------------------
# Memory-mapped safetensors files: a tensor is a view of the file, and takes memory only while it is used
#
# The safetensors library keeps read pages in memory; here madvise tells the kernel which pages are needed soon, and
# which aren't needed for a while.

_DTYPES: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()} | {
    name: dtype
    for name, dtype in (
        ("F8_E8M0", getattr(torch, "float8_e8m0fnu", None)),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
        ("C64", torch.complex64),
    )
    if dtype is not None
}
_LARGEST_HEADER_BYTES: Final = 100_000_000


@final
class MappedFile:
    """One memory-mapped safetensors file; writing to a tensor changes only this process's copy."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Map the file and check its header.

        Raises:
            CheckpointNotFound: the file doesn't exist.
            CheckpointError: it isn't a complete safetensors file.
        """
        self.path: Path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._size: int = os.fstat(file.fileno()).st_size
                self._start, header = self._read_header(file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointNotFound(f"{self.path} is missing") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, dict[str, Any]] = header
        self._check_entries()

    def _read_header(self, file: BinaryIO) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(file.read(8), "little")
        if self._size < 8 or length > min(self._size - 8, _LARGEST_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: not a whole safetensors file: its header would have {length} bytes, the file has "
                f"{self._size}"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: not a safetensors file ({error})") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: not a safetensors file (its header is no table)")
        return 8 + length, header

    def _check_entries(self) -> None:
        for name, entry in self.entries.items():
            try:
                begin, end = entry["data_offsets"]
                shape, dtype = entry["shape"], entry["dtype"]
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{self.path}: the header entry of {name} can't be read") from error
            if self._start + end > self._size:
                raise CheckpointError(
                    f"{self.path} is cut off: {name} ends at byte {self._start + end}, the file has {self._size}"
                )
            known = _DTYPES.get(dtype)
            if known is not None and end - begin != torch.Size(shape).numel() * known.itemsize:
                raise CheckpointError(f"{self.path}: {name} has {end - begin} bytes, which isn't {dtype} of {shape}")

    def names(self) -> Iterable[str]:
        """Return the names of the tensors in the file."""
        return self.entries

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of a tensor, without reading it."""
        entry = self.entries[name]
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} has the dtype {entry['dtype']}, which isn't known here")
        return _DTYPES[entry["dtype"]], tuple(entry["shape"])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of the file."""
        dtype, shape = self.describe(name)
        if not self.num_bytes(name):
            return torch.empty(shape, dtype=dtype)
        return tensor_view(self._map, self._start + self.position(name), dtype, shape)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        begin, end = self.entries[name]["data_offsets"]
        return end - begin

    def position(self, name: str) -> int:
        """Return the offset in bytes of a tensor from the first one."""
        return self.entries[name]["data_offsets"][0]

    def entry(self, name: str) -> Entry:
        """Return an entry for an offload index that refers to this file."""
        dtype = str(self.describe(name)[0]).removeprefix("torch.")
        return {"safetensors_file": str(self.path.absolute()), "weight_name": name, "dtype": dtype}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's values are in the mapped memory of this file."""
        begin = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        return begin <= tensor.data_ptr() < begin + self._size

    def will_need(self, name: str) -> None:
        """Tell the kernel to read this tensor in the background (MADV_WILLNEED)."""
        begin = self._start + self.position(name)
        self._advise("MADV_WILLNEED", begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + self.num_bytes(name))

    def release(self, name: str) -> None:
        """Free the memory pages read for this tensor (MADV_DONTNEED)."""
        begin, page = self._start + self.position(name), mmap.PAGESIZE
        end = begin + self.num_bytes(name)
        self._advise("MADV_DONTNEED", -(-begin // page) * page, end // page * page)  # a page with another tensor stays

    def _advise(self, advice: str, begin: int, end: int) -> None:
        option = getattr(mmap, advice, None)
        if option is not None and end > begin:  # some operating systems don't have it
            self._map.madvise(option, begin, end - begin)


def tensor_view(buffer: object, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that views the bytes of a buffer from ``offset`` on."""
    num_elements = torch.Size(shape).numel()
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(buffer, dtype=dtype, count=num_elements, offset=offset).reshape(shape)
    # Files of other writers may have a header of odd size; torch needs aligned elements, so these are copied.
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=num_elements * dtype.itemsize, offset=offset)
    return raw.clone().view(dtype).reshape(shape)


@final
class MappedFiles:
    """Mapped files by path, each opened on first use."""

    def __init__(self) -> None:
        self._files: dict[str, MappedFile] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: str | PathLike[str]) -> MappedFile:
        key = os.fspath(path)
        found = self._files.get(key)
        if found is None:
            with self._lock:
                found = self._files.get(key) or MappedFile(key)
                self._files[key] = found
        return found

    def __deepcopy__(self, memo: Mapping[int, object]) -> MappedFiles:
        return self  # the files are the same ones

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        return MappedFiles, ()  # another process maps them for itself
