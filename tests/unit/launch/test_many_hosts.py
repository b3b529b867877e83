"""Launches on 2,048 hosts of eight devices: the plans, and what is said of a failure."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import accelerate
from accelerate.distributed.environment import expand_host_list
from accelerate.distributed.failures import (
    RECORDS_VARIABLE,
    Failure,
    Frame,
    Traceback,
    forget_saved,
    record_saved,
    report,
)
from accelerate.distributed.mismatched_calls import RankState, Verdict
from accelerate.guests.clusters.kubernetes import Kubernetes
from accelerate.guests.clusters.mpi import Mpirun
from accelerate.guests.clusters.slurm import Slurm
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.records import EndRecords
from accelerate.launch.remote import hosts_of
from accelerate.launch.torchrun import Torchrun, exit_code_after, report_of_host
from tests.unit.launch.plans import GPU_HOST, PROGRAM, hosts_file, settings

HOSTS = 2048
RANKS = 8 * HOSTS
NAMES = [f"node{number:04d}" for number in range(HOSTS)]
LISTED = "node[0000-2047]"
HOST = replace(GPU_HOST, num_devices=8)
IN_JOB = replace(
    HOST, environment={"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(HOSTS), "SLURM_JOB_NODELIST": LISTED}
)


def by_slurm(folder: Path) -> LaunchPlan:
    return Slurm().plan(settings(launcher="slurm"), PROGRAM, IN_JOB)


def by_slurm_with_agents(folder: Path) -> LaunchPlan:
    return Slurm().plan(settings(launcher="slurm", max_restarts=1), PROGRAM, IN_JOB)


def by_sbatch(folder: Path) -> LaunchPlan:
    return Slurm().plan(settings(launcher="slurm", num_machines=HOSTS), PROGRAM, HOST)


def by_torchrun(folder: Path) -> LaunchPlan:
    given = settings(num_machines=HOSTS, num_processes=RANKS, machine_rank=7, main_process_ip="node0000")
    return Torchrun().plan(given, PROGRAM, HOST)


def by_mpirun(folder: Path) -> LaunchPlan:
    given = settings(mpirun_hostfile=hosts_file(folder, *(f"{name} slots=8" for name in NAMES)))
    return Mpirun(lambda: "openmpi").plan(given, PROGRAM, HOST)


def by_jobset(folder: Path) -> LaunchPlan:
    given = settings(launcher="kubernetes", k8s_kind="JobSet", k8s_image="image:1", num_machines=HOSTS)
    return Kubernetes().plan(given, PROGRAM, HOST)


def by_pytorchjob(folder: Path) -> LaunchPlan:
    given = settings(launcher="kubernetes", k8s_image="image:1", num_machines=HOSTS)
    return Kubernetes().plan(given, PROGRAM, HOST)


PLANS = (by_slurm, by_slurm_with_agents, by_sbatch, by_torchrun, by_mpirun, by_jobset, by_pytorchjob)


@pytest.mark.parametrize("made_by", PLANS)
def test_a_plan_is_one_screen_and_one_short_command(made_by: Callable[[Path], LaunchPlan], tmp_path: Path) -> None:
    made = made_by(tmp_path)
    shown = made.show()
    assert len(shown.splitlines()) < 150 and len(shown) < 8000  # a PyTorchJob spells its pods out twice
    assert len("\0".join(made.argv)) < 4000  # the limit of Linux is 128 KiB an argument, of POSIX 4 KiB for all
    assert "2048 node(s)" in made.engine or "2048 machine(s)" in made.engine or "2048 pod(s)" in made.engine
    assert sum(name in shown for name in NAMES) <= 2


def test_slurm_names_its_nodes_as_it_lists_them(tmp_path: Path) -> None:
    assert by_slurm(tmp_path).engine_options == {"nodes": "2,048: node[0000-2047]"}
    options = dict(pairwise(by_slurm(tmp_path).argv))
    assert (options["--nodes"], options["--ntasks"], options["--ntasks-per-node"]) == ("2048", str(RANKS), "8")
    assert dict(pairwise(by_slurm_with_agents(tmp_path).argv))["--rdzv-endpoint"] == "node0000:29500"
    assert expand_host_list(LISTED) == NAMES
    scattered = ",".join(NAMES[::2])
    host = replace(IN_JOB, environment={**IN_JOB.environment, "SLURM_JOB_NODELIST": scattered})
    nodes = str(Slurm().plan(settings(launcher="slurm"), PROGRAM, host).engine_options["nodes"])
    assert len(nodes) == 100 and nodes.startswith("1,024: node0000,node0002,") and nodes.endswith("...")


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's client programs aren't installed")
def test_slurm_itself_lists_the_same_hosts(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=tests\nSlurmctldHost=localhost\n")
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}

    def scontrol(*words: str) -> list[str]:
        done = subprocess.run(["scontrol", "show", *words], env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"this scontrol needs a cluster: {done.stderr.strip()[:100]}")
        return done.stdout.split()

    assert scontrol("hostlist", ",".join(NAMES)) == [LISTED]
    assert scontrol("hostnames", LISTED) == expand_host_list(LISTED)
    mixed = "gpu[001-003,007],cpu[1-2],login"
    assert scontrol("hostnames", mixed) == expand_host_list(mixed)


def test_a_batch_script_is_one_that_bash_reads(tmp_path: Path) -> None:
    (text,) = by_sbatch(tmp_path).files.values()
    assert "#SBATCH --nodes=2048" in text and len(text.splitlines()) < 60
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0


def test_torchs_own_parser_takes_the_command(tmp_path: Path) -> None:
    from torch.distributed import run

    parsed = run.parse_args(list(by_torchrun(tmp_path).argv[3:]))
    assert (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node) == (str(HOSTS), 7, "8")
    assert parsed.master_addr == "node0000" and parsed.training_script == "train.py"


def test_mpirun_gets_the_hosts_by_file(tmp_path: Path) -> None:
    made = by_mpirun(tmp_path)
    options = dict(pairwise(made.argv))
    assert (options["-n"], options["--npernode"]) == (str(RANKS), "8")
    assert hosts_of(Path(options["--hostfile"]).read_text()) == NAMES
    assert made.environment["MASTER_ADDR"] == "node0000"


@pytest.mark.parametrize("made_by", [by_jobset, by_pytorchjob])
def test_a_manifest_counts_its_pods(made_by: Callable[[Path], LaunchPlan], tmp_path: Path) -> None:
    (text,) = made_by(tmp_path).files.values()
    assert "accelerate.launch.agent" in text  # whose report of a host is one line where another host failed
    job = yaml.safe_load(text)
    if job["kind"] == "JobSet":
        pods = job["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert pods["parallelism"] == pods["completions"] == HOSTS
    else:
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert replicas["Master"]["replicas"] + replicas["Worker"]["replicas"] == HOSTS


def failure(rank: int, **values: object) -> Failure:
    given = {"rank": rank, "host": NAMES[rank // 8], "pid": rank, "returncode": -15, "seconds": 100.0, "stopped": True}
    return Failure(**{"traceback": None, **given, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["stopped", "each with an error of its own"])
def test_a_failure_of_one_rank_of_16384_is_one_screen(how: str) -> None:
    first = Traceback((), "RuntimeError: the batch is empty")
    failures = [failure(rank) for rank in range(RANKS)]
    if how != "stopped":
        failures = [
            failure(rank, returncode=1, stopped=False, traceback=Traceback((), f"ValueError: of rank {rank}"))
            for rank in range(RANKS)
        ]
    failures[9999] = failure(9999, returncode=1, seconds=50.0, stopped=False, traceback=first)
    lines = report(failures, RANKS).splitlines()
    assert len(lines) <= 14 and max(map(len, lines)) <= 240
    assert lines[0].startswith("First cause: rank 9999 of 16384 (host node1249, ")
    assert "RuntimeError: the batch is empty" in "\n".join(lines)
    if how == "stopped":
        assert f"stopped by the launcher with {signal.SIGTERM.name}" in "\n".join(lines)


def test_a_host_whose_ranks_only_lost_another_hosts_says_so_in_one_line() -> None:
    """2,048 agents may write to one log."""
    frames = (Frame("/home/me/train.py", 7), Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 1))
    lost = Traceback(frames, "RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4711")
    own = [failure(rank, returncode=1, stopped=False, traceback=lost) for rank in range(8, 16)]
    [line] = report_of_host(own, HOSTS, RANKS).splitlines()
    who = "Ranks 8, 9, 10, 11, 12, 13, 14 and 15 of 16384 (host node0001)"
    assert line.startswith(f"{who} ended after 100.0 s because a ")
    assert "Connection closed by peer" in line and len(line) <= 240
    assert "see that host's report" in report_of_host([failure(8)], HOSTS, RANKS)
    gone = Verdict("left", 3).explain(8, RankState(7, "wait_for_everyone"))
    left = failure(8, returncode=1, stopped=False, traceback=Traceback((), f"CollectiveError: {gone}"))
    assert len(report_of_host([left], HOSTS, RANKS).splitlines()) == 1
    assert report_of_host(own, 1, 8) == report(own, 8)
    cause = failure(9, returncode=1, stopped=False, traceback=Traceback((), "ValueError: no data"))
    assert report_of_host([cause, *own], HOSTS, RANKS).startswith("First cause: rank 9 of 16384 (host node0001")


REFUSED = "Connection refused"
SAVES = "ACCELERATE_SAVE_ON_SIGNAL"


@pytest.mark.parametrize(
    ("innermost", "message", "is_short"),
    [
        ("/x/site-packages/requests/adapters.py", f"requests.exceptions.ConnectionError: {REFUSED}", False),
        ("/home/me/train.py", "BrokenPipeError: [Errno 32] Broken pipe", False),
        ("/home/me/torch_distributed.py", f"ConnectionError: {REFUSED}", False),
        ("/home/me/train.py", f"DistanceError: {REFUSED}", False),
        ("/x/site-packages/torch/autograd/graph.py", "RuntimeError: [gloo/tcp/pair.cc:547] Connection reset", True),
        ("/home/me/train.py", f"torch.distributed.DistNetworkError: {REFUSED}", True),
        (accelerate.__file__, f"RuntimeError: {REFUSED}", True),
    ],
)
def test_a_lost_connection_of_the_scripts_own_is_reported_whole(innermost: str, message: str, is_short: bool) -> None:
    frames = (Frame("/home/me/train.py", 7, "load", "rows = database.read()"), Frame(innermost, 3))
    own = failure(9, returncode=1, stopped=False, traceback=Traceback(frames, message))
    for failures in ([own], [own, failure(8)]):
        text = report_of_host(failures, HOSTS, RANKS)
        assert ("see that host's report" in text) == is_short
        if not is_short:
            assert text.startswith("First cause: rank 9 of 16384") and "rows = database.read()" in text
            assert message in text


@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_an_agent_asks_to_be_started_again_only_after_a_notice_on_which_ranks_saved(
    received: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_SAVE_ON_SIGNAL", "true")
    records = EndRecords()
    try:
        folder = records.environment[RECORDS_VARIABLE]
        assert exit_code_after(received, records) == 128 + received
        record_saved(folder, 3)
        is_notice = received in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        assert exit_code_after(received, records) == (75 if is_notice else 128 + received)
        record_saved(folder, 3, 99)  # PreemptionPolicy(exit_code=99)
        assert exit_code_after(received, records) == (99 if is_notice else 128 + received)
        forget_saved(folder, 3)  # the agent has started it again
        assert exit_code_after(received, records) == 128 + received
    finally:
        records.close()
    record_saved(folder, 3)  # without a launcher nothing is written
    assert not Path(folder).exists()


def test_the_agents_records_say_which_exit_is_a_saved_one() -> None:
    records = EndRecords()
    folder = records.environment[RECORDS_VARIABLE]
    try:
        assert not records.is_preempted(0, 75, {}) and not records.is_preempted(0, 75, {SAVES: "false"})
        assert records.is_preempted(0, 75, {SAVES: "true"}) and not records.is_preempted(0, 3, {SAVES: "true"})
        record_saved(folder, 0)
        assert records.is_preempted(0, 75, {}) and not records.is_preempted(1, 75, {})
        record_saved(folder, 1, 99)
        assert records.is_preempted(1, 99, {}) and not records.is_preempted(1, 75, {})
        assert not records.is_preempted(1, 0, {}) and not records.is_preempted(1, None, {})
        # Between the agent's restart and the rank's first Accelerator, which removes the mark, it may end by itself.
        record_saved(folder, 2, 75, "/logs/attempt_0/2/error.json")
        assert records.is_preempted(2, 75, {}, "/logs/attempt_0/2/error.json") and records.is_preempted(2, 75, {})
        assert not records.is_preempted(2, 75, {}, "/logs/attempt_1/2/error.json")
    finally:
        records.close()
