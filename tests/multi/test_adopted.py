"""Models that were sharded before ``prepare``, by fully_shard and parallelize_module, train as one process does.

The fast part has some of the cells; ``RUN_SLOW=1`` (``make meshes``) has them all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.errors import MissingDependency, PreparationError, SettingError
from accelerate.parallel.fsdp import setup
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig
from tests.mesh_runs import BATCH, LENGTH, V2, LanguageModel, mean_loss, samples, second_pass, steps
from tests.ranks import run_on_ranks
from tests.sharded_runs import assert_same_run
from tests.slow import IS_SLOW, slow_for

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

UPDATES = 6 if IS_SLOW else 3


def cut_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Tensor parallelism by torch's own styles; norms and places stay whole."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.layers)):
        for name in ("self_attn.query", "self_attn.key", "self_attn.value", "up"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("self_attn.out", "down"):
            plan[f"layers.{number}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def shard_fully(model: LanguageModel, mesh: DeviceMesh) -> None:
    """FSDP2, by layers."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # pyright: ignore[reportArgumentType]
    fully_shard(model, mesh=mesh)


def mesh_of(**axes: int) -> DeviceMesh:
    """Torch's own mesh, under the user's names."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def fsdp(model: LanguageModel, ranks: int) -> None:
    """Over all ranks."""
    shard_fully(model, mesh_of(data=ranks))


def hsdp(model: LanguageModel, ranks: int) -> None:
    """Two replicas of shards."""
    shard_fully(model, mesh_of(replicas=2, shards=ranks // 2))


def layers_only(model: LanguageModel, ranks: int) -> None:
    """FSDP2 of the layers alone: the rest is whole on all ranks."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of(data=ranks))  # pyright: ignore[reportArgumentType]


def tp(model: LanguageModel, ranks: int) -> None:
    """All ranks share samples."""
    cut_layers(model, mesh_of(tp=ranks))


