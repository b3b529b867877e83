"""The blog post that introduced the library: DeepSpeed, which it promises (and spells "deepseed")."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.errors import MissingDependency
from accelerate.optional import is_deepspeed_available
from tests.ranks import run_on_ranks

row = pytest.mark.row
HAS_DEEPSPEED = is_deepspeed_available()

if HAS_DEEPSPEED:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401 - once, before ranks are forked


def losses(plugin: DeepSpeedPlugin | None) -> list[float]:
    """Two epochs on this rank."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    seen = []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            seen.append(loss.item())
    return [str(accelerator.distributed_type.value), *seen]  # pyright: ignore[reportReturnType]


def zero(stage: int) -> list[Any]:
    return losses(DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1e6))


@row("001-05")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed isn't installed: make deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_like_replicas(stage: int) -> None:
    for ours, theirs in zip(run_on_ranks(zero, 2, stage), run_on_ranks(losses, 2, None), strict=True):
        assert ours[0] == "DEEPSPEED" and ours[1:] == pytest.approx(theirs[1:], abs=1e-6)


@row("001-05")
def test_configuration_and_environment_are_read_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    document = DeepSpeedPlugin().deepspeed_config
    assert document["zero_optimization"]["stage"] == 3
    assert document["zero_optimization"]["offload_param"]["device"] == "cpu"
    plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": "auto", "zero_optimization": {"stage": 2}})
    plugin.deepspeed_config_process(must_match=False, train_batch_size=16)
    assert plugin.deepspeed_config["train_batch_size"] == 16 and plugin.zero_stage == 2


@row("001-05")
@pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is installed")
@pytest.mark.parametrize("asks", ["argument", "launcher"])
def test_without_it_the_setting_and_the_remedy_are_named(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if asks == "launcher":
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    name = "deepspeed_plugin" if asks == "argument" else "ACCELERATE_USE_DEEPSPEED"
    with pytest.raises(MissingDependency, match=rf"(?s){name}.*pip install"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin() if asks == "argument" else None)
