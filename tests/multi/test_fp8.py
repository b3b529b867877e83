"""fp8 by torchao for real: the same numbers, bit for bit, as torch and torchao without us, on one rank and on two."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from accelerate import Accelerator
from accelerate.errors import PreparationError
from accelerate.plugins.fp8 import AORecipeKwargs
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.fp8_models import Blocks, batches, float8, train_plainly
from tests.ranks import run_on_ranks

BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block"}
NUM_UPDATES = 6


def recipe(**changes: Any) -> AORecipeKwargs:
    """torchao's arithmetic as any CPU can do it."""
    return AORecipeKwargs(config=float8().Float8LinearConfig(emulate=True, **changes))


def train(
    fsdp: dict[str, Any] | None = None, bias: bool = True, max_norm: float = 1.0, **changes: Any
) -> dict[str, Any]:
    """Losses, gradient norms and final weights of a run in fp8, prepared by us."""
    plugin = None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp)
    run = Accelerator(cpu=True, mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe(**changes)])
    torch.manual_seed(0)
    model = Blocks(bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    losses, norms = [], []
    for inputs, targets in batches(NUM_UPDATES, run.process_index, run.num_processes):
        loss = nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        norms.append(float(run.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    report = run.conversions[-1]
    assert [module.name for module in report.converted] == [
        name for name, module in Blocks().named_modules() if isinstance(module, nn.Linear)
    ][1:-1]
    weights = {name: value.tolist() for name, value in run.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def plainly(wrap: Callable[[nn.Module], nn.Module] | None = None) -> dict[str, Any]:
    """The same without us: torch, torchao, and what ``wrap`` makes of the model."""
    return train_plainly(NUM_UPDATES, wrap)


def replicated(model: nn.Module) -> nn.Module:
    """torch's own replica."""
    return nn.parallel.DistributedDataParallel(model)


def test_one_rank_trains_as_torchao_does() -> None:
    assert train() == plainly()


def test_two_replicas_train_as_torchao_under_ddp_does() -> None:
    ours = run_on_ranks(train)
    theirs = run_on_ranks(plainly, 2, replicated)
    assert ours == theirs


def _sharded_plainly(gathers_in_fp8: bool) -> dict[str, Any]:
    return train_plainly(NUM_UPDATES, "fully_shard", gathers_in_fp8=gathers_in_fp8, max_norm=math.inf)


@pytest.mark.parametrize("gathers_in_fp8", [False, True])
def test_two_shards_train_as_torchao_under_fully_shard_does(gathers_in_fp8: bool) -> None:
    options = {"fsdp_version": 2, **BLOCKS}

    def run() -> dict[str, Any]:
        # Not clipped: the norm of shards is summed in another order than torch's, and the last bit would differ.
        return train(options, max_norm=math.inf, enable_fsdp_float8_all_gather=gathers_in_fp8)

    ours = run_on_ranks(run)
    theirs = run_on_ranks(_sharded_plainly, 2, gathers_in_fp8)
    for rank in (0, 1):
        assert ours[rank]["losses"] == theirs[rank]["losses"]
        assert ours[rank]["norms"] == pytest.approx(theirs[rank]["norms"], rel=1e-6)
    assert ours[0]["weights"] == theirs[0]["weights"]


def test_layers_that_came_sharded_are_refused_by_name_unless_they_were_converted_before() -> None:
    """What gathers their weights belongs to the layers that were there when they were sharded."""

    def run() -> tuple[str, str, bool]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe()])
        model: Any = Blocks()
        said: list[str] = []
        fully_shard(model, mesh=mesh)
        for prepare in (run.prepare, run.prepare_model):
            with pytest.raises(PreparationError) as caught:
                prepare(model)
            said.append(str(caught.value))
        assert not any(isinstance(module, float8().float8_linear.Float8Linear) for module in model.modules())
        torch.manual_seed(0)
        model = Blocks()
        float8().convert_to_float8_training(
            model, module_filter_fn=lambda _, name: name.startswith("layers"), config=recipe().config
        )
        fully_shard(model, mesh=mesh)
        model = run.prepare(model)
        inputs, targets = next(batches(1, run.process_index, 2))
        run.backward(nn.functional.mse_loss(model(inputs), targets))
        return said[0], said[1], all(parameter.grad is not None for parameter in model.parameters())

    for first, second, has_trained in run_on_ranks(run):
        assert first == second and has_trained
        assert "'fp8'" in first and "came sharded" in first and "convert_to_float8_training(model) before" in first


def test_units_whose_parameters_are_all_8_bit_travel_as_bytes() -> None:
    """gloo sends no 8-bit floats."""

    def run(gathers_in_fp8: bool) -> dict[str, Any]:
        sharding = {"fsdp_version": 2, **BLOCKS}
        return train(sharding, bias=False, max_norm=math.inf, enable_fsdp_float8_all_gather=gathers_in_fp8)

    in_bytes, in_bf16 = run_on_ranks(run, 2, True), run_on_ranks(run, 2, False)
    assert in_bytes[0]["losses"] == pytest.approx(in_bf16[0]["losses"], rel=1e-2)


def test_flat_shards_train_in_fp8() -> None:
    flat = run_on_ranks(lambda: train({"fsdp_version": 1, "use_orig_params": True, **BLOCKS}))
    assert flat[0]["losses"] == pytest.approx(train()["losses"], rel=2e-2)


def test_a_state_of_shards_in_fp8_goes_on_in_bf16_on_one_rank(tmp_path: Path) -> None:
    """Saved and loaded under another strategy and precision; torchao's weights are plain tensors in the file."""

    def save() -> list[float]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **BLOCKS)
        run = Accelerator(cpu=True, mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe()])
        model, _ = trained(run)
        run.save_state(tmp_path)
        return output(model)

    saved = run_on_ranks(save)[0]
    run = Accelerator(cpu=True)
    model, _ = trained(run)
    run.load_state(tmp_path)
    assert output(model) == pytest.approx(saved, abs=0.2)


def trained(run: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A prepared model and its optimizer after one update."""
    torch.manual_seed(0)
    model: nn.Module = Blocks()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    inputs, targets = next(batches(1, run.process_index, run.num_processes))
    run.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def output(model: nn.Module) -> list[float]:
    """What the model says of a fixed input."""
    with torch.no_grad():
        return model(torch.ones(1, 16)).flatten().tolist()
