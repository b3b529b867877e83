"""`accelerate verify` finds what is wrong in small scripts with one fault each, and nothing in right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import Proof, prove
from tests.slow import mostly_slow, slow_for
from tests.verify.corpus import FAULTS, RIGHT, Script

pytestmark = pytest.mark.timeout(900)  # several runs of a script, one after another
#: Those that are run in every test run.
QUICK = ("mean_of_means_in_parts",)

slow = slow_for("several runs of a script", "corpus")


def proof_of(script: Script, folder: Path) -> Proof:
    path = folder / "train.py"
    path.write_text(script.text)
    return prove(path, [], 6, chosen(script.layouts))


@pytest.mark.parametrize("name", mostly_slow(FAULTS, QUICK, slow))
def test_a_planted_fault_is_found_and_its_place_is_named(name: str, tmp_path: Path) -> None:
    script = FAULTS[name]
    proof = proof_of(script, tmp_path)
    outcome = proof.outcomes[0]
    finding = outcome.finding
    if script.code == "failed":
        assert outcome.state == "failed" and script.name in outcome.why, outcome.why
        assert proof.exit_code == 2
        return
    assert finding is not None, proof
    assert (finding.code, finding.quantity) == (script.code, script.quantity), finding
    assert script.name in finding.name
    if script.factor is not None:
        assert finding.factor == pytest.approx(script.factor, rel=1e-3)
    assert proof.exit_code == 1


@slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_raises_no_alarm(name: str, tmp_path: Path) -> None:
    proof = proof_of(RIGHT[name], tmp_path)
    assert [outcome.state for outcome in proof.outcomes] == ["agrees"] * len(proof.outcomes), proof
    assert proof.exit_code == 0 and proof.dtype == "float64"
