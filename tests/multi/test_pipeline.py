"""Pipelines on real ranks: the run of one process, however the layers are dealt and whoever works first."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, GradScalerKwargs
from accelerate.parallel.gradient_norm import local_tensor
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig, PipelineParallelConfig
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import BLOCKS, Block, Network, assert_same_run, samples, train
from tests.slow import mostly_slow, slow_for
from tests.torch_needed import needs_torch

slow = slow_for("many meshes", "meshes")


def as_sequence() -> nn.Module:
    """Blocks in a row."""
    return nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block(), nn.Linear(8, 8))


class Turned(nn.Module):
    """A block whose output isn't contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the values, transposed."""
        return self.linear(inputs).transpose(1, 2)


def turning() -> nn.Module:
    """Blocks in a row that hand on what isn't contiguous."""
    return nn.Sequential(nn.Unflatten(1, (4, 2)), Turned(), nn.Linear(4, 2), Turned(), nn.Flatten(), nn.Linear(16, 8))


class Widened(nn.Module):
    """Float64 of what comes in."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the values in double precision."""
        return inputs.double()


def in_float64() -> nn.Module:
    """Blocks in a row that compute in float64."""
    return nn.Sequential(Widened(), *as_sequence().double())


class Branching(Network):
    """A forward that asks its inputs, and so can only be traced."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of eight classes."""
        return super().forward(inputs if inputs.shape[-1] == 8 else inputs[..., :8])


def accelerator_of(
    num_ranks: int, pipeline: dict[str, Any] | None, precision: str = "no", replicas: int = 1, steps: int = 2
) -> Accelerator:
    """Over all processes."""
    if num_ranks == 1:
        return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)
    config = ParallelismConfig(
        pp_size=num_ranks // replicas, dp_replicate_size=replicas, pp_handler=PipelineParallelConfig(**pipeline or {})
    )
    return Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps, parallelism_config=config
    )


def _train(
    num_ranks: int,
    pipeline: dict[str, Any] | None = None,
    *,
    build: Any = Network,
    precision: str = "no",
    replicas: int = 1,
    batch_size: int = 8,
) -> dict[str, Any]:
    run = accelerator_of(num_ranks, pipeline, precision, replicas)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95 ** (count // replicas))
    loader = DataLoader(samples(), batch_size=batch_size // replicas)
    model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader)
    losses: list[float] = []
    norms: list[float] = []
    for inputs, classes in loader:
        with run.accumulate(model):
            loss = run.pipeline_step(model, (inputs, classes), nn.functional.cross_entropy)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    model.eval()
    with torch.no_grad():
        outputs = model(samples(6).tensors[0])
    weights = run.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "outputs": outputs.tolist(),
        "own": [name for name, _ in model.named_parameters()],
    }


@functools.cache
def _alone(**options: Any) -> dict[str, Any]:
    return run_on_ranks(functools.partial(_train, 1, **options), 1)[0]


def _compare(ranks: list[dict[str, Any]], alone: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert_same_run(ranks[0], alone, tolerance)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"] and rank["norms"] == ranks[0]["norms"]
        torch.testing.assert_close(
            torch.tensor(rank["outputs"]), torch.tensor(alone["outputs"]), rtol=10 * tolerance, atol=10 * tolerance
        )
    assert [rank["weights"] != {} for rank in ranks] == [True, *[False] * (len(ranks) - 1)]


TRACED = {"example_inputs": torch.zeros(4, 8)}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": {"schedule": "gpipe"}, "build": as_sequence},
    "1f1b": {"pipeline": {"schedule": "1f1b", "num_micro_batches": 4}, "build": as_sequence},
    "interleaved": {"pipeline": {"schedule": "interleaved"}, "build": as_sequence},
    "followed": {"pipeline": {}, "build": Network},
    "traced": {"pipeline": TRACED, "build": Branching},
    "traced where asked": {"pipeline": {**TRACED, "split_points": "head"}, "build": Branching},
    "tied": {"pipeline": TRACED, "build": functools.partial(Network, tied=True)},
    "transposed": {"pipeline": {"split_points": ["2"]}, "build": turning},
    "asked for": {"pipeline": {"split_points": ["4"]}, "build": as_sequence},
}


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, ["1f1b", "followed", "tied", "transposed"], slow))
def test_losses_norms_and_weights_are_those_of_one_process(name: str) -> None:
    variant = VARIANTS[name]
    _compare(run_on_ranks(functools.partial(_train, 2, **variant), 2), _alone(build=variant["build"]))


