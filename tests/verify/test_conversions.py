"""`accelerate verify` raises no false alarm on what `accelerate migrate` makes of the scripts of its corpus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from accelerate.guests.scripts.migrate import migrate
from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import Proof, prove
from accelerate.guests.scripts.verify.report import as_text
from tests.migrate.test_migrated_scripts import CONVERTED, SCRIPTS
from tests.migrate.test_verify import ARGUMENTS
from tests.ranks import free_port
from tests.slow import slow_for

pytestmark = pytest.mark.timeout(1800)  # about eight runs of a script, one after another

LAYOUTS: Final = "ranks2,parts2,fsdp2,resume"
_OWN_COUNT: Final = "the loop counts its batches by enumerate, from zero after a resume"
_MIXED: Final = "the script computes with a parameter and a plain tensor outside of forward(), which torch refuses"
_OF_A_RANK: Final = "the loss isn't a mean over samples, so the mean over processes is another loss"
_NOT_SAVED: Final = "the script keeps an average of the weights, which isn't registered for checkpointing"
#: Where a layout differs by design, or can't be run: the code of the finding or "failed", and why.
BY_DESIGN: Final = {
    ("accumulation", "ranks2"): ("V15", "the loop accumulates by hand, and exchanges gradients in each micro-batch"),
    ("accumulation", "resume"): ("V01", _OWN_COUNT),
    ("closures", "fsdp2"): ("failed", _MIXED),
    ("closures", "resume"): ("V14", _NOT_SAVED),
    ("contrastive", "ranks2"): ("V13", _OF_A_RANK),
    ("contrastive", "fsdp2"): ("V13", _OF_A_RANK),
    ("cured_neural_style", "fsdp2"): (
        "failed",
        "the image is a parameter, whose sharded dimension the script reshapes",
    ),
    ("cured_word_language_model", "fsdp2"): ("failed", _MIXED),
    ("ddp_gather", "resume"): ("V17", "the script sums up losses over an epoch, from zero after a resume"),
    ("ddp_metric", "ranks2"): ("V07", "the script multiplies the learning rate by the number of processes"),
    ("ddp_metric", "fsdp2"): ("V07", "the script multiplies the learning rate by the number of processes"),
    ("ddp_series_spawn", "resume"): ("V01", "the script draws a batch before its loop, so the loop is a new pass"),
    ("dqn_tutorial", "fsdp2"): ("failed", _MIXED),
    ("ema", "fsdp2"): ("failed", _MIXED),
    ("ema", "resume"): ("V14", _NOT_SAVED),
    ("gpt2_by_hand", "fsdp2"): ("failed", "the main process alone sums sharded parameters, so it hangs"),
    ("imagenet_spawn", "resume"): ("V14", "the learning rate follows a count of epochs, from zero after a resume"),
    ("lbfgs", "fsdp2"): ("failed", "torch's LBFGS joins gradients by view(-1), which sharded tensors don't have"),
    ("lr_finder", "resume"): ("V14", "the sweep of learning rates begins again after a resume"),
    ("phases", "resume"): (
        "V01",
        "resumed at the end of an epoch, it trains before the evaluation, which draws a number",
    ),
    ("seq2seq_padding", "ranks2"): ("V13", _OF_A_RANK),
    ("seq2seq_padding", "fsdp2"): ("V13", _OF_A_RANK),
    ("super_resolution_main", "fsdp2"): ("failed", "the script pickles the whole model, whose class FSDP 2 makes"),
    ("tensorboard_log", "resume"): ("V17", "the script sums up losses over an epoch, from zero after a resume"),
    ("weighted_sampler", "ranks2"): ("V13", _OF_A_RANK),
    ("weighted_sampler", "fsdp2"): ("V13", _OF_A_RANK),
    ("wgan_gp", "resume"): ("V01", _OWN_COUNT),
}
#: No layout can be compared, because the loop itself draws its samples or actions.
SKIPPED: Final = ("actor_critic", "cured_ppo_agent", "nanogpt_style", "nanogpt_train", "reinforce")


@slow_for("several runs of a script", "corpus")
@pytest.mark.parametrize("name", CONVERTED)
def test_a_conversion_raises_no_false_alarm(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(migrate(SCRIPTS[name].read_text(), SCRIPTS[name].name).after)
    arguments = ARGUMENTS.get(name, "").format(port=free_port()).split()
    proof = prove(script, arguments, 6, chosen(LAYOUTS))
    assert_no_false_alarm(proof, name, BY_DESIGN)
    is_skipped = all(outcome.state == "skipped" for outcome in proof.outcomes)
    assert is_skipped == (name in SKIPPED), as_text(proof)


def assert_no_false_alarm(proof: Proof, name: str, by_design: Mapping[tuple[str, str], tuple[str, str]]) -> None:
    """Assert that each layout agrees, is skipped with a reason, or has the finding (or "failed") of ``by_design``."""
    for outcome in proof.outcomes:
        expected, _ = by_design.get((name, outcome.layout.name), (None, ""))
        if expected == "failed":
            assert outcome.state == "failed", as_text(proof)
        elif expected is not None:
            assert outcome.finding is not None and outcome.finding.code == expected, as_text(proof)
        elif outcome.state == "skipped":
            assert outcome.why
        else:
            assert outcome.state == "agrees", as_text(proof)
