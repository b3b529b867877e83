"""A save by many ranks, made up in one process: what each rank stages and proposes, and what rank 0 makes of it."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import Replicate, Shard

from accelerate.checkpointing import dcp
from accelerate.checkpointing.agreement import Ranks
from accelerate.checkpointing.codec import Encoded
from accelerate.checkpointing.items import state_item
from accelerate.checkpointing.layout import GRADIENTS, RANDOM, folder_of_rank
from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.store import CheckpointStore
from accelerate.distributed.world import World

ROWS, COLUMNS = 1024, 4096


@dataclass
class Mesh:
    """Replicas by shards, as a rank sees it."""

    shape: tuple[int, int]
    coordinate: tuple[int, int]

    def get_coordinate(self) -> tuple[int, int]:
        return self.coordinate


@dataclass
class Sharded:
    """What the planner looks at of a DTensor."""

    device_mesh: Mesh
    placements: tuple[Replicate, Shard] = (Replicate(), Shard(0))


@dataclass(frozen=True)
class Save:
    """A save by ``ranks`` ranks of ``tensors`` tensors, each cut into ``shards``; a step count of each lies whole."""

    ranks: int
    tensors: int
    shards: int = 64

    def mesh(self, rank: int) -> Mesh:
        return Mesh((self.ranks // self.shards, self.shards), divmod(rank, self.shards))

    def plan_of(self, rank: int, own_only: bool = False) -> SavePlan:
        """Return what torch's planner makes of the rank's state; with ``own_only`` what it proposes of that at once."""
        replicas, (replica, shard) = self.ranks // self.shards, divmod(rank, self.shards)
        length = ROWS // self.shards
        offset = torch.Size([shard * length, 0])
        items: list[WriteItem] = []
        for name in NAMES[: self.tensors]:
            if not own_only or zlib.crc32(name.encode()) % replicas == replica:
                chunk = ChunkStorageMetadata(offset, torch.Size([length, COLUMNS]))
                data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), torch.Size([ROWS, COLUMNS]))
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
            if not own_only or rank == 0:
                whole = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
                data = TensorWriteData(whole, TensorProperties(dtype=torch.float32), torch.Size([]))
                items.append(
                    WriteItem(MetadataIndex(f"{name}.step", torch.Size([])), WriteItemType.TENSOR, tensor_data=data)
                )
        paths = {item.index.fqn: ("optimizer", *item.index.fqn.split(".")) for item in items}
        return SavePlan(items, planner_data=paths)

    def proposal_of(self, rank: int) -> bytes:
        """Return the message with which the rank proposes what it writes."""
        plan = self.plan_of(rank)
        state = dict.fromkeys(NAMES[: self.tensors], Sharded(self.mesh(rank)))
        plan = dcp.without_replicas(plan, state)
        return dcp.plain_pickle(dcp.proposed(plan, rank == 0))

    def quick_proposal_of(self, rank: int) -> bytes:
        """Return the same, without making first what is left out."""
        return dcp.plain_pickle(self.plan_of(rank, own_only=True))


NAMES = [f"model.layers.{number // 9}.block.{number % 9}.weight" for number in range(2000)]


def plan_by_rank_0(folder: Path, proposals: list[bytes]) -> tuple[list[bytes], Any]:
    """Return the plans of all ranks as messages, and the index without locations, as rank 0 makes them."""
    planner_class, writer_class = dcp._save_classes()
    planner, writer = planner_class(), writer_class(folder)
    planner.set_up_planner({}, writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([dcp._unpacked(message) for message in proposals])
    return [dcp.plain_pickle(plan) for plan in writer.prepare_global_plan(plans)], metadata


def results_of(message: bytes) -> bytes:
    """Return the message with which a rank tells what it has written."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    plan = dcp._unpacked(message)
    name = f"{plan.storage_data.prefix}0.distcp"
    return dcp.plain_pickle(
        [WriteResult(item.index, 10, _StorageInfo(name, 10 * at, 10)) for at, item in enumerate(plan.items)]
    )


def write_shards(folder: Path, save: Save) -> None:
    """Write real files of shards, each by the rank that the plan has for it, and the index; row r holds r."""
    planner_class, writer_class = dcp._save_classes()
    messages, metadata = plan_by_rank_0(folder, [save.quick_proposal_of(rank) for rank in range(save.ranks)])
    rows = torch.arange(ROWS, dtype=torch.bfloat16)[:, None].expand(ROWS, COLUMNS)
    writer = writer_class(folder, single_file_per_rank=True, thread_count=1)
    writer.set_up_storage_writer(True)
    folder.mkdir(parents=True)
    results: list[bytes] = []
    for message in messages:
        plan = dcp._unpacked(message)
        if not plan.items:
            continue
        (folder / plan.storage_data.prefix).parent.mkdir(exist_ok=True)
        planner = planner_class()
        planner.values = {
            item.index: rows[item.index.offset[0] :][: ROWS // save.shards]
            if item.type is WriteItemType.SHARD
            else torch.tensor(7.0)
            for item in plan.items
        }
        results.append(dcp.plain_pickle(writer.write_data(plan, planner).wait()))
    writer.finish(metadata, [dcp._unpacked(message) for message in results])


def write_index(folder: Path, metadata: Any, results: list[bytes]) -> None:
    """Write the index as rank 0 does at the end."""
    _, writer_class = dcp._save_classes()
    writer = writer_class(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [dcp._unpacked(message) for message in results])


# ------------------------------------------------------------------------------------- files and the manifest


def staged_by(rank: int, ranks: int) -> list[str]:
    """Return the names of the files that one rank stages: random streams, gradients, a file of each kind of shards."""
    names: list[str] = []

    @contextmanager
    def create(name: str, **_: object) -> Iterator[BytesIO]:
        names.append(name)
        yield BytesIO()

    folder = folder_of_rank(rank, ranks)
    encoded = Encoded({}, {})
    state_item(RANDOM.name(rank), encoded, beside=False, folder=folder).write(create)
    state_item(GRADIENTS.name(rank), encoded, beside=True, folder=folder).write(create)
    return [*names, *(f"{kind}/{folder}__{rank}_0.distcp" for kind in ("pytorch_model_fsdp_0", "optimizer_0"))]


Staged = tuple[Path, dict[str, tuple[int, int]], list[str], dict[str, Any]]


def stage_empty_files(folder: Path, ranks: int) -> list[Staged]:
    """Make the files of all ranks, empty, and return what all have gathered for the commit."""
    gathered: list[Staged] = []
    for rank in range(ranks):
        names = staged_by(rank, ranks)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(folder / name, os.O_CREAT | os.O_WRONLY))
        gathered.append((folder, dict.fromkeys(names, (0, 0)), [], {}))
    return gathered


def commit(folder: Path, ranks: int) -> CheckpointStore:
    """Stage the files of all ranks and commit them, as rank 0 does it; return the store."""
    crowd = Ranks(World.pretend(0, ranks))
    store = CheckpointStore(folder, ranks=Ranks())
    staging = store.begin()
    gathered = stage_empty_files(staging.folder, ranks)
    store.ranks = crowd
    store._write_manifest(staging.folder, gathered, Manifest({}, step=7))
    store._move_to_target(staging.folder)
    staging.held.close()
    return store


def entries_by_folder(folder: Path) -> Counter[str]:
    """Return how many entries each folder has."""
    return Counter({parent: len(folders) + len(files) for parent, folders, files in os.walk(folder)})
