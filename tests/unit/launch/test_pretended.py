"""The plan of a rank of a world that isn't there."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.errors import SettingError
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from tests.unit.launch.plans import CPU_HOST, GPU_HOST, settings


def plan(program: Program | None = None, **flags: Any) -> LaunchPlan:
    chosen = settings(**flags)
    engine = choose(chosen, GPU_HOST)
    assert engine.name == "pretended"
    return engine.plan(chosen, program or Program("train.py", ("--lr", "1")), CPU_HOST)


def test_the_rank_has_the_environment_of_its_place() -> None:
    found = plan(pretend=16384, rank=7777)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU")
    assert [found.environment[name] for name in names] == ["7777", "16384", "1", "8", "true"]
    assert found.argv[1:] == ("-m", "accelerate.guests.pretend", "1", "train.py", "--lr", "1")
    assert not found.ranks


def test_hosts_may_have_any_number_of_processes() -> None:
    assert plan(pretend=64, rank=13, num_machines=16).environment["LOCAL_WORLD_SIZE"] == "4"
    assert plan(pretend=6, rank=5).environment["LOCAL_RANK"] == "5"  # no whole hosts of 8: one host


def test_a_module_and_steps_are_passed_on() -> None:
    found = plan(Program("package.train", (), "module"), pretend=64, num_steps=3)
    assert found.argv[2:] == ("accelerate.guests.pretend", "3", "-m", "package.train")


@pytest.mark.parametrize(
    ("flags", "program", "words"),
    [
        ({"pretend": 64, "rank": 64}, None, r"--rank 64.* has the ranks 0 to 63"),
        ({"pretend": 64, "num_machines": 3}, None, r"64 processes can't be spread evenly over `--num_machines 3`"),
        ({"pretend": 64, "no_python": True}, Program("train.sh", (), "command"), "contradicts `--no_python`"),
    ],
)
def test_what_cannot_be_is_refused(flags: dict[str, Any], program: Program | None, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        plan(program, **flags)
