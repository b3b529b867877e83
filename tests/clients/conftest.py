"""Libraries that stand on this one: `make clients` makes .clients/, the environment that has them, and runs these."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# In any other environment there is nothing to run here.
collect_ignore_glob = [] if Path(sys.prefix).name == ".clients" else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--record FILE: the page of the docs that lists clients, versions and outcomes."""
    parser.addoption("--record", default=None, help="write the table of clients, versions and outcomes to this file")
