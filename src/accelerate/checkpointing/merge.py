"""Merging the weights of a sharded checkpoint into one file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final

import torch

from ..errors import CheckpointError, CheckpointNotFound
from ..names import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME
from .dcp import METADATA_NAME, is_distributed_checkpoint, plain_names, read_metadata, read_tensors, shapes_of
from .objects import atomic_file
from .tensor_files import file_order, write_tensors
from .weights import WeightNames, open_weights, write_weights

#: The bytes of a checkpoint that are in memory while it is merged, unless a single tensor is larger.
_CHUNK_BYTES: Final = 1 << 30


def merge_fsdp_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> str:
    """Merge the weights of a sharded checkpoint into one file in ``output_path``; return the file's path.

    ``checkpoint_dir`` is a folder of torch's distributed checkpoint, or a checkpoint with one, or a folder of
    safetensors shards with an index. A folder that can't be merged is left as it is.

    Raises:
        CheckpointNotFound: it is none of these; the text names folders nearby that are.
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
    """Remove from ``waiting`` as many of the first keys as may lie in memory at once, and return them."""
    chunk: list[str] = []
    bytes_left = _CHUNK_BYTES
    while waiting and (not chunk or shapes[waiting[0]].nbytes <= bytes_left):
        bytes_left -= shapes[waiting[0]].nbytes
        chunk.append(waiting.pop(0))
    return chunk


def _remove(folder: Path, output: Path) -> None:
    """Remove the folder of shards, unless the output lies in it."""
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
