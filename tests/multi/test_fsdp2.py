"""FSDP2 on real ranks: the run of one process, whatever is sharded, offloaded, recomputed or left out."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate import Accelerator
from accelerate.plugins.handlers import TorchDynamoPlugin
from accelerate.plugins.parallelism import ParallelismConfig
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import BLOCKS, Network, assert_same_run, plugin_of, samples, train
from tests.slow import mostly_slow, slow_for
from tests.torch_needed import FSDP2_ON_CPU

pytestmark = FSDP2_ON_CPU
slow = slow_for("many layouts", "meshes")
V2: dict[str, Any] = {"fsdp_version": 2, **BLOCKS}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The run of one process."""
    return run_on_ranks(train, 1)[0]


def every_linear(module: nn.Module, recurse: bool, **_: Any) -> bool:
    """A policy: each linear layer is a unit."""
    return recurse or isinstance(module, nn.Linear)


VARIANTS: dict[str, dict[str, Any]] = {
    "whole model one unit": {"fsdp_version": 2},
    "blocks": V2,
    "by size": {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    "by a function": {"fsdp_version": 2, "auto_wrap_policy": every_linear},
    "no resharding": {**V2, "reshard_after_forward": False},
    "offloaded": {**V2, "cpu_offload": True},
    "recomputed": {**V2, "activation_checkpointing": True},
    "recomputed and offloaded": {**V2, "activation_checkpointing": True, "activation_checkpointing_offload": True},
    "ignored modules": {**V2, "ignored_modules": "layers.1.up"},
}


#: "by size" and more units are in the tests below.
QUICK = ("blocks", "by a function", "offloaded", "recomputed", "ignored modules")


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, QUICK, slow))
def test_losses_norms_and_weights_are_those_of_one_process(name: str, alone: dict[str, Any]) -> None:
    """Whatever the variant."""
    ranks = run_on_ranks(train, 2, VARIANTS[name])
    assert_same_run(ranks[0], alone)
    assert ranks[1]["losses"] == ranks[0]["losses"] and ranks[1]["weights"] == {}


def test_four_ranks_train_as_one(alone: dict[str, Any]) -> None:
    """More ranks than rows of some parameters."""
    assert_same_run(run_on_ranks(train, 4, V2)[0], alone)


@slow
def test_shards_can_be_replicated_over_hosts(alone: dict[str, Any]) -> None:
    """HSDP, two by two: replicas start equal although every rank was seeded differently."""

    def hybrid() -> tuple[dict[str, Any], list[str]]:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        result = train(V2, accelerator={"parallelism_config": config})
        mesh = Accelerator().torch_device_mesh
        return result, list(mesh.mesh_dim_names)

    result, axes = run_on_ranks(hybrid, 4)[0]
    assert axes == ["dp_replicate", "dp_shard"]
    assert_same_run(result, alone)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=slow), "fp16"])
def test_mixed_precision_follows_one_process(precision: str) -> None:
    """With the master weights in float32."""
    reference = run_on_ranks(lambda: train(precision=precision), 1)[0]
    sharded = run_on_ranks(lambda: train(V2, precision=precision), 2)[0]
    assert_same_run(sharded, reference, tolerance=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own doing
@pytest.mark.parametrize("by_region", [False, True])
def test_compiled_models_train_as_one_process(by_region: bool, alone: dict[str, Any]) -> None:
    """The whole model or each block; names in the state dict stay the user's own."""

    def compiled() -> dict[str, Any]:
        dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=by_region)
        return train(V2, accelerator={"dynamo_plugin": dynamo})

    assert_same_run(run_on_ranks(compiled, 2, timeout_seconds=120)[0], alone)


def test_tied_weights_stay_tied() -> None:
    """Also where only rank 0 had the weights."""
    reference = run_on_ranks(lambda: train(tied=True), 1)[0]
    by_size = {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 1}  # each layer a unit
    for options in (V2, by_size):
        assert_same_run(run_on_ranks(functools.partial(train, options, tied=True), 2)[0], reference)
    sent = run_on_ranks(lambda: train({**V2, "cpu_ram_efficient_loading": True}, tied=True, change=_lose), 2)[0]
    assert_same_run(sent, reference)


