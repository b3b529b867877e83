"""Copies of a run's state in host memory, made while the training waits: as fast as the memory allows."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, final

import torch

from ..cores import threads_of_this_rank
from ..devices import kind_of
from ..world import current_world
from .content import Part

_ALIGNMENT_BYTES: Final = 64
_TASK_BYTES: Final = 16 << 20  # what one thread copies at a time
_MOST_THREADS: Final = 4  # more don't make the memory faster


@final
class HostMemory:
    """Memory that copies are made in; it stays from one save to the next, because fresh memory is slow to touch."""

    def __init__(self) -> None:
        self._plain = torch.empty(0, dtype=torch.uint8)
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def keep(self, parts: Iterable[Part]) -> None:
        """Every part stays as it is now. What was kept before is overwritten."""
        parts = list(parts)
        originals = {id(tensor): tensor for part in parts for tensor in part.tensors()}
        near = {key: tensor for key, tensor in originals.items() if tensor.device.type == "cpu"}
        far = {key: tensor for key, tensor in originals.items() if key not in near}
        if _num_bytes(near) > self._plain.numel():
            self._plain = torch.empty(0, dtype=torch.uint8)  # given back before more is asked for
            self._plain = _in_large_pages(_num_bytes(near))
        if _num_bytes(far) > self._pinned.numel():
            self._pinned = torch.empty(0, dtype=torch.uint8)
            self._pinned = _pinned(_num_bytes(far))
        copies = _places(far, self._pinned)
        with torch.no_grad():
            for key, place in copies.items():  # the device copies while we do
                place.copy_(far[key].detach(), non_blocking=True)
        places = _places(near, self._plain)
        _copy([(place, near[key].detach()) for key, place in places.items()])
        for device in {tensor.device for tensor in far.values()}:
            kind_of(device).synchronize()
        for part in parts:
            part.keep(copies | places)

    def release(self) -> None:
        """The memory is given back."""
        self._plain = self._pinned = torch.empty(0, dtype=torch.uint8)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _num_bytes(tensors: Mapping[int, torch.Tensor]) -> int:
    return sum(map(_padded, tensors.values()))


def _pinned(num_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # a device without pinned memory: copies are only slower
        return torch.empty(num_bytes, dtype=torch.uint8)


def _in_large_pages(num_bytes: int) -> torch.Tensor:
    """Memory whose first touch is not a fault for every few kilobytes, where the system has such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that is built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _places(tensors: Mapping[int, torch.Tensor], memory: torch.Tensor) -> dict[int, torch.Tensor]:
    """Room for every tensor in ``memory``, one after the other."""
    places: dict[int, torch.Tensor] = {}
    start = 0
    for key, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        places[key] = memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
        start += _padded(tensor)
    return places


Copy = tuple[torch.Tensor, torch.Tensor]


def _copy(pairs: Iterable[Copy]) -> None:
    """Every first tensor has the values of the second; by several threads, however many torch computes with."""
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
    """This process's share of the host's cores."""
    world = current_world()
    return min(_MOST_THREADS, threads_of_this_rank(world.local_size if world is not None else 1))


def _tasks(pairs: Iterable[Copy]) -> list[list[Copy]]:
    """The copies in portions of like size: small tensors together, large ones in pieces."""
    tasks: list[list[Copy]] = []
    room = 0
    for place, tensor in pairs:
        for piece in _pieces(place, tensor):
            if room <= 0:
                tasks.append([])
                room = _TASK_BYTES
            tasks[-1].append(piece)
            room -= piece[0].numel() * piece[0].element_size()
    return tasks


def _pieces(place: torch.Tensor, tensor: torch.Tensor) -> list[Copy]:
    if tensor.numel() * tensor.element_size() <= _TASK_BYTES or not tensor.is_contiguous():
        return [(place, tensor)]
    size = _TASK_BYTES // tensor.element_size()
    return list(zip(place.view(-1).split(size), tensor.view(-1).split(size), strict=True))


def _run(task: list[Copy]) -> None:
    with torch.no_grad():
        for place, tensor in task:
            place.copy_(tensor)
