"""A mesh: places, neighbours and shares by arithmetic alone, and the same groups as torch's own mesh."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch

from accelerate.distributed.mesh import AXES, DataParallelRank, Mesh
from accelerate.distributed.world import World
from accelerate.errors import SettingError
from accelerate.plugins.parallelism import ParallelismConfig
from tests.ranks import run_on_ranks


def _mesh(rank: int, **degrees: int) -> Mesh:
    return Mesh.of(World.pretend(rank, math.prod(degrees.values())), None, **degrees)


def test_neighbours_are_along_the_innermost_axis() -> None:
    mesh = _mesh(5, dp_shard=2, tp=4)
    assert (mesh.place("tp"), mesh.place("dp_shard"), mesh.place("cp")) == (1, 1, 0)
    assert mesh.ranks("tp") == (4, 5, 6, 7)
    assert mesh.ranks("dp_shard") == (1, 5)
    assert mesh.ranks("dp_shard", "tp") == tuple(range(8))


def test_without_degrees_all_ranks_are_replicas() -> None:
    mesh = Mesh.of(World.pretend(3, 8))
    assert mesh.size("dp_replicate") == 8 and mesh.data_share() == DataParallelRank(3, 8)


@pytest.mark.parametrize("axis", ["tp", "cp", "sp", "pp"])
def test_ranks_that_share_the_work_on_a_sample_share_the_data(axis: str) -> None:
    shares = [_mesh(rank, dp_replicate=2, dp_shard=2, **{axis: 2}).data_share() for rank in range(8)]
    assert {share.count for share in shares} == {4}
    for rank in range(8):
        mesh = _mesh(rank, dp_replicate=2, dp_shard=2, **{axis: 2})
        assert {shares[other].index for other in mesh.ranks(axis)} == {shares[rank].index}
    assert sorted({share.index for share in shares}) == [0, 1, 2, 3]


def test_expert_parallel_ranks_read_different_data() -> None:
    assert [_mesh(rank, dp_shard=2, ep=2).data_share().index for rank in range(4)] == [0, 1, 2, 3]


def test_places_and_ranks_agree_along_any_axes() -> None:
    degrees = dict.fromkeys(AXES, 2)
    for rank in range(0, 2 ** len(AXES), 7):
        mesh = _mesh(rank, **degrees)
        for axes in itertools.chain.from_iterable(itertools.combinations(AXES, length) for length in (1, 2, 3)):
            ranks = mesh.ranks(*axes)
            assert ranks == tuple(sorted(ranks)) and len(ranks) == mesh.size(*axes)
            assert ranks[mesh.place(*axes)] == rank


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 3}, r"don't fit the 4 processes: .*tp_size 3 = 3.*start 3 processes"),
        ({"tp": 0}, r"tp_size must be a whole number.*dp_replicate_size 1 \* .*tp_size 0 = 0"),
        ({"rows": 2}, "no axis.*dp_shard"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_whole_equation(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Mesh.of(World.pretend(0, 4), None, **degrees)


def test_a_pretended_mesh_of_4096_ranks_is_planned_in_seconds() -> None:
    config = ParallelismConfig(dp_replicate_size=4, dp_shard_size=16, cp_size=2, tp_size=8, pp_size=4)
    began = time.process_time()
    shares = [config.mesh(World.pretend(rank, 4096)).data_share() for rank in range(4096)]
    assert time.process_time() - began < 5
    assert {share.count for share in shares} == {64}
    readers = [sum(share.index == index for share in shares) for index in range(64)]
    assert readers == [64] * 64


def test_torch_makes_the_same_groups_of_4096_ranks_in_one_process() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def alone() -> list[Any]:
        torch.distributed.init_process_group("fake", rank=777, world_size=4096, store=FakeStore())
        config = ParallelismConfig(dp_replicate_size=4, dp_shard_size=16, cp_size=2, tp_size=8, pp_size=4)
        mesh = config.mesh(World.pretend(777, 4096, backend="fake"))
        chosen = [("tp",), ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"), ("pp", "tp")]
        found: list[Any] = []
        for axes in chosen:
            group = mesh.group(*axes)
            assert group is not None
            found.append((tuple(torch.distributed.get_process_group_ranks(group)), mesh.ranks(*axes)))
        return found

    [found] = run_on_ranks(alone, 1, timeout_seconds=30)
    assert all(torchs == ours for torchs, ours in found)


def test_a_world_within_an_axis_talks_to_its_own_ranks_only() -> None:
    from accelerate import Accelerator
    from accelerate.distributed import collectives

    def on_rank() -> list[int]:
        world = Accelerator(cpu=True).world
        mesh = Mesh.of(world, dp_replicate=2, tp=2)
        mine = torch.tensor([world.rank])
        alike, others = mesh.within("tp"), mesh.within("dp_replicate")
        assert mesh.within("dp_replicate", "tp") is world
        return [
            *collectives.gather(mine, world=alike).tolist(),
            *collectives.gather(mine, world=others).tolist(),
            int(collectives.reduce(mine, "sum", world=alike)),
            *collectives.gather_object([world.rank], world=others),
        ]

    assert run_on_ranks(on_rank, 4) == [
        [0, 1, 0, 2, 1, 0, 2],
        [0, 1, 1, 3, 1, 1, 3],
        [2, 3, 0, 2, 5, 0, 2],
        [2, 3, 1, 3, 5, 1, 3],
    ]
