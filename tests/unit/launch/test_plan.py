from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.errors import SettingError
from accelerate.launch.plan import LaunchPlan, Logs, Program, Stream, parse_tee


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("script", ("py", "t", "--a", "b c")),
        ("module", ("py", "-m", "t", "--a", "b c")),
        ("command", ("t", "--a", "b c")),
    ],
)
def test_a_program_is_run_as_a_script_a_module_or_a_command(kind: str, expected: tuple[str, ...]) -> None:
    assert Program("t", ("--a", "b c"), kind).argv("py") == expected  # type: ignore[arg-type]


def test_every_process_has_the_shared_environment_and_its_own() -> None:
    plan = LaunchPlan("local", ("x",), {"A": "1", "B": "2"}, ({"RANK": "0"}, {"RANK": "1", "B": "3"}))
    first, second = plan.environments({"A": "0", "PATH": "/bin"})
    assert first == {"A": "1", "B": "2", "RANK": "0", "PATH": "/bin"}
    assert second["B"] == "3"


def test_a_plan_without_ranks_is_one_process() -> None:
    plan = LaunchPlan("simple", ("x",), {"A": "1"})
    assert list(plan.environments({})) == [{"A": "1"}]
    assert plan.num_processes == 1


def test_the_shown_plan_can_be_copied_into_a_shell() -> None:
    plan = LaunchPlan("simple", ("python", "t.py", "a b", "$HOME"), {"X": "1 2"}, notes=("look",), cwd=Path("/w"))
    text = plan.show()
    assert "python t.py 'a b' '$HOME'" in text
    assert "X='1 2'" in text
    assert "look" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", {None: Stream.NONE}),
        ("3", {None: Stream.BOTH}),
        ("0:1,1:2", {0: Stream.OUT, 1: Stream.ERR}),
    ],
)
def test_tee_is_read_for_all_ranks_or_for_each(text: str, expected: dict[int | None, Stream]) -> None:
    assert parse_tee(text) == expected


@pytest.mark.parametrize("text", ["x", "9", "0:9", "0:1:2", "a:1", "-1:3", "0:1,-2:3", "0:1,0:2", "0:1,00:1"])
def test_a_senseless_tee_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--tee"):
        parse_tee(text)


def test_logs_are_one_folder_a_rank() -> None:
    logs = Logs(Path("/l"), {0: Stream.OUT, None: Stream.ERR})
    assert logs.file(3, "stderr") == Path("/l/3/stderr.log")
    assert Logs().file(0, "stdout") is None
    assert (logs.teed(0), logs.teed(5)) == (Stream.OUT, Stream.ERR)
