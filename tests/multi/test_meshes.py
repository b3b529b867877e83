"""Every mesh trains as one process does, and what one saves every other can load.

The fast part has each kind of parallelism once; ``RUN_SLOW=1`` (``make meshes``) has them all, by everything.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.errors import PreparationError, SettingError
from accelerate.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from tests.mesh_runs import (
    BATCH,
    LENGTH,
    NUM_UPDATES,
    PLAN,
    SEQUENCE_PLAN,
    V2,
    LanguageModel,
    accelerator,
    prepared,
    samples,
    second_pass,
    steps,
    train,
)
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import assert_same_run
from tests.slow import IS_SLOW, slow_for

# torch, of an output that is a view, under tensor parallelism
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

V1: dict[str, Any] = {**V2, "fsdp_version": 1, "use_orig_params": True}
RING = {"communication": "alltoall"}
FOUR_STAGES = {"split_points": ["layers.0", "layers.1", "norm"]}
INTERLEAVED = {"schedule": "interleaved", **FOUR_STAGES}

#: name -> (ranks, arguments of train)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "ddp on four": (4, {}),
    "fsdp1": (2, {"fsdp": V1}),
    "fsdp1 on four": (4, {"fsdp": V1}),
    "fsdp2": (2, {"fsdp": V2}),
    "fsdp2 on four": (4, {"fsdp": V2}),
    "hsdp": (4, {"fsdp": V2, "degrees": {"dp_replicate": 2, "dp_shard": 2}}),
    "tp": (2, {"degrees": {"tp": 2}}),
    "tp on four": (4, {"degrees": {"tp": 4}}),
    "tp, sequences cut between": (2, {"degrees": {"tp": 2}, "plan": SEQUENCE_PLAN}),
    "tp x fsdp": (4, {"fsdp": V2, "degrees": {"tp": 2, "dp_shard": 2}}),
    "tp x fsdp, sequences cut between": (4, {"fsdp": V2, "degrees": {"tp": 2, "dp_shard": 2}, "plan": SEQUENCE_PLAN}),
    "cp": (2, {"fsdp": V2, "degrees": {"cp": 2}}),
    "cp on four": (4, {"fsdp": V2, "degrees": {"cp": 4}}),
    "cp, a ring": (2, {"fsdp": V2, "degrees": {"cp": 2}, **RING}),
    "cp, a ring of four": (4, {"fsdp": V2, "degrees": {"cp": 4}, **RING}),
    "cp x fsdp": (4, {"fsdp": V2, "degrees": {"cp": 2, "dp_shard": 2}}),
    "cp x fsdp, a ring": (4, {"fsdp": V2, "degrees": {"cp": 2, "dp_shard": 2}, **RING}),
    "cp x tp": (4, {"fsdp": V2, "degrees": {"cp": 2, "tp": 2}}),
    "sp": (2, {"degrees": {"sp": 2}}),
    "sp on four": (4, {"degrees": {"sp": 4}}),
    "sp x ddp": (4, {"degrees": {"sp": 2, "dp_replicate": 2}}),
    "sp x fsdp": (4, {"fsdp": V2, "degrees": {"sp": 2, "dp_shard": 2}}),
    "pp": (2, {"degrees": {"pp": 2}}),
    "pp on four": (4, {"degrees": {"pp": 4}, "pipeline": FOUR_STAGES}),
    "pp, interleaved": (2, {"degrees": {"pp": 2}, "pipeline": INTERLEAVED}),
    "pp x ddp": (4, {"degrees": {"pp": 2, "dp_replicate": 2}}),
    "pp x fsdp": (4, {"fsdp": V2, "degrees": {"pp": 2, "dp_shard": 2}}),
    "pp x fsdp, interleaved": (4, {"fsdp": V2, "degrees": {"pp": 2, "dp_shard": 2}, "pipeline": INTERLEAVED}),
    "pp x tp": (4, {"degrees": {"pp": 2, "tp": 2}}),
    "pp x tp, sequences cut between": (4, {"degrees": {"pp": 2, "tp": 2}, "plan": SEQUENCE_PLAN}),
    "pp x hsdp": (8, {"fsdp": V2, "degrees": {"pp": 2, "dp_replicate": 2, "dp_shard": 2}}),
    "pp x fsdp x tp": (8, {"fsdp": V2, "degrees": {"pp": 2, "dp_shard": 2, "tp": 2}}),
}
#: Without the layers that a mixture of experts has instead.
PLAN_OF_MIXTURES = {name: style for name, style in PLAN.items() if name not in ("layers.*.up", "layers.*.down")}
#: The same for a mixture of experts.
MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"fsdp": V2}),
    "ep": (2, {"fsdp": V2, "degrees": {"ep": 2}}),
    "ep on four": (4, {"fsdp": V2, "degrees": {"ep": 4}}),
    "ep x fsdp": (4, {"fsdp": V2, "degrees": {"ep": 2, "dp_shard": 2}}),
    "ep x hsdp": (4, {"fsdp": V2, "degrees": {"ep": 2, "dp_replicate": 2}}),
    "ep x cp": (4, {"fsdp": V2, "degrees": {"ep": 2, "cp": 2}}),
    "ep x tp": (4, {"fsdp": V2, "degrees": {"ep": 2, "tp": 2}, "plan": PLAN_OF_MIXTURES}),
}
FAST = ("tp, sequences cut between", "cp", "cp, a ring", "sp", "pp x fsdp")
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "tied": {"tied": True},
    "weighted": {"weighted": True},
    "not causal": {"causal": False},
    "bf16": {"mixed_precision": "bf16"},
    "float64": {"double": True},
    "experts": {"mixture": True},
}

slow = slow_for("many meshes", "meshes")


@functools.cache
def alone(variant: str = "", updates: int = NUM_UPDATES) -> dict[str, Any]:
    """The run of one process."""
    return run_on_ranks(lambda: train(updates=updates, **VARIANTS[variant]), 1)[0]


def check_same_run(name: str, variant: str) -> None:
    """Losses and norms of every update, and the weights at the end."""
    ranks, arguments = MESHES[name]
    found = run_on_ranks(lambda: train(**arguments, **VARIANTS[variant]), ranks, timeout_seconds=180)
    assert_same_run(found[0], alone(variant), tolerance={"bf16": 1e-2, "float64": 1e-11}.get(variant, 1e-5))
    assert all(other["losses"] == found[0]["losses"] and other["norms"] == found[0]["norms"] for other in found)


@pytest.mark.parametrize("name", FAST)
def test_losses_norms_and_weights_are_those_of_one_process(name: str) -> None:
    """With accumulation, clipping and a schedule."""
    check_same_run(name, "")


def test_in_float64_a_ring_differs_by_the_order_of_sums_only() -> None:
    """The other meshes are in the slow table."""
    check_same_run("cp, a ring", "float64")


@pytest.mark.parametrize("name", ["cp", "sp"])
def test_a_default_device_changes_nothing_where_sequences_are_shared(name: str) -> None:
    """torch then looks up functions by their names, also those that are replaced."""
    ranks, arguments = MESHES[name]

    def with_default_device() -> dict[str, Any]:
        torch.set_default_device("cpu")
        return train(**arguments)

    assert_same_run(run_on_ranks(with_default_device, ranks, timeout_seconds=180)[0], alone(""))


@slow
@pytest.mark.parametrize(("variant", "name"), [*itertools.product([*VARIANTS][:-1], MESHES)])
def test_every_mesh_trains_as_one_process(name: str, variant: str) -> None:
    """Also with tied weights, weighted losses, attention in both directions, in bf16 and in float64."""
    if variant == "tied" and MESHES[name][1].get("plan") is SEQUENCE_PLAN:
        pytest.skip("an embedding and a head that see the sequence cut can't share a weight")
    if variant == "weighted" and "pp" in MESHES[name][1].get("degrees", {}):
        pytest.skip("the loss of a pipeline's step is a mean over samples")
    check_same_run(name, variant)


@pytest.mark.parametrize("name", [*MIXTURES] if IS_SLOW else ["ep x fsdp"])
def test_experts_that_are_dealt_to_ranks_train_as_in_one_process(name: str) -> None:
    """Each rank reads its own samples, and sends tokens to where their experts are."""
    ranks, arguments = MIXTURES[name]
    found = run_on_ranks(lambda: train(**arguments, mixture=True), ranks, timeout_seconds=180)
    assert_same_run(found[0], alone("experts"))


# -- what is saved ----------------------------------------------------------------------------------------------


def save(folder: Path, arguments: dict[str, Any]) -> None:
    """A run of one pass of three updates is saved in ``folder``."""
    run = accelerator(**arguments, scheduler_mode="updates")
    objects = prepared(run, updates=3)
    steps(run, objects)
    run.save_state(str(folder))


def go_on(folder: Path | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The second pass, by a run that has loaded the first (None: that has done it)."""
    run = accelerator(**arguments, scheduler_mode="updates")
    objects = prepared(run, updates=3)
    return second_pass(run, objects, folder)


