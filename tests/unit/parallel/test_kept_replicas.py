"""The mean over what living ranks gave, without processes."""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.devices.table import kind_of
from accelerate.distributed.environment import ProcessIdentity
from accelerate.distributed.mesh import Mesh
from accelerate.distributed.world import World
from accelerate.errors import CollectiveError, PreparationError, UnequalTensors
from accelerate.guests.fault_tolerance.collectives import COLLECTIVES
from accelerate.guests.fault_tolerance.membership import Membership
from accelerate.guests.fault_tolerance.shards import form_replica
from accelerate.guests.fault_tolerance.strategy import KeptReplicas
from tests.ranks import run_on_ranks


class TwoMembers:
    """Gives the gradients of this rank twice, with the weights that a test chose."""

    replica_size = 1

    def __init__(self, *weights: float) -> None:
        self.weights = weights

    def add_up(self, flat: torch.Tensor, value: object) -> tuple[torch.Tensor, Mapping[int, Any]]:
        return flat * len(self.weights), {rank: [weight, 0] for rank, weight in enumerate(self.weights)}


class Sharing:
    """Member ``rank`` of two, which learns what the other one shares."""

    is_behind = False

    def __init__(self, rank: int, others: dict[int, Any]) -> None:
        self.rank, self._shared = rank, others

    def share(self, operation: str, own: object) -> dict[int, Any]:
        self._shared[self.rank] = own
        return self._shared

    def without_copies(self, given: dict[int, Any], num_left_out: int) -> list[int]:
        return sorted(given)


ROW = torch.ones(1)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (name, given, expected)
        for name in ("gather", "reduce", "broadcast")
        for given, expected in (
            (({"a": ROW}, {"b": ROW}), "Process 1: (['.b'], [([1], 'torch.float32')])"),
            (({"a": ROW, "b": ROW}, {"b": ROW, "a": ROW}), "Process 0: (['.a', '.b'], "),
            (([ROW], ROW), "Process 0: (['.0'], "),
            (([ROW], [ROW, ROW]), "(['.0', '.1'], "),
            ((ROW, ROW.double()), "torch.float64"),
        )
    ]
    + [("broadcast_object_list", ([1], [1, 2]), "Process 1: 2 objects")],
)
def test_values_that_differ_between_members_are_refused_on_all(name: str, given: Any, expected: str) -> None:
    shared: dict[int, Any] = {}
    messages = []
    for rank in (0, 1, 0):  # the first call only shares, for the other's
        try:
            COLLECTIVES[name](Sharing(rank, shared), given[rank])
        except UnequalTensors as error:
            messages.append(str(error))
    assert len(messages) == 2 and messages[0] == messages[1]
    assert "Process 0: " in messages[0] and expected in messages[0]


def averaged(*weights: float) -> torch.Tensor | None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 6.0)
    strategy: Any = KeptReplicas.__new__(KeptReplicas)
    strategy._membership, strategy._trained = TwoMembers(*weights), [model]
    strategy._average([weights[0], 0])
    return model.weight.grad


def test_gradients_become_the_mean_over_the_samples() -> None:
    assert torch.equal(averaged(3, 1) or torch.empty(0), torch.full((1, 1), 3.0))


def test_an_update_without_samples_changes_nothing() -> None:
    assert averaged(0, 0) is None  # the only rank that had a sample was lost; an optimizer leaves such parameters alone


def test_an_update_without_samples_is_skipped_by_a_scaler() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    strategy: Any = KeptReplicas.__new__(KeptReplicas)
    strategy._membership, strategy._trained = TwoMembers(0, 0), [model]
    strategy._average([0, 0], has_scaler=True)
    assert model.weight.grad is not None and model.weight.grad.isinf().all()


@pytest.mark.parametrize("weights", [(None, 3), (3, None)])
def test_a_window_with_and_without_weights_is_refused(weights: tuple[int | None, int | None]) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    strategy: Any = KeptReplicas.__new__(KeptReplicas)
    strategy.options, strategy._trained, strategy._weight, strategy._step_calls = (
        accelerator.strategy.options,
        [],
        0,
        -1,
    )
    strategy._is_weighted = None
    accelerator.strategy = strategy
    accelerator.gradient_state.advance()
    first, second = weights
    accelerator.backward(model(torch.ones(2, 1)).sum(), weight=first)
    assert strategy._weight == (first or 1)
    with pytest.raises(PreparationError, match="in all of them, or in none"):
        accelerator.backward(model(torch.ones(2, 1)).sum(), weight=second)


def test_a_state_that_cannot_be_written_says_where_room_is_missing(tmp_path: Path) -> None:
    membership: Any = Membership.__new__(Membership)
    membership.folder, membership.rank, membership._num_states = tmp_path / "gone", 0, 0
    with pytest.raises(CollectiveError, match=r"no room for the state of a rank.*TMPDIR"):
        membership._write({})


def test_several_backwards_of_one_update_are_refused_in_the_words_of_kept_replicas() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    strategy: Any = KeptReplicas.__new__(KeptReplicas)
    strategy.retry = None
    accelerator.strategy = strategy
    rows = torch.ones(2, 1)
    with pytest.raises(PreparationError, match="but under --keep_replicas the ranks add up"):
        accelerator.backward_in_parts(lambda part: model(part).sum(), rows)


@pytest.mark.parametrize(
    "sizes", [{"pp": 2}, {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 3, "tp": 2}, {"tp": 2}], ids=str
)
def test_ranks_that_read_the_same_samples_are_those_of_the_mesh(sizes: dict[str, int]) -> None:
    """In a run's mesh, stages are the outermost axis; the ranks of a replica are neighbours."""
    size = 2 * math.prod(sizes.values())
    shares: dict[int, list[int]] = defaultdict(list)
    found: dict[int, Membership] = {}
    for rank in range(size):
        member = found[rank] = Membership.__new__(Membership)
        member.rank, member.replica_size = rank, size // 2
        member.num_copies, member.num_stages = sizes.get("tp", 1), sizes.get("pp", 1)
        mesh = member.placed(Mesh.of(World.pretend(rank, size), None, dp_replicate=2, **sizes))
        assert mesh.place("dp_replicate") == rank // member.replica_size
        shares[mesh.data_share().index].append(rank)
    for ranks in shares.values():
        assert {found[0].reader_of(rank) for rank in ranks} == {min(ranks)}
    for member in found.values():
        kept = member.without_copies(range(size), size // len(shares))
        assert member.rank in kept and [found[0].reader_of(rank) for rank in kept] == sorted(map(min, shares.values()))
        assert member.without_copies(range(size), 1) == [*range(size)]


def test_a_traceback_of_a_rank_in_a_replica_names_no_rank(tmp_path: Path) -> None:
    """torch adds a prefix with the rank in the process group, which is another one than the run's."""

    def go() -> bool:
        before, rank = sys.excepthook, int(os.environ["RANK"])
        identity = ProcessIdentity(2 + rank, 4, rank, 2, "localhost", 0, "test")
        world = form_replica(identity, 2, f"file://{tmp_path / 'group'}", torch.device("cpu"), kind_of("cpu"))
        return (world.rank, world.size) == (rank, 2) and sys.excepthook is before

    assert all(run_on_ranks(go, 2))