def test_each_rank_has_its_own_layers_only() -> None:
    first, second = run_on_ranks(functools.partial(_train, 2, **VARIANTS["asked for"]), 2)
    assert second["own"] == ["4.weight", "4.bias"]
    assert not set(first["own"]) & set(second["own"])


def test_four_stages_train_as_one_process() -> None:
    _compare(run_on_ranks(functools.partial(_train, 4, build=as_sequence), 4), _alone(build=as_sequence))


@pytest.mark.parametrize("name", ["1f1b", pytest.param("traced", marks=slow)])
def test_replicas_of_a_pipeline_train_as_one_process(name: str) -> None:
    variant = VARIANTS[name]
    _compare(run_on_ranks(functools.partial(_train, 4, replicas=2, **variant), 4), _alone(build=variant["build"]))


def test_in_float64_losses_differ_by_the_order_of_sums_only() -> None:
    ranks = run_on_ranks(functools.partial(_train, 2, {"split_points": ["3"]}, build=in_float64), 2)
    _compare(ranks, _alone(build=in_float64), 1e-13)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=slow), "fp16"])
def test_half_precision_trains_as_one_process(precision: str) -> None:
    ranks = run_on_ranks(functools.partial(_train, 2, precision=precision, **VARIANTS["1f1b"]), 2)
    _compare(ranks, _alone(build=as_sequence, precision=precision), 1e-2)


# ------------------------------------------------------------------------------------------------- shards

SHARDS = {"fsdp_version": 2, **BLOCKS}


def in_shards(
    precision: str = "no", steps: int = 1, fsdp: dict[str, Any] | None = None, **pipeline: Any
) -> Accelerator:
    """Two stages, each over two ranks."""
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
        fsdp_plugin=FullyShardedDataParallelPlugin(**SHARDS, **fsdp or {}),
        parallelism_config=ParallelismConfig(
            pp_size=2, dp_shard_size=2, pp_handler=PipelineParallelConfig(num_micro_batches=2, **pipeline)
        ),
    )


def _in_shards(build: Any, fsdp: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Any]:
    """The run of :func:`_train` by two stages in shards."""
    run = in_shards(steps=2, fsdp=fsdp, **pipeline)
    torch.manual_seed(run.process_index if fsdp.get("cpu_ram_efficient_loading") else 0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95 ** (count // 2))
    model, optimizer, schedule, loader = run.prepare(
        model, optimizer, schedule, DataLoader(samples(), batch_size=8 // run.mesh.data_share().count)
    )
    losses: list[float] = []
    norms: list[float] = []
    for inputs, classes in loader:
        with run.accumulate(model):
            loss = run.pipeline_step(model, (inputs, classes), nn.functional.cross_entropy)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss, "mean")))
    weights = run.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": {name: value.tolist() for name, value in weights.items()}}


@slow
@pytest.mark.parametrize("build", [as_sequence, functools.partial(Network, tied=True), Branching])
@pytest.mark.parametrize(
    "fsdp",
    [{}, {"cpu_ram_efficient_loading": True}, {"activation_checkpointing": True}, {"reshard_after_forward": False}],
    ids=str,
)
def test_stages_in_shards_train_as_one_process(build: Any, fsdp: dict[str, Any]) -> None:
    """With weights from the first rank alone, activations computed again, and of a model that was traced."""
    pipeline = {"example_inputs": torch.zeros(2, 8)} if build is Branching else {}
    found = run_on_ranks(functools.partial(_in_shards, build, fsdp, pipeline), 4)
    assert_same_run(found[0], _alone(build=build))


