"""What is seen before a run, and what the check of the machines makes of what ranks tell."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from accelerate.errors import SettingError
from accelerate.launch.preflight import Facts, check_cheap, contradictions, program_of, table
from tests.unit.launch.plans import settings

TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
}


def machine(rank: int, **more: Any) -> dict[str, Any]:
    address = {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
    return {"cpu": True, "num_machines": 2, "num_processes": 2, "machine_rank": rank, **address, **more}


def test_a_run_that_fits_its_slurm_step_is_let_pass() -> None:
    check_cheap(settings(**machine(1)), TASK)
    check_cheap(settings(cpu=True, num_processes=2), TASK)
    check_cheap(settings(**machine(0)), {})


def test_a_node_number_that_was_expanded_too_early_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--machine_rank 0.*node 1 \(SLURM_NODEID=1\).*single quotes"):
        check_cheap(settings(**machine(0)), TASK)


def test_a_number_of_machines_that_isnt_the_steps_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--num_machines 2.*SLURM_STEP_NUM_NODES=4"):
        check_cheap(settings(**machine(1)), {**TASK, "SLURM_STEP_NUM_NODES": "4"})


def test_an_address_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SettingError, match=r"--main_process_ip nowhere.* can't be resolved on"):
        check_cheap(settings(**machine(1, main_process_ip="nowhere")), {})


def test_each_contradiction_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SettingError) as caught:
        check_cheap(settings(**machine(0)), TASK)
    assert len(str(caught.value).splitlines()) == 2


def test_preflight_is_a_program_of_its_own() -> None:
    program = program_of(settings(preflight=True))
    assert (program.kind, program.target) == ("module", "accelerate.launch.preflight")


ONE = Facts(0, 0, "a", "cuda:0", 2, "3.11.7", "2.13.0", "1.15.0", 2**40)
TWO = replace(ONE, rank=1, local_rank=1, device="cuda:1")


def test_ranks_that_agree_have_no_contradictions() -> None:
    assert contradictions([ONE, TWO, replace(ONE, rank=2, host="b", clock=0.4)]) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"torch": "2.6.0"}, "Versions of torch differ: 2.13.0 on rank 0; 2.6.0 on rank 1. Install the same."),
        ({"python": "3.12.1"}, "Versions of python differ"),
        ({"accelerate": "1.0"}, "Versions of accelerate differ"),
        ({"device": "cpu"}, "different kinds of device: cuda on rank 0; cpu on rank 1"),
        ({"host": "b", "clock": -7.25}, "Clocks differ from rank 0's: b -7.2 s"),
        ({"host": "b", "free_bytes": 2**29}, "Host b has 0.50 GiB free"),
    ],
)
def test_what_differs_is_named_in_one_line(change: dict[str, Any], text: str) -> None:
    (line,) = contradictions([ONE, replace(TWO, **change)])
    assert text in line


def test_more_ranks_than_devices_are_a_contradiction() -> None:
    crowd = [replace(ONE, rank=rank, local_rank=rank, num_devices=2) for rank in range(3)]
    assert contradictions(crowd) == ["Host a has 2 device(s) for 3 ranks: start one rank a device."]


def test_the_table_has_a_line_a_rank() -> None:
    lines = table([ONE, TWO]).splitlines()
    assert len(lines) == 3 and "cuda:1" in lines[2] and "1024.0 GiB" in lines[1]