def fsdp_tp(model: LanguageModel, ranks: int) -> None:
    """Layers over two ranks, their parts over the others."""
    mesh = mesh_of(dp=ranks // 2, tp=2)
    cut_layers(model, mesh["tp"])
    shard_fully(model, mesh["dp"])


def dp_tp(model: LanguageModel, ranks: int) -> None:
    """Layers over two ranks; whole replicas of these."""
    cut_layers(model, mesh_of(dp=ranks // 2, tp=2)["tp"])


def whole(model: LanguageModel, ranks: int) -> None:
    """One process."""


#: name -> (ranks, who shards, shares of the data)
CELLS: dict[str, tuple[int, Callable[[LanguageModel, int], None], int]] = {
    "fsdp2": (2, fsdp, 2),
    "fsdp2, layers only": (2, layers_only, 2),
    "tp2": (2, tp, 1),
    "fsdp2 x tp2": (4, fsdp_tp, 2),
    "hsdp": (4, hsdp, 4),
    "dp2 x tp2": (4, dp_tp, 2),
}


def prepared(run: Accelerator, shard: Callable[[LanguageModel, int], None], shares: int, updates: int) -> Any:
    """Model, optimizer, schedule and loader, given in an order in which the loader comes first."""
    torch.manual_seed(0)
    model = LanguageModel()
    shard(model, run.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95**count)
    loader = DataLoader(samples(BATCH * 2 * updates), batch_size=BATCH // shares)
    loader, schedule, model, optimizer = run.prepare(loader, schedule, model, optimizer)
    assert run.mesh.data_share().count == shares
    return model, optimizer, schedule, loader


def train(
    shard: Callable[[LanguageModel, int], None] = whole, shares: int = 1, *, weighted: bool = False, **options: Any
) -> dict[str, Any]:
    """Accumulation, clipping, a schedule: losses, norms and the weights at the end."""
    run = Accelerator(cpu=True, gradient_accumulation_steps=2, scheduler_mode="updates", **options)
    objects = prepared(run, shard, shares, UPDATES)
    found = steps(run, objects, weighted=weighted)
    weights = run.get_state_dict(objects[0])
    return {**found, "weights": {name: value.tolist() for name, value in weights.items()}}


@functools.cache
def alone(weighted: bool = False) -> dict[str, Any]:
    """The run of one process."""
    return run_on_ranks(lambda: train(weighted=weighted), 1)[0]


@pytest.mark.parametrize("name", [*CELLS] if IS_SLOW else ["hsdp", "dp2 x tp2"])  # below: "fsdp2 x tp2"
def test_losses_norms_and_weights_are_those_of_one_process(name: str) -> None:
    """With accumulation, clipping and a schedule; the loader is prepared before the model, in one call."""
    ranks, shard, shares = CELLS[name]
    found = run_on_ranks(lambda: train(shard, shares), ranks, timeout_seconds=180)
    assert_same_run(found[0], alone())
    assert all(other["norms"] == found[0]["norms"] for other in found)


def test_a_loss_that_is_weighted_counts_the_tokens_of_each_share_once() -> None:
    """Ranks that share samples are one of them."""
    found = run_on_ranks(lambda: train(fsdp_tp, 2, weighted=True), 4, timeout_seconds=180)
    assert_same_run(found[0], alone(weighted=True))


def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    """Of a gradient scaler that was made before it was known that gradients lie in shards."""

    def on_rank() -> tuple[bool, bool, float]:
        run = Accelerator(cpu=True, mixed_precision="fp16")
        model: Any = torch.nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=mesh_of(data=2))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = run.prepare(model, optimizer)
        skipped: list[bool] = []
        for factor in (1.0, float("inf")):
            run.backward(model(torch.ones(2, 4)).float().mean())
            if run.process_index == 0:
                model.weight.grad.to_local().mul_(factor)
            optimizer.step()
            skipped.append(run.optimizer_step_was_skipped)
            optimizer.zero_grad()
        assert run.scaler is not None
        return skipped[0], skipped[1], run.scaler.get_scale()

    first, second = run_on_ranks(on_rank, 2)
    assert first == second and first[:2] == (False, True)


def test_a_batch_in_parts_has_the_gradients_of_the_whole() -> None:
    """Of shards, which are reduced once, and of what is whole beside them."""

    def on_rank() -> list[list[float]]:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh_of(data=2))
        run = Accelerator(cpu=True)
        model = run.prepare(model)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(run.process_index))
        found: list[list[float]] = []
        for num_parts in (1, 4):
            model.zero_grad()
            loss = run.backward_in_parts(lambda part: model(part).square().mean(), batch, num_parts=num_parts)
            gradients = [
                one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in model.parameters()
            ]
            found.append([float(loss), *torch.cat([one.flatten() for one in gradients]).tolist()])
        return found

    (first, second) = run_on_ranks(on_rank, 2)
    assert first[1] == pytest.approx(first[0], rel=1e-5) and first[1][1:] == second[1][1:]
    assert len(first[0]) == 1 + 2 * (16 + 4) and any(first[0][1:])


def test_the_scaler_of_fp16_goes_on_after_free_memory() -> None:
    """Its scale stays, and it hears of another rank's overflow, of a model in shards as of one in replicas."""

    def on_rank() -> list[tuple[bool, float]]:
        run = Accelerator(cpu=True, mixed_precision="fp16")
        found: list[tuple[bool, float]] = []
        for is_sharded in (True, False, True):
            model: Any = torch.nn.Linear(4, 4, bias=False)
            if is_sharded:
                fully_shard(model, mesh=mesh_of(data=2))
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = run.prepare(model, optimizer)
            for factor in (1.0, float("inf")):
                run.backward(model(torch.ones(2, 4)).float().mean())
                (gradient,) = [one.grad for one in model.parameters()]
                if run.process_index == 0 or not is_sharded:  # replicas have theirs reduced already
                    getattr(gradient, "to_local", lambda whole=gradient: whole)().mul_(factor)
                optimizer.step()
                assert run.scaler is not None
                found.append((run.optimizer_step_was_skipped, run.scaler.get_scale()))
                optimizer.zero_grad()
            run.free_memory()
        return found

    first, second = run_on_ranks(on_rank, 2)
    assert first == second and [skipped for skipped, _ in first] == [False, True] * 3
    assert [scale / first[0][1] for _, scale in first] == [1, 0.5, 0.5, 0.25, 0.25, 0.125]


# -- what is saved ----------------------------------------------------------------------------------------------

PLUGIN: dict[str, Any] = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": "Layer",
}


