"""The command `accelerate verify`: its layouts, its exit codes, and its report."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.commands.main import main
from accelerate.guests.scripts.verify.findings import CODES, Finding, distance, together
from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import Outcome, Proof
from accelerate.guests.scripts.verify.record import Moments
from accelerate.guests.scripts.verify.report import as_html, as_json
from tests.python_path import python_path
from tests.slow import slow_for
from tests.verify.corpus import LOOP, PREPARE, prepare

pytestmark = pytest.mark.timeout(600)

PLAIN = """\
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs in torch.utils.data.DataLoader(torch.randn(32, 3), 4):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--explain", "v02"]) == 0
    assert capsys.readouterr().out == f"V02: {CODES['V02']}\n"
    assert main(["verify", "--explain", "v3"]) == 0
    assert capsys.readouterr().out == f"V03: {CODES['V03']}\n"
    for unknown in ("V99", "3", "V0"):
        assert main(["verify", "--explain", unknown]) == 2
        assert f"--explain {unknown}: no such code. Known: V01, " in capsys.readouterr().out


def test_a_script_and_layouts_that_are_not_there_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "none.py")]) == 2
    assert "none.py: there is no such file" in capsys.readouterr().err
    (tmp_path / "train.py").write_text("")
    assert main(["verify", str(tmp_path / "train.py"), "--layouts", "ranks2,ranks3"]) == 2
    assert "--layouts ranks3: no such layout. Choose among ranks2, ranks4, " in capsys.readouterr().err
    for empty in ("", ",", " "):
        assert main(["verify", str(tmp_path / "train.py"), "--layouts", empty]) == 2
        assert f"--layouts {empty!r} names no layout. Choose among ranks2, " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_a_report_that_cannot_be_written_is_refused_at_once(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    for place, why in (("none/out", f"there is no folder {tmp_path / 'none'}. Make it first."), (".", "is a folder.")):
        assert main(["verify", str(tmp_path / "train.py"), option, str(tmp_path / place)]) == 2
        said = capsys.readouterr().err
        assert f"{option} {tmp_path / place}" in said and why in said and "Comparing" not in said


def test_a_script_that_is_no_program_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    for content, why in (
        (b"x = 1\nfor x in:\n    pass\n", f"{script}:2: it isn't valid Python (invalid syntax)."),
        (b"x = 1\n  y = 2\n", f"{script}:2: it isn't valid Python (unexpected indent)."),
        (b"x = '\xff'\n", f"{script}:1: it isn't valid Python ("),
        (b"x = '\x00'\n", f"{script}:1: it isn't valid Python ("),
    ):
        script.write_bytes(content)
        assert main(["verify", str(script)]) == 2
        said = capsys.readouterr().err
        assert why in said and "Traceback" not in said and "Comparing" not in said
    assert main(["verify", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder. Name the Python file to run." in capsys.readouterr().err
    assert main(["verify"]) == 2
    assert "No script was given." in capsys.readouterr().err


def test_a_script_that_does_not_train_is_refused_with_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no data in /nowhere')")
    assert main(["verify", str(script), "--layouts", "ranks2"]) == 2
    assert "no data in /nowhere" in capsys.readouterr().err


@slow_for("several runs of a script", "corpus")
def test_layouts_that_a_script_cannot_be_run_in_are_skipped_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    assert main(["verify", str(script), "--num_steps", "2", "--report", str(tmp_path / "out.json")]) == 2
    assert "skipped: the script, started as one process, makes no Accelerator" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert {layout["state"] for layout in report["layouts"]} == {"skipped"} and report["updates"] == 2


@slow_for("several runs of a script", "corpus")
def test_nothing_is_written_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    project = "Accelerator(project_config=ProjectConfiguration('run', automatic_checkpoint_naming=True))"
    text = LOOP.replace("Accelerator()", project).replace("import set_seed", "import ProjectConfiguration, set_seed")
    saves = "torch.save(model.state_dict(), 'model.pt')\n            accelerator.save_state()\n"
    script.write_text(f"{text}            {saves}")
    assert main(["verify", str(script), "--num_steps", "3", "--layouts", "parts2,resume"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@slow_for("several runs of a script", "corpus")
def test_the_fixture_fails_a_test_with_the_first_difference(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["accelerate.guests.scripts.verify.fixture"]\n')
    (tmp_path / "right.py").write_text(LOOP)
    (tmp_path / "wrong.py").write_text(LOOP.replace("accelerator.backward(loss)", "loss.backward()"))
    (tmp_path / "test_scripts.py").write_text(
        "import pytest\n\n"
        '@pytest.mark.parametrize("name", ["right", "wrong"])\n'
        "def test_it_trains_the_same(name, verified):\n"
        '    assert verified(f"{name}.py", layouts=["parts2"], num_steps=2).exit_code == 0\n'
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "2 times the reference: not divided by the number of micro-batches [V03]" in done.stdout


def test_the_page_draws_each_layout_and_escapes_what_it_shows() -> None:
    finding = Finding("ranks2", 1, "gradient", "a<b>", "V13", "norm 1 instead of 2", None, (3, 2))
    ranks2, resume = chosen("ranks2,resume")
    excesses = {"gradients": [1e9, math.inf], "weights": [1e-9, 2.0]}
    proof = Proof(
        Path("train.py"), "float64", 2,
        [Outcome(ranks2, "differs", finding=finding, excesses=excesses), Outcome(resume, "skipped", "no <reason>")],
        ["a note"],
    )  # fmt: skip
    page = as_html(proof)
    assert "gradient of a&lt;b&gt;: norm 1 instead of 2 [V13]" in page and "skipped: no &lt;reason&gt;" in page
    assert page.count("<polyline") == 2 and page.count("<circle") == 4 and "a note" in page
    assert "nan" not in page and "inf," not in page
    report = json.loads(json.dumps(as_json(proof), allow_nan=False))
    assert report["layouts"][0]["excesses"] == {"gradients": [1e9, None], "weights": [1e-9, 2.0]}


# -- moments -----------------------------------------------------------------------------------------------


def moments(values: list[float], start: int = 0, size: int | None = None) -> Moments:
    size = len(values) if size is None else size
    projection = sum(value * (0.5 - (place % 3)) for place, value in enumerate(values, start))
    return Moments(len(values), size, sum(values), sum(v * v for v in values), projection, "float64")


def test_parts_of_a_tensor_are_put_together_and_copies_are_compared() -> None:
    whole = moments([1.0, -2.0, 3.0, 4.0])
    parts = [moments([1.0, -2.0], 0, 4), moments([3.0, 4.0], 2, 4)]
    assert together(parts).moments == whole
    assert together([*parts, *parts]).moments == whole  # two copies, each over two ranks
    assert together([whole, whole]) == (whole, False)
    assert together([whole, moments([1.0, -2.0, 3.0, 4.1])]).differs
    assert together([whole, None]).differs and together([None, None]).moments is None


def test_a_distance_is_relative_and_finds_one_element() -> None:
    whole, near = moments([1.0, -2.0, 3.0, 4.0]), moments([1.0, -2.0, 3.0, 4.0 + 1e-6])
    assert distance(whole, whole, 0.0) == 0.0
    assert 1e-8 < distance(whole, near, 0.0) < 1e-6
    assert distance(whole, near, 1e6) < 1e-11  # small beside the others
    assert distance(whole, moments([1.0, -2.0, 3.0, float("nan")]), 0.0) == float("inf")


@slow_for("several runs of a script", "corpus")
def test_a_layout_that_hangs_is_ended_and_the_report_names_the_rank_the_others_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_HANG_SECONDS", "8")
    sleep = "if accelerator.process_index == 1:\n                __import__('time').sleep(600)\n            "
    script = tmp_path / "train.py"
    script.write_text(LOOP.replace("accelerator.backward(loss)", f"{sleep}accelerator.backward(loss)"))
    assert main(["verify", str(script), "--layouts", "ranks2", "--num_steps", "2"]) == 2
    said = capsys.readouterr().out
    assert "the run 'ranks2' hangs:" in said and "Verdict: the others wait for rank 1, at train.py:" in said, said


def test_an_error_of_the_script_is_shown_from_its_first_line_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def train():\n    raise KeyError('weights')\n\ntrain()\n")
    assert main(["verify", str(script), "--layouts", "ranks2", "--dtype", "float32"]) == 2
    said = capsys.readouterr().err
    begin = f'Traceback (most recent call last):\n  File "{script}", line 4, in <module>\n    train()\n'
    assert begin in said and "KeyError: 'weights'" in said and "observe.py" not in said


def test_a_missing_argument_of_the_script_is_told_with_where_to_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('data')\nparser.parse_args()\n"
    )
    assert main(["verify", str(script), "--layouts", "ranks2", "--dtype", "float32"]) == 2
    said = capsys.readouterr().err
    assert "the following arguments are required: data\nGive the script's own arguments after --.\n" in said


def test_an_optimizer_that_is_not_prepared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.replace(PREPARE, prepare("model", "loader", "scheduler")))
    assert main(["verify", str(script), "--layouts", "parts2", "--num_steps", "2"]) == 1
    said = capsys.readouterr().out
    assert "The optimizer steps in each micro-batch. Pass it to accelerator.prepare() [V01]" in said