@functools.cache
def uninterrupted() -> dict[str, Any]:
    """Both passes in one process."""
    return run_on_ranks(lambda: go_on(None, {}), 1)[0]


SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    **{name: MESHES[name] for name in ("ddp", "fsdp1", "fsdp2 on four", "hsdp", "tp", "tp x fsdp", "cp", "sp x ddp")},
    **{name: MESHES[name] for name in ("pp", "pp x fsdp", "pp x tp")},
}


def check_loads(saved: str, loaded: list[str], folder: Path) -> None:
    """What ``saved`` wrote goes on under each of ``loaded``."""
    ranks, arguments = SAVED[saved]
    run_on_ranks(lambda: save(folder, arguments), ranks, timeout_seconds=180)
    for name in loaded:
        ranks, arguments = SAVED[name]
        found = run_on_ranks(lambda arguments=arguments: go_on(folder, arguments), ranks, timeout_seconds=180)
        assert_same_run(found[0], uninterrupted())


def test_the_state_of_a_mesh_of_two_kinds_loads_in_one_process(tmp_path: Path) -> None:
    """Weights, optimizer, schedule and position."""
    check_loads("tp x fsdp", ["one process"], tmp_path / "state")


@slow
@pytest.mark.parametrize("saved", SAVED)
def test_saved_state_loads_under_every_strategy_and_rank_count(saved: str, tmp_path: Path) -> None:
    """All of them from all of them."""
    check_loads(saved, list(SAVED), tmp_path / "state")


