"""`accelerate verify` raises no false alarm on the examples."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import prove
from tests.slow import slow_for
from tests.verify.test_conversions import LAYOUTS, assert_no_false_alarm

pytestmark = pytest.mark.timeout(1800)  # about eight runs of a script, one after another

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
#: Not trained by an Accelerator of their own: plain torch, data, plots, the monitor's option, another library's engine.
OTHERS: Final = ("before", "curves", "offline_data", "demo", "watch_option", "deepspeed_with_config_support")
SCRIPTS: Final = {
    path.stem: path
    for path in sorted([*EXAMPLES.glob("*.py"), *(EXAMPLES / "by_feature").glob("*.py")])
    if path.stem not in OTHERS
}
_FROM_ZERO: Final = "the script prints the mean loss of an epoch, which counts from zero after a resume"
#: Where a layout differs by design, or can't be run: the code of the finding or "failed", and why.
BY_DESIGN: Final = {
    ("cifar10_mlp", "resume"): ("V17", _FROM_ZERO),
    ("cv_example", "resume"): ("V17", _FROM_ZERO),
    ("ddp_comm_hook", "ranks2"): ("V13", "gradients are compressed before they are sent"),
    ("digits", "resume"): ("V17", _FROM_ZERO),
    ("fp8", "ranks2"): ("V13", "a scale of fp8 is that of a process's own samples"),
    ("fp8", "fsdp2"): ("failed", "converted weights can't be sent from rank 0, as the launcher's default asks"),
    ("language_model", "resume"): ("V17", _FROM_ZERO),
    ("local_sgd", "ranks2"): ("V05", "each process steps with its own gradients, and weights are averaged later"),
    ("local_sgd", "fsdp2"): ("failed", "LocalSGD averages whole replicas, and refuses shards"),
    ("nlp_example", "resume"): ("V17", _FROM_ZERO),
}


@slow_for("several runs of a script", "corpus")
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_raises_no_false_alarm(name: str) -> None:
    proof = prove(SCRIPTS[name], [], 6, chosen(LAYOUTS))
    assert_no_false_alarm(proof, name, BY_DESIGN)
