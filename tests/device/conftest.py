"""Builds the imitated accelerator once, before the first test; no test runs where it can't be built."""

from __future__ import annotations

import pytest

from tests.device import sim
from tests.device.sim import build

REASON = build.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON is not None:
        for item in items:
            if "tests/device" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the device known to this process, which never uses it: tests use it in ranks that are forked from here.

    Here, and not in a fixture, because a first build may take longer than a test.
    """
    if REASON is None and any("tests/device" in str(item.path) for item in session.items):
        sim.start()
