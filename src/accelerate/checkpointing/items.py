"""The items of a checkpoint, taken from live objects: written at once, from a snapshot, or by a late rank.

An item is a value and the way to write it. A snapshot copies the tensors of items into memory that nobody else changes;
files written from the copies are the same, byte for byte.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

import torch

from ..distributed.call_rendezvous import CallParticipants
from ..distributed.random import capture_rng_states
from ..errors import CheckpointError, CollectiveError
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .codec import Encoded, encode
from .fit import OptimizerLayout, with_names
from .layout import (
    BUFFERS,
    CUSTOM,
    GRADIENTS,
    LOADER,
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    StateFiles,
    folder_of_rank,
    to_classic_streams,
    write_encoded,
)
from .manifest import PIN_NAME, FileRecord, Manifest, measure, read_manifest
from .quantized_state import split_optimizer
from .run_state import RunState, StateDict, StrategyState
from .storage import LocalStorage, Storage, storage_of
from .store import Create, StagingDirectory, file_names
from .tensor_files import raw_bytes
from .weights import Selection, check_weights, shared_names, write_weights


class CheckpointItem(ABC):
    """One piece of state of a checkpoint, written as one or a few files."""

    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors to copy for a snapshot of the item."""

    @abstractmethod
    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Use ``copies``, by the id of the originals, from now on, so that the originals may change."""

    @abstractmethod
    def write(self, create: Create) -> None:
        """Write the files of the item; ``create(name, pickle=)`` opens each."""


@final
class TensorsItem(CheckpointItem):
    """Tensors by name, and the function that writes them: ``write(create, tensors)``.

    The function must not hold the tensors itself, because a snapshot replaces them.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], write: Callable[[Create, dict[str, torch.Tensor]], object]
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(tensors)
        self._write = write

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors."""
        return self._tensors.values()

    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Replace the tensors by the copies."""
        self._tensors = {name: copies[id(tensor)] for name, tensor in self._tensors.items()}

    def write(self, create: Create) -> None:
        """Write the files."""
        self._write(create, self._tensors)


def weights_item(state: Mapping[str, torch.Tensor], index: int = 0) -> TensorsItem:
    """Return the item of one model's state dict, as safetensors; tied tensors are written once.

    Raises:
        CheckpointError: a tensor has no values, or the format doesn't support it.
    """
    check_weights(state, safe_serialization=True)
    tied = shared_names(state)
    return TensorsItem(
        {name: tensor for name, tensor in state.items() if name not in tied}, partial(write_weights, index=index)
    )


def state_item(stem: str, encoded: Encoded, *, beside: bool, folder: str = "") -> TensorsItem:
    """Return the item of a state dict as a JSON document and tensors; see :func:`write_encoded`."""
    document = encoded.document

    def write(create: Create, tensors: dict[str, torch.Tensor]) -> None:
        write_encoded(create, stem, Encoded(document, tensors), beside=beside, folder=folder)

    return TensorsItem(encoded.tensors, write)


@final
class PickledItem(CheckpointItem):
    """Files that a function writes through ``create``, such as pickles."""

    def __init__(self, write: Callable[[Create], None]) -> None:
        self._write = write

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return no tensors, because a snapshot holds the bytes of the files."""
        return ()

    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Run the function now and hold the bytes of the files in memory."""
        files: list[tuple[str, bool, bytes]] = []

        @contextmanager
        def create(name: str, *, pickle: bool = False) -> Iterator[BytesIO]:
            buffer = BytesIO()
            yield buffer
            files.append((name, pickle, buffer.getvalue()))

        self._write(create)
        self._write = lambda create: _write_files(create, files)

    def write(self, create: Create) -> None:
        """Write the files, with the function or from the snapshot's bytes."""
        self._write(create)


def _write_files(create: Create, files: Iterable[tuple[str, bool, bytes]]) -> None:
    for name, is_pickle, data in files:
        with create(name, pickle=is_pickle) as file:
            file.write(data)


# ------------------------------------------------------------------------------------------ of a whole run