def save(folder: Path, shard: Callable[[LanguageModel, int], None], shares: int) -> None:
    """A run of one pass of three updates is saved in ``folder``."""
    run = Accelerator(cpu=True, gradient_accumulation_steps=2, scheduler_mode="updates")
    objects = prepared(run, shard, shares, 3)
    steps(run, objects)
    run.save_state(str(folder))


def go_on(
    folder: Path | None, shard: Callable[[LanguageModel, int], None], shares: int, **options: Any
) -> dict[str, Any]:
    """The second pass, by a run that has loaded the first (None: that has done it)."""
    run = Accelerator(cpu=True, gradient_accumulation_steps=2, scheduler_mode="updates", **options)
    objects = prepared(run, shard, shares, 3)
    return second_pass(run, objects, folder)


@functools.cache
def two_passes() -> dict[str, Any]:
    """Both in one process."""
    return run_on_ranks(lambda: go_on(None, whole, 1), 1)[0]


@pytest.mark.parametrize("name", [*CELLS] if IS_SLOW else ["fsdp2"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(name: str, tmp_path: Path) -> None:
    """Bit by bit."""
    ranks, shard, shares = CELLS[name]
    run_on_ranks(lambda: save(tmp_path / "saved", shard, shares), ranks, timeout_seconds=180)
    resumed = run_on_ranks(lambda: go_on(tmp_path / "saved", shard, shares), ranks, timeout_seconds=180)
    assert resumed == run_on_ranks(lambda: go_on(None, shard, shares), ranks, timeout_seconds=180)


@pytest.mark.parametrize("name", [*CELLS] if IS_SLOW else ["tp2"])
def test_what_is_saved_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    """In one process, under FSDP by its plugin, and back from one process."""
    ranks, shard, shares = CELLS[name]
    run_on_ranks(lambda: save(tmp_path / "saved", shard, shares), ranks, timeout_seconds=180)
    assert_same_run(run_on_ranks(lambda: go_on(tmp_path / "saved", whole, 1), 1)[0], two_passes())
    plugin = FullyShardedDataParallelPlugin(**V2)
    found = run_on_ranks(lambda: go_on(tmp_path / "saved", whole, 2, fsdp_plugin=plugin), 2, timeout_seconds=180)
    assert_same_run(found[0], two_passes())
    run_on_ranks(lambda: save(tmp_path / "one", whole, 1), 1)
    found = run_on_ranks(lambda: go_on(tmp_path / "one", shard, shares), ranks, timeout_seconds=180)
    assert_same_run(found[0], two_passes())


@pytest.mark.parametrize("name", [*CELLS] if IS_SLOW else ["tp2"])
def test_a_run_goes_on_inside_a_window_with_its_averaged_weights(name: str, tmp_path: Path) -> None:
    """Bit by bit; metrics hear every sample once."""
    ranks, shard, shares = CELLS[name]

    def run_on(saves: bool, loads: bool) -> dict[str, Any]:
        run = Accelerator(cpu=True, gradient_accumulation_steps=2, scheduler_mode="updates")
        model, optimizer, schedule, loader = prepared(run, shard, shares, 3)
        average = run.average_weights(model, decay=0.5)
        if loads:
            run.load_state(str(tmp_path / "saved"))
        for number, (words, following) in enumerate(loader):
            with run.accumulate(model):
                places = torch.arange(LENGTH).repeat(len(words), 1)
                run.backward(mean_loss(model(words, places), following))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if run.sync_gradients:
                    average.update()
            assert run.gather_for_metrics(words).shape == (BATCH, LENGTH)
            if saves and number == 2:  # one update, and half of the next
                run.save_state(str(tmp_path / "saved"))
                break
        weights = run.get_state_dict(model)
        averaged = average.weights()
        return {name: (value.tolist(), averaged[name].tolist()) for name, value in weights.items()}

    expected = run_on_ranks(lambda: run_on(saves=False, loads=False), ranks, timeout_seconds=180)
    run_on_ranks(lambda: run_on(saves=True, loads=False), ranks, timeout_seconds=180)
    assert run_on_ranks(lambda: run_on(saves=False, loads=True), ranks, timeout_seconds=180) == expected


# -- what is said ----------------------------------------------------------------------------------------------


def said_by(function: Callable[[], Any]) -> str:
    """The words with which ``function`` is refused."""
    with pytest.raises((SettingError, PreparationError)) as caught:
        function()
    return str(caught.value)


def sharded(shard: Callable[[LanguageModel, int], None], ranks: int) -> LanguageModel:
    """A model of its own for each question."""
    model = LanguageModel()
    shard(model, ranks)
    return model


def test_a_model_that_contradicts_what_was_said_before_is_refused_with_both() -> None:
    """A ParallelismConfig, a loader from an earlier call, a model before it, a mesh in another order."""

    def on_rank() -> list[str]:
        said: list[str] = []
        run = Accelerator(cpu=True)
        run.prepare(DataLoader(samples(8), batch_size=2))
        said.append(said_by(lambda: run.prepare(sharded(tp, 4))))
        run = Accelerator(cpu=True)
        run.prepare(sharded(fsdp, 4))
        said.append(said_by(lambda: run.prepare(sharded(tp, 4))))
        mesh = mesh_of(tp=2, dp=2)
        model = LanguageModel()
        cut_layers(model, mesh["tp"])
        said.append(said_by(lambda: Accelerator(cpu=True).prepare(model)))
        half = LanguageModel()
        shard_fully(half, mesh["dp"])
        said.append(said_by(lambda: Accelerator(cpu=True).prepare(half)))
        run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=4))
        said.append(said_by(lambda: run.prepare(sharded(fsdp, 4))))
        run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
        said.append(said_by(lambda: run.prepare(LanguageModel())))
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        run = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=4))
        said.append(said_by(lambda: run.prepare_model(sharded(fsdp_tp, 4))))
        return said

    said = run_on_ranks(on_rank, 4)[0]
    expected = (
        "of 4 of the data, but LanguageModel, which came sharded (sharded by layer over ranks 0, 1, 2 and 3), takes",
        "LanguageModel, which came first, says",
        "ranks that share samples have to be neighbours",
        "is sharded over 2 of 4 ranks",
        "but ParallelismConfig says pp_size 1 * dp_replicate_size 1",
        "Without it LanguageModel has to come sharded",
        "dp_shard_size 2 * ep_size 1 * cp_size 1 * sp_size 1 * tp_size 2 = 4 says (",
    )
    for words, text in zip(expected, said, strict=True):
        assert words in text


