"""What the files of a checkpoint are called, in the safe format and in the classic one.

| state | safe | classic |
|---|---|---|
| optimizer | `optimizer.safetensors` + `.json` | `optimizer.bin` |
| scheduler | `scheduler.json` | `scheduler.bin` |
| loader | `sampler.json` | `dl_state_dict.bin` |
| gradient scaler | `scaler.json` | `scaler.pt` |
| random streams of a rank | `random_states_{rank}.json` | `random_states_{rank}.pkl` |
| gradients of a rank in an open window | `gradients_{rank}.safetensors` + `.json` | the same |
| registered object | `custom_checkpoint_{i}.safetensors` + `.json` | `custom_checkpoint_{i}.pkl` |

Further objects of a kind add `_1`, `_2`, ... to the stem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from ..errors import CheckpointNotFound
from ..names import (
    CUSTOM_CHECKPOINT_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCHEDULER_NAME,
)
from .codec import read_pickle, write_pickle
from .draft import Create
from .objects import read_state


@dataclass(frozen=True)
@final
class Slot:
    """One kind of state: its file names, and whether its tensors get a file of their own."""

    stem: str
    classic_stem: str
    classic_extension: str
    tensors_beside: bool
    always_numbered: bool = False

    def _suffix(self, number: int) -> str:
        return f"_{number}" if number or self.always_numbered else ""

    def name(self, number: int = 0) -> str:
        """The stem of the safe files of object ``number``."""
        return self.stem + self._suffix(number)

    def classic_name(self, number: int = 0) -> str:
        """The classic file of object ``number``."""
        return f"{self.classic_stem}{self._suffix(number)}.{self.classic_extension}"

    def write_pickle(self, create: Create, value: Any, number: int = 0) -> None:
        """The state of object ``number`` is in its classic file."""
        with create(self.classic_name(number), pickle=True) as file:
            write_pickle(value, file)

    def holds(self, folder: Path, number: int = 0) -> bool:
        """Whether ``folder`` has the state of object ``number``, in either format."""
        return any((folder / name).is_file() for name in (f"{self.name(number)}.json", self.classic_name(number)))

    def read(self, folder: Path, number: int = 0, **pickle_options: Any) -> Any:
        """The state of object ``number``.

        Raises:
            CheckpointNotFound: ``folder`` has neither file.
        """
        if (folder / f"{self.name(number)}.json").is_file():
            return read_state(folder, self.name(number))
        if (folder / self.classic_name(number)).is_file():
            return read_pickle(folder / self.classic_name(number), **pickle_options)
        raise CheckpointNotFound(f"{folder} holds no {self.name(number)}.json and no {self.classic_name(number)}")


OPTIMIZER: Final = Slot(OPTIMIZER_NAME, OPTIMIZER_NAME, "bin", tensors_beside=True)
SCHEDULER: Final = Slot(SCHEDULER_NAME, SCHEDULER_NAME, "bin", tensors_beside=False)
LOADER: Final = Slot(SAMPLER_NAME, "dl_state_dict", "bin", tensors_beside=False)
SCALER: Final = Slot("scaler", "scaler", "pt", tensors_beside=False)
RANDOM: Final = Slot(RNG_STATE_NAME, RNG_STATE_NAME, "pkl", tensors_beside=False, always_numbered=True)
GRADIENTS: Final = Slot("gradients", "gradients", "pkl", tensors_beside=True, always_numbered=True)
CUSTOM: Final = Slot(CUSTOM_CHECKPOINT_NAME, CUSTOM_CHECKPOINT_NAME, "pkl", tensors_beside=True, always_numbered=True)

#: In the details of a manifest: gradients of an open window are a part of the checkpoint.
OPEN_WINDOW: Final = "open_window"
#: In the details of a manifest that one rank wrote: all ranks had the same seed, so that their streams are in step.
STREAMS_ALIKE: Final = "streams_alike"

# -- random streams under their classic names --------------------------------------------------------------

_CLASSIC_HOST_STREAMS: Final = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
}


def to_classic_streams(streams: Mapping[str, Any]) -> dict[str, Any]:
    """Random streams by their classic names, in the shapes that ``random`` and ``numpy`` take back."""
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


def from_classic_streams(classic: Mapping[str, Any]) -> dict[str, Any]:
    """The random streams of a classic file under today's names."""
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
