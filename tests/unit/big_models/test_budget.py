from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accelerate.big_models import budget
from accelerate.big_models.budget import get_balanced_memory, get_max_memory, host_memory_available
from accelerate.errors import SettingError


def layers(count: int) -> nn.Module:
    """Return ``count`` layers of 40 bytes."""
    return nn.Sequential(*(nn.Linear(9, 1, device="meta") for _ in range(count)))


def test_text_becomes_bytes_and_devices_come_fastest_first() -> None:
    found = get_max_memory({"disk": "1KB", "cpu": "2GiB", 1: 5, 0: "1MB"})
    assert list(found.items()) == [(0, 10**6), (1, 5), ("cpu", 2 * 2**30), ("disk", 1000)]


def test_only_what_is_given_is_in_a_given_budget() -> None:
    assert get_max_memory({0: 10}) == {0: 10}


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(SettingError, match="'gpu', which is no device"):
        get_max_memory({"gpu": 10})
    with pytest.raises(ValueError):
        get_max_memory({True: 10})


def test_an_index_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        get_max_memory({99: 10})
    assert "device 99" in caplog.text


def test_without_a_budget_the_free_memory_is_measured() -> None:
    found = get_max_memory()
    assert found["cpu"] > 0
    assert list(found)[-1] == "cpu"


def test_host_memory_is_below_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    measured = host_memory_available()
    assert 0 < measured <= psutil.virtual_memory().total
    monkeypatch.setattr(budget, "_meminfo_bytes", lambda field: 0)
    assert abs(host_memory_available() - measured) < 2**30, "the same where only psutil can tell"


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_container_memory", lambda: [1234])
    assert host_memory_available() == 1234


def test_without_accelerators_the_budget_is_unchanged() -> None:
    assert get_balanced_memory(layers(4), {"cpu": 100, "disk": 1000}) == {"cpu": 100, "disk": 1000}


def test_a_single_device_keeps_what_was_given() -> None:
    assert get_balanced_memory(layers(4), {0: 1000, "cpu": 100}) == {0: 1000, "cpu": 100}


def test_all_but_the_last_device_get_an_even_share_and_some_slack() -> None:
    # 6 layers of 40 bytes on 3 devices: 80 each, and 1.25 times the mean layer.
    found = get_balanced_memory(layers(6), {0: 1000, 1: 1000, 2: 1000, "cpu": 1000})
    assert found == {0: 130, 1: 130, 2: 1000, "cpu": 1000}


def test_a_share_never_exceeds_the_limit() -> None:
    assert get_balanced_memory(layers(6), {0: 1000, 1: 50, 2: 1000})[1] == 50


def test_the_slack_covers_the_largest_block_that_is_not_split() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(9, 1), nn.Linear(9, 1)), *layers(4).children())
    found = get_balanced_memory(model, {0: 1000, 1: 1000}, no_split_module_classes=["Sequential"])
    assert found[0] == 120 + int(1.25 * 240), "the model itself is a Sequential, too"


def test_low_zero_gives_the_first_device_only_what_the_others_cannot_take() -> None:
    found = get_balanced_memory(layers(6), {0: 1000, 1: 100, 2: 100}, low_zero=True)
    assert found == {0: 40, 1: 100, 2: 100}
    assert get_balanced_memory(layers(6), {0: 1000, 1: 1000, 2: 1000}, low_zero=True)[0] == 0


def test_a_smaller_dtype_makes_smaller_shares() -> None:
    assert get_balanced_memory(layers(6), {0: 1000, 1: 1000}, dtype=torch.float16)[0] == 60 + 25
