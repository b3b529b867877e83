"""Folders of torch's distributed checkpoint (DCP): read their metadata and tensors without running code."""

from __future__ import annotations

import inspect
import io
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import torch

from ..errors import CheckpointError, CheckpointNotFound
from ..names import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME
from .codec import read_described_pickle, read_pickle, write_pickle
from .objects import atomic_file
from .storage import inside
from .tensor_files import file_order, write_tensors
from .weights import WeightNames, open_weights, write_weights

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from .run_state import StateDict

METADATA_NAME: Final = ".metadata"
#: The classes that the metadata may name; they describe tensors and their locations in files.
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
    """Return whether ``folder`` is a distributed checkpoint of torch."""
    return (folder / METADATA_NAME).is_file()


def read_metadata(folder: str | PathLike[str]) -> Metadata:
    """Read the metadata of a distributed checkpoint of torch.

    Raises:
        CheckpointNotFound: the folder isn't a distributed checkpoint.
        CheckpointError: its metadata can't be read, or names something that could run code.
    """
    import torch.distributed.checkpoint  # the metadata may name its classes  # noqa: F401

    path = Path(folder) / METADATA_NAME
    if not path.is_file():
        raise CheckpointNotFound(f"{folder} is no folder of a distributed checkpoint: it has no {METADATA_NAME}")
    found = read_described_pickle(path.read_bytes(), DESCRIPTIONS, str(path))
    locations: Mapping[object, object] = getattr(found, "storage_data", None) or {}
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


def read_tensors(folder: str | PathLike[str], found: Metadata, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors in full into CPU memory, without a process group."""
    shapes = shapes_of(found)
    tensors = {key: torch.empty(shapes[key].shape, dtype=shapes[key].dtype) for key in keys}
    read_into(folder, tensors, alone=True)
    return tensors


def read_into(folder: str | PathLike[str], state: StateDict, *, alone: bool) -> None:
    """Read the saved values into the tensors of ``state``, replacing other entries; a collective unless ``alone``."""
    from torch.distributed.checkpoint import state_dict_loader

    load: Callable[..., None] = state_dict_loader.load
    options: dict[str, bool] = {"no_dist": alone} if alone else {}
    if alone and "no_dist" not in inspect.signature(load).parameters:
        load = state_dict_loader.load_state_dict  # in torch 2.6, only this older function can ignore the process group
    reader, planner = _load_classes()
    with convert_torch_errors(f"load {folder}"):
        load(state, storage_reader=reader(str(folder)), planner=planner(), **options)


@contextmanager
def convert_torch_errors(what: str) -> Iterator[None]:
    """Convert torch's errors to ours; silence its warnings about a single process and about its own deprecations.

    Raises:
        CheckpointError: on every rank, if torch failed on any; torch's own error isn't an Exception.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason[0]}" for rank, reason in sorted(error.failures.items()))
            raise CheckpointError(f"can't {what}: {reasons}") from error


@cache  # made when first needed: importing torch's module takes half a second
def _load_classes() -> tuple[type, type]:
    """Return torch's reader and planner, changed to read pickles through an allow-list."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem

    @final
    class Reader(FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *arguments: object, **options: object) -> Metadata:
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
            write_pickle(entry, safe)  # this is only data, so torch's planner may unpickle it
            safe.seek(0)
            super().load_bytes(read_item, safe)

    return Reader, Planner


def plain_names(found: Metadata) -> dict[str, str]:
    """Map the keys of the tensors to their names in the model.

    If the state dict was saved as ``{"model": state_dict}``, every key begins with ``model.``.
    """
    paths: Mapping[str, tuple[object, ...]] = found.planner_data or {}
    keys = list(shapes_of(found))
    tops = {paths[key][0] if key in paths else None for key in keys}
    wrapped = len(tops) == 1 and None not in tops and all(len(path) > 1 for path in paths.values())
    top = f"{next(iter(tops))}." if wrapped else ""
    return {key: key.removeprefix(top) for key in keys}


# ----------------------------------------------------------------- merging the weights of shards into one file

#: The bytes of a checkpoint that a merge holds in memory at once, unless a single tensor is larger.
_CHUNK_BYTES: Final = 1 << 30


def merge_fsdp_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> str:
    """Merge the weights of a sharded checkpoint into one file in ``output_path``; return the file's path.

    ``checkpoint_dir`` is a distributed checkpoint of torch, a checkpoint that contains one, or a folder of safetensors
    shards with an index. A folder that can't be merged stays unchanged.

    Raises:
        CheckpointNotFound: it is none of these; the text names subfolders that are.
        CheckpointError: it can't be read, or reading it could run code.
    """
    folder = _shards_in(Path(checkpoint_dir))
    output = Path(output_path)
    name = WeightNames.of(0, safe=safe_serialization).whole
    if is_distributed_checkpoint(folder):
        _merge_distributed(folder, output, safe_serialization)
    else:
        with open_weights(folder) as weights:
            write_weights(partial(atomic_file, output), weights.state_dict(), safe_serialization=safe_serialization)
    if remove_checkpoint_dir:
        _remove(folder, output)
    return str(output / name)


def _merge_distributed(folder: Path, output: Path, safe_serialization: bool) -> None:
    found = read_metadata(folder)
    names = plain_names(found)
    if not names:
        raise CheckpointError(f"{folder} holds no tensors")
    if not safe_serialization:
        state = {names[key]: tensor for key, tensor in read_tensors(folder, found, names).items()}
        write_weights(partial(atomic_file, output), state, safe_serialization=False)
        return
    keys = {name: key for key, name in names.items()}
    shapes = shapes_of(found)
    described = {name: shapes[key] for name, key in keys.items()}
    waiting = [keys[name] for name in file_order(described)]
    ready: dict[str, torch.Tensor] = {}

    def value_of(name: str) -> torch.Tensor:
        if keys[name] not in ready:
            ready.clear()
            ready.update(read_tensors(folder, found, _first_chunk(waiting, shapes)))
        return ready[keys[name]]

    with atomic_file(output, WeightNames.of(0, safe=True).whole) as file:
        write_tensors(file, described, {"format": "pt"}, value_of=value_of)


def _first_chunk(waiting: list[str], shapes: Mapping[str, torch.Tensor]) -> list[str]:
    """Remove from ``waiting``, and return, the first keys whose tensors fit into memory at once."""
    chunk: list[str] = []
    bytes_left = _CHUNK_BYTES
    while waiting and (not chunk or shapes[waiting[0]].nbytes <= bytes_left):
        bytes_left -= shapes[waiting[0]].nbytes
        chunk.append(waiting.pop(0))
    return chunk


def _remove(folder: Path, output: Path) -> None:
    """Remove the folder of shards; raise CheckpointError if it contains the output."""
    if folder.resolve() in (output.resolve(), *output.resolve().parents):
        raise CheckpointError(f"{folder} is not removed: the merged weights lie in it, in {output}")
    shutil.rmtree(folder)


def _shards_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointNotFound(f"no folder {folder}")
    for candidate in (folder, folder / f"{FSDP_MODEL_NAME}_0"):
        if is_distributed_checkpoint(candidate):
            return candidate
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return folder
    near = sorted(path.parent.name for path in folder.glob(f"*/{METADATA_NAME}"))
    hint = f" Did you mean one of these in it: {', '.join(near)}?" if near else ""
    raise CheckpointNotFound(
        f"{folder} holds no sharded weights: neither {METADATA_NAME} of a distributed checkpoint nor "
        f"{SAFE_WEIGHTS_INDEX_NAME}.{hint}"
    )
