"""Which precision a label means on a device, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from accelerate.devices import table as devices
from accelerate.distributed.world import join_world
from accelerate.errors import SettingError
from accelerate.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accelerate.precision import choose
from accelerate.precision.choose import get_grad_scaler


@pytest.mark.parametrize(
    ("label", "is_autocast", "has_scaler"), [("no", False, False), ("bf16", True, False), ("fp16", True, True)]
)
def test_a_label_says_what_computes_how(label: str, is_autocast: bool, has_scaler: bool) -> None:
    precision = choose(label, "cpu")
    assert (precision.label, precision.is_autocast, precision.scaler is not None) == (label, is_autocast, has_scaler)


def test_bf16_is_refused_where_the_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(devices.CPU, name="old")
    monkeypatch.setattr(type(old), "supports_bf16", lambda kind: kind.name != "old")
    # The package's function of that name hides the module.
    room = sys.modules["accelerate.precision.choose"]
    monkeypatch.setattr(room, "kind_of", lambda name: old if name == "old" else devices.CPU)
    assert choose("bf16", "cpu").label == "bf16"
    with pytest.raises(SettingError, match=r"old device can't compute in bfloat16.*'fp16' or 'no'"):
        choose("bf16", "old")


def test_fp8_without_a_backend_is_the_bf16_around_it() -> None:
    with choose("fp8", "cpu").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_unknown_words_are_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"'fp61'.*'bf16'"):
        choose("fp61", "cpu")


def test_the_scaler_handler_reaches_the_scaler() -> None:
    scaler = choose("fp16", "cpu", scaler_handler=GradScalerKwargs(init_scale=8.0, growth_interval=3)).scaler
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.is_enabled()) == (8.0, 3, True)
    assert not choose("fp16", "cpu", scaler_handler=GradScalerKwargs(enabled=False)).scaler.is_enabled()


def test_the_autocast_handler_reaches_the_context() -> None:
    handled = choose("bf16", "cpu", autocast_handler=AutocastKwargs(cache_enabled=False)).autocast()
    assert isinstance(handled, torch.autocast) and not handled._cache_enabled


@pytest.mark.parametrize("kwargs", [{}, {"init_scale": 4.0}])
def test_the_documented_scaler_is_real_on_this_device(kwargs: dict[str, Any]) -> None:
    join_world(cpu=True)
    scaler = get_grad_scaler(**kwargs)
    assert scaler.is_enabled() and scaler.get_scale() == kwargs.get("init_scale", 65536.0)
    loss = scaler.scale(torch.ones(1, requires_grad=True))
    assert loss.item() == scaler.get_scale()
