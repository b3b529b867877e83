"""`accelerate verify` meets what right scripts do each in its own way: schedules, batch sizes, samplers, closures."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import Outcome, Proof, prove
from accelerate.guests.scripts.verify.report import as_text
from tests.slow import slow_for
from tests.verify.corpus import BACKWARD, BARE, LOSS, PREPARE, Script, prepare

pytestmark = [slow_for("several runs of a script", "corpus"), pytest.mark.timeout(900)]

BATCHES = (
    (
        "loader = DataLoader(data, 8, shuffle=True)",
        (
            "class Batches:\n    def __iter__(self):\n"
            "        return iter([list(range(start, start + 8)) for start in range(0, 64, 8)])\n\n"
            "    def __len__(self):\n        return 8\n\n\nloader = DataLoader(data, batch_sampler=Batches())"
        ),
    ),
)
STEP = BARE[BARE.index("        with accelerator.accumulate") :]
CLOSURE = (
    "        def closure():\n            optimizer.zero_grad()\n"
    f"            {LOSS}\n            accelerator.backward(loss * WEIGHT)\n            return loss\n\n"
    "        optimizer.step(closure)\n"
)
BY_CLOSURE = (
    (STEP, CLOSURE),
    ("torch.optim.AdamW(model.parameters(), lr=1e-2)", "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)"),
)


def proof_of(folder: Path, changes: tuple[tuple[str, str], ...], layouts: str) -> tuple[Proof, dict[str, Outcome]]:
    path = folder / "train.py"
    path.write_text(Script(changes, base=BARE).text)
    proof = prove(path, [], 6, chosen(layouts))
    return proof, {outcome.layout.name: outcome for outcome in proof.outcomes}


def test_a_schedule_that_counts_micro_batches_by_an_own_option_agrees_with_a_note(tmp_path: Path) -> None:
    length = ("StepLR(optimizer, 2, 0.5)", "CosineAnnealingLR(optimizer, 3 * len(loader))")
    proof, found = proof_of(tmp_path, (length,), "parts2")
    assert found["parts2"].state == "agrees", as_text(proof)
    assert any("parts2: the learning rate agrees if the lengths of loaders" in note for note in proof.notes)


def test_a_script_that_divides_its_batch_size_itself_agrees(tmp_path: Path) -> None:
    divided = ("DataLoader(data, 8,", "DataLoader(data, 8 // accelerator.num_processes,")
    proof, found = proof_of(tmp_path, (divided, (PREPARE, prepare("model", "optimizer", "loader"))), "ranks2")
    assert found["ranks2"].state == "agrees", as_text(proof)


def test_batches_that_cannot_be_cut_are_skipped_with_the_reason(tmp_path: Path) -> None:
    proof, found = proof_of(tmp_path, BATCHES, "ranks2,parts2,recompute")
    assert [outcome.state for outcome in found.values()] == ["skipped", "skipped", "agrees"], as_text(proof)
    assert found["ranks2"].why.startswith("split_batches=True cuts each batch into equal parts")
    assert found["parts2"].why.startswith("the script's own batch sampler makes its batches")


def test_a_schedule_that_is_not_saved_is_found_after_the_stop(tmp_path: Path) -> None:
    changes = (
        ("StepLR(optimizer, 2, 0.5)", "StepLR(optimizer, 3, 0.5)"),
        (PREPARE, prepare("model", "optimizer", "loader")),
    )
    proof, found = proof_of(tmp_path, changes, "resume")
    finding = found["resume"].finding
    assert finding is not None and (finding.code, finding.quantity) == ("V14", "learning rate"), as_text(proof)
    assert finding.update > 2


def test_gradients_of_a_closure_are_compared(tmp_path: Path) -> None:
    proof, found = proof_of(tmp_path, (*BY_CLOSURE, ("WEIGHT", "accelerator.num_processes")), "ranks2")
    finding = found["ranks2"].finding
    assert finding is not None and (finding.code, finding.quantity) == ("V02", "gradient"), as_text(proof)
    assert finding.factor == pytest.approx(2.0, rel=1e-3)


def test_several_steps_in_one_batch_and_a_loop_inside_of_it_are_resumed(tmp_path: Path) -> None:
    """The evaluation after each batch is a pass inside of another one, where a run can't be resumed."""
    evaluation = "            for other, *_ in held_out:\n                model(other).detach()\n"
    changes = (
        (PREPARE, f"{PREPARE}\nheld_out = accelerator.prepare(DataLoader(data, 32))"),
        (BACKWARD, f"{BACKWARD}\n            optimizer.step()"),
        ("            optimizer.zero_grad()\n", f"            optimizer.zero_grad()\n{evaluation}"),
    )
    proof, found = proof_of(tmp_path, changes, "resume")
    assert found["resume"].state == "agrees", as_text(proof)