# -- what is done with a model ----------------------------------------------------------------------------------


def use(arguments: dict[str, Any]) -> dict[str, Any]:
    """After three updates: evaluation of 21 samples, each once; generation; the user's own model and its state."""
    run = accelerator(**arguments)
    model, *_ = objects = prepared(run, updates=3)
    steps(run, objects)
    model.eval()
    shares = run.mesh.data_share().count
    loader = run.prepare(DataLoader(samples(21), batch_size=BATCH // shares))
    seen: list[torch.Tensor] = []
    mean = run.streaming_mean()
    for words, following in loader:
        places = torch.arange(LENGTH).repeat(len(words), 1)
        with torch.no_grad():
            scores = model(words, places)
        losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="none")
        mean.update(losses.view(len(words), -1).mean(1))
        seen.append(run.gather_for_metrics(scores.argmax(-1)))
    own = run.unwrap_model(model)
    state = run.get_state_dict(model)
    if run.is_main_process():
        fresh = LanguageModel()
        fresh.load_state_dict(state)
    return {
        "predicted": torch.cat(seen).tolist(),
        "mean": mean.sum_and_count(),
        "generated": model.generate(torch.tensor([[1, 2, 3]]), 5).tolist(),
        "own": own is model or isinstance(own, LanguageModel),
        "step": run.optimizer_step_was_skipped,
    }


@functools.cache
def used_alone() -> dict[str, Any]:
    """The same by one process."""
    return run_on_ranks(lambda: use({}), 1)[0]


WHOLE = [name for name in MESHES if "cut between" not in name]  # those take lengths that the ranks divide


@pytest.mark.parametrize("name", WHOLE if IS_SLOW else ["tp x fsdp", "cp"])
def test_evaluation_generation_unwrapping_and_state_are_those_of_one_process(name: str) -> None:
    """On every rank."""
    ranks, arguments = MESHES[name]
    expected = used_alone()
    for found in run_on_ranks(lambda: use(arguments), ranks, timeout_seconds=120):
        assert found["predicted"] == expected["predicted"] and len(found["predicted"]) == 21
        assert found["mean"] == pytest.approx(expected["mean"], rel=1e-5)
        assert (found["generated"], found["own"]) == (expected["generated"], True)


def test_ranks_that_share_layers_draw_the_same_random_numbers_and_start_equal() -> None:
    """Whatever they were seeded with: dropout between cut layers must agree."""

    def on_rank() -> list[float]:
        run = accelerator({"tp": 2})
        torch.manual_seed(run.process_index)
        model = LanguageModel()
        model = run.prepare(model)
        return [float(torch.rand(())), float(model.places.weight.detach().sum())]

    first, second = run_on_ranks(on_rank, 2)
    assert first == second


def test_the_deprecated_spelling_cuts_a_model_by_its_own_plan() -> None:
    """And the documented views know the mesh."""

    def on_rank() -> tuple[Any, ...]:
        with pytest.warns(FutureWarning, match="old spelling"):
            run = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        model = LanguageModel()
        model.tp_plan = PLAN  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        model = run.prepare(model)
        kinds = [type(weight.data).__name__ for weight in (model.head.weight, model.norm.weight)]
        return run.distributed_type.value, run.tensor_parallel_rank, run.context_parallel_rank, kinds

    ranks = run_on_ranks(on_rank, 2)
    assert ranks == [("MULTI_CPU", rank, 0, ["DTensor", "Tensor"]) for rank in (0, 1)]


def test_several_accelerators_have_a_mesh_each() -> None:
    """Whatever the first was made for."""

    def on_rank() -> list[Any]:
        first, second = accelerator({"tp": 2}), accelerator({"cp": 2}, V2)
        names = second.torch_device_mesh.mesh_dim_names
        return [first.mesh.active(), second.mesh.active(), second.context_parallel_rank, names]

    ranks = run_on_ranks(on_rank, 2)
    assert ranks == [[("tp",), ("cp",), rank, ("cp",)] for rank in (0, 1)]


# -- what can't be ----------------------------------------------------------------------------------------------


def refused(function: Callable[[], Any]) -> str:
    """The words with which ``function`` is refused."""
    with pytest.raises((SettingError, PreparationError)) as caught:
        function()
    return str(caught.value)


def test_plans_that_cannot_be_are_refused_with_the_way_out() -> None:
    """Each names what was asked for."""

    def on_rank() -> list[str]:
        said: list[str] = []
        for plan in ({"layers.*.upp": "colwise"}, {"layers.*.up": "column"}, {"head": "colwise"}):
            run = accelerator({"tp": 2}, plan=plan)
            said.append(refused(lambda run=run: run.prepare(LanguageModel(tied=True))))
        run = accelerator({"tp": 2}, plan={"layers.0": "rowwise", "layers.1": "colwise"})
        said.append(refused(lambda: run.prepare(torch.nn.Sequential())))
        odd = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 5)})
        said.append(refused(lambda: accelerator({"tp": 2}, plan={"head": "colwise"}).prepare(odd)))
        run = accelerator({"tp": 2}, plan={})
        run.parallelism_config.tp_handler.plan = None
        said.append(refused(lambda: run.prepare(LanguageModel())))
        loaded = LanguageModel()
        loaded.tp_size = 4  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        loaded.norm.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), run.mesh.over("tp")))
        said.append(refused(lambda: run.prepare(loaded)))
        cut = accelerator({"tp": 2}, plan=SEQUENCE_PLAN).prepare(LanguageModel())
        said.append(refused(lambda: cut(torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None])))
        model = LanguageModel()
        joint = torch.optim.AdamW(model.parameters(), foreach=True)
        said.append(refused(lambda: accelerator({"tp": 2}).prepare(model, joint)))
        return said

    said = run_on_ranks(on_rank, 2)[0]
    expected = (
        "'layers.*.upp' is no module of LanguageModel. Did you mean 'layers.",
        "'column' is no style",
        "share one weight, but are sharded in different ways",
        "'layers.0' is no module of Sequential",
        "doesn't divide its 5",
        "has no plan of how its layers are sharded",
        "was loaded for tp_size=4, but ParallelismConfig says tp_size=2",
        "got one of length 3. Pad it to a multiple of 2",
        "AdamW(foreach=True) updates all parameters at once",
    )
    for words, text in zip(expected, said, strict=True):
        assert words in text


