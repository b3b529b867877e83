"""The files of a checkpoint: which tensor lies where, known before anything is read."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import torch

from ..checkpointing.codec import read_pickle
from ..checkpointing.inside import inside
from ..errors import CheckpointError, CheckpointNotFound, SettingError
from ..names import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from ..offload.folder import Entry
from ..offload.mapped import MappedFile

_SAFE_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".index.json"
#: In this order: what holds no code first, a whole file before its shards.
_KNOWN: Final = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def find_files(checkpoint: str | PathLike[str]) -> list[Path]:
    """The weight files of a checkpoint: one file, the shards of an index, or what a folder holds of these.

    Raises:
        CheckpointNotFound: there are none (also a ValueError).
        SettingError: a folder holds several checkpoints (a ValueError).
        CheckpointError: the index can't be read, or shards are missing.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return _files_in(path)
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: there is no such file or folder.")
    return _shards(path) if path.suffix == ".json" else [path]


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


def _shards(index: Path) -> list[Path]:
    try:
        content = json.loads(index.read_bytes())
        weight_map: dict[str, str] = content.get("weight_map", content)
        shard_names = set(weight_map.values())
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of weights ({type(error).__name__}: {error})") from error
    shards = sorted(inside(index.parent, name, index) for name in shard_names)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}. Download them again."
        )
    return shards


class Source(ABC):
    """One weight file, open."""

    path: Path

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The names of the tensors in the file."""

    @abstractmethod
    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of a tensor."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor; its memory may be the file's."""

    @abstractmethod
    def done_with(self, names: Iterable[str]) -> None:
        """These tensors aren't needed any more."""

    @abstractmethod
    def entry(self, name: str) -> Entry | None:
        """What an offload index says to read the tensor from this very file; None where that can't be."""

    def position(self, name: str) -> int:
        """Where in the file the tensor begins, as far as that is known."""
        del name
        return 0

    def num_bytes(self, name: str) -> int:
        """The bytes of the tensor."""
        dtype, shape = self.describe(name)
        return torch.Size(shape).numel() * dtype.itemsize


@final
class SafetensorsSource(Source):
    """A safetensors file, read in place."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            CheckpointError: it isn't a whole safetensors file of torch tensors.
        """
        self.path = path
        self._file = MappedFile(path)
        written_by = self._file.metadata.get("format", "pt")
        if written_by != "pt":
            raise CheckpointError(f"{path}: written for {written_by!r}, not for torch. Convert it first.")

    def names(self) -> Iterable[str]:
        return self._file.entries

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._file.dtype(name), self._file.shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.tensor(name)

    def done_with(self, names: Iterable[str]) -> None:
        self._file.release(names)

    def entry(self, name: str) -> Entry | None:
        dtype = str(self._file.dtype(name)).removeprefix("torch.")
        return {"safetensors_file": str(self.path.absolute()), "weight_name": name, "dtype": dtype}

    def position(self, name: str) -> int:
        return int(self._file.entries[name]["data_offsets"][0])


@final
class PickleSource(Source):
    """A file of ``torch.save``, read through an allow-list, its tensors mapped where the file allows it."""

    def __init__(self, path: Path) -> None:
        """Read what the file says; the values follow when they are used.

        Raises:
            CheckpointError: it is broken, holds code, or no dict of tensors.
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
        return self._state

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._state[name].dtype, tuple(self._state[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._state[name].detach()

    def done_with(self, names: Iterable[str]) -> None:
        return None

    def entry(self, name: str) -> Entry | None:
        return None


def open_source(path: Path) -> Source:
    """The weight file, open."""
    return SafetensorsSource(path) if path.suffix == _SAFE_SUFFIX else PickleSource(path)
