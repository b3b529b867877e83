"""The documented folder: one raw file ``{name}.dat`` per weight, and ``index.json`` with dtypes and shapes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from ..checkpointing.inside import inside
from ..checkpointing.tensor_files import raw_bytes
from ..errors import CheckpointError

INDEX_NAME: Final = "index.json"

Entry = dict[str, Any]


def weight_path(folder: str | PathLike[str], name: str) -> Path:
    """Where the values of a weight lie in an offload folder."""
    return Path(folder) / f"{name}.dat"


def index_path(folder: str | PathLike[str]) -> Path:
    """Return the path of the index of an offload folder."""
    return Path(folder) / INDEX_NAME


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | PathLike[str],
    index: dict[str, Entry] | None = None,
) -> dict[str, Entry]:
    """The folder holds the values of ``weight``, and the index (a new one where none is given) knows it.

    Raises:
        CheckpointError: the weight has no values, or its name, which may come from a file, leads out of the folder.
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
    """The weight that a file of an offload folder holds, in memory of its own.

    Raises:
        CheckpointError: the file hasn't the size that the index says.
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


def dtype_of(info: Mapping[str, Any], where: object) -> torch.dtype:
    """The dtype that an entry of an index names."""
    dtype = getattr(torch, str(info.get("dtype")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: the index names {info.get('dtype')!r}, which is no dtype of torch.")
    return dtype


def read_index(folder: str | PathLike[str]) -> dict[str, Entry]:
    """The index of an offload folder; empty where it has none.

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
    """The index in the folder knows these entries, beside those it knew."""
    if not index:
        return
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    merged = read_index(folder) | dict(index)
    beside = folder / f".{INDEX_NAME}.{os.getpid()}"
    beside.write_text(json.dumps(merged, indent=2), encoding="utf-8")
    os.replace(beside, folder / INDEX_NAME)


def offload_state_dict(save_dir: str | PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """The folder holds every weight of the state dict, and the index knows them."""
    index: dict[str, Entry] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)