@dataclass
@final
class RunItems:
    """The items of a run. Loaders' states and gradients are read once, when an item first needs them."""

    run: RunState
    parts: StrategyState
    selection: Selection
    safe_serialization: bool = True

    def weights(self) -> list[StateDict]:
        """Return the state dict of each model in a dict of its own, so that hooks may take entries out."""
        return [dict(state) for state in self.parts.weights]

    def of_weights(self, weights: Sequence[StateDict]) -> list[CheckpointItem]:
        """Return one item for the weights of each model."""
        chosen = [self.selection.of(state) for state in weights]
        if self.safe_serialization:
            return [weights_item(state, index) for index, state in enumerate(chosen)]
        return [
            PickledItem(partial(write_weights, state_dict=state, index=index, safe_serialization=False))
            for index, state in enumerate(chosen)
        ]

    def shared(self) -> list[CheckpointItem]:
        """Return the items that are the same on all ranks, besides weights."""
        items: list[CheckpointItem] = []
        for state_files, kind, objects in (
            (OPTIMIZER, "optimizer", self.parts.optimizers),
            (SCHEDULER, "scheduler", self.run.schedulers),
            (CUSTOM, "registered object", self.run.custom_objects),
        ):
            for number, obj in enumerate(objects):
                what = f"{kind} {number} ({type(obj).__qualname__}).state_dict()"
                is_pickle = state_files is CUSTOM and self.run.pickles(obj)
                state = obj.state_dict()
                if state_files is OPTIMIZER and isinstance(state, Mapping):
                    state = with_names(split_optimizer(state, getattr(obj, "optimizer", obj)), self._layout(number))
                items.append(self._item(state_files, state, number, what, is_pickle))
        for number, state in self.loader_states.items():
            items.append(self._item(LOADER, state, number, f"data loader {number}.state_dict()"))
        if self.run.scaler is not None:
            items.append(self._item(SCALER, self.run.scaler.state_dict(), 0, "scaler.state_dict()"))
        return items

    def _layout(self, number: int) -> OptimizerLayout:
        prepared: Any = (self.run.optimizers or self.parts.optimizers)[number]
        return self.run.strategy.access.optimizer_layout(getattr(prepared, "optimizer", prepared), self.run.models)

    @cached_property
    def buffers(self) -> list[dict[str, torch.Tensor]]:
        """The buffers of each model whose values may differ between ranks."""
        access, select = self.run.strategy.access, self.selection
        return [
            {}
            if access.broadcasts_buffers(model)
            else {name: buffer.detach() for name, buffer in access.buffers(model).items() if select.holds(name)}
            for model in self.run.models
        ]

    def differing_buffers(self, ranks: Ranks) -> list[dict[str, torch.Tensor]]:
        """Return the :attr:`buffers` whose values differ between ranks; a collective."""
        if ranks.size == 1:
            return []
        digests = [
            (_digest(f"{index}.{name}".encode()), _digest(raw_bytes(buffer)))
            for index, buffers in enumerate(self.buffers)
            for name, buffer in buffers.items()
        ]
        known: dict[int, int] = {}
        pairs = chain.from_iterable(ranks.all_gather(digests))
        differ = {name for name, content in pairs if known.setdefault(name, content) != content}
        names = iter(digests)
        return [{name: one for name, one in buffers.items() if next(names)[0] in differ} for buffers in self.buffers]

    def of_rank(self, rank: int, buffers: Sequence[Mapping[str, torch.Tensor]]) -> list[CheckpointItem]:
        """Return this rank's items: random streams, its part of loaders' states, gradients of an open window, buffers.

        Args:
            buffers: this rank's own buffers of each model.
        """
        streams = capture_rng_states(self.run.step)
        value: dict[str, object] = to_classic_streams(streams) if self.run.is_classic else {"streams": streams}
        if not self.run.is_classic:
            states = [self.loader_states.get(number) for number in range(len(self.run.dataloaders))]
            value["loaders"] = [state.get("own") if isinstance(state, Mapping) else None for state in states]
        items = [self._item(RANDOM, value, rank, "random streams")]
        folder = folder_of_rank(rank, self.run.num_ranks)
        more = (GRADIENTS, self.window, "gradients"), (BUFFERS, list(buffers) if any(buffers) else None, "buffers")
        for state_files, own, what in more:  # never pickles: other programs' classic format has no names for these
            if own is not None:
                items.append(state_item(state_files.name(rank), encode(own, what), beside=True, folder=folder))
        return items

    @cached_property
    def loader_states(self) -> dict[int, object]:
        """The states of the loaders that have one, by the loader's number."""
        found: dict[int, object] = {}
        for number, loader in enumerate(self.run.dataloaders):
            state = getattr(loader, "position_state", None) or getattr(loader, "state_dict", None)
            if callable(state) and callable(getattr(loader, "load_state_dict", None)):
                found[number] = state()
        return found

    @cached_property
    def window(self) -> Mapping[str, object] | None:
        """This rank's gradients, if the run is saved between two optimizer updates."""
        return None if self.run.open_window is None else self.run.open_window.state_dict()

    def updates(self) -> list[int]:
        """Return the number of updates of each optimizer; 0 if it doesn't count them."""
        return [getattr(optimizer, "num_updates", 0) for optimizer in self.run.optimizers]

    def epoch(self) -> int | None:
        """Return the epoch of the first loader that knows it."""
        found = [state.get("epoch") for state in self.loader_states.values() if isinstance(state, Mapping)]
        return next((epoch for epoch in found if isinstance(epoch, int)), None)

    def _item(
        self, state_files: StateFiles, value: object, number: int, what: str, is_pickle: bool = False
    ) -> CheckpointItem:
        if self.run.is_classic or is_pickle:
            return PickledItem(partial(state_files.write_pickle, value=value, number=number))
        folder = folder_of_rank(number, self.run.num_ranks) if state_files.is_of_rank else ""
        return state_item(
            state_files.name(number), encode(value, what), beside=state_files.tensors_beside, folder=folder
        )


