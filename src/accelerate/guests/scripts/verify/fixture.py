"""The fixture `verified` for pytest: `pytest_plugins = ["accelerate.guests.scripts.verify.fixture"]` in conftest.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .prove import Proof


@pytest.fixture
def verified(record_property: Callable[[str, object], None]) -> Callable[..., Proof]:
    """Give a function that runs `accelerate verify` on a script, and fails the test if a layout doesn't agree."""

    def verify(
        script: str | Path,
        *arguments: str,
        layouts: str | Sequence[str] | None = None,
        num_steps: int = 8,
        dtype: str | None = None,
        same_bits: bool = False,
    ) -> Proof:
        """Compare layouts of a script, and return what was compared.

        Args:
            arguments: the script's own.
            layouts: names, as for `--layouts`; None means all.
            same_bits: compare every bit, as for `--same_bits`.

        Raises:
            VerificationError: the script doesn't run as one process.
        """
        from .layouts import chosen
        from .prove import prove
        from .report import as_json, as_text

        names = ",".join(layouts) if layouts is not None and not isinstance(layouts, str) else layouts
        proof = prove(
            Path(script), arguments, num_steps, chosen(names, same_bits=same_bits), dtype, same_bits=same_bits
        )
        record_property("accelerate verify", json.dumps(as_json(proof)))
        if proof.exit_code:
            pytest.fail(as_text(proof), pytrace=False)
        return proof

    return verify
