"""DeepSpeed for real on its CPU backend; `make deepspeed` installs it beside .venv and runs these tests.

DeepSpeed is imported once, here, so that forked ranks have it; without it the tests are skipped.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from accelerate.optional import is_deepspeed_available

HERE = Path(__file__).parent

if is_deepspeed_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_BUILD_OPS", "0")
    import deepspeed
    import deepspeed.runtime.lr_schedules  # noqa: F401

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without DeepSpeed nothing runs; with it, what the libraries around it deprecate is not ours to report."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not is_deepspeed_available():
                item.add_marker(pytest.mark.skip(reason="DeepSpeed isn't installed: make deepspeed"))