def _lose(model: nn.Module) -> None:
    """Ranks other than 0 have no weights."""
    if os.environ.get("RANK", "0") != "0":
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))


def _lose_all(model: nn.Module) -> None:
    """Ranks other than 0 have no memory for weights either."""
    if os.environ.get("RANK", "0") != "0":
        model.to("meta")


def test_only_rank_0_needs_weights(alone: dict[str, Any]) -> None:
    """The others may be on the meta device."""
    sent = run_on_ranks(lambda: train({**V2, "cpu_ram_efficient_loading": True}, change=_lose_all), 2)
    assert_same_run(sent[0], alone)


def _freeze_half(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "up" in name:
            parameter.requires_grad = False


def test_frozen_parameters_stay_and_the_rest_trains() -> None:
    """Mixed in one unit, as with adapters."""
    reference = run_on_ranks(lambda: train(change=_freeze_half), 1)[0]
    assert_same_run(run_on_ranks(lambda: train(V2, change=_freeze_half), 2)[0], reference)


def _frozen_base_in_bf16(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "up" in name:
            parameter.requires_grad = False
        parameter.data = parameter.data.to(torch.bfloat16)


def test_trainable_parameters_are_made_float32_and_frozen_ones_are_not() -> None:
    """The adapters of a base model in bf16."""

    def dtypes() -> dict[str, str]:
        run = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin_of(V2))
        model = Network()
        _frozen_base_in_bf16(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = run.prepare(model, optimizer)
        run.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        return {name: str(parameter.dtype) for name, parameter in model.named_parameters()}

    found = run_on_ranks(dtypes, 2)[0]
    assert found["layers.0.up.weight"] == "torch.bfloat16"
    assert found["layers.0.down.weight"] == "torch.float32"


def test_weighted_losses_give_the_true_mean() -> None:
    """Sums and their weights."""
    reference = run_on_ranks(lambda: train(weighted=True), 1)[0]
    sharded = run_on_ranks(lambda: train(V2, weighted=True), 2)[0]
    torch.testing.assert_close(torch.tensor(sharded["norms"]), torch.tensor(reference["norms"]), rtol=1e-5, atol=1e-5)


def test_a_part_of_the_parameters_is_clipped_by_its_own_norm() -> None:
    """Not by that of the whole model, nor of this rank's pieces."""

    def norms(options: dict[str, Any] | None) -> tuple[float, float, float]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(options))
        torch.manual_seed(0)
        model = Network()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.backward(model(samples(4).tensors[0]).square().sum())
        first = float(run.clip_grad_norm_(list(model.parameters())[:3], 0.1))
        again = float(run.clip_grad_norm_(list(model.parameters())[:3], 0.1))
        largest = float(run.clip_grad_norm_(model.parameters(), 1e9, norm_type=float("inf")))
        return first, again, largest

    alone = run_on_ranks(norms, 1, None)[0]
    assert alone[1] == pytest.approx(0.1, rel=1e-4)
    for rank in run_on_ranks(norms, 2, V2):
        assert rank == pytest.approx(alone, rel=1e-4)


def test_no_sync_keeps_gradients_on_the_rank() -> None:
    """Until the last micro-batch of a window."""

    def gradients() -> list[bool]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(V2))
        model = Network()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.ones(2, 8)
        with run.no_sync(model):
            run.backward(model(inputs).sum())
        held = model.head.weight.grad is None
        run.backward(model(inputs).sum())
        return [held, isinstance(model.head.weight.grad, DTensor)]

    assert run_on_ranks(gradients, 2) == [[True, True]] * 2


