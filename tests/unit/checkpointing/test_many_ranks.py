"""Checkpoints of many ranks: how many files a folder holds, what rank 0 plans, and what each rank reads."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from accelerate.checkpointing import dcp
from accelerate.checkpointing import manifest as manifests
from accelerate.checkpointing.agreement import Ranks
from accelerate.checkpointing.codec import encode
from accelerate.checkpointing.dcp import read_into, read_metadata
from accelerate.checkpointing.items import RunItems, state_item
from accelerate.checkpointing.layout import CUSTOM, GRADIENTS, MAX_RANKS, RANDOM, folder_of_rank
from accelerate.checkpointing.manifest import FileRecord, read_manifest
from accelerate.checkpointing.run_state import RunState, StrategyState
from accelerate.checkpointing.sharded import GivenState
from accelerate.checkpointing.store import CheckpointStore, StagingDirectory
from accelerate.checkpointing.weights import EVERYTHING
from accelerate.distributed.world import World
from accelerate.errors import CheckpointError
from tests.checkpoint_parts import transaction
from tests.ranks import run_on_ranks
from tests.slow import slow_for
from tests.unit.checkpointing.many_ranks import (
    COLUMNS,
    NAMES,
    ROWS,
    Save,
    commit,
    entries_by_folder,
    plan_by_rank_0,
    results_of,
    staged_by,
    write_index,
    write_shards,
)

slow = slow_for("full size")


# ------------------------------------------------------------------------------------------------------ folders


def test_up_to_1024_ranks_files_lie_where_they_always_did() -> None:
    assert staged_by(1023, MAX_RANKS) == [
        "random_states_1023.json", "gradients_1023.safetensors", "gradients_1023.json",
        "pytorch_model_fsdp_0/__1023_0.distcp", "optimizer_0/__1023_0.distcp",
    ]  # fmt: skip


def test_files_of_more_ranks_lie_in_folders_by_thousand() -> None:
    assert staged_by(1023, MAX_RANKS + 1)[0] == "ranks_01000/random_states_1023.json"
    assert staged_by(16_383, 16_384) == [
        "ranks_16000/random_states_16383.json", "ranks_16000/gradients_16383.safetensors",
        "ranks_16000/gradients_16383.json", "pytorch_model_fsdp_0/ranks_16000/__16383_0.distcp",
        "optimizer_0/ranks_16000/__16383_0.distcp",
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1100, pytest.param(16_384, marks=slow)])
def test_no_folder_of_a_checkpoint_is_full(tmp_path: Path, ranks: int) -> None:
    store = commit(tmp_path / "checkpoint_0", ranks)
    found = read_manifest(store.folder)
    assert found is not None and len(found.files) == 5 * ranks and found.world_size == ranks
    assert max(entries_by_folder(store.folder).values()) == 3000
    assert os.listdir(tmp_path) == ["checkpoint_0"]
    assert RANDOM.holds(store.folder, ranks - 1) and not RANDOM.holds(store.folder, ranks)
    assert (store.folder / "manifest.json").stat().st_size < 120 * 5 * ranks


@pytest.mark.parametrize("ranks", [4, 5000])
def test_what_a_rank_wrote_is_read_wherever_it_lies(tmp_path: Path, ranks: int) -> None:
    staging = StagingDirectory(tmp_path, True, Ranks())
    folder = folder_of_rank(3, ranks)
    state_item(RANDOM.name(3), encode({"streams": {"a": 1}}, "x"), beside=False, folder=folder).write(staging.create)
    gradients = {"weight": torch.ones(3)}
    state_item(GRADIENTS.name(3), encode(gradients, "x"), beside=True, folder=folder).write(staging.create)
    assert RANDOM.read(tmp_path, 3) == {"streams": {"a": 1}}
    assert torch.equal(GRADIENTS.read(tmp_path, 3)["weight"], torch.ones(3))
    assert set(staging.records) >= {f"{folder}random_states_3.json"}
    assert not CUSTOM.holds(tmp_path, 3) and not RANDOM.holds(tmp_path, 4)


def test_a_run_of_many_ranks_goes_on_from_its_own_streams(tmp_path: Path) -> None:
    """One rank of 5,000 saves and loads by itself; the others' part is tested above."""
    world = World.pretend(4321, 5000)
    torch.manual_seed(7)
    staging = StagingDirectory(tmp_path / "c", True, Ranks())
    run = RunState(GivenState(StrategyState()), world)
    for item in RunItems(run, StrategyState(), EVERYTHING).of_rank(world.rank, []):
        item.write(staging.create)
    assert list(staging.records) == ["ranks_04000/random_states_4321.json"]
    assert "streams" in RANDOM.read(tmp_path / "c", 4321)


