"""The doctor finds planted mistakes at their lines, accepts right scripts, and fixes without new findings."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from accelerate.guests.scripts.doctor import RULES, examine, fixed
from tests.doctor.corpus import FAULTS, RIGHT
from tests.slow import mostly_slow, slow_for
from tests.verify import corpus

ROOT: Final = Path(__file__).resolve().parents[2]
#: What each script with a batch size is told; it is no mistake.
BATCH_SIZE: Final = "D213"
#: The share of the planted mistakes that has to be found.
LEAST_FOUND: Final = 57 / 60
#: Findings about right scripts that are true: what they do is right for what they test only.
TRUE_OF_VERIFIED: Final = {"adapter_saved": {"D202", "D203"}}  # on one process: it isn't prepared on purpose


def codes(text: str, name: str) -> list[tuple[int, str]]:
    return [(each.line, each.code) for each in examine(text, name) if each.code != BATCH_SIZE]


def test_nearly_all_planted_mistakes_are_found_at_their_lines() -> None:
    missed = {
        name: found
        for name, script in FAULTS.items()
        if (script.line, script.code) not in (found := codes(script.text, name))
    }
    assert len(FAULTS) >= 60
    assert len(missed) <= (1 - LEAST_FOUND) * len(FAULTS), missed
    assert missed == {}  # as it is today


def test_each_rule_finds_a_planted_mistake() -> None:
    planted = {script.code for script in FAULTS.values()}
    assert {rule.code for rule in RULES} - planted == {BATCH_SIZE}


def test_right_scripts_have_no_findings() -> None:
    assert len(RIGHT) >= 40
    assert {name: found for name, script in RIGHT.items() if (found := codes(script.text, name))} == {}


@pytest.mark.parametrize("name", [name for name, script in corpus.RIGHT.items() if "accelerate" in script.text])
def test_scripts_that_are_verified_have_no_findings(name: str) -> None:
    found = {code for _, code in codes(corpus.RIGHT[name].text, name)}
    assert found == TRUE_OF_VERIFIED.get(name, set())


#: Of each rule the first mistake.
FIRST: Final = set({script.code: name for name, script in reversed(FAULTS.items())}.values())


@pytest.mark.parametrize("name", mostly_slow(FAULTS, FIRST, slow_for("as another mistake of the rule", "corpus")))
def test_a_fix_leaves_fewer_findings_and_is_done_at_once(name: str) -> None:
    script = FAULTS[name]
    before, after = examine(script.text, name), fixed(script.text, name)
    ast.parse(after)
    left = examine(after, name)
    assert {each.code for each in left} - {BATCH_SIZE} <= {each.code for each in before}
    assert (after == script.text) == (left == before)
    assert fixed(after, name) == after
    changed = set(script.text.splitlines()) ^ set(after.splitlines())
    assert len(changed) <= 8  # lines, not files


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_left_as_it_is(name: str) -> None:
    assert fixed(RIGHT[name].text, name) == RIGHT[name].text


@pytest.mark.parametrize(
    ("size", "is_told"),
    [
        ("8", True),
        ("arguments.batch_size", True),
        ("64 // accelerator.num_processes", False),
        ("share", False),
        ("64 // torch.distributed.get_world_size()", False),
    ],
)
def test_a_batch_size_by_the_number_of_processes_is_right(size: str, is_told: bool) -> None:
    script = f"""
import torch
from accelerate import Accelerator

accelerator = Accelerator()
share = 64 // accelerator.num_processes
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(256, 4), batch_size={size}, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    accelerator.backward(model(rows).mean())
    optimizer.step()
    optimizer.zero_grad()
"""
    assert (BATCH_SIZE in {each.code for each in examine(script, "train.py")}) is is_told
