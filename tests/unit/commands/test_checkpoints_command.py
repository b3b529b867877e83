from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import write_checkpoint
from accelerate.commands.main import main
from accelerate.settings.training import ProjectOptions


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A project of three checkpoints, of which the last is torn."""
    options = ProjectOptions(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    for step, loss in enumerate([0.25, 0.5, 0.75]):
        write_checkpoint(
            project=options,
            weights=[{"w": torch.zeros(100)}],
            step=step,
            strategy="MULTI_CPU",
            metrics={"loss": loss},
            details={"epoch": 4},
        )
    (tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_table_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run), "--best_metric", "loss", "--best-mode", "max"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "epoch", "metrics", "size", "ranks", "strategy", "valid"]
    assert lines[1].split()[:4] == ["checkpoint_0", "0", "4", "loss=0.25"]
    assert lines[2].split()[:3] == ["checkpoint_1", "*", "1"]
    assert lines[1].split()[-3:] == ["1", "MULTI_CPU", "yes"]
    assert lines[3].split()[-1] == "no"
    assert lines[5] == "checkpoint_2: model.safetensors: truncated to 0 bytes of 504"


def test_a_list_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run / "checkpoints"), "--json", "--best_metric", "loss"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(entry["name"], entry["step"], entry["valid"], entry["best"]) for entry in listed] == [
        ("checkpoint_0", 0, True, True),
        ("checkpoint_1", 1, True, False),
        ("checkpoint_2", 2, False, False),
    ]


@pytest.mark.parametrize(("algorithm", "window"), [(torch.optim.SGD, 1), (torch.optim.AdamW, 2)])
def test_without_a_step_of_its_own_a_save_has_the_optimizers_updates(
    algorithm: Any, window: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in range(3):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        model = torch.nn.Linear(2, 2)
        data: Any = torch.zeros(8, 2)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, algorithm(model.parameters(), lr=0.1), loader)
        if run:
            accelerator.load_state(str(tmp_path / str(run - 1)))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / str(run)))
        assert main(["checkpoints", str(tmp_path / str(run)), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["step"] == (run + 1) * 4 // window
        accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path / "named"), details={"step": 700})
    assert main(["checkpoints", str(tmp_path / "named"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step"] == 700


def test_every_byte_is_compared_on_request(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run / "checkpoints" / "checkpoint_1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    main(["checkpoints", str(run)])
    assert "content changed" not in capsys.readouterr().out
    main(["checkpoints", str(run), "--check"])
    assert "checkpoint_1: model.safetensors: its content changed" in capsys.readouterr().out


def test_pins_are_set_and_taken_away(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run), "--pin", "checkpoint_0"]) == 0
    assert "checkpoint_0 (pinned)" in capsys.readouterr().out
    assert main(["checkpoints", str(run), "--unpin", "0"]) == 0
    assert "pinned" not in capsys.readouterr().out
    assert main(["checkpoints", str(run), "--pin", "checkpoint_9"]) == 2
    assert "there are checkpoint_0, checkpoint_1" in capsys.readouterr().err


def test_the_exit_code_tells_whether_a_run_could_go_on(run: Path, tmp_path: Path) -> None:
    for number in (0, 1):
        (run / "checkpoints" / f"checkpoint_{number}" / "manifest.json").unlink()
    assert main(["checkpoints", str(run)]) == 1
    assert main(["checkpoints", str(tmp_path / "nowhere")]) == 2


def test_a_listing_starts_without_torch(run: Path) -> None:
    program = (
        "import sys; from accelerate.commands.main import main; main(['checkpoints', sys.argv[1]]);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "checkpoint_1" in done.stdout


def saved_with_fingerprints(folder: Path, fingerprints: dict[int, str]) -> str:
    """A project with one checkpoint for each step; "" saves no fingerprint."""
    options = ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True)
    for step, fingerprint in fingerprints.items():
        details = {"fingerprint": fingerprint} if fingerprint else {}
        write_checkpoint(project=options, weights=[{"w": torch.zeros(9)}], step=step, strategy="NO", details=details)
    return str(folder)


def test_fingerprints_are_shown_and_compared_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = saved_with_fingerprints(tmp_path / "one", {10: "a" * 64, 20: "b" * 64, 30: "c" * 64, 40: ""})
    two = saved_with_fingerprints(tmp_path / "two", {20: "b" * 64, 30: "d" * 64, 40: "e" * 64})
    assert main(["checkpoints", one]) == 0
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()] == [
        "fingerprint", "a" * 12, "b" * 12, "c" * 12, "-",
    ]  # fmt: skip
    assert main(["checkpoints", one, "--compare", two]) == 1
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()] == [
        "compared", "-", "equal", "differs", "-",
    ]  # fmt: skip
    assert main(["checkpoints", f"{one}/checkpoints/checkpoint_1", "--compare", f"{two}/checkpoints/checkpoint_0"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", one, "--compare", two, "--json"]) == 1
    assert [(entry["fingerprint"], entry["compared"]) for entry in json.loads(capsys.readouterr().out)] == [
        ("a" * 64, None), ("b" * 64, "equal"), ("c" * 64, "differs"), (None, None),
    ]  # fmt: skip


def test_a_comparison_checks_the_bytes_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (saved_with_fingerprints(tmp_path / name, {10: "a" * 64, 20: "b" * 64}) for name in ("one", "two"))
    weights = next(Path(two).rglob("checkpoint_1/*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["checkpoints", one, "--compare", two, "--check"]) == 1
    assert ["broken" in line for line in capsys.readouterr().out.splitlines()] == [False, False, True]
    assert main(["checkpoints", two, "--compare", one, "--check"]) == 1
    assert "checkpoint_1: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (None, "no checkpoint in this folder"),
        ({}, "no checkpoint in this folder"),
        ({10: ""}, "no checkpoint in {two} has a fingerprint."),
        ({20: "a" * 64}, "no step is in both folders: 10 and 20."),
    ],
    ids=["no folder", "empty", "no fingerprint", "other step"],
)
def test_a_comparison_of_nothing_is_refused(
    other: dict[int, str] | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = saved_with_fingerprints(tmp_path / "one", {10: "a" * 64}), str(tmp_path / "two")
    if other is not None:
        saved_with_fingerprints(tmp_path / "two", other)
    assert main(["checkpoints", one, "--compare", two]) == 2
    assert f"--compare {two}: {why.format(two=two)}" in capsys.readouterr().err
