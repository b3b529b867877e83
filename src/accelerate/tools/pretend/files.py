"""The files of a checkpoint that a rank would write, without writing them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ...checkpointing import codec
from ...checkpointing.agreement import Ranks
from ...checkpointing.items import CheckpointItem, RunItems
from ...checkpointing.layout import MAX_RANKS, folder_of_rank
from ...checkpointing.shards_item import ShardsItem
from ...checkpointing.store import StagingDirectory
from ...checkpointing.weights import EVERYTHING
from ...distributed.mesh import Mesh
from ...torch_private.tracing import fake_tensor_class
from .memory import num_bytes_of
from .replacing import replaced

if TYPE_CHECKING:
    from ...accelerator import Accelerator


@final
@dataclass(frozen=True)
class WrittenFile:
    """A file that this rank writes.

    Attributes:
        num_replicas: so many ranks hold the same; each of them writes a part, and the bytes are those of all parts.
    """

    name: str
    num_bytes: int
    num_replicas: int = 1


@final
class _CountingFile:
    """A file that only counts what is written to it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Do nothing."""


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
    with replaced(codec, "plain_tensors", plain), tempfile.TemporaryDirectory() as folder:
        staging = StagingDirectory(Path(folder), is_writer, Ranks(world))
        later = parts.write(staging) if parts.write is not None else None
        written: list[CheckpointItem] = list(later) if later is not None and not callable(later) else []
        if is_writer:
            written += [*items.of_weights(items.weights()), *items.shared()]
        written += items.of_rank(world.rank)
        replicas = 1 if world.size > MAX_RANKS else mesh.size("dp_replicate")  # of many, each plans its own part
        for item in written:
            if isinstance(item, ShardsItem):
                place = f"{item.folder.relative_to(folder).as_posix()}/{folder_of_rank(world.rank, world.size)}"
                found.append(WrittenFile(f"{place}__{world.rank}_0.distcp", num_bytes_of(item.tensors()), replicas))
            else:
                item.write(create)
    return found
