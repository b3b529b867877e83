"""What a checkpoint will hold, taken from live objects: written right away, or kept in host memory first.

A part is a value and the way in which it is written. Keeping a part copies its tensors into memory that nobody else
changes; the files that are written from the copies are the same, byte for byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, final

import torch

from .codec import Encoded
from .draft import Create
from .objects import INLINE_LIMIT_BYTES, write_encoded
from .weights import check_weights, shared_names, write_weights


class Part(ABC):
    """Something that becomes one or a few files."""

    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor that would be copied to keep the part."""

    @abstractmethod
    def keep(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Whatever happens to the original from now on, the part stays; ``copies`` are found by the originals' id."""

    @abstractmethod
    def write(self, create: Create) -> None:
        """The files of the part are written; ``create(name, pickle=)`` opens each."""


@final
class Weights(Part):
    """The state dict of one model, as safetensors."""

    def __init__(self, state: Mapping[str, Any], index: int = 0) -> None:
        check_weights(state, safe_serialization=True)
        self._state: dict[str, torch.Tensor] = dict(state)
        self._first = shared_names(state)
        self._index = index

    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors of the state dict; one with several names once."""
        return [tensor for name, tensor in self._state.items() if name not in self._first]

    def keep(self, copies: Mapping[int, torch.Tensor]) -> None:
        """The state dict holds the copies; what had two names has two names still."""
        self._state = {name: copies[id(self._state[self._first.get(name, name)])] for name in self._state}

    def write(self, create: Create) -> None:
        """``model.safetensors`` and its like."""
        write_weights(create, self._state, index=self._index)


@final
class State(Part):
    """A state dict in the typed encoding."""

    def __init__(self, stem: str, encoded: Encoded, *, beside: bool) -> None:
        self._stem = stem
        self._encoded = encoded
        self._beside = beside or encoded.num_tensor_bytes > INLINE_LIMIT_BYTES

    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that the document names."""
        return self._encoded.tensors.values()

    def keep(self, copies: Mapping[int, torch.Tensor]) -> None:
        """The document names the copies."""
        tensors = {key: copies[id(tensor)] for key, tensor in self._encoded.tensors.items()}
        self._encoded = Encoded(self._encoded.document, tensors)

    def write(self, create: Create) -> None:
        """``{stem}.json``, and ``{stem}.safetensors`` where the tensors lie beside it."""
        write_encoded(create, self._stem, self._encoded, beside=self._beside)


@final
class Pickled(Part):
    """Files that a function writes through ``create``: pickles, which say what they hold in their own way."""

    def __init__(self, write: Callable[[Create], None]) -> None:
        self._write = write

    def tensors(self) -> Iterable[torch.Tensor]:
        """None: whole files are kept."""
        return ()

    def keep(self, copies: Mapping[int, torch.Tensor]) -> None:
        """The bytes of the files lie in memory."""
        files: list[tuple[str, bool, bytes]] = []

        @contextmanager
        def create(name: str, *, pickle: bool = False) -> Iterator[BytesIO]:
            buffer = BytesIO()
            yield buffer
            files.append((name, pickle, buffer.getvalue()))

        self._write(create)
        self._write = lambda create: _write_files(create, files)

    def write(self, create: Create) -> None:
        """The function has run, now or when the part was kept."""
        self._write(create)


def _write_files(create: Create, files: Iterable[tuple[str, bool, bytes]]) -> None:
    for name, is_pickle, data in files:
        with create(name, pickle=is_pickle) as file:
            file.write(data)


@final
class Late(Part):
    """Files that somebody else's function writes in its own way, from values that it keeps itself."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def tensors(self) -> Iterable[torch.Tensor]:
        """None that we know of."""
        return ()

    def keep(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Nothing changes."""

    def write(self, create: Create) -> None:
        """The function has run."""
        self._write()