def test_the_optimizer_trains_the_shards() -> None:
    """The groups and their options are those that were given; the model is the user's own object."""

    def look() -> list[Any]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(V2))
        model = Network(tied=True)
        biases = [p for p in model.parameters() if p.ndim == 1]
        weights = [p for p in model.parameters() if p.ndim == 2]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1)
        prepared, wrapped = run.prepare(model, optimizer)
        mine = {id(parameter) for parameter in prepared.parameters()}
        held = [p for group in wrapped.param_groups for p in group["params"]]
        return [
            prepared is model and run.unwrap_model(prepared) is model,
            all(id(p) in mine and isinstance(p, DTensor) for p in held) and len(held) == len(mine),
            [group["weight_decay"] for group in optimizer.param_groups],
            str(run.distributed_type),
            model.head.weight is model.entrance.weight,
        ]

    assert run_on_ranks(look, 2) == [[True, True, [0.01, 0.0], "DistributedType.FSDP", True]] * 2


def test_state_that_an_optimizer_had_before_goes_along() -> None:
    """A run that was begun without sharding goes on with it."""

    def go_on(options: dict[str, Any] | None) -> list[float]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(options))
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = samples(4).tensors[0]
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = run.prepare(model, optimizer)
        run.backward(model(inputs).square().sum())
        optimizer.step()
        return [float(value.sum()) for value in run.get_state_dict(model).values()]

    assert run_on_ranks(go_on, 2, V2)[0] == pytest.approx(run_on_ranks(go_on, 1, None)[0], rel=1e-4, abs=1e-5)


def test_documented_refusals() -> None:
    """A model without its optimizer, an optimizer without its model, two models at once."""

    def refusals() -> list[str]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(V2))
        one, other = Network(), Network()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        told: list[str] = []
        for objects in ((one,), (optimizer,), (one, other, optimizer)):
            with pytest.raises(ValueError) as refusal:
                run.prepare(*objects)
            told.append(str(refusal.value))
        return told

    first, second, third = run_on_ranks(refusals, 2)[0]
    assert "passed together" in first and "passed together" in second and "Only one model" in third


def test_two_models_are_prepared_one_after_the_other() -> None:
    """Each with its optimizer; a third only to evaluate."""

    def both() -> list[bool]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(V2))
        pairs = []
        for _ in range(2):
            model = Network()
            pairs.append(run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        judge = run.prepare_model(Network(), evaluation_mode=True)
        moved = []
        for model, optimizer in pairs:
            before = model.head.weight.to_local().clone()
            run.backward((model(torch.ones(2, 8)) - judge(torch.ones(2, 8)).detach()).square().sum())
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            moved.append(not torch.equal(before, model.head.weight.to_local()))
        return moved

    assert run_on_ranks(both, 2)[0] == [True, True]


def test_evaluation_and_methods_beside_forward_see_whole_parameters() -> None:
    """`generate` is prepared as `forward` is."""

    class Speaker(Network):
        def generate(self, inputs: torch.Tensor) -> torch.Tensor:
            """The likeliest class, computed from a parameter directly."""
            return (self.entrance(inputs) @ self.head.weight.T).argmax(-1)

    def speak() -> list[Any]:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of({"fsdp_version": 2}))
        torch.manual_seed(0)
        model = Speaker()
        inputs = samples(8).tensors[0]
        with torch.no_grad():
            expected = model.generate(inputs).tolist(), model(inputs).sum().item()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        with torch.no_grad():
            found = model.generate(inputs).tolist(), model(inputs).sum().item()
        return [found[0] == expected[0], found[1] == pytest.approx(expected[1], abs=1e-5)]

    assert run_on_ranks(speak, 2) == [[True, True]] * 2


# -- checkpoints -----------------------------------------------------------------------------------------------


def begin(options: dict[str, Any] | None) -> tuple[Accelerator, Any, Any]:
    """A run that can be saved."""
    run = Accelerator(cpu=True, fsdp_plugin=plugin_of(options))
    torch.manual_seed(0)
    model = Network(tied=True)
    decayed, plain = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], lr=0.01)
    return run, *run.prepare(model, optimizer)


