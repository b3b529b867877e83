"""The command lines of mpirun, for each MPI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from accelerate.errors import SettingError
from accelerate.guests.clusters.mpi import Mpirun, flavor_of
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from accelerate.launch.preflight import Host
from tests.unit.launch.plans import CPU_HOST, NASTY_PROGRAM, PROGRAM, argument_lists, hosts_file, settings

TWO = ("n1 slots=4", "n2 slots=4  # the second")
SHELL = {"PATH": "/bin", "HF_TOKEN": "secret", "WANDB_API_KEY": "secret", "NCCL_DEBUG": "INFO", "EDITOR": "vi"}


def plan(
    folder: Path,
    *lines: str,
    flavor: str = "openmpi",
    program: Program = PROGRAM,
    host: Host = CPU_HOST,
    **flags: Any,
) -> LaunchPlan:
    chosen = settings(cpu=True, mpirun_hostfile=hosts_file(folder, *(lines or TWO)), **flags)
    return Mpirun(lambda: flavor).plan(chosen, program, host)


def test_open_mpi(tmp_path: Path) -> None:
    made = plan(tmp_path, num_processes=8)
    where = ("--hostfile", str(tmp_path / "hosts file"), "--npernode", "4", "-n", "8", "--bind-to", "socket")
    assert made.argv[: len(where) + 1] == ("mpirun", *where)
    assert made.argv[-4:] == (PROGRAM.argv()[0], "train.py", "--lr", "1")
    carried = {name for option, name in zip(made.argv, made.argv[1:], strict=False) if option == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"} <= carried
    assert made.environment["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize("flavor", ["mpich", "intel", "mvapich"])
def test_the_others_speak_hydra(tmp_path: Path, flavor: str) -> None:
    made = plan(tmp_path, flavor=flavor, num_processes=8)
    where = ("mpirun", "-f", str(tmp_path / "hosts file"), "-ppn", "4", "-n", "8", "-genvlist")
    assert made.argv[: len(where)] == where
    assert {"MASTER_ADDR", "ACCELERATE_USE_CPU"} <= set(made.argv[len(where)].split(","))


def test_the_flavor_can_be_named(tmp_path: Path) -> None:
    hosts = hosts_file(tmp_path, *TWO)
    flags = {"cpu": True, "num_processes": 2, "mpirun_hostfile": hosts, "mpi_flavor": "intel"}
    assert "-ppn" in Mpirun(lambda: "openmpi").plan(settings(**flags), PROGRAM, CPU_HOST).argv


def test_values_and_secrets_are_not_on_the_command_line(tmp_path: Path) -> None:
    made = plan(tmp_path, num_processes=2, host=replace(CPU_HOST, environment=SHELL))
    assert {"PATH", "NCCL_DEBUG"} <= set(made.argv)
    assert not {"HF_TOKEN", "WANDB_API_KEY", "EDITOR"} & set(made.argv)
    after_hosts = made.argv[made.argv.index("--bind-to") :]
    assert not [word for word in after_hosts if "secret" in word or "=" in word]


def test_the_hostfile_gives_the_number_of_machines_unless_it_is_given(tmp_path: Path) -> None:
    assert "1 processes on each of 2" in plan(tmp_path, num_processes=2).engine
    address = {"num_machines": 1, "main_process_ip": "n1"}
    assert "2 processes on each of 1" in plan(tmp_path, num_processes=2, **address).engine


def test_more_machines_than_hosts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--num_machines 3.*lists 2 host"):
        plan(tmp_path, num_processes=3, num_machines=3)


def test_a_number_that_cant_be_spread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"num_processes=3 \(.*multiple of 2"):
        plan(tmp_path, num_processes=3)


def test_a_hostfile_that_isnt_there_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--mpirun_hostfile nowhere.*no such file"):
        Mpirun(lambda: "openmpi").plan(settings(cpu=True, mpirun_hostfile="nowhere"), PROGRAM, CPU_HOST)


def test_a_first_host_that_each_machine_takes_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"lists localhost first.*--main_process_ip"):
        plan(tmp_path, "localhost", "n2", num_processes=2)


def test_on_this_host_alone_a_busy_port_is_replaced(tmp_path: Path) -> None:
    made = plan(tmp_path, "localhost slots=2", num_processes=2, host=replace(CPU_HOST, busy_ports=frozenset({29500})))
    assert (made.environment["MASTER_ADDR"], made.environment["MASTER_PORT"]) == ("127.0.0.1", "40000")


@pytest.mark.parametrize(
    ("version", "flavor"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/", "openmpi"),
        ("HYDRA build details:\n    Version:                                 4.0.2", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)", "intel"),
        ("MVAPICH Version: 3.0\nHYDRA build details:", "mvapich"),
    ],
)
def test_the_installed_mpi_is_known_by_its_version(version: str, flavor: str) -> None:
    assert flavor_of(version) == flavor


def test_an_unknown_mpi_is_refused() -> None:
    with pytest.raises(SettingError, match="--mpi_flavor"):
        flavor_of("FancyMPI 1.0")


def test_a_hostfile_chooses_mpirun(tmp_path: Path) -> None:
    chosen = settings(cpu=True, num_processes=2, mpirun_hostfile=hosts_file(tmp_path, *TWO))
    assert choose(chosen, CPU_HOST).name == "mpirun"


@pytest.mark.parametrize("flavor", ["openmpi", "mpich", "intel", "mvapich"])
@given(argument_lists)
def test_every_argument_is_a_word_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, flavor: str, arguments: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    made = plan(folder, flavor=flavor, num_processes=2, program=Program("train.py", tuple(arguments)))
    assert made.argv[len(made.argv) - len(arguments) :] == tuple(arguments)
    assert NASTY_PROGRAM.argv()[1] == made.argv[len(made.argv) - len(arguments) - 1]
