"""Recorded environments of launchers, and the seats that they describe."""

from __future__ import annotations

import pytest

from accelerate.distributed.environment import (
    CPUInformation,
    ProcessIdentity,
    detect,
    expand_host_list,
    expand_task_counts,
    get_cpu_distributed_information,
)
from accelerate.errors import WorldError

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "5",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "7"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-04,11]",
    "SLURM_JOB_NODELIST": "gpu[03-04,11]",
}
LSF = {
    "LSB_JOBID": "77",
    "LSB_HOSTS": "batch5 h36n03 h36n03 h36n04 h36n04",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}

SEATS = {
    "torchrun": (TORCHRUN, ProcessIdentity(5, 8, 1, 4, "node1", 29501, "torchrun", 2)),
    "torchrun of one process": (
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        ProcessIdentity(0, 1, 0, 1, "node1", 29501, "torchrun", 2),
    ),
    "by hand on one host": (
        {"RANK": "1", "WORLD_SIZE": "2"},
        ProcessIdentity(1, 2, 1, 2, "127.0.0.1", 29500, "environment"),
    ),
    "by hand with an address": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
        ProcessIdentity(1, 2, 0, 1, "10.0.0.1", 1234, "environment"),
    ),
    "Kubeflow PyTorchJob": (
        {
            "RANK": "2",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "job-master-0",
            "MASTER_PORT": "23456",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        },
        ProcessIdentity(2, 3, 0, 1, "job-master-0", 23456, "environment"),
    ),
    "torchrun under srun": (
        {**SLURM, **TORCHRUN},
        ProcessIdentity(5, 8, 1, 4, "node1", 29501, "torchrun", 2),
    ),
    "Open MPI on one host": (OPEN_MPI, ProcessIdentity(1, 2, 1, 2, "127.0.0.1", 29500, "Open MPI")),
    "Open MPI on two hosts": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"},
        ProcessIdentity(1, 2, 0, 1, "a", 29500, "Open MPI"),
    ),
    "Open MPI inside a Slurm job": (
        {**OPEN_MPI, "SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
        ProcessIdentity(1, 2, 1, 2, "127.0.0.1", 29500, "Open MPI"),
    ),
    "MPICH or Intel MPI": (
        {**MPICH, "MASTER_ADDR": "b", "MASTER_PORT": "3000"},
        ProcessIdentity(3, 4, 1, 2, "b", 3000, "MPICH"),
    ),
    "MPICH of one process": (
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        ProcessIdentity(0, 1, 0, 1, "127.0.0.1", 29500, "MPICH"),
    ),
    "MVAPICH": ({**MVAPICH, "MASTER_ADDR": "c"}, ProcessIdentity(2, 4, 0, 2, "c", 29500, "MVAPICH")),
    "Slurm": (SLURM, ProcessIdentity(5, 6, 1, 2, "gpu03", 12000 + 1234 * 7, "Slurm")),
    "Slurm, second step": (
        {**SLURM, "SLURM_STEP_ID": "1"},
        ProcessIdentity(5, 6, 1, 2, "gpu03", 12000 + 1234 * 7 + 1, "Slurm"),
    ),
    "Slurm speaking PMI": (
        {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6", "PMI_FD": "9"},
        ProcessIdentity(5, 6, 1, 2, "gpu03", 12000 + 1234 * 7, "Slurm"),
    ),
    "Slurm with an address of its own": (
        {**SLURM, "MASTER_ADDR": "login", "MASTER_PORT": "4321", "WORLD_SIZE": "6"},
        ProcessIdentity(5, 6, 1, 2, "login", 4321, "Slurm"),
    ),
    "LSF with jsrun": (LSF, ProcessIdentity(3, 4, 1, 2, "h36n03", 12000 + 77 * 7, "LSF")),
    "nobody": ({"PATH": "/bin", "HOME": "/root"}, None),
    "the batch script of a Slurm job": (
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
        None,
    ),
    "the interactive shell of an allocation": ({**SLURM, "SLURM_STEP_ID": "4294967290"}, None),
    "srun --pty": ({**SLURM, "SLURM_PTY_PORT": "40000"}, None),
    "srun of one task": ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
    "only WORLD_SIZE=1": ({"WORLD_SIZE": "1"}, None),
    "only LOCAL_RANK=0": ({"LOCAL_RANK": "0"}, None),
    "LOCAL_RANK=-1 of old launchers": ({"LOCAL_RANK": "-1", "RANK": "-1"}, None),
}


@pytest.mark.parametrize("name", SEATS)
def test_the_seat_of_a_recorded_environment(name: str) -> None:
    environment, expected = SEATS[name]
    assert detect(environment) == expected


REFUSED = {
    "a world without a rank": (
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        ["WORLD_SIZE=2", "LOCAL_RANK=1", "RANK isn't set"],
    ),
    "a rank without a world": ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE isn't set"]),
    "a rank beyond the world": ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    "a local rank beyond the host": (
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
        ["LOCAL_RANK=3", "LOCAL_WORLD_SIZE=2"],
    ),
    "a host bigger than the world": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
        ["LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"],
    ),
    "no number": ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK='zero'"]),
    "several hosts without a local rank": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
        ["RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=node1", "LOCAL_RANK isn't set"],
    ),
    "MPI over several hosts without an address": (MPICH, ["MASTER_ADDR isn't set", "MPICH", "4 processes"]),
    "Open MPI without a local rank": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        ["OMPI_COMM_WORLD_LOCAL_RANK isn't set", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2"],
    ),
    "MPICH without a size": ({"PMI_RANK": "0"}, ["PMI_SIZE isn't set", "PMI_RANK=0"]),
    "Slurm and WORLD_SIZE disagree": ({**SLURM, "WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "Slurm", "6"]),
    "Open MPI and RANK disagree": ({**OPEN_MPI, "RANK": "0"}, ["RANK=0", "Open MPI", "1"]),
    "a port beyond the last": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
    "a restart count that is none": (
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"},
        ["TORCHELASTIC_RESTART_COUNT='x'"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_refused_with_its_variables(name: str) -> None:
    environment, words = REFUSED[name]
    with pytest.raises(WorldError) as caught:
        detect(environment)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-10,15],cpu7", ["gpu08", "gpu09", "gpu10", "gpu15", "cpu7"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1,3].cluster.local", ["n1.cluster.local", "n3.cluster.local"]),
    ],
)
def test_slurm_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_host_list(text) == hosts


@pytest.mark.parametrize(("text", "counts"), [("", []), ("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])])
def test_slurm_task_counts(text: str, counts: list[int]) -> None:
    assert expand_task_counts(text) == counts


def test_the_port_of_a_job_is_the_same_in_every_task_and_below_the_ephemeral_ones() -> None:
    for job in ("1", "999999", "123456789"):
        ports = {
            identity.port
            for rank in range(6)
            if (
                identity := detect(
                    {**SLURM, "SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}
                )
            )
        }
        assert len(ports) == 1
        assert 12000 <= ports.pop() < 32000


def test_the_documented_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_cpu_distributed_information() == CPUInformation()
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert get_cpu_distributed_information() == CPUInformation(1, 2, 1, 2)