# ----------------------------------------------------------------------------------------------- planning shards


@pytest.mark.parametrize(("ranks", "tensors", "shards"), [(2048, 20, 64), pytest.param(16_384, 1000, 64, marks=slow)])
def test_rank_0_plans_each_piece_once(tmp_path: Path, ranks: int, tensors: int, shards: int) -> None:
    save = Save(ranks, tensors, shards)
    proposals = [save.quick_proposal_of(rank) for rank in range(ranks)]
    assert proposals[ranks // 2] == save.proposal_of(ranks // 2) and proposals[0] == save.proposal_of(0)
    assert sum(map(len, proposals)) < 1000 * ranks + 800 * tensors * shards
    plans, metadata = plan_by_rank_0(tmp_path, proposals)
    results = [results_of(message) for message in plans]
    write_index(tmp_path / "shards", metadata, results)

    found = read_metadata(tmp_path / "shards")
    assert len(found.storage_data) == tensors * (shards + 1)
    files = Counter(info.relative_path for info in found.storage_data.values())
    assert all(name.startswith("ranks_") for name in files)
    assert found.planner_data[NAMES[0]] == ("optimizer", *NAMES[0].split("."))
    entry = found.state_dict_metadata[NAMES[0]]
    assert isinstance(entry, TensorStorageMetadata)
    chunks = entry.chunks
    assert len(chunks) == shards and sum(chunk.sizes[0] for chunk in chunks) == ROWS
    if ranks > 10_000:
        return
    of_one_tensor = {info.relative_path for index, info in found.storage_data.items() if index.fqn == NAMES[3]}
    assert len(of_one_tensor) == shards  # written by one replica; others write other tensors
    assert len(files) > tensors * shards / 4


def test_pieces_that_several_ranks_propose_are_planned_once() -> None:
    plans = [Save(4, 3, 2).plan_of(rank) for rank in range(4)]
    once = dcp.each_once(plans)
    assert [len(plan.items) for plan in once] == [6, 3, 0, 0]
    indices = [item.index for plan in once for item in plan.items]
    assert len(set(indices)) == len(indices)


def test_ranks_with_the_same_whole_values_leave_them_to_the_first() -> None:
    class Gathering:
        rank = 2

        def all_gather(self, value: int) -> list[int]:
            return [1, 2, value, value]

    assert dcp.is_first_alike(Gathering(), 3) and not dcp.is_first_alike(Gathering(), 2)  # type: ignore[arg-type]
    plan = Save(4, 3, 2).plan_of(2)
    kinds = Counter(item.type for item in dcp.proposed(plan, False).items)
    assert kinds == {WriteItemType.SHARD: 3}
    assert len(dcp.proposed(plan, True).items) == 6
    assert set(dcp.proposed(plan, False).planner_data or {}) == set(NAMES[:3])
    assert dcp.whole_values(plan) == dcp.whole_values(Save(4, 3, 2).plan_of(1))
    assert dcp.whole_values(plan) != dcp.whole_values(Save(4, 2, 2).plan_of(1))
    assert dcp.without_replicas(SavePlan([]), {}).items == []


def metadata_of(*boxes: tuple[tuple[int, int], tuple[int, int]], size: tuple[int, int] = (4, 6)) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(length)) for at, length in boxes]
    return Metadata({"weight": TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)})


def test_pieces_have_to_fill_their_tensor() -> None:
    dcp.require_whole(metadata_of(((0, 0), (4, 3)), ((0, 3), (4, 3))))
    dcp.require_whole(metadata_of(*(((x, y), (2, 2)) for x in (0, 2) for y in (0, 2, 4))))
    dcp.require_whole(metadata_of(((0, 0), (4, 6))))
    for wrong in (
        [((0, 0), (4, 3))],  # a gap
        [((0, 0), (4, 3)), ((0, 4), (4, 3))],  # beyond the edge
        [((0, 0), (4, 4)), ((0, 3), (4, 2))],  # overlapping, and a gap of the same size
    ):
        with pytest.raises(CheckpointError, match="don't fill weight"):
            dcp.require_whole(metadata_of(*wrong))


