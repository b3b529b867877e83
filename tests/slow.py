"""What `make test` leaves out for its time: ``RUN_SLOW=1``, which `make slow` and its neighbours set, runs it."""

from __future__ import annotations

import os

import pytest

IS_SLOW = "RUN_SLOW" in os.environ
slow = pytest.mark.skipif(not IS_SLOW, reason="seconds of a processor: RUN_SLOW=1 (make slow)")
