"""Saving in a background thread from a snapshot, one save at a time.

The error of a failed save is raised by the next call; at the exit of the program it sets the exit status.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, final
from weakref import WeakSet

import torch

from ..cores import threads_of_this_rank
from ..devices.table import kind_of
from ..distributed.world import current_world, release_before_leaving
from ..errors import CheckpointError
from .items import CheckpointItem

_log = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------
# Snapshots in host memory. The training waits for them, so they copy as fast as the memory allows.

_ALIGNMENT_BYTES: Final = 64
_TASK_BYTES: Final = 16 << 20  # copied by one thread at a time
_MAX_THREADS: Final = 4  # more don't make the memory faster


@final
class HostMemory:
    """Host memory for a snapshot, reused by the next one because the first use of new memory is slow."""

    def __init__(self) -> None:
        self._plain = torch.empty(0, dtype=torch.uint8)
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def snapshot(self, items: Iterable[CheckpointItem]) -> None:
        """Copy the current tensors of all items, over the copies of the previous snapshot."""
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
            kind_of(device).synchronize(device)
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
    """Allocate memory, in huge pages if the system has them, so that its first use causes few page faults."""
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
    """Copy the second tensor of every pair into the first, with several threads, independent of torch's threads."""
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


# ------------------------------------------------------------------------------------------- the thread


@final
class Background:
    """The save that runs in the background while the training continues, if there is one.

    Attributes:
        failure: the error of the last save until it is raised; the training loop checks it at each step.
        memory: the memory of snapshots. The next save reuses it, so it has to wait for this one.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.memory: HostMemory = HostMemory()
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, save: Callable[[], object]) -> None:
        """Run ``save()`` in a thread that the program waits for before it exits."""
        assert not self.is_running
        _finish_before_world_exit()
        _instances.add(self)
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except Exception as error:  # to be raised in the training loop's thread
            self.failure = error

    def finish(self) -> None:
        """Wait for the running save; keep its error, if it failed, to be raised later."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process_id == os.getpid():  # a forked child has no such thread
            thread.join()

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CheckpointError: it failed.
        """
        self.finish()
        self.raise_failure()

    def release_memory(self) -> None:
        """Wait for the save that reads the snapshots' memory, then free it."""
        self.finish()
        self.memory.release()

    def raise_failure(self) -> None:
        """Raise the error of the last save if it has failed, without waiting for a running one.

        Raises:
            CheckpointError: it failed; raised once.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise CheckpointError(f"a checkpoint that was being saved in the background failed: {failure}") from failure


_instances: WeakSet[Background] = WeakSet()
_is_registered = False


def _finish_before_world_exit() -> None:
    """Finish running saves before the process group is destroyed, because they need the other ranks."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        release_before_leaving(_finish_at_world_exit)


def _finish_at_world_exit() -> None:
    global _is_registered
    _is_registered = False
    _finish_all()


def _finish_all() -> list[Exception]:
    """Wait for all running saves, and return the errors that haven't been raised."""
    mine = [background for background in _instances if background._process_id == os.getpid()]
    for background in mine:
        background.finish()
    return [background.failure for background in mine if background.failure is not None]


@atexit.register  # registered early, so it runs late at the exit, after leaving the world
def _fail_the_program() -> None:
    failures = _finish_all()
    for failure in failures:
        _log.error("A checkpoint that was being saved in the background at the end of the program failed: %s", failure)
    if failures:  # only the exit status shows a launcher that the last checkpoint is missing
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