def test_torch_reads_shards_in_folders_by_thousand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files lie deeper, and the index says so: any reader of distributed checkpoints follows it."""
    monkeypatch.setattr(dcp, "folder_of_rank", lambda rank, ranks: "ranks_00000/")
    state = {"model": {"weight": torch.arange(6.0), "step": torch.tensor(3)}}
    dcp.ShardsItem(tmp_path / "shards", state, Ranks()).write(lambda name, **_: pytest.fail(name))
    assert [path.name for path in tmp_path.rglob("*.distcp")] == ["__0_0.distcp"]
    assert (tmp_path / "shards" / "ranks_00000" / "__0_0.distcp").is_file()
    found: dict[str, Any] = {"model": {"weight": torch.zeros(6), "step": torch.tensor(0)}}
    read_into(tmp_path / "shards", found, alone=True)
    assert torch.equal(found["model"]["weight"], torch.arange(6.0)) and found["model"]["step"] == 3

    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    warnings.simplefilter("ignore")  # of torch, about a single process
    plain: dict[str, Any] = {"model": {"weight": torch.zeros(6), "step": torch.tensor(0)}}
    load(plain, storage_reader=FileSystemReader(tmp_path / "shards"))
    assert torch.equal(plain["model"]["weight"], torch.arange(6.0))


# ------------------------------------------------------------------------------------------------------- reading


def bytes_checked(
    folder: Path, rank: int, identities: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str | None]:
    """Return the bytes that one rank reads to check the checkpoint, and what it says of it."""
    read: list[int] = []
    measure = manifests.measure

    def counted(path: Path, *args: Any) -> FileRecord:
        found = measure(path, *args)
        read.append(found.size)
        return found

    ranks = Ranks(World.pretend(rank, len(identities)))
    answers = iter([identities])
    monkeypatch.setattr(ranks, "all_gather", lambda value: next(answers, [value]))
    monkeypatch.setattr(manifests, "measure", counted)
    reason = CheckpointStore(folder, ranks=ranks).problem()
    monkeypatch.undo()
    return sum(read), reason


@dataclass
class Load:
    """What one rank reads of a folder of shards, as bytes."""

    needed: int
    read: int
    is_right: bool


def load_as(rank: int, folder: Path, save: Save) -> Load:
    """Load `folder` as `rank` of a world of `save`'s ranks that isn't there; /proc counts the bytes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    def state() -> dict[str, Any]:
        local = torch.zeros(ROWS // save.shards, COLUMNS, dtype=torch.bfloat16)
        placements = [Replicate(), Shard(0)]
        shards = {name: DTensor.from_local(local.clone(), mesh, placements, run_check=False) for name in names}
        return {**shards, **{f"{name}.step": torch.tensor(0.0) for name in names}}

    torch.distributed.init_process_group("fake", rank=rank, world_size=save.ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (save.ranks // save.shards, save.shards))
    names = NAMES[: save.tensors]
    read_into(folder, state(), alone=True)  # imports what it takes
    values, before = state(), bytes_read()
    read_into(folder, values, alone=True)
    read = bytes_read() - before
    torch.distributed.destroy_process_group()
    first = rank % save.shards * (ROWS // save.shards)
    expected = torch.arange(first, first + ROWS // save.shards, dtype=torch.bfloat16)[:, None].expand(-1, COLUMNS)
    tensors = [values[name].to_local() for name in names]
    is_right = all(torch.equal(tensor, expected) for tensor in tensors) and values[f"{names[0]}.step"] == 7
    return Load(sum(tensor.nbytes for tensor in tensors), read, is_right)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system counts no bytes by process")
def test_a_rank_of_8192_reads_what_it_needs_of_what_16384_saved(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", Save(16_384, 4, shards=64))
    index = (tmp_path / "shards" / ".metadata").stat().st_size
    for rank, shards in ((0, 64), (4097, 64), (8191, 64), (77, 32), (77, 128)):
        # In a process of its own: torch keeps the shares of a mesh, whichever rank asked.
        [load] = run_on_ranks(lambda: load_as(rank, tmp_path / "shards", Save(8192, 4, shards)), 1)  # noqa: B023
        whole = load.needed * max(1, shards // 64)  # a piece that was saved is read whole
        assert load.is_right
        pieces = 4 * max(1, 64 // shards) + 4  # each a small archive
        assert whole <= load.read - index < whole + 16_384 * pieces, (load, shards, index)


def test_each_file_is_checked_by_one_rank_of_those_that_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "c")
    with transaction(store) as staging:
        for number in range(64):
            with staging.create(f"file_{number}") as file:
                file.write(b"x" * 1000)
    one_disk = [(1, 1, 1)] * 16
    assert [bytes_checked(store.folder, rank, one_disk, monkeypatch) for rank in range(16)] == [(4000, None)] * 16
    two_disks = [(number // 8, 1, 1) for number in range(16)]
    assert [bytes_checked(store.folder, rank, two_disks, monkeypatch)[0] for rank in range(16)] == [8000] * 16
    (store.folder / "file_9").write_bytes(b"y" * 1000)
    reasons = [bytes_checked(store.folder, rank, one_disk, monkeypatch)[1] for rank in range(16)]
    assert len([reason for reason in reasons if reason]) == 1 and "file_9" in "".join(filter(None, reasons))
