"""Safetensors files read in place: a tensor is a view of the file, and takes memory only while it is used.

The library's own reader keeps what was touched in memory; here the kernel is told what will be needed soon, and what
won't be needed for a while.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import torch

from ..checkpointing.tensor_files import SAFETENSORS_NAMES
from ..errors import CheckpointError, CheckpointNotFound

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
    """One safetensors file, mapped for reading; writing to a tensor changes this process's copy only."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Map the file.

        Raises:
            CheckpointNotFound: it isn't there.
            CheckpointError: it isn't a whole safetensors file.
        """
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                self._start, header = self._read_header(file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointNotFound(f"{self.path} is missing") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, dict[str, Any]] = header
        self._check_entries()

    def _read_header(self, file: Any) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(file.read(8), "little")
        if self.num_bytes < 8 or length > min(self.num_bytes - 8, _LARGEST_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: not a whole safetensors file: its header would have {length} bytes, the file has "
                f"{self.num_bytes}"
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
            if self._start + end > self.num_bytes:
                raise CheckpointError(
                    f"{self.path} is cut off: {name} ends at byte {self._start + end}, the file has {self.num_bytes}"
                )
            known = _DTYPES.get(dtype)
            if known is not None and end - begin != torch.Size(shape).numel() * known.itemsize:
                raise CheckpointError(f"{self.path}: {name} has {end - begin} bytes, which isn't {dtype} of {shape}")

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        spelled = self.entries[name]["dtype"]
        if spelled not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} has the dtype {spelled}, which isn't known here")
        return _DTYPES[spelled]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self.entries[name]["shape"])

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, as a view of the file."""
        begin, end = self.entries[name]["data_offsets"]
        dtype, shape = self.dtype(name), self.shape(name)
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        return view_of(self._map, self._start + begin, dtype, shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the values of the tensor are the bytes of this file."""
        begin = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        return begin <= tensor.data_ptr() < begin + self.num_bytes

    def will_need(self, names: Iterable[str]) -> None:
        """The kernel reads these tensors from disk in the background, in large pieces."""
        option = getattr(mmap, "MADV_WILLNEED", None)
        if option is None:
            return
        for name in names:
            begin, end = (self._start + offset for offset in self.entries[name]["data_offsets"])
            begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                self._map.madvise(option, begin, end - begin)

    def release(self, names: Iterable[str]) -> None:
        """What was read of these tensors no longer counts as memory of this process."""
        option = getattr(mmap, "MADV_DONTNEED", None)
        if option is None:  # an operating system that can't be told
            return
        page = mmap.PAGESIZE
        for name in names:
            begin, end = (self._start + offset for offset in self.entries[name]["data_offsets"])
            begin, end = -(-begin // page) * page, end // page * page  # a page with a part of another tensor stays
            if end > begin:
                self._map.madvise(option, begin, end - begin)


def view_of(buffer: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the bytes of a buffer from ``offset`` on."""
    num_elements = torch.Size(shape).numel()
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(buffer, dtype=dtype, count=num_elements, offset=offset).reshape(shape)
    # Files of other writers may have an odd header: torch wants elements at their own alignment, so these are copied.
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=num_elements * dtype.itemsize, offset=offset)
    return raw.clone().view(dtype).reshape(shape)


@final
class OpenFiles:
    """Mapped files by path, each opened when it is first asked for."""

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

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenFiles:
        return self  # the files are the same ones

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # another process maps them for itself
