"""Islands train as a plain loop over several models does, bit for bit where the sums allow it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate import Accelerator, DiLoCo, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.errors import ReplicaError
from accelerate.local_sgd import LocalSGD
from accelerate.utils import ProjectConfiguration
from tests.diloco.training import Network, batch, equal, loss_of, optimizer_of, plain, sharded, train, weights_of
from tests.ranks import run_on_ranks
from tests.slow import slow_for
from tests.torch_needed import FSDP2_ON_CPU, MUON

CASES: dict[str, dict[str, Any]] = {
    "plain": {"inner_steps": 4, "compression": "none", "fragments": 1, "overlap": False},
    "int8": {"inner_steps": 4, "compression": "int8", "fragments": 2, "overlap": False},
    "2 bits": {"inner_steps": 4, "compression": "2bit", "fragments": 1, "overlap": False, "kind": "adamw"},
    "overlap": {"inner_steps": 6, "compression": "int8", "fragments": 3, "overlap": True, "overlap_steps": 3},
    "muon": {"inner_steps": 4, "compression": "2bit", "fragments": 2, "overlap": False, "kind": "muon"},
    "bf16": {"inner_steps": 4, "compression": "int8", "fragments": 2, "overlap": False, "dtype": torch.bfloat16},
}


def _train(num_steps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return train(num_steps, **arguments)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[MUON] * (case == "muon")) for case in CASES])
def test_islands_of_one_process_train_as_a_plain_loop(case: str) -> None:
    arguments = CASES[case]
    ranks = run_on_ranks(_train, 2, 15, arguments)
    expected = plain(15, 2, **arguments)
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], expected["inside"][rank]), f"rank {rank} inside of the context"
        assert equal(found["after"], expected["after"]), f"rank {rank} after it"
    assert not equal(ranks[0]["inside"], ranks[1]["inside"])  # islands did train apart


def test_the_bytes_that_leave_are_counted() -> None:
    (found, _) = run_on_ranks(_train, 2, 8, CASES["int8"])
    sizes = [33 * 6, 33, 5 * 33, 5]
    scales = sum(4 * -(-size // 256) for size in sizes)
    # Two rounds, then the means of weights and of momentum.
    assert found["sent"] == 2 * (sum(sizes) + scales) + 2 * 4 * sum(sizes)


def test_islands_of_two_processes_reduce_gradients_inside() -> None:
    arguments = CASES["plain"] | {"islands": 2}
    ranks = run_on_ranks(_train, 4, 10, arguments)
    expected = plain(10, 2, size=2, **CASES["plain"])
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], ranks[rank // 2 * 2]["inside"]), "an island's replicas are equal"
        assert equal(found["after"], ranks[0]["after"])
        for own, other in zip(found["inside"], expected["inside"][rank // 2], strict=True):
            torch.testing.assert_close(own, other)


def _compared(folder: str) -> tuple[bool, bool]:
    """Train with every comparison of replicas there is; return whether islands differed, and a change afterwards."""
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, compare_replicas="raise")
    accelerator = Accelerator(cpu=True, project_config=config)
    model = Network()
    model, optimizer = accelerator.prepare(model, optimizer_of("sgd", model))
    watch = accelerator.watch_run(every=1, compare_replicas=1)
    differed = False
    with DiLoCo(accelerator, model, inner_steps=4, fragments=1) as diloco:
        for step in range(6):
            accelerator.backward(loss := loss_of(model, step, accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            watch.step(loss)
            differed |= bool((accelerator.gather(weights_of(model)[1][None]).std(0) > 0).any())
        accelerator.save_state()
        accelerator.compare_replicas()
    accelerator.compare_replicas()
    with torch.no_grad():
        next(model.parameters()).add_(accelerator.process_index)
    try:
        accelerator.compare_replicas()
    except ReplicaError:
        return differed, True
    return differed, False


def test_islands_are_not_compared_while_they_train_apart(tmp_path: Path) -> None:
    for differed, is_noticed in run_on_ranks(_compared, 2, str(tmp_path)):
        assert differed and is_noticed


def averages(kind: str, accelerator: Accelerator, model: Any, *, inner_steps: int) -> DiLoCo | LocalSGD:
    """The context in which islands, or replicas, train apart."""
    if kind == "DiLoCo":
        return DiLoCo(accelerator, model, inner_steps=inner_steps, fragments=1)
    return LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)


def _trains_on(kind: str, optimizer_kind: str, axes: dict[str, Any]) -> None:
    accelerator = sharded(**axes) if axes else Accelerator(cpu=True)
    model = Network()
    model, optimizer = accelerator.prepare(model, optimizer_of(optimizer_kind, model))
    with averages(kind, accelerator, model, inner_steps=4) as averaging:
        for step in range(7):
            accelerator.backward(loss_of(model, step, accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()
    for step in range(3):
        accelerator.compare_replicas()  # weights and optimizer states
        accelerator.backward(loss_of(model, step, accelerator.process_index))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.compare_replicas()


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("both", marks=MUON)])
@pytest.mark.parametrize("kind", ["DiLoCo", "LocalSGD"])
def test_replicas_stay_equal_when_training_goes_on_without_islands(kind: str, optimizer: str) -> None:
    run_on_ranks(_trains_on, 2, kind, optimizer, {})


@FSDP2_ON_CPU
@MUON
def test_shards_stay_equal_when_training_goes_on_without_islands() -> None:
    run_on_ranks(_trains_on, 4, "DiLoCo", "both", {"dp_replicate_size": 2, "dp_shard_size": 2})


def _raises() -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("accelerate").addHandler(handler)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Network())
    with pytest.raises(ZeroDivisionError), DiLoCo(accelerator, model, inner_steps=4):
        raise ZeroDivisionError
    with DiLoCo(accelerator, model, inner_steps=4):
        pass
    return [text for text in texts if "the islands keep weights of their own" in text]


def test_an_exception_that_leaves_the_block_is_remarked_on() -> None:
    first, other = run_on_ranks(_raises, 2)
    assert len(first) == 1 and not other


def _uses_a_part(kind: str) -> tuple[bool, list[torch.Tensor]]:
    """Train with a layer that one rank never uses; return whether its optimizer has state, and the weights."""
    from accelerate.utils import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model: Any = Partly()
    inner = optimizer_of("adamw", model)
    model, optimizer = accelerator.prepare(model, inner)
    rank = accelerator.process_index
    with averages(kind, accelerator, model, inner_steps=2) as averaging:
        for step in range(4):
            inputs, targets = batch(step, rank)
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs, rank == 0), targets))
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()
    accelerator.compare_replicas()
    return model.module.unused.weight in inner.state, weights_of(model)


@pytest.mark.parametrize("kind", ["DiLoCo", "LocalSGD"])
def test_state_that_only_some_ranks_have_begins_anew(kind: str) -> None:
    (first, weights), (second, others) = run_on_ranks(_uses_a_part, 2, kind)
    assert not first and not second and equal(weights, others)


def _train_shards(num_steps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return train(num_steps, sharded(dp_replicate_size=2, dp_shard_size=2), **arguments)


@FSDP2_ON_CPU
@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=MUON), pytest.param("both", marks=MUON)])
def test_islands_of_shards_reduce_gradients_inside(kind: str) -> None:
    arguments: dict[str, Any] = CASES["plain"] | {"kind": kind}
    ranks = run_on_ranks(_train_shards, 4, 10, arguments)
    expected = plain(10, 2, size=2, **arguments)
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], ranks[rank // 2 * 2]["inside"]), "an island has one model"
        assert equal(found["after"], ranks[0]["after"])
        for own, other in zip(found["inside"], expected["inside"][rank // 2], strict=True):
            torch.testing.assert_close(own, other)
    assert not equal(ranks[0]["inside"], ranks[2]["inside"])


class Partly(torch.nn.Module):
    """A model with running statistics, and a layer that not every batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.used, self.unused = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        """Scores of five classes."""
        outputs = self.used(self.norm(inputs))
        return outputs + self.unused(inputs) if uses_all else outputs


