"""Plans for thousands of ranks, checked in one process: by arithmetic, and by torch's group that talks to nobody."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.distributed.mesh import AXES, Mesh
from accelerate.distributed.world import World
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig
from tests.ranks import run_on_ranks
from tests.torch_needed import FSDP2_ON_CPU

SIZE = 4096
MESHES: list[dict[str, int]] = [
    {"dp_shard": 1024, "tp": 4},
    {"dp_replicate": 64, "dp_shard": 64},
    {"pp": 16, "dp_replicate": 4, "dp_shard": 8, "tp": 8},
    {"dp_shard": 64, "cp": 8, "tp": 8},
    {"pp": 8, "dp_shard": 16, "ep": 4, "sp": 8},
]


@pytest.mark.parametrize("degrees", MESHES, ids=lambda degrees: "x".join(f"{axis}{n}" for axis, n in degrees.items()))
def test_every_rank_has_one_place_and_agrees_with_its_neighbours(degrees: dict[str, int]) -> None:
    started = time.process_time()
    shares: Counter[int] = Counter()
    groups: dict[str, Counter[tuple[int, ...]]] = {axis: Counter() for axis in degrees}
    for rank in range(SIZE):
        mesh = Mesh.of(World.pretend(rank=rank, size=SIZE), None, **degrees)
        share = mesh.data_share()
        shares[share.index] += 1
        for axis, degree in degrees.items():
            ranks = mesh.ranks(axis)
            assert len(ranks) == degree and ranks[mesh.place(axis)] == rank
            groups[axis][ranks] += 1
    readers = math.prod(degree for axis, degree in degrees.items() if axis in ("dp_replicate", "dp_shard", "ep"))
    assert shares == dict.fromkeys(range(readers), SIZE // readers)
    for axis, degree in degrees.items():  # the groups of an axis part the world, and all in a group name the same one
        assert set(groups[axis].values()) == {degree} and len(groups[axis]) == SIZE // degree
    assert time.process_time() - started < 20


@pytest.mark.parametrize("degrees", [MESHES[1], MESHES[2]], ids=["hsdp", "pipelines"])
def test_the_data_of_all_ranks_is_the_data(degrees: dict[str, int]) -> None:
    batches = [list(range(start, start + 2)) for start in range(0, 2 * SIZE, 2)]
    read: Counter[int] = Counter()
    for rank in range(SIZE):
        share = Mesh.of(World.pretend(rank=rank, size=SIZE), None, **degrees).data_share()
        shard = BatchSamplerShard(batches, num_processes=share.count, process_index=share.index)  # pyright: ignore[reportArgumentType]
        read.update(sample for batch in shard for sample in batch)
    copies = SIZE // Mesh.of(World.pretend(size=SIZE), None, **degrees).data_share().count
    assert read == dict.fromkeys(range(2 * SIZE), copies)


class Block(nn.Module):
    """Two layers with a plan for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """More of it."""
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Sequential):
    """Blocks."""

    tp_plan = {
        f"{number}.{name}": kind for number in range(16) for name, kind in (("up", "colwise"), ("down", "rowwise"))
    }

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(16)))


def _prepared(rank: int, degrees: dict[str, int]) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    started = time.process_time()
    dist.init_process_group("fake", rank=rank, world_size=SIZE, store=FakeStore())
    sizes: dict[str, Any] = {f"{axis}_size": degree for axis, degree in degrees.items()}
    config = ParallelismConfig(**sizes)
    sharded = any(axis in degrees for axis in ("dp_shard", "cp"))
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **blocks) if sharded else None  # pyright: ignore[reportArgumentType]
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    if sharded:  # a whole step, although nobody answers; torch's reducer wants an answer
        accelerator.backward(model(torch.randn(2, 64)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    shapes = {name: tuple(getattr(p, "to_local", lambda p=p: p)().shape) for name, p in model.named_parameters()}
    share = accelerator.mesh.data_share()
    return {
        "strategy": type(accelerator.strategy).__name__,
        "share": (share.index, share.count),
        "shapes": shapes,
        "seconds": time.process_time() - started,
    }


@pytest.mark.parametrize(
    ("degrees", "strategy", "share", "shape"),
    [
        ({"dp_replicate": 4096}, "DataParallel", (4095, 4096), (256, 64)),
        pytest.param({"dp_replicate": 64, "dp_shard": 64}, "FullyShard", (4095, 4096), (4, 64), marks=FSDP2_ON_CPU),
        pytest.param({"dp_shard": 512, "tp": 8}, "FullyShard", (511, 512), (0, 64), marks=FSDP2_ON_CPU),
        pytest.param(
            {"dp_replicate": 64, "dp_shard": 8, "tp": 8}, "FullyShard", (511, 512), (4, 64), marks=FSDP2_ON_CPU
        ),
    ],
    ids=["ddp", "hsdp", "fsdp x tp", "hsdp x tp"],
)
def test_one_rank_of_thousands_prepares_and_steps(
    degrees: dict[str, int], strategy: str, share: tuple[int, int], shape: tuple[int, int]
) -> None:
    # The first of the last tensor-parallel group: what it is sent by itself is all that it can receive.
    rank = SIZE - degrees.get("tp", 1)
    found = run_on_ranks(functools.partial(_prepared, rank, degrees), 1)[0]
    assert found["strategy"] == strategy and found["share"] == share
    up = next(value for name, value in found["shapes"].items() if name.endswith("0.up.weight"))
    assert up == shape
    assert found["seconds"] < 30


def test_each_stage_of_a_long_pipeline_has_its_own_layers() -> None:
    degrees = {"pp": 16, "dp_replicate": 256}
    for rank, number in ((0, 0), (SIZE - 1, 15)):
        found = run_on_ranks(functools.partial(_prepared, rank, degrees), 1)[0]
        assert found["strategy"] == "Pipeline" and found["share"] == (rank % 256, 256)
        assert {name.split(".")[0] for name in found["shapes"]} == {str(number)}


def test_degrees_that_do_not_fit_are_refused_with_the_equation() -> None:
    with pytest.raises(ValueError, match=r"dp_shard_size 512 .* tp_size 16 = 8192"):
        Mesh.of(World.pretend(size=SIZE), None, dp_shard=512, tp=16)
    assert len(AXES) == 7
