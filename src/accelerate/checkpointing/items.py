"""The items of a checkpoint, taken from live objects: written right away, or from a snapshot in host memory.

An item is a value and the way in which it is written. A snapshot copies the tensors of items into memory that nobody
else changes; the files that are written from the copies are the same, byte for byte.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from typing import Any, Final, final

import torch

from ..cores import threads_of_this_rank
from ..devices.table import kind_of
from ..distributed.random import capture_rng_states
from ..distributed.world import current_world
from .codec import Encoded, encode
from .layout import (
    CUSTOM,
    GRADIENTS,
    LOADER,
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    StateFiles,
    to_classic_streams,
)
from .objects import INLINE_LIMIT_BYTES, write_encoded
from .run_state import RunState, StateDict, StrategyState
from .store import Create
from .weights import Selection, check_weights, shared_names, write_weights


class CheckpointItem(ABC):
    """One piece of state of a checkpoint, which becomes one or a few files."""

    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that have to be copied for a snapshot of the item."""

    @abstractmethod
    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Write from ``copies``, found by the originals' id, from now on, so that the originals may change."""

    @abstractmethod
    def write(self, create: Create) -> None:
        """Write the files of the item; ``create(name, pickle=)`` opens each."""


@final
class WeightsItem(CheckpointItem):
    """The state dict of one model, as safetensors."""

    def __init__(self, state: Mapping[str, Any], index: int = 0) -> None:
        check_weights(state, safe_serialization=True)
        self._state: dict[str, torch.Tensor] = dict(state)
        self._first = shared_names(state)
        self._index = index

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the state dict; one with several names once."""
        return [tensor for name, tensor in self._state.items() if name not in self._first]

    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Replace the tensors by the copies; tied names stay tied."""
        self._state = {name: copies[id(self._state[self._first.get(name, name)])] for name in self._state}

    def write(self, create: Create) -> None:
        """Write ``model.safetensors``, or shards and their index."""
        write_weights(create, self._state, index=self._index)


@final
class StateItem(CheckpointItem):
    """A state dict as a JSON document and tensors."""

    def __init__(self, stem: str, encoded: Encoded, *, beside: bool) -> None:
        self._stem = stem
        self._encoded = encoded
        self._beside = beside or encoded.num_tensor_bytes > INLINE_LIMIT_BYTES

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that the document names."""
        return self._encoded.tensors.values()

    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Replace the tensors that the document names by the copies."""
        tensors = {key: copies[id(tensor)] for key, tensor in self._encoded.tensors.items()}
        self._encoded = Encoded(self._encoded.document, tensors)

    def write(self, create: Create) -> None:
        """Write ``{stem}.json``, and ``{stem}.safetensors`` where the tensors lie beside it."""
        write_encoded(create, self._stem, self._encoded, beside=self._beside)


@final
class PickledItem(CheckpointItem):
    """Files that a function writes through ``create``, such as pickles."""

    def __init__(self, write: Callable[[Create], None]) -> None:
        self._write = write

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return no tensors: the snapshot is that of whole files."""
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
        """Write the files: by the function, or the bytes of the snapshot."""
        self._write(create)


def _write_files(create: Create, files: Iterable[tuple[str, bool, bytes]]) -> None:
    for name, is_pickle, data in files:
        with create(name, pickle=is_pickle) as file:
            file.write(data)


@final
class DeferredItem(CheckpointItem):
    """Files that a strategy's own function writes when the checkpoint is written, from values that it copies itself."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return no tensors: the function has copies of its own."""
        return ()

    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Do nothing: the function has copies of its own."""

    def write(self, create: Create) -> None:
        """Run the function."""
        self._write()


# ------------------------------------------------------------------------------------------ of a whole run


@dataclass
@final
class RunItems:
    """The items of a run. States of loaders are taken once, when the first item needs them, and so are gradients."""

    run: RunState
    parts: StrategyState
    selection: Selection
    safe_serialization: bool = True

    def weights(self) -> list[dict[str, Any]]:
        """Return the state dict of each model in a dict of its own, so that hooks may take entries out."""
        return [dict(state) for state in self.parts.weights]

    def of_weights(self, weights: Sequence[StateDict]) -> list[CheckpointItem]:
        """Return one item for the weights of each model."""
        chosen = [self.selection.of(state) for state in weights]
        if self.safe_serialization:
            return [WeightsItem(state, index) for index, state in enumerate(chosen)]
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
                items.append(self._item(state_files, obj.state_dict(), number, what, is_pickle))
        for number, state in self.loader_states.items():
            items.append(self._item(LOADER, state, number, f"data loader {number}.state_dict()"))
        if self.run.scaler is not None:
            items.append(self._item(SCALER, self.run.scaler.state_dict(), 0, "scaler.state_dict()"))
        return items

    def of_rank(self, rank: int) -> list[CheckpointItem]:
        """Return the items of this rank: random streams, its part of loaders' states, gradients of an open window."""
        streams = capture_rng_states(self.run.step)
        value: dict[str, object] = to_classic_streams(streams) if self.run.is_classic else {"streams": streams}
        if not self.run.is_classic:
            states = [self.loader_states.get(number) for number in range(len(self.run.dataloaders))]
            value["loaders"] = [state.get("own") if isinstance(state, Mapping) else None for state in states]
        items = [self._item(RANDOM, value, rank, "random streams")]
        if self.window is not None:  # never a pickle: the classic format of other programs has no name for it
            items.append(StateItem(GRADIENTS.name(rank), encode(self.window, "gradients"), beside=True))
        return items

    @cached_property
    def loader_states(self) -> dict[int, object]:
        """The states of the loaders that have one, by the loader's number."""
        found: dict[int, object] = {}
        for number, loader in enumerate(self.run.dataloaders):
            state_dict, load = getattr(loader, "state_dict", None), getattr(loader, "load_state_dict", None)
            if callable(state_dict) and callable(load):
                found[number] = state_dict()
        return found

    @cached_property
    def window(self) -> StateDict | None:
        """The gradients of this rank, if the run is saved between two updates."""
        return None if self.run.open_window is None else self.run.open_window.state_dict()

    def epoch(self) -> int | None:
        """Return the epoch of the first loader that knows it."""
        found = [state.get("epoch") for state in self.loader_states.values() if isinstance(state, Mapping)]
        return next((epoch for epoch in found if isinstance(epoch, int)), None)

    def _item(
        self, state_files: StateFiles, value: object, number: int, what: str, is_pickle: bool = False
    ) -> CheckpointItem:
        if self.run.is_classic or is_pickle:
            return PickledItem(partial(state_files.write_pickle, value=value, number=number))
        return StateItem(state_files.name(number), encode(value, what), beside=state_files.tensors_beside)


