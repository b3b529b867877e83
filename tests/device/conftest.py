"""Builds the imitated accelerator once, before the first test; no test runs where it can't be built.

This process never has the device, so that other tests in it don't find one: each rank makes it known to itself.
"""

from __future__ import annotations

import os

import pytest

from tests.device.devices import start_server
from tests.device.sim import build

REASON = build.why_not()
#: What `make device` runs, and `make test` leaves out for its time.
SLOW = ("test_footprint.py", "test_parallel.py", "test_saves.py", "test_starting.py", "test_watching.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what can't be built here, and the slow half in a run of all tests."""
    for item in items:
        if "tests/device" not in str(item.path):
            continue
        if REASON is not None:
            item.add_marker(pytest.mark.skip(reason=REASON))
        elif item.path.name in SLOW and "RUN_SLOW" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="RUN_SLOW isn't set: `make device` runs it"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the extension: here, and not in a fixture, because that may take longer than a test.

    No test has computed yet: a process forked now can still give its forks devices.
    """
    if REASON is None and any("tests/device" in str(item.path) for item in session.items):
        build.library()
        start_server()
