"""The blog post that introduced the library: "and model parallelism", in each of the ways that it came to mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, ParallelismConfig, dispatch_model, infer_auto_device_map, prepare_pippy
from accelerate.errors import MissingDependency
from accelerate.utils import MegatronLMPlugin, TorchTensorParallelConfig
from tests.ranks import run_on_ranks

row = pytest.mark.row


def network() -> nn.Sequential:
    """A little network, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def inputs() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@row("001-07")
def test_a_device_map_spreads_a_model_over_memory_and_disk(tmp_path: Path) -> None:
    model = network()
    expected = model(inputs())
    places = infer_auto_device_map(model, max_memory={"cpu": 1800, "disk": 10_000})
    assert set(places.values()) == {"cpu", "disk"}
    spread = dispatch_model(network(), places, offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(spread(inputs()), expected)


@row("001-07")
def test_tensor_parallel_training_on_two_processes() -> None:
    def train(degree: int) -> list[float]:
        plan = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})  # pyright: ignore[reportCallIssue]
        config = None if degree == 1 else ParallelismConfig(tp_size=degree, tp_handler=plan)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(3):
            loss = model(inputs()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run_on_ranks(train, 1, 1)[0]
    assert run_on_ranks(train, 2, 2) == [pytest.approx(expected, abs=1e-6)] * 2


@row("001-07")
def test_inference_through_a_pipeline_of_two_processes() -> None:
    def answer() -> Any:
        accelerator = Accelerator(cpu=True)
        model = network()
        expected = model(inputs()).tolist()
        model = prepare_pippy(model, example_args=(inputs(),), gather_output=True)
        output = model(inputs()) if accelerator.is_main_process else model()
        return output.tolist(), expected

    for output, expected in run_on_ranks(answer, 2):
        torch.testing.assert_close(torch.tensor(output), torch.tensor(expected))


@row("001-07")
def test_megatrons_plan_is_written_down_and_its_absence_named() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["tensor_model_parallel_size"], arguments["pipeline_model_parallel_size"]) == (2, 2)
    with pytest.raises(MissingDependency, match=r"(?s)megatron_lm_plugin.*NVIDIA/Megatron-LM"):
        Accelerator(cpu=True, megatron_lm_plugin=plugin)
