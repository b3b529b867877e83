"""`accelerate replay` opens a run before an update, and runs on from there with something changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.commands.main import main
from accelerate.guests.rewind import rerun
from tests.rewind import forked
from tests.rewind.training import hashes, script, train
from tests.slow import slow_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.nonfinite]

slow = slow_for("several runs of a script", "corpus")

#: Trains the update of the run by hand, as its loop does, and prints its numbers.
BY_HAND = """
inputs, targets = next(iter(loader))
with accelerator.accumulate(model):
    accelerator.backward(loss := torch.nn.functional.mse_loss(model(inputs), targets))
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)

print("numbers", loss.item(), float(norm), progress.update)
"""

#: Makes links to a folder of the run and to a file outside, anew at each start.
LINKS = """
import os
for name, to in (("weights", "checkpoints"), ("code", os.path.abspath(__file__))):
    if accelerator.is_main_process and os.path.lexists(link := os.path.join(options.project, name)):
        os.unlink(link)
    if accelerator.is_main_process:
        os.symlink(to, link)
"""


def logged(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in next(run.glob("*.jsonl")).read_text().splitlines()]
    return {line["step"]: line for line in lines if "step" in line}


def replay(run: Path, path: Path, *arguments: str, text: str = "", flags: tuple[str, ...] = ()) -> str:
    """Run the command with what is typed into it, and return what it prints."""
    command = ["replay", str(run), *arguments, "--", "--cpu", *flags, str(path), "--project", str(run)]
    return forked.command(command, text, path.parent / "told")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks from this process, in place of a launch."""
    monkeypatch.setattr(rerun, "start", forked.start)


@pytest.mark.parametrize("update", [11, pytest.param(1, marks=slow), pytest.param(18, marks=slow)])
def test_an_opened_run_trains_the_update_with_the_same_numbers(update: int, tmp_path: Path) -> None:
    path, run = script(tmp_path, UPDATES=20), tmp_path / "run"
    train(path, run)
    before = hashes(run)
    told = replay(run, path, "--update", str(update), text=BY_HAND)
    numbers = next(line for line in told.splitlines() if "numbers" in line).split()[-3:]
    expected = logged(run)[update]
    assert [float(numbers[0]), float(numbers[1])] == [expected["loss"], expected["grad_norm"]]
    assert int(numbers[2]) == update - 1
    assert hashes(run) == before


@slow
@pytest.mark.parametrize("flags", [(), ("--use_fsdp", "--fsdp_version", "2")], ids=["ddp", "fsdp2"])
def test_a_run_of_two_ranks_is_opened_as_one_process(flags: tuple[str, ...], tmp_path: Path) -> None:
    path, run = script(tmp_path, UPDATES=20), tmp_path / "run"
    train(path, run, ranks=2, flags=flags)
    text = "print('numbers', progress.update, len(batch[0]))\n"
    assert "numbers 13 3" in replay(run, path, "--update", "14", "--samples", "3,9,4", text=text, flags=flags)


@slow
def test_a_branch_says_where_it_comes_from_and_differs_from_its_update_on(tmp_path: Path) -> None:
    path, run = script(tmp_path, ("pass  # begin", LINKS), UPDATES=20), tmp_path / "run"
    train(path, run)
    before = hashes(run)
    replay(run, path, "--update", "14", "--with", "lr=0.001")
    branch = tmp_path / "run_update_14"
    origin = json.loads((branch / "branch.json").read_text())
    assert origin["run"] == str(run) and origin["update"] == 14 and origin["with"] == {"lr": 0.001}
    mine, its = logged(branch), logged(run)
    assert sorted(mine) == list(range(14, 21))
    assert mine[14]["loss"] == its[14]["loss"] and mine[15]["loss"] != its[15]["loss"]
    assert (branch / "checkpoints").is_dir() and hashes(run) == before
    assert (branch / "weights").readlink() == Path("checkpoints") and (branch / "code").readlink() == path


@slow
def test_a_branch_leaves_samples_out(tmp_path: Path) -> None:
    path, run = script(tmp_path, ("pass  # data", "self.targets[77] = 50.0")), tmp_path / "run"
    train(path, run)
    assert max(line["loss"] for line in logged(run).values()) > 20
    replay(run, path, "--update", "1", "--without_samples", "77", "--branch", str(tmp_path / "better"))
    assert max(line["loss"] for line in logged(tmp_path / "better").values()) < 20


@slow
def test_a_notebook_opens_the_run(tmp_path: Path) -> None:
    path, run = script(tmp_path, UPDATES=20), tmp_path / "run"
    train(path, run)
    file = tmp_path / "look.ipynb"
    replay(run, path, "--update", "14", "--samples", "3,9", "--to_notebook", str(file))
    cells = [cell["source"] for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    text = "\n".join([*cells, "print('numbers', names['progress'].update, len(batch[0]))"])
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert "numbers 13 2" in ended.stdout, ended.stdout + ended.stderr


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--update", "3"]) == 2
    assert "-- train.py" in capsys.readouterr().err
    assert main(["bisect", str(tmp_path / "nowhere"), "--when", "loss > 4", "--", "train.py"]) == 2
    assert "project_dir" in capsys.readouterr().err
    (tmp_path / "run_update_3").mkdir()
    (tmp_path / "run").mkdir()
    assert main(["replay", str(tmp_path / "run"), "--update", "3", "--with", "lr=1", "--", "train.py"]) == 2
    assert "--branch" in capsys.readouterr().err
