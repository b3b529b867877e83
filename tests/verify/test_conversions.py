"""`accelerate verify` raises no false alarm on what `accelerate migrate` makes of the scripts of its corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from accelerate.guests.scripts.migrate import migrate
from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import prove
from accelerate.guests.scripts.verify.report import as_text
from tests.migrate.test_migrated_scripts import CONVERTED, SCRIPTS
from tests.migrate.test_verify import ARGUMENTS
from tests.ranks import free_port
from tests.slow import slow_for

pytestmark = pytest.mark.timeout(1800)  # about eight runs of a script, one after another

LAYOUTS: Final = "ranks2,parts2,fsdp2,resume"
#: Where a layout differs by design, or can't be run: the code of the finding or "failed", and why.
BY_DESIGN: Final = {
    ("accumulation", "ranks2"): ("V15", "the loop accumulates by hand, and exchanges gradients in each micro-batch"),
    ("accumulation", "resume"): ("V01", "the loop counts its batches by enumerate, from zero after a resume"),
    ("lbfgs", "fsdp2"): ("failed", "torch's LBFGS joins gradients by view(-1), which sharded tensors don't have"),
}


@slow_for("several runs of a script", "corpus")
@pytest.mark.parametrize("name", CONVERTED)
def test_a_conversion_raises_no_false_alarm(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(migrate(SCRIPTS[name].read_text(), SCRIPTS[name].name).after)
    arguments = ARGUMENTS.get(name, "").format(port=free_port()).split()
    proof = prove(script, arguments, 6, chosen(LAYOUTS))
    for outcome in proof.outcomes:
        expected = BY_DESIGN.get((name, outcome.layout.name))
        if expected is not None and expected[0] == "failed":
            assert outcome.state == "failed", as_text(proof)
        elif expected is not None:
            assert outcome.finding is not None and outcome.finding.code == expected[0], as_text(proof)
        elif outcome.state == "skipped":
            assert outcome.why
        else:
            assert outcome.state == "agrees", as_text(proof)
    assert any(outcome.state != "skipped" for outcome in proof.outcomes), as_text(proof)