# --------------------------------------------------------------------------------------------------
# Snapshots in host memory. The training waits for them, so they copy as fast as the memory allows.

_ALIGNMENT_BYTES: Final = 64
_TASK_BYTES: Final = 16 << 20  # copied by one thread at a time
_MAX_THREADS: Final = 4  # more don't make the memory faster


@final
class HostMemory:
    """Host memory for the copies of a snapshot, used again by the next one because fresh memory is slow to touch."""

    def __init__(self) -> None:
        self._plain = torch.empty(0, dtype=torch.uint8)
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def snapshot(self, items: Iterable[CheckpointItem]) -> None:
        """Copy the tensors of all items as they are now, over the copies of the snapshot before."""
        items = list(items)
        originals = {id(tensor): tensor for item in items for tensor in item.tensors()}
        host_tensors = {key: tensor for key, tensor in originals.items() if tensor.device.type == "cpu"}
        device_tensors = {key: tensor for key, tensor in originals.items() if key not in host_tensors}
        if _num_bytes(host_tensors) > self._plain.numel():
            self._plain = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
            self._plain = _allocate_huge_pages(_num_bytes(host_tensors))
        if _num_bytes(device_tensors) > self._pinned.numel():
            self._pinned = torch.empty(0, dtype=torch.uint8)
            self._pinned = _allocate_pinned(_num_bytes(device_tensors))
        device_copies = _views(device_tensors, self._pinned)
        with torch.no_grad():
            for key, copy in device_copies.items():  # in parallel with the copies of host tensors
                copy.copy_(device_tensors[key].detach(), non_blocking=True)
        host_copies = _views(host_tensors, self._plain)
        _copy([(copy, host_tensors[key].detach()) for key, copy in host_copies.items()])
        for device in {tensor.device for tensor in device_tensors.values()}:
            kind_of(device).synchronize()
        for item in items:
            item.use_copies(device_copies | host_copies)

    def release(self) -> None:
        """Free the memory."""
        self._plain = self._pinned = torch.empty(0, dtype=torch.uint8)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _num_bytes(tensors: Mapping[int, torch.Tensor]) -> int:
    return sum(map(_padded, tensors.values()))


def _allocate_pinned(num_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # a device without pinned memory: copies are only slower
        return torch.empty(num_bytes, dtype=torch.uint8)


def _allocate_huge_pages(num_bytes: int) -> torch.Tensor:
    """Allocate memory in huge pages, where the system has them, so that touching it first causes few page faults."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that is built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _views(tensors: Mapping[int, torch.Tensor], memory: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return a view of ``memory`` for every tensor, with its shape and dtype, one after the other."""
    views: dict[int, torch.Tensor] = {}
    start = 0
    for key, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        views[key] = memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
        start += _padded(tensor)
    return views


Copy = tuple[torch.Tensor, torch.Tensor]


def _copy(pairs: Iterable[Copy]) -> None:
    """Copy the second tensor of every pair into the first, by several threads, however many torch computes with."""
    tasks = _tasks(pairs)
    num_threads = min(_num_threads(), len(tasks))
    if num_threads <= 1:
        for task in tasks:
            _run(task)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="snapshot") as pool:
        for _ in pool.map(_run, tasks):  # raises what a thread raised
            pass


def _num_threads() -> int:
    """Return the number of threads that copy: at most this process's share of the host's cores."""
    world = current_world()
    return min(_MAX_THREADS, threads_of_this_rank(world.local_size if world is not None else 1))


def _tasks(pairs: Iterable[Copy]) -> list[list[Copy]]:
    """Divide the copies into tasks of similar size: small tensors together, large ones in pieces."""
    tasks: list[list[Copy]] = []
    bytes_left = 0
    for target, source in pairs:
        for piece in _pieces(target, source):
            if bytes_left <= 0:
                tasks.append([])
                bytes_left = _TASK_BYTES
            tasks[-1].append(piece)
            bytes_left -= piece[0].numel() * piece[0].element_size()
    return tasks


def _pieces(target: torch.Tensor, source: torch.Tensor) -> list[Copy]:
    if source.numel() * source.element_size() <= _TASK_BYTES or not source.is_contiguous():
        return [(target, source)]
    size = _TASK_BYTES // source.element_size()
    return list(zip(target.view(-1).split(size), source.view(-1).split(size), strict=True))


def _run(task: list[Copy]) -> None:
    with torch.no_grad():
        for target, source in task:
            target.copy_(source)