def _features() -> dict[str, Any]:
    """Weighted losses in windows of several micro-batches, BatchNorm, and parameters that a rank doesn't use."""
    from accelerate.utils import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[handler])
    model: Any = Partly()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counts: list[int] = []
    used, has_unused = torch.zeros(0), False
    rank = accelerator.process_index
    with DiLoCo(accelerator, model, inner_steps=4, islands=2, fragments=1, compression="none", overlap=False) as diloco:
        for step in range(6):
            with accelerator.accumulate(model):
                inputs, targets = batch(step, rank)
                size = 2 + (rank + step) % 3
                outputs = model(inputs[:size], rank < 2)
                loss = torch.nn.functional.cross_entropy(outputs, targets[:size], reduction="sum")
                accelerator.backward(loss, weight=size)
                if accelerator.sync_gradients:
                    used = model.module.used.weight.grad.clone()
                    has_unused = model.module.unused.weight.grad is not None
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
                counts.append(diloco.num_steps)
        running = model.module.norm.running_mean.clone()
    return {
        "counts": counts,
        "gradient": used,
        "has_unused": has_unused,
        "inside": running,
        "after": model.module.norm.running_mean.clone(),
        "weights": weights_of(model),
    }


def test_a_step_stays_inside_of_its_island() -> None:
    ranks = run_on_ranks(_features, 4)
    for rank, found in enumerate(ranks):
        first = ranks[rank // 2 * 2]
        assert found["counts"] == [0, 1, 1, 2, 2, 3]  # updates, not micro-batches
        assert torch.equal(found["gradient"], first["gradient"])
        assert found["has_unused"] == (rank < 2)  # the other island is not asked whether it uses them
        assert equal(found["weights"], ranks[0]["weights"])
        assert torch.equal(found["after"], ranks[0]["after"])
    assert not torch.equal(ranks[0]["gradient"], ranks[2]["gradient"])
    assert not torch.equal(ranks[0]["inside"], ranks[2]["inside"])


def _train_stages(num_steps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    config = ParallelismConfig(pp_size=2, dp_replicate_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    torch.manual_seed(0)
    whole = Network()
    model = torch.nn.Sequential(whole.first, torch.nn.Tanh(), whole.second)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    island = accelerator.mesh.place("dp_replicate")
    with DiLoCo(accelerator, model, **arguments) as diloco:
        for step in range(num_steps):
            accelerator.pipeline_step(model, batch(step, island), torch.nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        inside = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"inside": inside, "after": accelerator.get_state_dict(model), "island": island}


def test_islands_of_pipelines_reduce_gradients_inside() -> None:
    arguments = CASES["plain"]
    ranks = run_on_ranks(_train_stages, 4, 10, arguments)
    expected = plain(10, 2, kind="adamw", **arguments)
    for found in ranks:
        for name in ("inside", "after"):
            right = expected["inside"][0] if name == "inside" else expected["after"]
            for own, other in zip(found[name].values(), right, strict=False):  # the main process has all, others none
                torch.testing.assert_close(own, other)
    assert ranks[0]["inside"]


class Cut(torch.nn.Module):
    """Two layers that tensor parallelism cuts, and one that it doesn't."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 32), torch.nn.Linear(32, 5)
        self.norm = torch.nn.LayerNorm(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        return self.norm(self.second(torch.tanh(self.first(inputs))))


def _seven_updates(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, part: int, **arguments: Any
) -> dict[str, Any]:
    """Train on the samples of ``part``; return the weights inside of the context and after it."""
    with DiLoCo(accelerator, model, inner_steps=3, fragments=2, **arguments) as diloco:
        for step in range(7):
            inputs, targets = batch(step, part)
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        inside = weights_of(model)
    return {"inside": inside, "after": weights_of(model)}


def _train_cut() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    model = Cut()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    part = accelerator.mesh.place("dp_replicate")
    return _seven_updates(accelerator, model, optimizer, part, compression="2bit")


def test_islands_of_tensor_parallel_ranks_stay_equal() -> None:
    ranks = run_on_ranks(_train_cut, 4)
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], ranks[rank // 2 * 2]["inside"])
        assert equal(found["after"], ranks[0]["after"])
    assert not equal(ranks[0]["inside"], ranks[2]["inside"])


def _train_fsdp_inside(axes: dict[str, Any], kind: str) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, **axes)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    model: Any = Cut()
    if "tp_size" in axes:
        model._tp_plan = {"first": "colwise", "second": "rowwise"}
    model, optimizer = accelerator.prepare(model, optimizer_of(kind, model))
    part = 2 * accelerator.mesh.place("dp_replicate") + accelerator.mesh.place("dp_shard")
    found = _seven_updates(accelerator, model, optimizer, part, compression="none", overlap=False)
    accelerator.compare_replicas()
    return found


@slow_for("eight ranks")
@FSDP2_ON_CPU
@pytest.mark.parametrize(
    ("axes", "kind"),
    [({"tp_size": 2}, "adamw"), ({"cp_size": 2}, "adamw"), pytest.param({"tp_size": 2}, "muon", marks=MUON)],
    ids=str,
)
def test_islands_of_fsdp_with_another_axis_inside(axes: dict[str, int], kind: str) -> None:
    ranks = run_on_ranks(_train_fsdp_inside, 8, axes, kind)
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], ranks[rank // 4 * 4]["inside"])
        assert equal(found["after"], ranks[0]["after"])
    assert not equal(ranks[0]["inside"], ranks[4]["inside"])
