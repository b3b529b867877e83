"""Rows that later work has to fulfil are expected to fail, and must say so: one that passes leaves pending.txt."""

from __future__ import annotations

import dataclasses

import pytest

from tests.seeds.tools import pending


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    waiting = pending()
    for item in items:
        for mark in item.iter_markers("row"):
            late = [row for row in mark.args if row in waiting]
            if late:
                reason = "; ".join(f"{row}: {waiting[row]}" for row in late)
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device that is not the CPU and is everywhere: torch's `meta`, as one more row of the table."""
    from accelerate.devices import table as devices

    row = dataclasses.replace(devices.CPU, name="meta", available="torch:is_grad_enabled")
    monkeypatch.setattr(devices, "KINDS", (*devices.KINDS, row))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    return "meta"