def steps(run: Accelerator, model: Any, optimizer: Any, count: int = 3) -> list[float]:
    """Norms of some updates on the same samples."""
    norms: list[float] = []
    for _ in range(count):
        run.backward(model(samples(8).tensors[0]).square().mean())
        norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def save(options: dict[str, Any] | None, folder: str) -> tuple[list[str], list[float]]:
    """The files, and the norms of the updates after them."""
    run, model, optimizer = begin(options)
    steps(run, model, optimizer)
    run.save_state(folder)
    return sorted(os.listdir(folder)), steps(run, model, optimizer)


def resume(options: dict[str, Any] | None, folder: str) -> list[float]:
    """The norms of the updates after loading."""
    run, model, optimizer = begin(options)
    run.load_state(folder)
    return steps(run, model, optimizer)


FORMS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "shards": (V2, 2),
    "whole": ({**V2, "state_dict_type": "FULL_STATE_DICT"}, 2),
    "one process": (None, 1),
}
READERS: dict[str, tuple[dict[str, Any] | None, int]] = {**FORMS, "four ranks": (V2, 4), "replicas": (None, 2)}


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["shards"], slow))
def test_a_checkpoint_loads_under_every_strategy_and_rank_count(form: str, tmp_path: Path) -> None:
    """The updates after it are the same ones."""
    options, num_ranks = FORMS[form]
    files, expected = run_on_ranks(save, num_ranks, options, str(tmp_path / "saved"))[0]
    assert ("pytorch_model_fsdp_0" in files and "optimizer_0" in files) == (form == "shards")
    for name, (other, count) in READERS.items():
        found = run_on_ranks(resume, count, other, str(tmp_path / "saved"))[0]
        assert found == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_documented_functions_save_and_load(kind: str, tmp_path: Path) -> None:
    """As libraries call them, with the documented names on disk."""
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    options = {**V2, "state_dict_type": kind}

    def there_and_back() -> tuple[list[str], list[float], list[float]]:
        run, model, optimizer = begin(options)
        plugin = run.state.fsdp_plugin
        steps(run, model, optimizer)
        save_fsdp_model(plugin, run, model, str(tmp_path))
        save_fsdp_optimizer(plugin, run, optimizer, model, str(tmp_path))
        files = sorted(os.listdir(tmp_path))
        expected = steps(run, model, optimizer)
        load_fsdp_model(plugin, run, model, str(tmp_path))
        load_fsdp_optimizer(plugin, run, optimizer, model, str(tmp_path))
        return files, expected, steps(run, model, optimizer)

    files, expected, found = run_on_ranks(there_and_back, 2)[0]
    assert found == pytest.approx(expected, rel=1e-4)
    names = {"FULL_STATE_DICT": ["optimizer.bin", "pytorch_model_fsdp.bin"]}
    assert files == names.get(kind, ["optimizer_0", "pytorch_model_fsdp_0"])


def test_weights_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    """By name."""

    def go() -> None:
        run, _, _ = begin(V2)
        run.save_state(str(tmp_path / "saved"))
        run.free_memory()
        other = nn.Sequential(nn.Linear(8, 8))
        run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        run.load_state(str(tmp_path / "saved"))

    with pytest.raises(RankFailed, match=r"0\.weight"):
        run_on_ranks(go, 2)


def test_a_setting_from_the_launcher_is_enough(alone: dict[str, Any]) -> None:
    """No plugin in the script."""
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    }
    assert_same_run(run_on_ranks(train, 2, environment=environment)[0], alone)


def test_functools_partial_of_no_sync_is_usable() -> None:
    """As transformers holds it."""

    def go() -> bool:
        run, model, _ = begin(V2)
        with functools.partial(run.no_sync, model=model)():
            run.backward(model(torch.ones(1, 8)).sum())
        return model.head.weight.grad is None

    assert run_on_ranks(go, 2) == [True, True]