#: What FSDP gathers and reduces with: in torch since 2.13, and before.
COLLECTIVES = (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor"))


def _counted(function: Any, counts: list[list[int]], number: int) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1][number] += 1
        return function(*args, **kwargs)

    return counted


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param({}, id="once"),
        pytest.param({"reshard_between_parts": True}, id="for each part", marks=slow),
        pytest.param({"schedule": "interleaved"}, id="interleaved", marks=slow),
    ],
)
def test_shards_are_gathered_once_a_step_and_gradients_reduced_once_an_update(pipeline: dict[str, Any]) -> None:
    """Or gathered for each part of a batch, where that was asked for."""

    def on_rank() -> list[list[int]]:
        counts: list[list[int]] = []
        for number, names in enumerate(COLLECTIVES):
            name = next(name for name in names if callable(getattr(dist, name, None)))
            setattr(dist, name, _counted(getattr(dist, name), counts, number))
        run = in_shards(steps=2, **pipeline)
        model = as_sequence()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            counts.append([0, 0])
            with run.accumulate(model):
                run.pipeline_step(model, (torch.ones(4, 8), torch.zeros(4).long()), nn.functional.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
        return counts

    first, *_ = run_on_ranks(on_rank, 4)
    units = first[-1][1]  # each unit reduces once
    assert units > 1
    assert [reduced for _, reduced in first] == [0, units, 0, units]
    if "reshard_between_parts" in pipeline:
        assert all(gathered > units for gathered, _ in first)
    else:
        assert all(gathered == units for gathered, _ in first)


def _resumed(folder: str, resume: bool, stop: int) -> list[float]:
    """Losses of one pass, saved after three batches; the rest of them, when resumed."""
    run = in_shards()
    torch.manual_seed(int(resume))
    model = as_sequence()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(48), batch_size=4, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    if resume:
        run.load_state(folder)
    losses: list[float] = []
    for number, (inputs, classes) in enumerate(loader, start=3 if resume else 0):
        loss = run.pipeline_step(model, (inputs, classes), nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss, "mean")))
        if not resume and number == 2:
            run.save_state(folder)
        if number + 1 == stop:
            break
    return losses


def test_stages_in_shards_go_on_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    """Bit by bit, with the samples that were left."""
    whole = run_on_ranks(functools.partial(_resumed, str(tmp_path / "state"), False, 6), 4)[0]
    rest = run_on_ranks(functools.partial(_resumed, str(tmp_path / "state"), True, 6), 4)[0]
    assert len(whole) == 6 and rest == whole[3:]
    assert (tmp_path / "state" / "pytorch_model_fsdp_0").is_dir()


@pytest.mark.parametrize("shards", [False, True])
def test_an_overflow_in_one_stage_skips_the_update_in_all(shards: bool) -> None:
    """And halves the scale everywhere."""

    def on_rank() -> list[Any]:
        if shards:
            run = in_shards("fp16")
        else:
            run = accelerator_of(2, None, "fp16", steps=1)
        torch.manual_seed(0)  # some weights overflow in the first step already
        model = as_sequence()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found: list[Any] = []
        for number in range(3):
            run.pipeline_step(model, (torch.ones(4, 8), torch.zeros(4).long()), nn.functional.cross_entropy)
            if number == 1 and run.process_index == run.num_processes - 1:
                gradient: Any = own[-1].grad
                (gradient.to_local() if shards else gradient).fill_(float("inf"))
            before = [local_tensor(parameter.detach()).clone() for parameter in own]
            optimizer.step()
            moved = [
                not torch.equal(old, local_tensor(parameter.detach()))
                for old, parameter in zip(before, own, strict=True)
            ]
            found.append((optimizer.step_was_skipped, any(moved), run.scaler.get_scale()))
            optimizer.zero_grad()
        return found

    ranks = run_on_ranks(on_rank, 4 if shards else 2)
    assert all(rank == ranks[0] for rank in ranks)
    assert [row[:2] for row in ranks[0]] == [(False, True), (True, False), (False, True)]
    assert ranks[0][2][2] == ranks[0][0][2] / 2


# ------------------------------------------------------------------------------------------- checkpoints


