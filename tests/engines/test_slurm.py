"""Slurm with two virtual nodes on this machine: srun inside an allocation, and a batch job from outside of one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import NASTY, Launch, needs
from tests.multi.test_lost_replica import SCRIPT, _check, _lines

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool_%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd_%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort=16817
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=16821-16822 CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which clients reach a cluster of two nodes."""
    needs("slurmctld", "slurmd", "srun", "munged")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root here")
    run = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool_n1", "spool_n2"):
        (run / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    configuration = run / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=host, run=run, cpus=os.cpu_count() or 1))
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    daemons = []
    if subprocess.run(["munge", "-n"], capture_output=True).returncode != 0:
        as_munge = ("setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups")
        daemons.append(subprocess.Popen([*as_munge, "munged", "--foreground"], stderr=subprocess.DEVNULL))
        wait_until(lambda: subprocess.run(["munge", "-n"], capture_output=True).returncode == 0)
    # The nodes' tasks see a hosts file of their own, in which the nodes have addresses.
    hosts = run / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n1 n2\n")
    inside = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts))
    for words in (["slurmctld", "-D"], [*inside, "slurmd", "-D", "-N", "n1"], [*inside, "slurmd", "-D", "-N", "n2"]):
        daemons.append(subprocess.Popen([*words, "-f", str(configuration)], stderr=subprocess.DEVNULL))
    variables = {"SLURM_CONF": str(configuration)}
    try:
        wait_until(lambda: "idle" in states(variables) and "down" not in states(variables))
        yield variables
    finally:
        environment = {**os.environ, **variables}
        subprocess.run(["scancel", "--user", "root"], env=environment, timeout=20)
        wait_until(lambda: not subprocess.run(["squeue", "-h"], env=environment, capture_output=True).stdout)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            daemon.wait(20)


def states(variables: dict[str, str]) -> str:
    shown = subprocess.run(
        ["sinfo", "-h", "-o", "%D %t"], env={**os.environ, **variables}, capture_output=True, text=True
    )
    return shown.stdout