def test_a_model_under_fully_shard_is_refused_where_torch_would_add_gradients_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPU ranks torch 2.7 and 2.8 ask gloo for a mean and get a sum, whoever called ``fully_shard``."""

    def on_rank() -> list[str]:
        monkeypatch.setattr(setup, "OLDEST_ON_CPU", "99.0")
        run = Accelerator(cpu=True)
        said: list[str] = []
        for prepare in (run.prepare, run.prepare_model):
            with pytest.raises(MissingDependency) as caught:
                prepare(sharded(fsdp, 2))
            said.append(str(caught.value))
        return said

    assert all("version 2 on CPU needs torch 99.0" in said for said in run_on_ranks(on_rank, 2)[0])


@pytest.mark.parametrize("config", [{"dp_shard_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 2}], ids=str)
@pytest.mark.parametrize("has_plugin", [pytest.param(False, marks=slow_for("four ranks", "meshes")), True])
def test_a_config_that_says_the_same_is_used(config: dict[str, Any], has_plugin: bool) -> None:
    """``dp_shard_size`` may count the replicas of shards."""

    def on_rank() -> tuple[int, int, str]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if has_plugin else None
        run = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**config))
        model = run.prepare_model(sharded(hsdp, 4))
        share = run.mesh.data_share()
        return share.index, share.count, type(model).__name__

    assert run_on_ranks(on_rank, 4) == [(rank, 4, "FSDPLanguageModel") for rank in range(4)]


def test_a_replica_whose_gradient_is_that_of_a_part_of_the_sequence_is_refused() -> None:
    """Ranks that share samples would each train their own."""

    def on_rank() -> str:
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "up": torch.nn.Linear(4, 4, bias=False)})
        parallelize_module(model, mesh_of(tp=2), {"up": ColwiseParallel()})
        run = Accelerator(cpu=True)
        model: Any = run.prepare(model)
        part = torch.full((2, 4), 1.0 + 2 * run.process_index)
        return said_by(lambda: run.backward(model["first"](part).square().mean()))

    assert "gradient of 'first.weight' (2 of 2 parameters) differs between ranks 0 and 1" in run_on_ranks(on_rank, 2)[0]


def test_replicas_beside_shards_start_equal_and_stay_so() -> None:
    """Also a parameter that some ranks don't use, and one that nobody does."""

    def on_rank() -> list[list[float]]:
        torch.manual_seed(int(os.environ["RANK"]))
        model: Any = torch.nn.ModuleDict(
            {name: torch.nn.Linear(2, 2) for name in ("sharded", "common", "some", "none")}
        )
        fully_shard(model["sharded"], mesh=mesh_of(data=2))
        run = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = run.prepare(model, optimizer)
        for step in range(3):
            hidden = model["common"](model["sharded"](torch.randn(4, 2)))
            loss = (model["some"](hidden) if run.process_index == step % 2 else hidden).square().mean()
            run.backward(loss)
            assert model["none"].weight.grad is None and model["some"].weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
        weights = run.get_state_dict(model)
        assert bool(weights) == run.is_main_process
        return [model[name].weight.flatten().tolist() for name in ("common", "some", "none")]

    first, second = run_on_ranks(on_rank, 2)
    assert first == second


