"""`accelerate verify --same_bits`: layouts agree in every bit, and the first other bit is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accelerate.commands.main import main
from accelerate.guests.scripts.verify.findings import together
from accelerate.guests.scripts.verify.moments import Places
from accelerate.parallel.state import HeldTensor
from tests.slow import IS_SLOW, slow_for
from tests.verify.corpus import BARE, Script

pytestmark = pytest.mark.timeout(600)

#: With what other layouts can't have: dropout, BatchNorm, and numbers that the loop draws.
CHANGES = (
    ("self.last = nn.Linear(16, 1)", "self.last = nn.Linear(16, 1)\n        self.norm = nn.BatchNorm1d(16)"),
    ("torch.tanh(self.first(inputs))", "nn.functional.dropout(self.norm(self.first(inputs)), 0.3)"),
    ("model(inputs)", "model(inputs + torch.randn(1) * 0.1)"),
)
SCRIPT = Script(CHANGES, base=BARE).text
#: Fault -> (what is replaced, by what; the first differing quantity).
FAULTS = {
    "input": ("torch.randn(1) * 0.1", "torch.randn(1) * 0.1 + accelerator.process_index * 1e-12", "gradient"),
    "weight": (
        "for epoch in range(3):",
        "optimizer.param_groups[0]['weight_decay'] = 0.01 + accelerator.num_processes * 1e-9\nfor epoch in range(3):",
        "parameter",
    ),
    "buffer": (
        "            scheduler.step()",
        "            model.get_buffer('norm.running_var').mul_(1 + accelerator.num_processes * 1e-12)\n"
        "            scheduler.step()",
        "fingerprint",
    ),
}
LAYOUTS = "ranks2,ranks4,fsdp2,hsdp,resume,resume_ranks" if IS_SLOW else "ranks2"


def test_a_right_script_agrees_in_every_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    report = tmp_path / "report.json"
    arguments = ["--same_bits", "--num_steps", "5", "--layouts", LAYOUTS, "--report", str(report)]
    code = main(["verify", str(tmp_path / "train.py"), *arguments])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "5 updates of one process in float64, and the same in layouts, compared by every bit" in out
    told = json.loads(report.read_text())
    assert told["same_bits"] and {layout["state"] for layout in told["layouts"]} == {"agrees"}
    assert set(told["layouts"][0]["excesses"]["gradients"]) == {0.0}


@slow_for("several runs of a script", "corpus")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_other_bit_is_named(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, quantity = FAULTS[fault]
    assert before in SCRIPT
    (tmp_path / "train.py").write_text(SCRIPT.replace(before, after))
    report = tmp_path / "report.json"
    main(
        [
            "verify",
            str(tmp_path / "train.py"),
            "--same_bits",
            "--num_steps",
            "2",
            "--layouts",
            "ranks2",
            "--report",
            str(report),
        ]
    )
    (layout,) = json.loads(report.read_text())["layouts"]
    out = capsys.readouterr().out
    assert (layout["state"], layout["finding"]["quantity"]) == ("differs", quantity), out
    assert layout["finding"]["code"] == "V19", out


def test_a_layout_without_the_promise_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    assert main(["verify", str(tmp_path / "train.py"), "--same_bits", "--layouts", "parts2"]) == 2
    assert "--layouts parts2: no such layout of --same_bits. Choose among ranks2, ranks4, fsdp2, hsdp, resume" in (
        capsys.readouterr().err
    )


def test_a_loop_that_has_no_parts_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("with accelerator.accumulate(model):", "if True:"))
    assert main(["verify", str(tmp_path / "train.py"), "--same_bits", "--layouts", "ranks2"]) == 2
    said = capsys.readouterr().err
    assert "train.py: backward() outside of accumulate(), with batch_parts=4" in said and "Traceback" not in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_hash_adds_up_over_shards_and_copies_and_sees_each_bit(dtype: torch.dtype) -> None:
    values = (torch.randn(6, 5, dtype=torch.float64) * 9).to(dtype)
    places = Places(takes_bits=True)

    def held(first: int, last: int, tensor: torch.Tensor = values) -> HeldTensor:
        return HeldTensor(("w",), (6, 5), dtype, tensor[first:last], ((first, last), (0, 5)))

    def bits(*parts: HeldTensor) -> int:
        moments = together([places.of_held([part])["w"] for part in parts]).moments
        assert moments is not None
        return moments.bits

    whole = bits(held(0, 6))
    assert bits(held(0, 4), held(4, 6), held(6, 6)) == whole
    assert bits(held(0, 3), held(3, 6), held(0, 3), held(3, 6)) == whole
    swapped = values.clone()
    swapped[0], swapped[1] = values[1], values[0]
    negated = values.clone()
    negated[2:4] *= -1  # an even number of signs
    assert len({whole, bits(held(0, 6, swapped)), bits(held(0, 6, negated))}) == 3
