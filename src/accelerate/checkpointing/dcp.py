"""Folders of torch's distributed checkpoint: their index and tensors, read without running code."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch

from ..errors import CheckpointError, CheckpointNotFound
from .codec import read_described_pickle, read_pickle, write_pickle
from .paths import inside

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA_NAME: Final = ".metadata"
#: The classes that the index may name, which describe tensors and their locations in files.
DESCRIPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    "collections": ("OrderedDict",),
}


def is_distributed_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is a folder of torch's distributed checkpoint."""
    return (folder / METADATA_NAME).is_file()


def read_metadata(folder: str | PathLike[str]) -> Metadata:
    """Read the index of a folder of torch's distributed checkpoint.

    Raises:
        CheckpointNotFound: it is no folder of a distributed checkpoint.
        CheckpointError: its index can't be read, or names something that could run code.
    """
    import torch.distributed.checkpoint  # whose classes the index may name  # noqa: F401

    path = Path(folder) / METADATA_NAME
    if not path.is_file():
        raise CheckpointNotFound(f"{folder} is no folder of a distributed checkpoint: it has no {METADATA_NAME}")
    found = read_described_pickle(path, DESCRIPTIONS)
    locations: Mapping[Any, Any] = getattr(found, "storage_data", None) or {}
    for name in {getattr(location, "relative_path", None) for location in locations.values()}:
        inside(folder, name, path)
    return found


def shapes_of(found: Metadata) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint by key, on the meta device."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for key, entry in found.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: str | PathLike[str], found: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Read the named tensors, whole, into host memory, without a process group."""
    shapes = shapes_of(found)
    tensors = {key: torch.empty(shapes[key].shape, dtype=shapes[key].dtype) for key in keys}
    read_into(folder, tensors, alone=True)
    return tensors


def read_into(folder: str | PathLike[str], state: dict[str, Any], *, alone: bool) -> None:
    """Read the saved values into the tensors of ``state``, replacing other entries; a collective unless ``alone``."""
    from torch.distributed.checkpoint.state_dict_loader import load

    # older versions notice by themselves that there is no process group, and have no option to ignore one
    options: dict[str, Any] = {"no_dist": alone} if "no_dist" in inspect.signature(load).parameters else {}
    reader, planner = _load_classes()
    with convert_torch_errors(f"load {folder}"):
        load(state, storage_reader=reader(str(folder)), planner=planner(), **options)


@contextmanager
def convert_torch_errors(what: str) -> Iterator[None]:
    """Convert torch's errors to ours, and silence its warnings about a single process and its own deprecations.

    Raises:
        CheckpointError: on every rank, when torch failed on any; torch's own is no Exception at all.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason[0]}" for rank, reason in sorted(error.failures.items()))
            raise CheckpointError(f"can't {what}: {reasons}") from error


@cache  # made when first needed: importing torch's part takes half a second
def _load_classes() -> tuple[type, type]:
    """Return a reader and a planner as torch's own, except that pickles are read through an allow-list."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem

    @final
    class Reader(FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
            return read_metadata(str(self.path))

    @final
    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            try:
                entry = read_pickle(value)
            except CheckpointError as error:
                raise CheckpointError(f"{read_item.dest_index.fqn}: {error}") from error
            if not self.flatten_state_dict:
                self.state_dict[read_item.dest_index.fqn] = entry
                return
            safe = io.BytesIO()
            write_pickle(entry, safe)  # what has been read is data, so the original may read it in its own way
            safe.seek(0)
            super().load_bytes(read_item, safe)

    return Reader, Planner


def plain_names(found: Metadata) -> dict[str, str]:
    """Map the keys of the tensors to the names that they have in the model.

    A state dict that was saved as ``{"model": state_dict}`` has ``model.`` in front of every name.
    """
    paths: Mapping[str, tuple[Any, ...]] = found.planner_data or {}
    keys = list(shapes_of(found))
    tops = {paths[key][0] if key in paths else None for key in keys}
    wrapped = len(tops) == 1 and None not in tops and all(len(path) > 1 for path in paths.values())
    top = f"{next(iter(tops))}." if wrapped else ""
    return {key: key.removeprefix(top) for key in keys}