def test_a_rank_whose_batch_uses_no_replica_averages_those_of_others() -> None:
    """Behind and before the shards, prepared once more after free_memory, and trained only from some step on."""

    def on_rank() -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("before", "sharded", "behind")})
        model["before"].requires_grad_(False)
        fully_shard(model["sharded"], mesh=mesh_of(data=2))
        hooks: list[int] = []
        for _ in range(2):
            run = Accelerator(cpu=True)
            model = run.prepare(model)
            hooks.append(len(model["behind"].weight._post_accumulate_grad_hooks))
            run.free_memory()
        model["before"].requires_grad_(True)
        found: list[float] = []
        for used in (("behind",), ("before",), ("before", "behind"), ()):
            model.zero_grad()
            hidden = torch.ones(4, 2)
            for name in ("before", "sharded", "behind"):
                if name == "sharded" or (name in used and run.process_index == 0):
                    hidden = model[name](hidden)
            run.backward(hidden.sum())
            gradients = [model[name].bias.grad for name in ("before", "behind")]
            found += [-1.0 if gradient is None else gradient.sum().item() for gradient in gradients]
        return found, hooks

    first, second = run_on_ranks(on_rank, 2)
    assert first == second and first[1] == [1, 1]
    found = first[0]
    assert [found[0], found[1], found[3], found[5], *found[6:]] == [-1.0, 4.0, -1.0, 4.0, -1.0, -1.0]
    assert found[2] not in (-1.0, 0.0)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_rank_whose_loss_reaches_nothing_beside_frozen_shards_counts_as_zeros(precision: str) -> None:
    """Without a graph, with one that reaches no parameter; where no rank's loss reaches one, all raise."""

    def on_rank() -> list[list[float]]:
        torch.manual_seed(0)
        model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("sharded", "head")})
        model["sharded"].requires_grad_(False)
        fully_shard(model["sharded"], mesh=mesh_of(data=2))
        run = Accelerator(cpu=True, mixed_precision=precision)
        model, optimizer = run.prepare(model, torch.optim.SGD(model["head"].parameters(), lr=0.5))
        with pytest.raises(RuntimeError, match="does not require grad"):
            run.backward(model["sharded"](torch.ones(4, 2)).float().sum())
        found: list[list[float]] = []
        for has_graph in (False, True):
            hidden = model["sharded"](torch.ones(4, 2, requires_grad=has_graph)).float()
            run.backward((model["head"](hidden) if run.process_index == 0 else hidden).float().sum())
            found.append((model["head"].bias.grad / (run.scaler.get_scale() if run.scaler else 1)).tolist())
            optimizer.step()
            optimizer.zero_grad()
        return [*found, model["head"].bias.tolist()]

    first, second = run_on_ranks(on_rank, 2)
    assert first == second
    assert first[:2] == [[2.0, 2.0], [2.0, 2.0]]  # 4, and 0 of the other rank


