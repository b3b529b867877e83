"""Tests that drive a browser run only when they are asked for: pytest -m browser."""

from __future__ import annotations

import pytest

from accelerate.guests.monitor.export import find_browser


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = "browser" in (config.getoption("-m") or "")
    reason = "no Chromium or Chrome here" if asked else "drives a browser: make monitor"
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if "browser" in item.keywords and not (asked and find_browser()):
            item.add_marker(skip)
