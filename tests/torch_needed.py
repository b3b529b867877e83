"""What a test needs of torch that the oldest supported one doesn't have; `make versions` runs on that one too.

What an old torch is refused for skips any test that meets the refusal (:func:`skip_refused`); the marks save time.
"""

from __future__ import annotations

from typing import Final

import pytest

from accelerate.parallel.fsdp.setup import OLDEST_ON_CPU
from accelerate.parallel.pipeline.strategy import OLDEST_TORCH
from accelerate.versions import is_torch_version

#: How a refusal begins, and the first torch that isn't refused.
_REFUSALS: Final = {"FSDP version 2 on CPU": OLDEST_ON_CPU, "Pipeline parallelism (pp_size)": OLDEST_TORCH}


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip under an older torch; ``why`` says what that one does."""
    return pytest.mark.skipif(not is_torch_version(">=", version), reason=f"before torch {version}, {why}")


FSDP2_ON_CPU: Final = needs_torch(OLDEST_ON_CPU, "FSDP version 2 is refused on CPU")
MUON: Final = needs_torch("2.9", "there is no Muon")


def skip_refused(report: pytest.TestReport) -> None:
    """Turn the report of a failure into that of a skip where it shows what this torch is refused for."""
    for what, oldest in _REFUSALS.items():
        refusal = f"{what} needs torch {oldest} or newer"
        if report.failed and not is_torch_version(">=", oldest) and refusal in report.longreprtext:
            path, line, _ = report.location
            reason = f"Skipped: before torch {oldest}, it is refused: {what}"
            report.outcome, report.longrepr = "skipped", (path, line or 0, reason)