def test_a_part_of_a_tensor_that_is_no_dtensor_is_refused_by_name() -> None:
    """The first rank's would be written over the others', which are of another size."""

    def on_rank() -> str:
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4, bias=False)})
        parallelize_module(model, mesh_of(tp=2), {"up": ColwiseParallel()})
        model["part"] = torch.nn.Linear(2, 2 + int(os.environ["RANK"]))
        return said_by(lambda: Accelerator(cpu=True).prepare(model))

    for words in run_on_ranks(on_rank, 2):
        assert "'part.weight', which is no DTensor, differs in name, shape or dtype between ranks" in words


# -- more than one Accelerator, and none of its models ----------------------------------------------------------


def test_a_model_that_another_accelerator_prepared_is_adopted_by_the_second_too() -> None:
    """Shares of the data are those of its mesh, and it isn't placed again."""

    def on_rank() -> list[tuple[str, int]]:
        model, found = sharded(tp, 2), []
        for _ in range(2):
            run = Accelerator(cpu=True)
            assert run.prepare(model) is model
            found.append((type(run.strategy).__name__, run.mesh.data_share().count))
        run = Accelerator(cpu=True)
        run.prepare_model(model)
        return [*found, (type(run.strategy).__name__, run.mesh.data_share().count)]

    assert run_on_ranks(on_rank, 2) == [[("Adopted", 1)] * 3] * 2


def test_free_memory_ends_an_adoption() -> None:
    """A plain model is replicated, and one on another mesh is taken."""

    def on_rank() -> list[tuple[str, int]]:
        run, found = Accelerator(cpu=True), []
        for model in (sharded(tp, 2), torch.nn.Linear(2, 2), sharded(fsdp, 2)):
            run.prepare(model)
            found.append((type(run.strategy).__name__, run.mesh.data_share().count))
            run.free_memory()
        return found

    plain = run_on_ranks(lambda: type(Accelerator(cpu=True).strategy).__name__, 2)[0]
    assert run_on_ranks(on_rank, 2) == [[("Adopted", 1), (plain, 2), ("Adopted", 2)]] * 2


def test_an_optimizer_that_was_prepared_before_its_sharded_model_gets_its_step_hooks() -> None:
    """Once: AdamW updates parameter by parameter where some are sharded, and some are whole."""

    def on_rank() -> list[object]:
        model = sharded(layers_only, 2)
        run = Accelerator(cpu=True)
        optimizer: Any = run.prepare(torch.optim.AdamW(model.parameters()))
        run.prepare(model)
        return [group["foreach"] for group in optimizer.param_groups]

    assert run_on_ranks(on_rank, 2) == [[False]] * 2
