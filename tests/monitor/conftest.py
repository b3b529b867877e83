"""Tests that drive a browser run only when they are asked for: pytest -m browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate.guests.monitor.export import find_browser
from tests.monitor.browser import Page


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = "browser" in (config.getoption("-m") or "")
    reason = "no Chromium or Chrome here" if asked else "drives a browser: make monitor"
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if "browser" in item.keywords and not (asked and find_browser()):
            item.add_marker(skip)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    browser = find_browser()
    assert browser is not None
    with Page(browser, tmp_path) as page:
        yield page


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """The folder of pictures: that of the documentation with DOCS_IMAGES=1."""
    docs = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
    return docs if os.environ.get("DOCS_IMAGES") else tmp_path / "images"
