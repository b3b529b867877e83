"""What `make test` leaves out for its time: ``RUN_SLOW=1``, which `make slow` and its neighbours set, runs it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

IS_SLOW = "RUN_SLOW" in os.environ


def slow_for(reason: str, target: str = "slow") -> pytest.MarkDecorator:
    """The mark of a test that only ``make target`` runs, and why."""
    return pytest.mark.skipif(not IS_SLOW, reason=f"{reason}: RUN_SLOW=1 (make {target})")


slow = slow_for("seconds of a processor")


def mostly_slow(names: Iterable[str], quick: Collection[str], mark: pytest.MarkDecorator = slow) -> list[Any]:
    """The names as parameters of a test, all but the quick ones with the mark."""
    found = list(names)
    assert set(quick) <= set(found), f"no such cases: {sorted(set(quick) - set(found))}"
    return [pytest.param(name, marks=() if name in quick else mark) for name in found]