def _digest(data: bytes | memoryview) -> int:
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "big")


# ------------------------------------------------------------------------------------------ of a late rank
#
# A late rank adds items to a checkpoint that the main process has saved alone and committed. It writes the files first
# and the manifest that lists them last, each atomically, so the checkpoint stays valid if a process is killed. It adds
# nothing to a checkpoint that has been removed or replaced meanwhile.

#: In a manifest's details: the ranks whose own items the checkpoint lacks.
ABSENT_RANKS: Final = "absent_ranks"


@final
class AddedItems:
    """The items that one rank adds to a checkpoint saved by the main process alone."""

    def __init__(self, participants: CallParticipants, ranks: Ranks) -> None:
        self._participants = participants
        self._folder = Path(tempfile.mkdtemp(prefix="accelerate-added-"))
        self.staging: StagingDirectory = StagingDirectory(
            self._folder / (Path(participants.address).name or "items"), False, ranks
        )
        self.staging.folder.mkdir()
        self.items: list[CheckpointItem] = []

    def add(self) -> None:
        """Wait until the main process has committed, then add the files.

        Raises:
            CheckpointError: the main process couldn't save, or these items couldn't be written.
        """
        address = self._participants.address
        try:
            identity = self._participants.wait_for_outcome()
            for item in self.items:
                item.write(self.staging.create)
            with self._participants.exclusive():
                _add_files(storage_of(address), identity, self.staging)
        except FileNotFoundError:
            return  # it was removed meanwhile
        except (OSError, CollectiveError) as error:
            raise CheckpointError(f"can't save {address}: {error}") from error
        finally:
            self.items.clear()
            self.close()

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _add_files(storage: Storage, identity: str, staging: StagingDirectory) -> None:
    manifest = read_manifest(storage)
    if manifest is None or manifest.identity != identity:
        return  # removed, or replaced by a later save
    added: dict[str, FileRecord] = {}
    for name in file_names(staging.folder):
        if name not in manifest.files and name not in (MANIFEST_NAME, PIN_NAME):
            added[name] = staging.records.get(name) or measure(staging.folder / name)
            _write_into(storage, name, (staging.folder / name).read_bytes())
    storage.write(MANIFEST_NAME, _with_added(manifest, staging, added).to_bytes())


def _write_into(storage: Storage, name: str, data: bytes) -> None:
    *parents, leaf = name.split("/")
    for parent in parents:
        storage = storage.child(parent)
        if isinstance(storage, LocalStorage):
            storage.path.mkdir(exist_ok=True)  # not the checkpoint's own folder: if it was removed, it stays removed
    storage.write(leaf, data)


def _with_added(manifest: Manifest, staging: StagingDirectory, added: dict[str, FileRecord]) -> Manifest:
    absent = [rank for rank in manifest.details.get(ABSENT_RANKS, []) if rank != staging.ranks.rank]
    details = {name: value for name, value in manifest.details.items() if name != ABSENT_RANKS}
    pickled = sorted({*manifest.pickled, *(name for name in staging.pickled if name in added)})
    return replace(
        manifest,
        files={**manifest.files, **added},
        pickled=tuple(pickled),
        details={**details, **({ABSENT_RANKS: absent} if absent else {})},
    )
