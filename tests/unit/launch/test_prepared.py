"""The documented functions that say what a launch would run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.launch.prepared import (
    PrepareForLaunch,
    convert_nargs_to_dict,
    env_var_path_add,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    return "s.py"


def test_a_simple_launch_is_a_command_and_a_whole_environment(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", script, "--lr", "1"])
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, script, "--lr", "1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["PATH"] == os.environ["PATH"]


def test_several_ranks_share_an_environment(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "2", script])
    assert prepare_multi_gpu_env(args)["ACCELERATE_USE_CPU"] == "true"


def test_bf16_on_a_tpu_is_a_variable(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", script])
    assert prepare_tpu(args, {})[1]["XLA_USE_BF16"] == "1"


def test_arguments_become_the_hyper_parameters_of_a_job() -> None:
    words = ["--lr", "1e-3", "--steps=5", "--offset", "-2", "--name", "a b", "--fast", "True"]
    assert convert_nargs_to_dict(words) == {"lr": 1e-3, "steps": 5, "offset": -2, "name": "a b", "fast": True}


@pytest.mark.parametrize("words", [["--fast"], ["--fast", "--lr", "1"], ["stray"]])
def test_options_without_a_value_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="without"):
        convert_nargs_to_dict(words)


def test_a_prepared_function_knows_its_rank() -> None:
    seen: list[tuple[str | None, ...]] = []
    names = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")
    os.environ.update({"NPROC": "4", "NODE_RANK": "1"})
    PrepareForLaunch(lambda word: seen.append((word, *map(os.environ.get, names))), "MULTI_GPU")(2, "x")
    assert seen == [("x", "6", "2", "1")]


def test_a_path_is_added_to_a_list_of_paths() -> None:
    os.environ["SOME_PATHS"] = "/a"
    assert env_var_path_add("SOME_PATHS", "/b") == "/a:/b"
    assert env_var_path_add("NO_PATHS", "/b") == "/b"
    assert os.environ["SOME_PATHS"] == "/a"
