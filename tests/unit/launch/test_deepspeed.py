"""The command line of `deepspeed`, and the encoded command in it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate.errors import SettingError
from accelerate.guests.deepspeed.encoded_command import decode_command, encode_command
from accelerate.guests.deepspeed.launcher import DECODER, DeepSpeedLauncher
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan
from tests.unit.launch.plans import (
    CPU_HOST,
    GPU_HOST,
    NASTY,
    NASTY_PROGRAM,
    PROGRAM,
    argument_lists,
    hosts_file,
    settings,
)

SHELL = {"PATH": "/bin", "HF_TOKEN": "secret", "PYTHONPATH": "/a b;touch pwned"}


def flags(folder: Path, **more: Any) -> dict[str, Any]:
    hosts = hosts_file(folder, "n1 slots=4", "n2 slots=4")
    return {"use_deepspeed": True, "num_machines": 2, "num_processes": 8, "deepspeed_hostfile": hosts, **more}


def plan(folder: Path, **more: Any) -> LaunchPlan:
    return DeepSpeedLauncher().plan(settings(**flags(folder, **more)), PROGRAM, GPU_HOST)


def test_pdsh_is_the_default(tmp_path: Path) -> None:
    made = plan(tmp_path, main_process_port=7)
    where = ("--hostfile", str(tmp_path / "hosts file"), "--launcher", "pdsh", "--num_nodes", "2", "--num_gpus", "4")
    rendezvous = ("--master_addr", "n1", "--master_port", "7", "--no_local_rank", DECODER)
    assert made.argv[:-1] == ("deepspeed", *where, *rendezvous)


def test_filters_replace_the_counts(tmp_path: Path) -> None:
    made = plan(tmp_path, deepspeed_inclusion_filter="n1@n2:0,1", main_process_ip="10.0.0.1")
    assert made.argv[5:7] == ("--include", "n1@n2:0,1")
    assert "--num_nodes" not in made.argv and "10.0.0.1" in made.argv


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "mvapich"])
def test_mpi_launchers_take_the_whole_hostfile(tmp_path: Path, launcher: str) -> None:
    assert "--num_nodes" not in plan(tmp_path, deepspeed_multinode_launcher=launcher).argv
    with pytest.raises(SettingError, match=f"{launcher} launcher .* has no --exclude"):
        plan(tmp_path, deepspeed_multinode_launcher=launcher, deepspeed_exclusion_filter="n1")


def test_without_ssh_each_machine_is_told_its_rank(tmp_path: Path) -> None:
    made = plan(tmp_path, deepspeed_multinode_launcher="nossh", machine_rank=1)
    assert made.argv[3:6] == ("--no_ssh", "--node_rank", "1") and "--launcher" not in made.argv


def test_a_short_or_missing_hostfile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--num_machines 4.*lists 2 host"):
        plan(tmp_path, num_machines=4)
    with pytest.raises(SettingError, match=r"--deepspeed_hostfile .*standard"):
        DeepSpeedLauncher().plan(settings(**{**flags(tmp_path), "deepspeed_hostfile": None}), PROGRAM, GPU_HOST)


def test_who_starts_several_machines(tmp_path: Path) -> None:
    def engine(**more: Any) -> str:
        return choose(settings(**flags(tmp_path, **more)), GPU_HOST).name

    assert engine() == "deepspeed"
    assert engine(deepspeed_multinode_launcher="standard", main_process_ip="n1") == "torchrun"
    assert engine(deepspeed_hostfile=None, main_process_ip="n1") == "torchrun"
    assert engine(deepspeed_hostfile=None, deepspeed_multinode_launcher="pdsh") == "deepspeed"
    assert engine(num_machines=1, num_processes=4, deepspeed_hostfile=None) == "local"


def test_no_secret_travels_and_no_shell_sees_a_value(tmp_path: Path) -> None:
    host = replace(CPU_HOST, environment=SHELL)
    made = DeepSpeedLauncher().plan(settings(**flags(tmp_path)), NASTY_PROGRAM, host)
    argv, environment = decode_command(made.argv[-1])
    assert tuple(argv) == NASTY_PROGRAM.argv()
    assert environment["PYTHONPATH"] == SHELL["PYTHONPATH"] and environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert "HF_TOKEN" not in environment
    assert not made.files


@given(argument_lists, st.dictionaries(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), st.text(max_size=9), max_size=3))
def test_decoding_gives_the_encoded_command_back(argv: list[str], environment: dict[str, str]) -> None:
    encoded = encode_command(argv, environment)
    assert encoded.replace("-", "").replace("_", "").replace("=", "").isalnum() and encoded.isascii()
    assert decode_command(encoded) == (argv, environment)


@pytest.mark.parametrize("arguments", [NASTY, ("\udcff",)])
def test_a_remote_shell_starts_the_program_with_its_arguments(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    tell = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['X']]))"
    encoded = encode_command([sys.executable, "-c", tell, *arguments], {"X": "$(touch pwned)"})
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -u {DECODER} {encoded}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [list(arguments), "$(touch pwned)"]
    assert not (tmp_path / "pwned").exists()
