"""`accelerate estimate-memory`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accelerate.commands import estimate

PROGRAM = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return model, lambda batch, sequence: torch.zeros(batch, sequence, 64)

def bare():
    return nn.Linear(1024, 256, bias=False)
"""
MB = 1 << 20


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models_to_estimate.py").write_text(PROGRAM, encoding="utf-8")


def test_the_tables_say_what_is_stored_and_what_a_step_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main(["models_to_estimate.py:build", "--batch", "2", "--sequence", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "models_to_estimate.py:build: 33,088 parameters"
    assert lines[2] == "Stored, and in training with Adam:"
    assert [line.split()[0] for line in lines[5:9]] == ["float32", "float16", "int8", "int4"]
    title = "One training step of batch 2, sequence 16, AdamW, on the busiest rank at its fullest moment:"
    names = [line.split()[0] for line in lines[lines.index(title) + 2 :]]
    assert names[-6:] == ["single", "ddp8", "zero2x8", "fsdp-grad8", "fsdp8", "tp8"]


def test_the_tables_have_the_names_that_programs_get(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main(["models_to_estimate.py:build", "--num_processes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert estimate.main(["models_to_estimate.py:build", "--num_processes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    columns = [re.split("  +", line) for line in lines if line.startswith(("dtype ", "layout "))]
    assert columns == [[name.replace("_", " ") for name in found[kind][0]] for kind in ("stored", "ranks")]


def test_programs_get_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["models_to_estimate.py:build", "--json", "--num-processes", "4", "--layouts", "fsdp", "tp2+ddp"]
    assert estimate.main([*arguments, "--dtypes", "float32", "bfloat16", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    total = 4 * 33_088
    assert found["parameters"] == 33_088
    assert [size["total"] for size in found["stored"]] == [total, total // 2, total // 4]
    assert [size["training"] for size in found["stored"]] == [4 * total, 4 * total + total // 2, None]
    assert [(each["layout"], each["ranks"]) for each in found["ranks"]] == [("fsdp4", 4), ("tp2+ddp2", 4)]
    for each in found["ranks"]:
        parts = ("weights", "buffers", "gradients", "optimizer", "activations", "communication")
        assert each["peak"] == sum(each[part] for part in parts)
    assert found["step"]["activations_left_out"] is None


def test_a_model_that_cant_be_traced_is_estimated_without_activations(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main(["models_to_estimate.py:bare", "--num_processes", "1"]) == 0
    out = capsys.readouterr().out
    assert "Without activations of forward and backward. models_to_estimate.py:bare: what Linear is called" in out
    row = next(line for line in out.splitlines() if line.startswith("single")).split()
    assert row[:8] == ["single", "1", "1.0", "MiB", "0", "bytes", "1.0", "MiB"]


def test_more_activations_come_from_larger_batches_and_fewer_from_recomputation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def activations(*options: str) -> int:
        assert estimate.main(["models_to_estimate.py:build", "--json", "--num_processes", "1", *options]) == 0
        return json.loads(capsys.readouterr().out)["ranks"][0]["activations"]

    plain = activations("--batch", "4")
    assert activations("--batch", "16") > 3 * plain
    assert activations("--batch", "4", "--mixed_precision", "bf16") < plain
    assert activations("--batch", "4", "--recompute") <= plain


def test_the_bars_are_drawn(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    assert estimate.main(["models_to_estimate.py:build", "--plot", "bars.png"]) == 0
    image = matplotlib.imread(tmp_path / "bars.png")
    assert image.shape[1] > 1000
    weights_blue = (abs(image[:, :, :3] - [0x44 / 255, 0x77 / 255, 0xAA / 255]) < 0.02).all(-1)
    assert weights_blue.sum() > 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models_to_estimate.py:missing"], "has no function 'missing'"),
        (["models_to_estimate.py:build", "--optimizer", "nix"], "optimizer='nix'"),
        (["models_to_estimate.py:build", "--layouts", "tp3"], "doesn't make 8 ranks"),
        (["some/model"], "isn't among the downloaded models"),
    ],
)
def test_a_wrong_request_is_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert estimate.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("accelerate estimate-memory: ") and message in error
    assert len(error.splitlines()) <= 5


def test_numbers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        estimate.main(["m:f", "--batch", "0"])
    assert "'0' is no number from 1 on" in capsys.readouterr().err


def test_the_documented_functions_stay() -> None:
    args = estimate.estimate_command_parser().parse_args(["models_to_estimate.py:bare", "--dtypes", "float32", "int4"])
    assert estimate.gather_data(args) == [["float32", MB, MB, 4 * MB], ["int4", MB // 8, MB // 8, None]]
    assert estimate.add_timm_hub_prefix("timm/resnet18") == "hf-hub:timm/resnet18"
    assert estimate.add_timm_hub_prefix("resnet18.a1_in1k") == "resnet18.a1_in1k"
    assert estimate.add_timm_hub_prefix("hf_hub:timm/resnet18") == "hf_hub:timm/resnet18"
