"""What a test needs of torch that the oldest supported one doesn't have; `make versions` runs on that one too."""

from __future__ import annotations

from typing import Final

import pytest

from accelerate.parallel.fsdp.fsdp2 import OLDEST_ON_CPU
from accelerate.versions import is_torch_version


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip under an older torch; ``why`` says what that one does."""
    return pytest.mark.skipif(not is_torch_version(">=", version), reason=f"before torch {version}, {why}")


FSDP2_ON_CPU: Final = needs_torch(OLDEST_ON_CPU, "FSDP version 2 is refused on CPU")
