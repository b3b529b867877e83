"""Checkpoints inside of DiLoCo: the same bits after a resume, and other numbers of islands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, DiLoCo, ParallelismConfig
from tests.diloco.training import Network, batch, equal, loss_of, optimizer_of, sharded, train, weights_of
from tests.ranks import run_on_ranks
from tests.slow import slow
from tests.torch_needed import FSDP2_ON_CPU, MUON

#: Saved after step 7: the fragment that was sent after step 6 is on its way.
OVERLAP: dict[str, Any] = {
    "inner_steps": 6, "compression": "2bit", "fragments": 2, "overlap": True, "overlap_steps": 2, "kind": "adamw"
}  # fmt: skip


def _accelerator(shards: bool) -> Accelerator:
    return sharded(dp_replicate_size=2, dp_shard_size=2) if shards else Accelerator(cpu=True)


def _saves(folder: str, arguments: dict[str, Any], shards: bool) -> dict[str, Any]:
    def after_step(diloco: DiLoCo, step: int) -> None:
        if step == 6:
            diloco.accelerator.save_state(folder)

    return train(20, _accelerator(shards), after_step=after_step, **arguments)


def _resumes(folder: str, arguments: dict[str, Any], shards: bool) -> dict[str, Any]:
    steps: list[int] = []

    def begin(accelerator: Accelerator) -> int:
        accelerator.load_state(folder)
        return 7

    found = train(20, _accelerator(shards), begin=begin, after_step=lambda d, _: steps.append(d.num_steps), **arguments)
    return found | {"steps": steps}


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "shards"),
    [
        pytest.param(2, OVERLAP, False, id="islands of one"),
        pytest.param(4, OVERLAP | {"islands": 2}, False, id="islands of two"),
        pytest.param(4, OVERLAP, True, id="islands of shards", marks=[FSDP2_ON_CPU, slow]),
        pytest.param(4, OVERLAP | {"kind": "both"}, True, id="of shards, with Muon", marks=[FSDP2_ON_CPU, MUON]),
        pytest.param(2, OVERLAP | {"kind": "both"}, False, id="of one, with Muon", marks=MUON),
    ],
)
def test_a_resumed_run_has_the_same_bits(
    num_ranks: int, arguments: dict[str, Any], shards: bool, tmp_path: Path
) -> None:
    without = run_on_ranks(_saves, num_ranks, str(tmp_path / "state"), arguments, shards)
    resumed = run_on_ranks(_resumes, num_ranks, str(tmp_path / "state"), arguments, shards)
    for rank, (first, second) in enumerate(zip(without, resumed, strict=True)):
        assert second["steps"] == list(range(8, 21))
        assert equal(first["inside"], second["inside"]), f"rank {rank} inside of the context"
        assert equal(first["after"], second["after"]), f"rank {rank} after it"


def _stages(folder: str, num_steps: int, loads: bool) -> list[torch.Tensor]:
    """Train pipelines from step 0, and save, or load and train from step 7 on; return the weights of this stage."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, pp_size=2))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9), torch.nn.Linear(9, 5)
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    island = accelerator.mesh.place("dp_replicate")
    with DiLoCo(accelerator, model, 6, compression="2bit", fragments=4, overlap_steps=2) as diloco:
        if loads:
            accelerator.load_state(folder)
        for step in range(7 if loads else 0, num_steps):
            accelerator.pipeline_step(model, batch(step, island), torch.nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            if step == 6:
                accelerator.save_state(folder)
    return [one.detach().clone() for one in model.parameters() if not one.is_meta]


def test_resumed_pipelines_have_the_same_bits(tmp_path: Path) -> None:
    """Each stage has the fragments of its own layers; the first one has fewer tensors than there are fragments."""
    without = run_on_ranks(_stages, 4, str(tmp_path / "state"), 15, False)
    resumed = run_on_ranks(_stages, 4, str(tmp_path / "state"), 15, True)
    assert all(map(equal, without, resumed)) and equal(without[0], without[1])


def _saves_shards(folder: str) -> list[list[torch.Tensor]]:
    """Save shards of islands that differ; return the weights of all islands, and their momentum."""
    accelerator = sharded("SHARDED_STATE_DICT", dp_replicate_size=2, dp_shard_size=2)
    model: Any = Network()
    inner = optimizer_of("adamw", model)
    model, optimizer = accelerator.prepare(model, inner)
    with DiLoCo(accelerator, model, inner_steps=9) as diloco:
        for step in range(3):
            accelerator.backward(loss_of(model, step, accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        accelerator.save_state(folder)
        states: list[Any] = [inner.state[parameter]["exp_avg"] for parameter in model.parameters()]
        return [weights_of(model), [one.full_tensor() for one in states]]


@FSDP2_ON_CPU
def test_a_checkpoint_in_shards_has_the_first_island(tmp_path: Path) -> None:
    """For a run without DiLoCo: no weight of another island is among them."""
    ranks = run_on_ranks(_saves_shards, 4, str(tmp_path / "state"))

    def loads() -> list[list[torch.Tensor]]:
        accelerator = Accelerator(cpu=True)
        model = Network()
        inner = optimizer_of("adamw", model)
        model, _ = accelerator.prepare(model, inner)
        accelerator.load_state(str(tmp_path / "state"))
        return [weights_of(model), [inner.state[parameter]["exp_avg"] for parameter in model.parameters()]]

    (found,) = run_on_ranks(loads, 1)
    for part in (0, 1):
        assert equal(found[part], ranks[0][part])
        assert not any(map(torch.equal, ranks[0][part], ranks[2][part]))


def test_other_islands_continue(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run_on_ranks(_saves, 2, folder, OVERLAP, False)
    for islands in (4, 2):  # more islands, and islands of two processes that divide the outer weights
        ranks = run_on_ranks(_resumes, 4, folder, OVERLAP | {"islands": islands}, False)
        assert ranks[0]["steps"] == list(range(8, 21))
        assert all(equal(found["after"], ranks[0]["after"]) for found in ranks)
        assert len({tuple(found["inside"][0].flatten().tolist()) for found in ranks}) == islands


class _Counted(torch.optim.SGD):
    """Counts the changes that the outer weights of a fragment were stepped by."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step, and count."""
        super().step(closure)
        type(self).num_steps += 1


def _changes_applied(folder: str, arguments: dict[str, Any], loads: bool) -> list[int]:
    """Return the number of changes that were applied, and those that still are on their way."""

    def begin(accelerator: Accelerator) -> int:
        if loads:
            accelerator.load_state(folder)
        return 7 if loads else 0

    def after_step(diloco: DiLoCo, step: int) -> None:
        if step == 6 and not loads:
            diloco.accelerator.save_state(folder)
        applied[:] = [_Counted.num_steps, sum(one.arriving is not None for one in diloco._fragments)]

    applied = [0, 0]
    optimizer = partial(_Counted, lr=0.7)
    train(12 if loads else 7, begin=begin, after_step=after_step, outer_optimizer=optimizer, **arguments)
    return applied


@pytest.mark.parametrize(
    "after", [{"inner_steps": 2}, {"inner_steps": 3, "overlap_steps": 1}, {"inner_steps": 4, "overlap": False}]
)
def test_a_change_on_its_way_is_applied_with_other_steps(after: dict[str, Any], tmp_path: Path) -> None:
    """Also if the fragment's turn comes before the step at which the saved run would have applied it."""
    before: dict[str, Any] = {"inner_steps": 6, "fragments": 1, "overlap_steps": 5}
    folder = str(tmp_path / "state")
    assert run_on_ranks(_changes_applied, 2, folder, before, False) == [[0, 1]] * 2  # sent after step 6
    arguments = before | after
    turns = sum(step % arguments["inner_steps"] == 0 for step in range(8, 13))
    for applied, on_their_way in run_on_ranks(_changes_applied, 2, folder, arguments, True):
        assert applied + on_their_way == 1 + turns


def _alone(folder: str) -> str:
    def after_step(diloco: DiLoCo, step: int) -> None:
        if diloco.accelerator.is_main_process and step == 0:
            with pytest.raises(RuntimeError, match="on the main process alone, inside of DiLoCo"):
                diloco.accelerator.save_state(folder)

    train(1, after_step=after_step, inner_steps=2, fragments=1)
    return "trained"


def test_a_save_on_the_main_process_alone_is_refused(tmp_path: Path) -> None:
    assert run_on_ranks(_alone, 2, str(tmp_path / "state")) == ["trained"] * 2


def _without(folder: str) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.save_state(folder)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with DiLoCo(accelerator, model, inner_steps=2, fragments=1) as diloco:
        optimizer.step()
        accelerator.load_state(folder)
        assert diloco.num_steps == 0
    return [*before, *(parameter.detach().clone() for parameter in model.parameters())]


def test_a_checkpoint_of_a_run_without_it_is_a_beginning(tmp_path: Path) -> None:
    for found in run_on_ranks(_without, 2, str(tmp_path / "state")):
        assert equal(found[:2], found[2:])
