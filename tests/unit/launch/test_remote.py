"""What engines that reach other machines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.errors import MissingDependency, SettingError
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.remote import (
    Secret,
    forwarded_environment,
    hosts_of,
    looks_secret,
    run_command,
    spread,
    write_files,
)
from tests.unit.launch.plans import CPU_HOST, GPU_HOST, settings


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "COMET_APIKEY", "X_CREDENTIALS"],
)
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert looks_secret(name) and forwarded_environment({name: "x"}) == {}


def test_what_a_run_needs_elsewhere_travels_and_the_rest_stays() -> None:
    shell = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": "/h",
        "OMP_NUM_THREADS": "2",
    }
    assert forwarded_environment({**shell, "EDITOR": "vi", "SSH_AUTH_SOCK": "/s", "HF_TOKEN": "t"}) == shell


def test_a_value_of_several_lines_stays() -> None:
    assert forwarded_environment({"NCCL_X": "a\nb"}) == {}


@pytest.mark.parametrize(
    ("flags", "machines", "devices", "expected"),
    [
        ({"cpu": True}, 2, None, (2, 1)),
        ({}, 2, None, (8, 4)),
        ({}, 2, 8, (16, 8)),
        ({"gpu_ids": "0,2"}, 3, None, (6, 2)),
        ({"num_processes": 6}, 3, None, (6, 2)),
    ],
)
def test_processes_are_spread(flags: dict[str, object], machines: int, devices: int | None, expected: object) -> None:
    assert spread(settings(**flags), GPU_HOST, machines, devices=devices) == expected


def test_a_machine_without_devices_has_one_process() -> None:
    assert spread(settings(), CPU_HOST, 2) == (2, 1)


def test_an_uneven_number_is_refused() -> None:
    with pytest.raises(SettingError, match="multiple of 4"):
        spread(settings(num_processes=6), GPU_HOST, 4)


def test_hostfiles_of_every_kind_are_read() -> None:
    text = "# nodes\nn1 slots=4\nn2:8  # fast\n\n  n3\nn1 slots=2\n"
    assert hosts_of(text) == ["n1", "n2", "n3"]


def test_a_secret_never_shows() -> None:
    secret = Secret("hush")
    assert f"{secret}" == "***" == repr(secret) and {"a": secret} == {"a": Secret("hush")} and secret.value == "hush"


def test_files_of_a_plan_are_written_beside_the_run(tmp_path: Path) -> None:
    write_files(LaunchPlan("x", ("x",), {}, files={"a/b.txt": "é"}, cwd=tmp_path))
    assert (tmp_path / "a" / "b.txt").read_text(encoding="utf-8") == "é"


def test_a_command_that_isnt_installed_is_named() -> None:
    with pytest.raises(MissingDependency, match="needs the command no-such-engine on the PATH: install it"):
        run_command(LaunchPlan("x", ("no-such-engine",), {}), "install it")
