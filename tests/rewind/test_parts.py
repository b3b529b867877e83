"""The parts of a search that need no run: conditions, logs, commands, and what stands out in an update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.main import main
from accelerate.errors import SettingError
from accelerate.guests.rewind.rerun import RerunError, split_command
from accelerate.guests.rewind.run_folder import Condition, Log, Recorded, RunFolder
from accelerate.guests.rewind.updates import Update, first_difference, stands_out


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("loss > 4", {"loss": 4.5}, True),
        ("loss > 4", {"loss": 4.0}, False),
        ("loss>=4", {"loss": 4.0}, True),
        ("loss > 4", {"loss": math.nan}, True),
        ("loss > 4", {"accuracy": 9.0}, None),
        ("grad_norm < 1e-3", {"gradient_norm": 1e-4}, True),
        ("gradient_norm > 10", {"grad_norm": 11.0}, True),
        ("eval/loss != 0", {"eval/loss": 0.0}, False),
        ("not finite", {"loss": 1.0, "lr": math.inf}, True),
        ("not finite", {"loss": 1.0}, False),
        ("not finite", {}, None),
        ("loss not finite", {"loss": 1.0, "lr": math.inf}, False),
    ],
)
def test_a_condition_is_read_and_decided(text: str, values: dict[str, float], holds: bool | None) -> None:
    assert Condition.parse(text).holds(values) is holds


@pytest.mark.parametrize("text", ["", "loss", "loss > high", "loss => 4", "finite", "loss > 4 and lr > 1"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingError, match="grad_norm > 10"):
        Condition.parse(text)


@pytest.mark.parametrize(
    ("command", "flags", "program"),
    [
        (["train.py", "--lr", "1"], [], ["train.py", "--lr", "1"]),
        (["accelerate", "launch", "--cpu", "a.py", "b.py"], ["--cpu"], ["a.py", "b.py"]),
        (["/usr/bin/python3", "-m", "own.train", "-m", "x"], [], ["-m", "own.train", "-m", "x"]),
        (["--num_processes", "2", "train.py"], ["--num_processes", "2"], ["train.py"]),
    ],
)
def test_a_command_has_flags_and_a_program(command: list[str], flags: list[str], program: list[str]) -> None:
    assert split_command(command) == (flags, program)


@pytest.mark.parametrize("command", [[], ["--cpu"], ["train"], ["-m"]])
def test_a_command_without_a_script_is_refused(command: list[str]) -> None:
    with pytest.raises(RerunError, match=r"-- train\.py"):
        split_command(command)


def lines_of(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_log_after_a_restart_has_the_newer_numbers(tmp_path: Path) -> None:
    path = lines_of(
        tmp_path / "run.jsonl",
        {"time": 1, "config": {}},
        *({"time": step, "step": step, "loss": step} for step in (1, 2, 3)),
        {"time": 4, "step": 2, "loss": "nan"},
        {"time": 4, "step": 2, "accuracy": 1},
    )
    path.write_text(path.read_text() + '{"step": 3, "lo')
    lines = Log.read(path).lines
    assert [line.step for line in lines] == [1, 2]
    assert math.isnan(lines[1].values["loss"]) and lines[1].values["accuracy"] == 1
    before, hit = Log.read(path).first(Condition.parse("not finite"))
    assert before is not None and hit is not None and (before.step, hit.step) == (1, 2)


def test_a_run_knows_its_last_launch(tmp_path: Path) -> None:
    launch = {"kind": "launch", "ranks": 2, "command": {"words": ["train.py", "1"], "folder": "/data"}}
    lines_of(
        tmp_path / "run.lock.json",
        {**launch, "launch": "a", "packages": {"torch": "1"}, "code": {"files": {"train.py": "12"}}},
        {"kind": "update", "launch": "a", "updates": 4, "weights": "ab"},
        {**launch, "launch": "b", "command": {"words": ["train.py", "2"], "folder": "/data"}, "variables": {"A": "1"}},
    )
    recorded = RunFolder(tmp_path).recorded
    assert recorded is not None and recorded.words == ["train.py", "2"] and recorded.num_processes == 2
    assert recorded.facts == {"variables A": "1"} and recorded.weights == {4: "ab"}
    last = Recorded.read(tmp_path, only_last=True)
    assert last is not None and last.weights == {}
    with pytest.raises(SettingError, match="project_dir"):
        RunFolder(tmp_path / "nowhere")


def update(number: int, *ranks: list[list[Any]], samples: tuple[int, ...] = (5, 6)) -> Update:
    """An update with these tensors by rank, each in one batch of samples."""
    facts = [
        {"tensors": tensors, "batches": [{"samples": list(samples), "loss": 1.0}], "logged": {}} for tensors in ranks
    ]
    return Update(number, facts)


def usual(factor: float = 1.0) -> list[list[Any]]:
    """The tensors of an update in which nothing stands out, times a factor."""
    top = [[0], 1.2]
    return [
        ["weight", "first.weight", factor, -1, None],
        ["input", "0", factor, 0, top],
        ["output", "first", factor, 0, top],
        ["loss", "", factor, 0, None],
        ["gradient", "first", factor, 0, top],
    ]


def test_the_earliest_tensor_that_exceeds_its_history_stands_out() -> None:
    history = [update(number, usual(), usual(1.5)) for number in (1, 2)]
    late, early = usual(), usual()
    late[4][2] = 100.0
    early[2][2], early[2][4], early[3][2] = 7.0, [[1], 30.0], 9.0
    found = stands_out([*history, update(3, late, early)], 3)
    assert found is not None and (found.rank, found.module, found.samples) == (1, "first", [6])
    assert "at most 1.5" in found.how
    assert stands_out([*history, update(3, usual(3.9), usual())], 3) is None


def test_what_is_not_finite_comes_before_what_is_large() -> None:
    tensors = usual()
    tensors[1][2], tensors[3][2], tensors[4][2:] = 90.0, math.nan, [math.nan, 0, [[1], math.inf]]
    found = stands_out([update(1, usual()), update(2, tensors)], 2)
    assert found is not None and (found.what, found.samples) == ("the loss", [6])


def test_no_sample_is_named_if_all_are_large() -> None:
    tensors = usual()
    tensors[2][2] = 50.0
    found = stands_out([update(1, usual()), update(2, tensors)], 2)
    assert found is not None and found.module == "first" and not found.samples


def compared(*sums: int, samples: tuple[int, ...] = (5, 6)) -> Update:
    tensors = [[*tensor, checksum, [checksum, 3]] for tensor, checksum in zip(usual(), sums, strict=True)]
    return update(1, tensors, samples=samples)


def test_the_first_difference_in_the_order_of_computation_is_named() -> None:
    same = compared(1, 2, 3, 4, 5)
    assert first_difference([same], [same]) is None
    found = first_difference([same], [compared(1, 2, 9, 9, 9)])
    assert found is not None and found.module == "first" and found.what == "the output of first"
    found = first_difference([same], [compared(1, 9, 9, 9, 9)])
    assert found is not None and found.what == "the input 0" and found.samples == [5]
    found = first_difference([same], [compared(1, 2, 3, 4, 5, samples=(5, 8))])
    assert found is not None and found.what == "the choice of samples" and found.samples == [8]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two folders, the second of them empty; the first has a log and the record of a command with a secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n')
    command = {"words": ["train.py", "--api_key", "***"], "folder": str(tmp_path)}
    launch = {"kind": "launch", "launch": "a", "command": command, "ranks": 1}
    (tmp_path / "one" / "run.lock.json").write_text(json.dumps(launch) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bisect", "one", "--when", "los > 3", "--", "train.py"], "no log has los. Did you mean loss?"),
        (["bisect", "one", "--when", "", "--", "train.py"], "this is no condition"),
        (["bisect", "one", "--script", "missing.py", "--", "train.py"], "there is no such file"),
        (["bisect", "one", "--against", "two", "--", "train.py"], "there is nothing to compare"),
        (["bisect", "one", "--against", "one", "--", "train.py"], "this is the run itself"),
        (["bisect", "one", "--when", "loss > 3"], "leaves out arguments that look like secrets (***)"),
        (["replay", "one", "--update", "2"], "leaves out arguments that look like secrets (***)"),
        (["replay", "one", "--update", "2", "--until", "1", "--with", "lr=1"], "it is before --update 2"),
        (["replay", "one", "--update", "2", "--until", "3"], "it ends a branch, and none is made"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_replay(
    words: list[str], said: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Replaying" not in shown and "Traceback" not in shown
