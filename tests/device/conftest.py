"""Builds the imitated accelerator once, before the first test; no test runs where it can't be built.

This process never has the device, so that other tests in it don't find one: each rank makes it known to itself.
"""

from __future__ import annotations

import pytest

from tests.device.devices import start_server
from tests.device.sim import build

REASON = build.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON is not None:
        for item in items:
            if "tests/device" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the extension: here, and not in a fixture, because that may take longer than a test.

    No test has computed yet: a process forked now can still give its forks devices.
    """
    if REASON is None and any("tests/device" in str(item.path) for item in session.items):
        build.library()
        start_server()
