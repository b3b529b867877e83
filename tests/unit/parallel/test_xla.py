"""What the strategy of XLA devices asks of torch_xla, by a stand-in; tests/xla trains on the real one (`make xla`)."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import seams
from accelerate.devices import table as devices
from accelerate.distributed.world import World
from accelerate.errors import SettingError
from accelerate.guests.xla import attach
from accelerate.guests.xla.strategy import XlaDevices
from accelerate.parallel import StrategyOptions
from accelerate.parallel.base import Clipping
from accelerate.plugins import Plugins
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import GradientAccumulationPlugin
from accelerate.precision import choose
from accelerate.settings.env import patched, read
from accelerate.settings.labels import DistributedType
from accelerate.training.accumulation import GradientState
from accelerate.training.optimizer import AcceleratedOptimizer

XLA = devices.kind_of("xla")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch_xla's modules as stand-ins; the list says what was asked of them."""
    asked: list[str] = []
    package, runtime = types.ModuleType("torch_xla"), types.ModuleType("torch_xla.runtime")
    model = types.ModuleType("torch_xla.core.xla_model")
    package.sync = lambda: asked.append("sync")  # type: ignore[attr-defined]
    runtime.is_spmd = lambda: False  # type: ignore[attr-defined]
    runtime.device_type = lambda: "TPU"  # type: ignore[attr-defined]
    model.REDUCE_SUM = "sum"  # type: ignore[attr-defined]
    model.broadcast_master_param = lambda model: asked.append("broadcast")  # type: ignore[attr-defined]

    def all_reduce(how: str, gradients: list[torch.Tensor], scale: float) -> None:
        asked.append(f"{how} of {len(gradients)} gradients x {scale}")
        for gradient in gradients:
            gradient.mul_(2 * scale)  # the other process has the same

    model.all_reduce = all_reduce  # type: ignore[attr-defined]
    for module in (package, runtime, model, types.ModuleType("torch_xla.core")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def made(size: int = 2, **plugins: Any) -> tuple[XlaDevices, GradientState]:
    world = World.pretend(size=size, kind=XLA, backend="xla")
    gradient_state = GradientState.create(GradientAccumulationPlugin(num_steps=1))
    return XlaDevices(world, StrategyOptions(plugins=Plugins(**plugins), gradient_state=gradient_state)), gradient_state


def test_it_suits_devices_with_a_runtime_of_their_own() -> None:
    candidate = next(one for one in seams.strategies() if one.name == "XlaDevices")
    assert candidate.load() is XlaDevices
    assert candidate.suits(None, World.pretend(kind=XLA))
    assert not candidate.suits(None, World.pretend(kind=devices.CPU))


def test_gradients_are_summed_once_before_clipping_or_the_step_and_the_step_ends_the_program(calls: list[str]) -> None:
    strategy, gradient_state = made()
    assert strategy.label is DistributedType.XLA
    model = strategy.place_model(nn.Linear(2, 1), choose("no", "cpu"), device_placement=True)
    assert calls == ["broadcast"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.register_step_hooks(optimizer)
    prepared = AcceleratedOptimizer(optimizer, gradient_state=gradient_state)
    for clips in (True, False):
        calls.clear()
        model(torch.ones(1, 2)).sum().backward()
        if clips:
            strategy.clip_grad_norm([*model.parameters()], Clipping(1.0))
        prepared.step()
        prepared.zero_grad()
        assert calls == ["sum of 2 gradients x 0.5", "sync"]


def test_one_process_sums_nothing(calls: list[str]) -> None:
    strategy, _ = made(size=1)
    model = strategy.place_model(nn.Linear(2, 1), choose("no", "cpu"), device_placement=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.register_step_hooks(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    strategy.clip_grad_value([*model.parameters()], 0.1)
    optimizer.step()
    assert calls == ["sync"]


def test_asking_for_a_batch_ends_the_program_of_the_one_before(calls: list[str]) -> None:
    strategy, _ = made()
    loader = types.SimpleNamespace()
    strategy.configure_loader(loader)
    batch = {"inputs": torch.ones(2)}
    assert torch.equal(loader.device_prefetch.receive(loader.device_prefetch.send(batch))["inputs"], batch["inputs"])
    assert calls == ["sync"]


def test_weights_that_are_tied_stay_tied_on_the_device(calls: list[str]) -> None:
    del calls

    class Moves(nn.Sequential):
        """Moving makes new parameters, as it does on XLA devices."""

        def to(self, *args: Any, **kwargs: Any) -> Any:
            for layer in self:
                layer.weight = nn.Parameter(layer.weight.detach().clone())
            return self

    model = Moves(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    placed: Any = made()[0].place_model(model, choose("no", "cpu"), device_placement=True)
    assert placed[1].weight is placed[0].weight


def test_fsdp_in_several_processes_is_refused(calls: list[str]) -> None:
    del calls
    with pytest.raises(SettingError, match=r"one process for all of them, and there are 2\. Start the script"):
        made(fsdp=FullyShardedDataParallelPlugin(fsdp_version=2))


def run_in(label: str) -> Any:
    """Stands for an Accelerator on XLA devices, with mixed precision ``label``."""
    run: Any = nn.Identity()
    run.strategy, run.precision = made()[0], choose(label, "cpu")
    run.world = run.strategy.world
    return run


@pytest.mark.parametrize(("downcast", "switch"), [("false", "XLA_USE_BF16"), ("true", "XLA_DOWNCAST_BF16")])
def test_bf16_on_a_tpu_is_the_devices_own_float(calls: list[str], downcast: str, switch: str) -> None:
    """As documented: --downcast_bf16 makes float64 float32, and without it everything is bfloat16."""
    del calls
    with patched(ACCELERATE_DOWNCAST_BF16=downcast, XLA_USE_BF16=None, XLA_DOWNCAST_BF16=None):
        attach(run_in("no"), None)
        assert read(switch) is None
        run = run_in("bf16")
        attach(run, None)
        assert read(switch) == "1" and not run.precision.is_autocast
        del run
        assert read(switch) is None  # a later Accelerator in full precision computes in float32


def test_bf16_elsewhere_is_autocast(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    del calls
    monkeypatch.setattr(sys.modules["torch_xla.runtime"], "device_type", lambda: "CPU", raising=False)
    run = run_in("bf16")
    with patched(XLA_USE_BF16=None):
        attach(run, None)
        assert run.precision.is_autocast and read("XLA_USE_BF16") is None
