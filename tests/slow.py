"""What `make test` leaves out for its time: ``RUN_SLOW=1``, which `make slow` and its neighbours set, runs it."""

from __future__ import annotations

import os

import pytest

IS_SLOW = "RUN_SLOW" in os.environ


def slow_for(reason: str, target: str = "slow") -> pytest.MarkDecorator:
    """The mark of a test that only ``make target`` runs, and why."""
    return pytest.mark.skipif(not IS_SLOW, reason=f"{reason}: RUN_SLOW=1 (make {target})")


slow = slow_for("seconds of a processor")