def wait_until(is_so: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "Slurm didn't come up"
        time.sleep(0.2)


def test_srun_inside_an_allocation_starts_a_rank_on_each_node(launch: Launch, cluster: dict[str, str]) -> None:
    launch.variables |= cluster
    launch.prefix = ("salloc", "--nodes", "2", "--ntasks-per-node", "1", "-Q")
    code, output = launch("--cpu", "--num_machines", "2", "--num_processes", "2", "who.py", "--out", ".", *NASTY)
    assert code == 0, output
    lines = launch.lines()
    assert [(line["rank"], line["size"], line["local_rank"], line["sum"]) for line in lines] == [
        (0, 2, 0, 3.0),
        (1, 2, 0, 3.0),
    ]
    assert all(line["arguments"] == list(NASTY) for line in lines)
    assert not (launch.folder / "pwned").exists()


def test_a_batch_job_is_written_submitted_and_waited_for(launch: Launch, cluster: dict[str, str]) -> None:
    launch.variables |= cluster | {"WANDB_NOTES": "$(touch pwned)"}
    given = ("--cpu", "--launcher", "slurm", "--num_machines", "2", "--num_processes", "2", "--slurm_wait")
    setup = ("--slurm_setup", "export FROM_SETUP=1", "--slurm_output", "job's output.txt", "--mixed_precision", "bf16")
    code, output = launch(*given, *setup, "who.py", "--out", ".", *NASTY)
    assert code == 0, output
    lines = launch.lines()
    assert [(line["rank"], line["size"], line["sum"]) for line in lines] == [(0, 2, 3.0), (1, 2, 3.0)]
    assert all(line["arguments"] == list(NASTY) and line["precision"] == "bf16" for line in lines)
    assert all(line["variable"] == "$(touch pwned)" for line in lines)
    assert (launch.folder / "who.sbatch").exists() and (launch.folder / "job's output.txt").exists()
    assert not (launch.folder / "pwned").exists()


def test_a_batch_job_with_agents_starts_again_after_a_kill(launch: Launch, cluster: dict[str, str]) -> None:
    launch.variables |= cluster
    given = ("--cpu", "--launcher", "slurm", "--num_machines", "2", "--num_processes", "2", "--slurm_wait")
    more = ("--max_restarts", "2", "--main_process_port", "29641", "--slurm_output", "out.txt")
    code, output = launch(*given, *more, "who.py", "--out", ".", "--fail_rank", "1")
    output += (launch.folder / "out.txt").read_text()
    assert code == 0, output
    lines = launch.lines()
    assert [(line["rank"], line["sum"]) for line in lines] == [(0, 3.0), (1, 3.0)]
    # torch counts the attempts of each agent by itself; the one whose rank died has another behind it.
    assert any(line["attempt"] >= 1 for line in lines)


def test_a_failing_job_gives_its_code(launch: Launch, cluster: dict[str, str]) -> None:
    launch.variables |= cluster
    given = ("--cpu", "--launcher", "slurm", "--num_machines", "2", "--num_processes", "2", "--slurm_wait")
    code, output = launch(*given, "--slurm_output", "out.txt", "who.py", "--fail_rank", "0")
    assert code != 0, output


def test_a_lost_machine_of_kept_replicas_is_started_again(launch: Launch, cluster: dict[str, str]) -> None:
    launch.variables |= cluster
    (launch.folder / "train.py").write_text(SCRIPT)
    again = (
        'for _ in 1 2 3; do "$@" --machine_rank "$SLURM_NODEID" "$SCRIPT" . 600 1000 0.02 {} 0 && exit; done; exit 1'
    )
    launch.variables["SCRIPT"] = "train.py"
    step = ("srun", "--no-kill", "--kill-on-bad-exit=0", "sh", "-c", again, "sh")
    launch.prefix = ("salloc", "--nodes", "2", "--ntasks-per-node", "1", "-Q", *step)
    meeting = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", "29643")
    running = launch.start("--cpu", "--num_processes", "4", *meeting, "--keep_replicas", "3")

    def members_since(moment: float) -> list[list[int]]:
        return [line["members"] for line in _lines(launch.folder) if "members" in line and line["time"] > moment]

    def trains(*ranks: int) -> bool:
        assert running.process.poll() is None, running.output
        return [*ranks] in members_since(moment)

    moment = 0.0
    wait_until(lambda: trains(0, 1, 2, 3), 100)
    moment = time.time()
    lost = int((launch.folder / "pid_2").read_text())
    os.kill(int(Path(f"/proc/{lost}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)  # its launcher
    wait_until(lambda: trains(0, 1), 60)
    moment = time.time()  # before it there may be updates of all four from before the loss was known
    wait_until(lambda: trains(0, 1, 2, 3), 100)
    (launch.folder / "enough").touch()
    code, output = running.ended()
    assert code == 0, output
    _check(launch.folder, 4, 4, 600, len({line["epoch"] for line in _lines(launch.folder) if "samples" in line}))


@pytest.mark.timeout(1300)  # Slurm holds a job that is queued again back for two minutes
@pytest.mark.parametrize("notice", ["scancel", "scancel at the start", "time limit"])
def test_a_preempted_job_saves_is_queued_again_and_goes_on(
    notice: str, launch: Launch, cluster: dict[str, str]
) -> None:
    """By a signal, or by Slurm itself some time before the job's time limit, which the whole run doesn't keep to."""
    launch.variables |= cluster
    shutil.copy(Path(__file__).with_name("preempted.py"), launch.folder)
    one = ("--cpu", "--num_processes", "2", "preempted.py")
    for name in ("undisturbed", "run"):
        (launch.folder / name).mkdir()
    code, output = launch(*one, "undisturbed")
    assert code == 0, output
    given = ("--cpu", "--launcher", "slurm", "--num_machines", "2", "--num_processes", "2", "--slurm_wait")
    if notice == "time limit":
        launch.variables["PAUSE"] = "0.3"  # longer in all than until Slurm signals
        given = (*given, "--slurm_time", "1", "--grace_seconds", "30")
    if notice == "scancel at the start":
        launch.variables["WAITS_AT_START"] = "1"
    more = ("--save_on_signal", "--slurm_output", "out.txt", "preempted.py", "run")
    running = launch.start(*given, *more)
    starts = launch.folder / "run" / "starts_1.txt"
    at_start = launch.folder / "run" / "begun_1"
    if notice == "scancel at the start":
        wait_until(at_start.exists, 60)
    else:  # Slurm's own signal may come before the script listens
        wait_until(starts.exists, 60 if notice == "scancel" else 400)
    if notice != "time limit":
        time.sleep(1)
        environment = {**os.environ, **cluster}
        queue = subprocess.run(["squeue", "-h", "-o", "%A"], env=environment, capture_output=True, text=True)
        job = queue.stdout.split()[0]
        subprocess.run(["scancel", "--signal", "USR1", job], env=environment, check=True)
    num_starts = 2
    if notice == "scancel at the start":
        wait_until(starts.exists, 250)
        num_starts = 1  # of which the script knows
    else:
        wait_until(lambda: "ranks saved" in out(launch), 60)
        wait_until(lambda: len(starts.read_text().splitlines()) == 2, 250)  # Slurm holds the job back for two minutes
    code, output = running.ended(900 if notice == "time limit" else 60)  # its next limit may come before its end
    assert code == 0, output + out(launch)
    resumed = [line.partition(" ")[2].rpartition("/")[2] for line in starts.read_text().splitlines()]
    assert resumed == ["None", *(f"checkpoint_{number}" for number in range(len(resumed) - 1))]
    assert len(resumed) == num_starts or notice == "time limit"
    assert out(launch).count("All 2 ranks saved") == len(resumed) - 1  # of each start, in one file
    for rank in (0, 1):
        weights = [(launch.folder / name / f"weights_{rank}.txt").read_text() for name in ("undisturbed", "run")]
        assert weights[0] == weights[1]


def out(launch: Launch) -> str:
    """What the job has printed so far."""
    path = launch.folder / "out.txt"
    return path.read_text() if path.exists() else ""
