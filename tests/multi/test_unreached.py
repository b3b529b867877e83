"""A rank whose loss reaches nothing that is trained: it counts as zeros, or all ranks end with one error; none waits.

The fast part has the layouts in which it counts; ``RUN_SLOW=1`` has all, and the errors, for which a rank
waits some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate import Accelerator
from accelerate.errors import CollectiveError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW, slow_for
from tests.torch_needed import FSDP2_ON_CPU

pytestmark = FSDP2_ON_CPU
slow = slow_for("a rank waits some seconds for others", "meshes")


class Parts(nn.Module):
    """A body of two layers that is sharded, and parts in front of it and behind that are whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.behind = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *used: str) -> torch.Tensor:
        """Use the body, and those of the other parts that are named."""
        hidden = self.body(self.front(x) if "front" in used else x)
        return self.behind(hidden) if "behind" in used else hidden


def unit(model: Parts) -> None:
    """The body as one unit."""
    model.body.requires_grad_(False)
    fully_shard(model.body, mesh=init_device_mesh("cpu", (2,)))


def nested(model: Parts) -> None:
    """The body and its layers, which are gathered again in a backward pass."""
    model.body.requires_grad_(False)
    for module in (*model.body, model.body):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def ignored(model: Parts) -> None:
    """FSDP's plugin shards the body, and ignores the rest."""
    model.body.requires_grad_(False)


def trained(model: Parts) -> None:
    """All of it, and trained."""
    fully_shard(model.body, mesh=init_device_mesh("cpu", (2,)))


def tensor_parallel(model: Parts) -> None:
    """The body's layers are cut; ranks share samples."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model.body, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def accelerator_for(shard: Callable[[Parts], None], model: Parts) -> Accelerator:
    """With the plugin where nothing else shards."""
    if shard is not ignored:
        return Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=[model.front, model.behind])
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def weights_after(
    shard: Callable[[Parts], None], used: tuple[str, ...], *, has_graph: bool, is_plain: bool
) -> list[float]:
    """The weights after three updates, in each of which one rank's loss uses the parts ``used``, the other's none."""
    model: Any = Parts()
    shard(model)
    run = accelerator_for(shard, model)
    optimizer: Any = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    for step in range(3):
        x = torch.ones(2, 4, requires_grad=has_graph)
        loss = model(x, *(used if run.process_index == step % 2 else ())).square().mean()
        if is_plain:
            loss.backward()
        else:
            run.backward(loss)
            run.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.flatten() for part in (model.front, model.behind) for one in part.parameters()]).tolist()


def weights_expected(used: tuple[str, ...]) -> list[float]:
    """Those of one process, whose loss is the mean of both ranks'."""
    model = Parts()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(3):
        (model(torch.ones(2, 4), *used).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.flatten() for part in (model.front, model.behind) for one in part.parameters()]).tolist()


#: (who shards, the parts used, whether losses have a graph of their own, whether by loss.backward())
Cell = tuple[Callable[[Parts], None], tuple[str, ...], bool, bool]
ALL_CELLS: list[Cell] = [
    (shard, used, has_graph, is_plain)
    for shard in (unit, nested, ignored)
    for used in (("front",), ("behind",), ("front", "behind"))
    # By itself, torch's backward raises for a loss without a graph.
    for has_graph, is_plain in ((True, False), (True, True), (False, False))
]
SOME_CELLS: list[Cell] = [
    (nested, ("front",), False, False),
    (unit, ("behind",), True, True),
    (ignored, ("front", "behind"), False, False),
    (ignored, ("behind",), True, False),
]


def test_it_counts_as_zeros_beside_shards_that_are_frozen() -> None:
    """With replicas in front of the shards, behind, on both sides; its loss with a graph of its own, and without."""
    cells = ALL_CELLS if IS_SLOW else SOME_CELLS

    def on_rank() -> list[list[float]]:
        found: list[list[float]] = []
        for shard, used, has_graph, is_plain in cells:
            found.append(weights_after(shard, used, has_graph=has_graph, is_plain=is_plain))
            AcceleratorState._reset_state(False)  # the next has no plugin, or another
        return found

    first, second = run_on_ranks(on_rank, 2, timeout_seconds=180)
    assert first == second
    for cell, weights in zip(cells, first, strict=True):
        assert weights == pytest.approx(weights_expected(cell[1]), abs=1e-5), cell


class Adapter(nn.Module):
    """A frozen layer that is sharded, and a whole one of ``width`` behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.behind = nn.Linear(4, width)
        self.back = nn.Linear(width, 4)
        fully_shard(self.body, mesh=init_device_mesh("cpu", (2,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.behind(self.body(x)))


def test_two_models_in_one_loss_count_as_zeros_on_the_rank_that_uses_neither() -> None:
    """A pass reaches the last model first; messages of ranks that it doesn't reach come in the same order."""

    def on_rank() -> tuple[list[float], str]:
        run = Accelerator(cpu=True)
        first, second = run.prepare(Adapter(3), Adapter(7))
        loss = second(first(torch.ones(2, 4))).square().mean()
        run.backward(loss if run.process_index == 0 else torch.zeros(()))
        norms = [float(model.behind.weight.grad.norm()) for model in (first, second)]
        with pytest.raises(RuntimeError) as caught:  # the gradients are still there
            run.backward(torch.zeros(()))
        return norms, str(caught.value)

    there, here = run_on_ranks(on_rank, 2)
    assert there == here
    assert min(there[0]) > 0
    assert "does not require grad" in there[1]


@slow
@pytest.mark.parametrize("way", ["backward", "without a graph", "plain, clip", "plain, step"])
@pytest.mark.parametrize("shard", [trained, tensor_parallel])
def test_all_ranks_end_with_one_error_where_shards_are_trained(shard: Callable[[Parts], None], way: str) -> None:
    """The rank says which one waits for it, and what to do; the other's collective ends."""
    if shard is tensor_parallel and way == "without a graph":
        pytest.skip("torch's own error, on that rank")

    def on_rank() -> str:
        model: Any = Parts()
        shard(model)
        run = Accelerator(cpu=True)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 4, requires_grad=way != "without a graph")
        loss = model(x, "behind").sum() if run.process_index == 0 else model(x).detach().sum() + 0 * x.sum()
        with pytest.raises(RuntimeError) as caught:
            if way.startswith("plain"):
                loss.backward()
            else:
                run.backward(loss)
            if way != "plain, step":
                run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert run.process_index == 0 or isinstance(caught.value, CollectiveError)
        return str(caught.value)

    said = run_on_ranks(on_rank, 2)[1]
    assert "Rank 1 is in `backward of a loss that reaches no shard` that is trained, but rank 0 waits" in said
    assert "`loss + 0.0 * output.sum()`" in said
