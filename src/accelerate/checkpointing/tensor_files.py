"""Safetensors files, written in one pass and read through the page cache.

This module writes them itself, instead of using the library, to compute the checksum during the write, to copy tensors
from the device one at a time, and to avoid a second copy of the state. Any safetensors reader can open the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, final

import safetensors
import torch

from ..errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: The format's names of the dtypes that every reader since safetensors 0.4.3 supports.
SAFETENSORS_NAMES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_CHUNK_BYTES: Final = 16 << 20


class Writable(Protocol):
    """An object that bytes can be written to."""

    def write(self, data: Buffer, /) -> object:
        """Write all of ``data``."""
        ...


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the values of a tensor in row-major order; copy only if they aren't contiguous in CPU memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")


def check_tensor(name: str, tensor: torch.Tensor) -> str:
    """Return the format's name of the tensor's dtype.

    Raises:
        CheckpointError: the format doesn't support the tensor's dtype or layout.
    """
    spelled = SAFETENSORS_NAMES.get(tensor.dtype)
    if spelled is None or tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name}: a {tensor.dtype} tensor of layout {tensor.layout} has no place in a safetensors "
            "file. Convert it first, or save with safe_serialization=False."
        )
    return spelled


def _header(tensors: Mapping[str, torch.Tensor], names: list[str], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        dtype = check_tensor(name, tensor)
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names in the order of their values in a file.

    The largest elements come first, as in the format's own library, so every tensor is aligned to its element size.
    """
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def write_tensors(
    file: Writable,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    value_of: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write ``tensors`` to ``file`` in the safetensors format.

    ``value_of(name)`` returns the values if ``tensors`` has only shapes; it is called once per name, in file order.

    Raises:
        CheckpointError: the format doesn't support a tensor's dtype or layout.
    """
    names = file_order(tensors)
    file.write(_header(tensors, names, metadata))
    for name in names:
        data = raw_bytes(tensors[name] if value_of is None else value_of(name))
        for start in range(0, len(data), _CHUNK_BYTES):
            file.write(data[start : start + _CHUNK_BYTES])


@final
class TensorFile:
    """An open safetensors file, which reads values lazily."""

    def __init__(self, handle: safetensors.safe_open) -> None:
        self._handle = handle

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._handle.keys())

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor that may be memory-mapped from the file: copy it before the file can change."""
        return cast(torch.Tensor, self._handle.get_tensor(name))

    def owned(self, name: str) -> torch.Tensor:
        """Return a tensor that owns its memory."""
        return self.mapped(name).clone()


@contextmanager
def open_tensors(path: str | PathLike[str], device: str = "cpu") -> Iterator[TensorFile]:
    """Enter a context with the open safetensors file at ``path``.

    Raises:
        CheckpointError: it isn't a complete safetensors file.
    """
    try:
        handle = safetensors.safe_open(str(path), framework="pt", device=device)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error
    with handle as opened:
        yield TensorFile(opened)
