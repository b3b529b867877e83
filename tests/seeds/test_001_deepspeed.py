"""The blog post that introduced the library: DeepSpeed, which it promises (and spells "deepseed")."""

from __future__ import annotations

import os

import pytest

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.errors import MissingDependency
from accelerate.optional import is_deepspeed_available
from tests.ranks import run_on_ranks
from tests.seeds.two_epochs import losses_of

row = pytest.mark.row
HAS_DEEPSPEED = is_deepspeed_available()

if HAS_DEEPSPEED:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401 - once, before ranks are forked


def replicas() -> tuple[str, list[float]]:
    accelerator = Accelerator(cpu=True)
    return accelerator.distributed_type.value, losses_of(accelerator)


def zero(stage: int) -> tuple[str, list[float]]:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1e6))
    return accelerator.distributed_type.value, losses_of(accelerator)


@row("001-05")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed isn't installed: make deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_like_replicas(stage: int) -> None:
    for (kind, ours), (_, theirs) in zip(run_on_ranks(zero, 2, stage), run_on_ranks(replicas, 2), strict=True):
        assert kind == "DEEPSPEED" and ours == pytest.approx(theirs, abs=1e-6)


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
