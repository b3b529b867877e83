"""Offloaded weights as one mapping from name to tensor, wherever they wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..checkpointing.inside import inside
from ..devices import CPU
from ..errors import CheckpointError, SettingError
from .ahead import SMALLEST_UNIT_BYTES, Lookahead
from .folder import Entry, dtype_of, index_path, load_offloaded_weight, read_index, weight_path
from .mapped import MappedFile, OpenFiles


class PrefixedDataset(Mapping[str, Any]):
    """The entries of ``dataset`` whose names begin with ``prefix``, without it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in a state dict, else in files: ``.dat`` files of a folder, or safetensors files that are read in place.

    An entry of ``index`` is ``{"dtype", "shape"}`` for a file of ``save_folder``, or ``{"safetensors_file",
    "weight_name", "dtype"}``. What is read in place is a view of the file: it costs memory only while it is used.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | PathLike[str] | None = None,
        index: Mapping[str, Entry] | None = None,
        device: Any = None,
    ) -> None:
        """Know the names of all weights; nothing is read yet.

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
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._paths: dict[str, Path] = {}
        self._files = OpenFiles()
        self._ahead: Lookahead | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is not None:
            return self._from_safetensors(key, entry)
        if self.save_folder is None:
            raise CheckpointError(f"{key} waits in a folder, and no `save_folder` was given.")
        if key not in self._paths:
            self._paths[key] = inside(self.save_folder, weight_path("", key).as_posix(), index_path(self.save_folder))
        weight = load_offloaded_weight(self._paths[key], entry)
        return weight if self.device is None else weight.to(self.device)

    def _from_safetensors(self, key: str, entry: Entry) -> torch.Tensor:
        file, name = self._files[entry["safetensors_file"]], entry.get("weight_name", key)
        if name not in file.entries:
            raise CheckpointError(f"{file.path} has no tensor {name!r}, where the index looks for {key!r}.")
        tensor = file.tensor(name)
        dtype = dtype_of(entry, file.path) if "dtype" in entry else tensor.dtype
        if self.device is not None or dtype != tensor.dtype:
            tensor = tensor.to(device=self.device, dtype=dtype)
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def alias(self, name: str, known: str) -> None:
        """``name`` is another name of the weight ``known``."""
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
        """Where the values of a weight lie as long as this mapping lives; None where they are read anew each time."""
        if key in self.state_dict:
            return None if self.state_dict[key].is_meta else self.state_dict[key].data_ptr()
        if self.index[key].get("safetensors_file") is None:
            return None
        values = self[key]
        in_place = self._files[self.index[key]["safetensors_file"]].holds(values)
        return values.data_ptr() if in_place else None

    def num_bytes(self, key: str) -> int:
        """The bytes of a weight, without reading it."""
        if key in self.state_dict:
            return self.state_dict[key].numel() * self.state_dict[key].element_size()
        entry = self.index[key]
        if entry.get("safetensors_file") is not None:
            begin, end = self._files[entry["safetensors_file"]].entries[entry.get("weight_name", key)]["data_offsets"]
            return end - begin
        return torch.Size(entry["shape"]).numel() * dtype_of(entry, key).itemsize

    @property
    def ahead(self) -> Lookahead:
        """What reads the weights of the modules that run next."""
        if self._ahead is None:
            self._ahead = Lookahead(self)
        return self._ahead

    def needs_reading(self, keys: Sequence[str], device: torch.device) -> bool:
        """Whether it takes time to have these weights on the device."""
        is_waiting = device.type != CPU.name or any(key not in self.state_dict for key in keys)
        return is_waiting and device.type != "meta" and sum(map(self.num_bytes, keys)) >= SMALLEST_UNIT_BYTES

    def _mapped(self, key: str) -> tuple[MappedFile, str] | None:
        """The file in which a weight is read in place, and its name there."""
        entry = self.index.get(key) if key not in self.state_dict else None
        if entry is None or entry.get("safetensors_file") is None:
            return None
        return self._files[entry["safetensors_file"]], entry.get("weight_name", key)

    def will_need(self, keys: Sequence[str]) -> bool:
        """Whether the kernel reads all of these weights in the background from now on."""
        places = [self._mapped(key) for key in keys if key not in self.state_dict]
        if any(place is None for place in places):
            return False
        for place in places:
            if place is not None:
                place[0].will_need([place[1]])
        return True

    def release(self, keys: Sequence[str]) -> None:
        """What was read of these weights doesn't count as memory any more, where they lie in safetensors files."""
        for place in map(self._mapped, keys):
            if place is not None:
                place[0].release([place[1]])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None}  # a copy learns its own order


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The entries that are, or lie in, one of the named submodules."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}.") for name in submodule_names)
    }