def test_expert_plans_that_cannot_be_are_refused_with_the_way_out() -> None:
    """No plan, no such module, parameters that aren't stacked."""

    def on_rank() -> list[str]:
        said: list[str] = []
        run = accelerator({"ep": 2}, V2)
        model = LanguageModel(mixture=True)
        for plan in ([], ["experts"], ["layers.*"]):
            run.parallelism_config.ep_handler.plan = plan
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            said.append(refused(lambda optimizer=optimizer: run.prepare(model, optimizer)))
        return said

    said = run_on_ranks(on_rank, 2)[0]
    expected = ("doesn't say which of its modules hold experts", "'experts' is no module", "have [4, 16] rows")
    for words, text in zip(expected, said, strict=True):
        assert words in text


def test_what_cannot_be_cut_along_the_sequence_is_refused_with_the_way_out() -> None:
    """Masks, odd lengths, recurrent layers, attention that isn't torch's."""

    def on_rank() -> list[str]:
        said: list[str] = []
        run = accelerator({"sp": 2})
        recurrent = torch.nn.Sequential(torch.nn.LSTM(4, 4))
        said.append(refused(lambda: run.prepare(recurrent)))
        blind = run.prepare(torch.nn.Linear(4, 4))
        words = torch.zeros(2, 4)

        def inside(call: Callable[[], Any], buffer: torch.Tensor = words, dims: Sequence[int] = (1,)) -> None:
            with run.maybe_context_parallel(buffers=[buffer], buffer_seq_dims=list(dims)):
                call()

        said.append(refused(lambda: inside(lambda: blind(torch.zeros(2, 4)))))
        said.append(refused(lambda: inside(lambda: None, torch.zeros(2, 5))))
        said.append(refused(lambda: inside(lambda: None, dims=(1, 1))))
        heads = torch.zeros(1, 2, 4, 4)
        mask = torch.ones(4, 4, dtype=torch.bool)
        attention = torch.nn.functional.scaled_dot_product_attention
        attend = torch.nn.functional
        said.append(refused(lambda: inside(lambda: attend.scaled_dot_product_attention(heads, heads, heads, mask))))
        odd = torch.zeros(1, 3, 4, 4)
        said.append(refused(lambda: inside(lambda: attend.scaled_dot_product_attention(odd, odd, odd))))
        assert attend.scaled_dot_product_attention is attention and words.shape == (2, 4)
        return said

    said = run_on_ranks(on_rank, 2)[0]
    expected = (
        "has LSTM layers",
        "computed no attention by torch.nn.functional.scaled_dot_product_attention",
        "can't be split along dimension 1: sp_size=2 takes sequences whose length is a multiple of 2",
        "`buffer_seq_dims` must have the same number of elements as `buffers`",
        "takes no attn_mask",
        "doesn't divide this model's 3 heads",
    )
    for words, text in zip(expected, said, strict=True):
        assert words in text


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"cp": 2}, "context parallelism needs an FSDP2 plugin"),
        ({"dp_shard": 2}, "shards the model, which takes FSDP2"),
        ({"tp": 2, "sp": 2}, "tp_size=2 beside other axes takes FSDP2"),
        ({"ep": 2}, "ep_size=2 shards experts"),
    ],
    ids=str,
)
def test_axes_without_an_engine_are_refused(degrees: dict[str, int], words: str) -> None:
    """With what to give."""
    with pytest.raises(RankFailed, match=words):
        run_on_ranks(lambda: accelerator(degrees).prepare(torch.nn.Linear(2, 2)), math.prod(degrees.values()))


def test_deepspeeds_sequence_parallelism_takes_deepspeed() -> None:
    """Ours doesn't."""
    with pytest.raises(RankFailed, match="sp_backend='torch', which needs none"):
        run_on_ranks(lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2)), 2)
