"""The checkpoint files that a rank would write, computed without writing them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from ...checkpointing import codec
from ...checkpointing.agreement import Ranks
from ...checkpointing.items import CheckpointItem, RunItems
from ...checkpointing.layout import MAX_RANKS, folder_of_rank
from ...checkpointing.shards_item import ShardsItem
from ...checkpointing.store import StagingDirectory
from ...checkpointing.weights import EVERYTHING
from ...distributed.mesh import Mesh
from ...distributed.world import World
from ...torch_private.tracing import fake_tensor_class
from .replacing import replaced

if TYPE_CHECKING:
    from ...accelerator import Accelerator


@final
@dataclass(frozen=True)
class WrittenFile:
    """A file that this rank writes.

    Attributes:
        num_replicas: the number of ranks with the same values; each writes a part, and the bytes are those of all
            parts.
    """

    name: str
    num_bytes: int
    num_replicas: int = 1


@final
class _CountingFile:
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Do nothing."""


def _bytes_of(item: ShardsItem, world: World) -> int:
    """Return the bytes of this rank's pieces in torch's format; rank 0 writes the values that aren't sharded."""
    from torch.distributed.checkpoint.planner import WriteItemType

    file = _CountingFile()
    for piece, value in item.planned():
        if piece.type != WriteItemType.SHARD and not world.is_main:
            continue
        if isinstance(value, torch.Tensor):
            _save(torch.empty(value.shape, dtype=value.dtype), file)
        else:
            file.write(value.getbuffer())
    return file.num_bytes


def _save(tensor: torch.Tensor, file: _CountingFile) -> None:
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the checksum would read every byte
    try:
        torch.serialization.save(tensor, file)  # pyright: ignore[reportArgumentType]
    finally:
        torch.serialization.set_crc32_options(checked)


def files_of_checkpoint(accelerator: Accelerator, mesh: Mesh) -> list[WrittenFile]:
    """Return the files that ``save_state`` would write on this rank, without those of hooks."""
    run = accelerator._run_state
    world = accelerator.world
    parts = run.strategy.checkpoint_state(run.models, run.optimizers)
    items = RunItems(run, parts, EVERYTHING)
    is_writer = world.is_main or (run.project.save_on_each_node and world.is_local_main)
    found: list[WrittenFile] = []

    @contextmanager
    def create(name: str, *, pickle: bool = False) -> Iterator[Any]:
        del pickle
        file = _CountingFile()
        yield file
        found.append(WrittenFile(name, file.num_bytes))

    plain = (*codec.plain_tensors, fake_tensor_class())
    with (
        replaced(codec, "plain_tensors", plain),
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # of torch 2.6; it is 0 there too
        staging = StagingDirectory(Path(folder), is_writer, Ranks(world))
        later = parts.write(staging) if parts.write is not None else None
        written: list[CheckpointItem] = list(later) if later is not None and not callable(later) else []
        if is_writer:
            written += [*items.of_weights(items.weights()), *items.shared()]
        written += items.of_rank(world.rank, [])
        replicas = 1 if world.size > MAX_RANKS else mesh.size("dp_replicate")  # of many, each plans its own part
        for item in written:
            if isinstance(item, ShardsItem):
                place = f"{item.folder.relative_to(folder).as_posix()}/{folder_of_rank(world.rank, world.size)}"
                found.append(WrittenFile(f"{place}__{world.rank}_0.distcp", _bytes_of(item, world), replicas))
            else:
                item.write(create)
    return found
