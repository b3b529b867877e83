"""What a worker draws while it reads a batch depends on the batch, not on what the worker has read before.

Torch seeds a worker once, when it starts, so a run that continues inside an epoch would augment differently: its
workers are new. Here the streams of the worker begin anew with every batch, from the worker's own seed, the epoch and
the number of the batch. The key travels with the indices and acts where they are unpacked, so that neither the
dataset nor ``worker_init_fn`` is touched.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import get_worker_info

from accelerate.seeding import seed_host_streams

# The seed that this worker began with, by process: the streams' own seed changes with every batch.
_first_seed: tuple[int, int] | None = None


@final
@dataclass(frozen=True)
class KeyedIndices:
    """The indices of one batch; the worker that receives them gets them bare, and has its streams begun for them."""

    indices: Any
    epoch: int
    number: int

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.indices, self.epoch, self.number)


def _received(indices: Any, epoch: int, number: int) -> Any:
    worker = get_worker_info()
    if worker is not None:
        seed_host_streams(derived_seed(_seed_of_all_workers(worker.id), epoch, number))
    return indices


def _seed_of_all_workers(worker_id: int) -> int:
    """What the seeds of this loader's workers have in common: torch, and most ``worker_init_fn``, add the id to it."""
    global _first_seed
    if _first_seed is None or _first_seed[0] != os.getpid():
        _first_seed = (os.getpid(), torch.initial_seed())
    return _first_seed[1] - worker_id


def derived_seed(seed: int, epoch: int, number: int) -> int:
    """63 bits that depend on all of ``seed``, ``epoch`` and ``number``."""
    key = f"{seed}/{epoch}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