def _saved_half_way(folder: str, num_ranks: int, stop: int, resume: bool, **options: Any) -> dict[str, Any]:
    """The updates from a half on, with the state of the first half from ``folder``."""
    options = dict(options)
    run = accelerator_of(num_ranks, options.pop("pipeline", None), steps=1, **options)
    torch.manual_seed(int(resume))  # other weights than those that were saved
    model = as_sequence()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    inputs, classes = samples().tensors
    if resume:
        run.load_state(folder)
    share = slice(0, 8) if run.mesh.data_share().count == 1 else slice(run.mesh.data_share().index * 4, None)
    for number in range(5 if resume else 0, stop):
        rows = slice(number * 8, number * 8 + 8)
        x, y = inputs[rows][share], classes[rows][share]
        if run.mesh.data_share().count > 1:
            x, y = x[:4], y[:4]
        run.pipeline_step(model, (x, y), nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    if not resume and stop == 5:
        run.save_state(folder)
    return {name: value.tolist() for name, value in run.get_state_dict(model).items()}


INTERLEAVED = {"pipeline": {"schedule": "interleaved"}}


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        pytest.param((2, {}), (2, {}), id="itself", marks=slow),
        pytest.param((2, INTERLEAVED), (1, {}), id="into one process"),
        pytest.param((1, {}), (2, {"pipeline": {"split_points": ["1"]}}), id="from one process"),
        pytest.param((2, {}), (4, {"replicas": 2}), id="into replicas", marks=slow),
    ],
)
def test_a_checkpoint_loads_under_any_number_of_stages(
    saves: tuple[int, dict[str, Any]], loads: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    whole = run_on_ranks(functools.partial(_saved_half_way, str(tmp_path / "none"), 1, 10, False), 1)[0]
    run_on_ranks(functools.partial(_saved_half_way, str(tmp_path / "half"), saves[0], 5, False, **saves[1]), saves[0])
    resumed = run_on_ranks(
        functools.partial(_saved_half_way, str(tmp_path / "half"), loads[0], 10, True, **loads[1]), loads[0]
    )[0]
    assert list(resumed) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(torch.tensor(resumed[name]), torch.tensor(value), rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------------------------------------- refusals


def _refused(case: str) -> None:
    if case == "backward":
        run = accelerator_of(2, None)
        run.prepare(as_sequence())
        run.backward(torch.zeros((), requires_grad=True))
    elif case == "gradients":
        accelerator_of(2, None).prepare(as_sequence())(torch.zeros(4, 8))
    elif case == "no example":
        accelerator_of(2, None).prepare(Branching())
    elif case == "name":
        accelerator_of(2, {"split_points": ["nowhere"]}).prepare(as_sequence())
    elif case == "number":
        accelerator_of(2, {"split_points": ["1", "2"]}).prepare(as_sequence())
    elif case == "blocks":
        accelerator_of(2, None).prepare(nn.Sequential(nn.Linear(8, 8)))
    elif case == "shapes":
        run = accelerator_of(2, None)
        model = run.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8)))
        run.pipeline_step(model, (torch.zeros(4, 8), torch.zeros(4).long()), nn.functional.cross_entropy)
    elif case == "inputs":
        run = accelerator_of(2, None)
        run.pipeline_step(run.prepare(as_sequence()), ({"x": 1}, None), nn.functional.cross_entropy)
    elif case == "no optimizer":
        in_shards().prepare(as_sequence())
    elif case == "ignored":
        model = as_sequence()
        in_shards(fsdp={"ignored_modules": "0"}).prepare(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("backward", r"loss = accelerator\.pipeline_step"),
        ("gradients", r"Train with `loss = accelerator\.pipeline_step"),
        ("no example", r"can't be traced symbolically .*example_inputs="),
        ("name", r"no module 'nowhere'"),
        ("number", r"makes 3 stages, but pp_size=2"),
        ("blocks", r"1 blocks, too few for 2 stages"),
        ("shapes", r"Stage 1 of the pipeline can't compute with inputs of shapes"),
        ("inputs", r"inputs of a pipeline are tensors"),
        ("no optimizer", r"without its optimizer.*call prepare\(model, optimizer\) with both"),
        pytest.param(
            *("ignored", r"ignored_modules='0'\) with pp_size=2.*Leave ignored_modules out"),
            marks=needs_torch("2.7", "ignored_modules with FSDP version 2 is refused"),
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(case: str, text: str) -> None:
    with pytest.raises(RankFailed, match=text):
        run_on_ranks(functools.partial(_refused, case), 4 if case in ("no optimizer", "ignored") else 2)


def test_the_same_loop_runs_without_a_pipeline() -> None:
    plain = run_on_ranks(train, 1)[0]
    assert_same_run(_alone(build=Network), plain)


class WithUnused(Network):
    """A network with layers and a buffer that its forward doesn't use, as pretrained heads often are."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.BatchNorm1d(3)


def _state_with_unused(folder: str) -> list[bool]:
    run = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    torch.manual_seed(0)
    model = WithUnused()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, _optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    whole = run.get_state_dict(model)
    run.save_state(folder)
    run.load_state(folder)
    again = run.get_state_dict(model)
    if not run.is_main_process:
        return []
    return [torch.equal(state[name], value) for state in (whole, again) for name, value in expected.items()]


def test_what_no_stage_uses_is_kept(tmp_path: Path) -> None:
    found = run_on_ranks(functools.partial(_state_with_unused, str(tmp_path / "saved")), 2)
    assert found[0] and all(found[0])
