"""The file names of a checkpoint's state, in the safe and in the classic format.

| state | safe | classic |
|---|---|---|
| optimizer | `optimizer.safetensors` + `.json` | `optimizer.bin` |
| scheduler | `scheduler.json` | `scheduler.bin` |
| loader | `sampler.json` | `dl_state_dict.bin` |
| gradient scaler | `scaler.json` | `scaler.pt` |
| random streams of a rank | `random_states_{rank}.json` | `random_states_{rank}.pkl` |
| gradients of a rank in an open window | `gradients_{rank}.safetensors` + `.json` | the same |
| buffers of a rank, if they differ between ranks | `buffers_{rank}.safetensors` + `.json` | the same |
| registered object | `custom_checkpoint_{i}.safetensors` + `.json` | `custom_checkpoint_{i}.pkl` |

Further objects of a kind add `_1`, `_2`, ... to the stem. With more than 1,024 ranks, the files of each rank are in
folders of a thousand ranks, `ranks_00000/`, `ranks_01000/`, ...; but not in the classic format, which other programs
read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from ..errors import CheckpointError, CheckpointNotFound
from ..names import CUSTOM_CHECKPOINT_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCHEDULER_NAME, engine_tag
from ..optional import require
from .codec import Encoded, decode, envelope, inline, inlined_tensor, open_envelope, read_pickle, write_pickle
from .run_state import StateDict
from .storage import inside
from .store import Create
from .tensor_files import open_tensors, write_tensors

#: Tensors larger than this in total are never stored inside a JSON file.
INLINE_LIMIT_BYTES: Final = 16 << 20
#: With more ranks, their files are in folders by thousand, because file systems are slow with tens of thousands in one.
MAX_RANKS: Final = 1024
_RANKS_IN_FOLDER: Final = 1000


def folder_of_rank(rank: int, num_ranks: int) -> str:
    """Return the folder (with a slash) of the own files of ``rank`` of ``num_ranks``; empty for few ranks."""
    return "" if num_ranks <= MAX_RANKS else _numbered_folder(rank)


def _numbered_folder(rank: int) -> str:
    return f"ranks_{rank // _RANKS_IN_FOLDER * _RANKS_IN_FOLDER:05d}/"


def write_encoded(create: Create, stem: str, encoded: Encoded, *, beside: bool, folder: str = "") -> None:
    """Write an encoded state to ``{stem}.json``, and large tensors, or all with ``beside``, to ``{stem}.safetensors``.

    Args:
        folder: the subfolder, with a slash; empty for the checkpoint itself.
    """
    tensor_file = f"{stem}.safetensors"
    beside = beside or encoded.num_tensor_bytes > INLINE_LIMIT_BYTES
    content = envelope(encoded.document, beside=tensor_file) if beside else inline(encoded)
    if beside:
        with create(f"{folder}{tensor_file}") as file:
            write_tensors(file, encoded.tensors, {"format": "pt"})
    with create(f"{folder}{stem}.json") as file:
        file.write(json.dumps(content, separators=(",", ":")).encode())


def read_state(folder: Path, stem: str) -> Any:
    """Read the value in ``{stem}.json``; its tensors own their CPU memory.

    Raises:
        CheckpointNotFound: there is no such file.
        CheckpointError: this version can't read it.
    """
    path = folder / f"{stem}.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    content = open_envelope(content, str(path))
    beside = content.get("tensors_in")
    if beside is None:
        return decode(content["state"], lambda key: inlined_tensor(content, key), str(path))
    if beside != f"{stem}.safetensors":
        raise CheckpointError(f"{path}: its tensors can't lie in {beside!r}")
    if not (folder / beside).is_file():
        raise CheckpointNotFound(f"{folder / beside} is missing")
    with open_tensors(inside(folder, beside, path)) as tensors:
        return decode(content["state"], tensors.owned, str(path))


@dataclass(frozen=True)
@final
class StateFiles:
    """The file names of one kind of state, and whether its tensors have a file of their own."""

    stem: str
    classic_stem: str
    classic_extension: str
    tensors_beside: bool
    always_numbered: bool = False
    is_of_rank: bool = False

    def _suffix(self, number: int) -> str:
        return f"_{number}" if number or self.always_numbered else ""

    def name(self, number: int = 0) -> str:
        """Return the stem of the safe files of object ``number``."""
        return self.stem + self._suffix(number)

    def classic_name(self, number: int = 0) -> str:
        """Return the name of the classic file of object ``number``."""
        return f"{self.classic_stem}{self._suffix(number)}.{self.classic_extension}"

    def write_pickle(self, create: Create, value: object, number: int = 0) -> None:
        """Write the state of object ``number`` to its classic file."""
        with create(self.classic_name(number), pickle=True) as file:
            write_pickle(value, file)

    def holds(self, folder: Path, number: int = 0) -> bool:
        """Return whether ``folder`` has the state of object (or rank) ``number``, in either format."""
        return any((folder / name).is_file() for name in self.possible_names(number))

    def possible_names(self, number: int = 0) -> tuple[str, ...]:
        """Return all possible paths, relative to the checkpoint, of the first file of object (or rank) ``number``."""
        name = f"{self.name(number)}.json"
        by_thousand = (f"{_numbered_folder(number)}{name}",) if self.is_of_rank else ()
        return (name, self.classic_name(number), *by_thousand)

    def read(self, folder: Path, number: int = 0, **pickle_options: Any) -> Any:
        """Read the state of object ``number``.

        Raises:
            CheckpointNotFound: ``folder`` has neither file.
        """
        for path in (folder / name for name in self.possible_names(number)):
            if path.is_file():
                return (
                    read_state(path.parent, path.stem)
                    if path.suffix == ".json"
                    else read_pickle(path, **pickle_options)
                )
        raise CheckpointNotFound(f"{folder} holds no {self.name(number)}.json and no {self.classic_name(number)}")


OPTIMIZER: Final = StateFiles(OPTIMIZER_NAME, OPTIMIZER_NAME, "bin", tensors_beside=True)
SCHEDULER: Final = StateFiles(SCHEDULER_NAME, SCHEDULER_NAME, "bin", tensors_beside=False)
LOADER: Final = StateFiles(SAMPLER_NAME, "dl_state_dict", "bin", tensors_beside=False)
SCALER: Final = StateFiles("scaler", "scaler", "pt", tensors_beside=False)
RANDOM: Final = StateFiles(
    RNG_STATE_NAME, RNG_STATE_NAME, "pkl", tensors_beside=False, always_numbered=True, is_of_rank=True
)
GRADIENTS: Final = StateFiles(
    "gradients", "gradients", "pkl", tensors_beside=True, always_numbered=True, is_of_rank=True
)
BUFFERS: Final = StateFiles("buffers", "buffers", "pkl", tensors_beside=True, always_numbered=True, is_of_rank=True)
CUSTOM: Final = StateFiles(
    CUSTOM_CHECKPOINT_NAME, CUSTOM_CHECKPOINT_NAME, "pkl", tensors_beside=True, always_numbered=True
)

#: In the details of a manifest: the checkpoint includes gradients of an open window.
OPEN_WINDOW: Final = "open_window"
#: In the details of a manifest that one rank wrote: all ranks had the same seed, so their streams are equal.
STREAMS_ALIKE: Final = "streams_alike"

# ----------------------------------------------------------------- random streams under their classic names

_CLASSIC_HOST_STREAMS: Final = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
}


def to_classic_streams(streams: Mapping[str, Any]) -> dict[str, object]:
    """Convert random streams to their classic names, in the form that ``random`` and ``numpy`` accept."""
    classic: dict[str, Any] = {}
    for name, state in streams.items():
        if name == "python":
            version, words, gauss = state
            classic["random_state"] = (version, tuple(words), gauss)
        elif name == "numpy":
            kind, words, *rest = state
            classic["numpy_random_seed"] = (kind, np.asarray(words, dtype=np.uint32), *rest)
        elif name == "torch":
            classic["torch_manual_seed"] = state
        elif name == "step":
            classic["step"] = state
        else:
            classic[f"torch_{name}_manual_seed"] = state
    return classic


def from_classic_streams(classic: Mapping[str, Any]) -> StateDict:
    """Convert the random streams of a classic file to the current names."""
    streams: dict[str, Any] = {}
    for name, state in classic.items():
        known = _CLASSIC_HOST_STREAMS.get(name)
        if known == "python":
            streams[known] = [state[0], list(state[1]), state[2]]
        elif known == "numpy":
            streams[known] = [str(state[0]), np.asarray(state[1]).tolist(), *state[2:]]
        elif known is not None:
            streams[known] = state
        elif name.startswith("torch_") and name.endswith("_manual_seed"):
            streams[name.removeprefix("torch_").removesuffix("_manual_seed")] = state
        elif name == "step":
            streams["step"] = state
    return streams


# -------------------------------------------------- weights in DeepSpeed's own shards, read without its engine


def holds_engine_state(folder: Path, index: int = 0) -> bool:
    """Return whether DeepSpeed's engine saved model ``index`` into ``folder``."""
    return (folder / engine_tag(index)).is_dir()


def read_engine_weights(folder: Path, index: int = 0, *, trusted: bool = False) -> StateDict:
    """Read the full-precision weights of model ``index`` from DeepSpeed's shards of all ranks.

    Args:
        trusted: whether to read DeepSpeed's files, which are pickles and can run code.

    Raises:
        CheckpointError: they are not trusted.
        MissingDependency: DeepSpeed isn't installed.
    """
    if not trusted:
        raise CheckpointError(
            f"{folder} holds weights in DeepSpeed's own shards only, which are pickles and can run code. If you trust "
            "them, pass load_kwargs={'weights_only': False}, or run `python zero_to_fp32.py . . --safe_serialization` "
            "in that folder; to have whole weights in the next checkpoint, save with zero3_save_16bit_model=True."
        )
    library = require("deepspeed.utils.zero_to_fp32", "deepspeed", purpose=f"reading {folder / engine_tag(index)}")
    return library.get_fp32_state_dict_from_zero_checkpoint(str(folder), engine_tag(index))
