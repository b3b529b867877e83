"""Slurm: srun's command lines, and batch scripts that a real bash runs with an srun of the test's own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples

from accelerate.errors import SettingError
from accelerate.guests.clusters.slurm import Slurm, in_batch_script, is_task
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from tests.unit.launch.plans import CPU_HOST, GPU_HOST, NASTY, PROGRAM, argument_lists, settings

ALLOCATION = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[3-4]"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
TASK = {**ALLOCATION, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"}


def plan(program: Program = PROGRAM, host: Any = CPU_HOST, **flags: Any) -> LaunchPlan:
    return Slurm().plan(settings(launcher="slurm", **flags), program, host)


def script(made: LaunchPlan) -> str:
    (text,) = made.files.values()
    return text


def test_inside_an_allocation_srun_starts_the_ranks() -> None:
    made = plan(host=replace(CPU_HOST, environment=BATCH), cpu=True, num_processes=4)
    counts = ("--nodes", "2", "--ntasks", "4", "--ntasks-per-node", "2", "--kill-on-bad-exit=1")
    assert made.argv == ("srun", *counts, *PROGRAM.argv())
    assert not made.files and "OMP_NUM_THREADS" in made.environment
    assert made.engine_options["nodes"] == "gpu3, gpu4"


def test_restarts_need_agents_which_meet_on_the_first_node() -> None:
    made = plan(host=replace(CPU_HOST, environment=BATCH), cpu=True, num_processes=4, max_restarts=3)
    assert made.argv[:7] == ("srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1")
    options = dict(pairwise(made.argv))
    expected = {"--nproc-per-node": "2", "--rdzv-backend": "c10d", "--rdzv-endpoint": "gpu3:29500", "--rdzv-id": "17"}
    assert expected.items() <= options.items() and options["--max-restarts"] == "3"


def test_one_rank_a_device_of_the_allocation() -> None:
    made = plan(host=replace(CPU_HOST, environment={**BATCH, "SLURM_GPUS_ON_NODE": "8"}))
    assert "8 processes on each of 2 node(s)" in made.engine


def test_slurms_own_number_of_tasks_counts_where_none_is_given() -> None:
    environment = {**BATCH, "SLURM_NTASKS_PER_NODE": "3"}
    assert "3 processes on each of 2" in plan(host=replace(CPU_HOST, environment=environment), cpu=True).engine
    assert "1 processes on each of 2" in plan(host=replace(CPU_HOST, environment=BATCH), cpu=True).engine


def test_more_machines_than_the_allocation_has_are_refused() -> None:
    with pytest.raises(SettingError, match=r"--num_machines 3.*allocation 17 has 2 node"):
        plan(host=replace(CPU_HOST, environment=BATCH), cpu=True, num_processes=3, num_machines=3)


def test_a_launcher_inside_of_a_task_is_refused() -> None:
    with pytest.raises(SettingError, match="task 1 of an srun"):
        plan(host=replace(CPU_HOST, environment=TASK), cpu=True, num_processes=2)


def test_tasks_and_batch_scripts_are_told_apart() -> None:
    assert is_task(TASK) and not is_task(BATCH) and not is_task({})
    assert in_batch_script(BATCH) and in_batch_script(ALLOCATION) and not in_batch_script(TASK)


@pytest.mark.parametrize(
    ("environment", "flags", "engine"),
    [
        (BATCH, {"num_machines": 2, "num_processes": 2}, "slurm"),
        (BATCH, {"num_processes": 2}, "local"),
        (TASK, {"num_machines": 2, "num_processes": 2, "machine_rank": 1, "main_process_ip": "gpu3"}, "torchrun"),
        (BATCH, {"num_machines": 2, "num_processes": 2, "main_process_ip": "gpu3"}, "torchrun"),
        ({}, {"num_machines": 2, "num_processes": 2, "main_process_ip": "gpu3"}, "torchrun"),
    ],
)
def test_several_machines_of_an_allocation_without_a_meeting_place_are_slurms(
    environment: dict[str, str], flags: dict[str, Any], engine: str
) -> None:
    assert choose(settings(cpu=True, **flags), replace(CPU_HOST, environment=environment)).name == engine


def test_from_a_login_node_a_script_is_written_and_submitted() -> None:
    flags = {"num_machines": 2, "num_processes": 8, "slurm_partition": "gpu", "slurm_time": "2:00:00"}
    made = plan(host=GPU_HOST, **flags, slurm_cpus_per_task=6, slurm_setup=["module load cuda"])
    assert made.argv == ("sbatch", "train.sbatch")
    lines = script(made).splitlines()
    assert lines[0] == "#!/bin/bash"
    wanted = "--job-name=train --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=6 --time=2:00:00"
    assert {f"#SBATCH {word}" for word in [*wanted.split(), "--partition=gpu"]} <= set(lines)
    assert "module load cuda" in lines and "export ACCELERATE_MIXED_PRECISION=no" in lines
    assert lines[-1].startswith("exec srun --nodes 2 --ntasks 8 --ntasks-per-node 4 ")
    assert "OMP_NUM_THREADS" not in script(made)


def test_waiting_and_the_scripts_place_can_be_chosen() -> None:
    made = plan(cpu=True, num_processes=1, slurm_wait=True, slurm_script="jobs/a.sbatch")
    assert made.argv == ("sbatch", "--wait", "jobs/a.sbatch")
    assert list(made.files) == ["jobs/a.sbatch"]


@pytest.mark.parametrize("value", ["a\nrm -rf /", "a\x1b"])
def test_an_option_cant_break_out_of_its_line(value: str) -> None:
    with pytest.raises(SettingError, match="one line of printable text"):
        plan(cpu=True, num_processes=1, slurm_account=value)


@pytest.mark.parametrize("value", ["rm", "--a b", "--a;b=1"])
def test_an_argument_of_sbatch_is_an_option(value: str) -> None:
    with pytest.raises(SettingError, match="no argument of sbatch"):
        plan(cpu=True, num_processes=1, slurm_argument=[value])


def test_further_arguments_of_sbatch_stand_in_the_script() -> None:
    text = script(plan(cpu=True, num_processes=1, slurm_argument=["--exclusive", "--comment=a b"]))
    assert "#SBATCH --exclusive\n" in text and '#SBATCH --comment="a b"\n' in text


def run_script(folder: Path, text: str) -> tuple[list[str], dict[str, str]]:
    """Return (srun's arguments, srun's environment) when bash runs the script."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, body in {
        "srun": 'printf "%s\\0" "$@" > "$OUT/arguments"; env -0 > "$OUT/variables"',
        "scontrol": "printf 'gpu3\\ngpu4\\n'",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    path = folder / "job.sbatch"
    path.write_text(text)
    variables = {**ALLOCATION, "PATH": f"{tools}:/usr/bin:/bin", "OUT": str(folder)}
    subprocess.run(["bash", str(path)], env=variables, cwd=folder, check=True, timeout=20)
    found = (folder / "arguments").read_bytes().decode().split("\0")[:-1]
    pairs = [line.split("=", 1) for line in (folder / "variables").read_bytes().decode().split("\0") if line]
    return found, dict(pairs)


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
@given(argument_lists)
@examples(max_examples=25, deadline=None)
def test_bash_hands_every_argument_on_as_it_was(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp()
    made = plan(Program("train.py", tuple(arguments)), cpu=True, num_processes=1)
    found, _ = run_script(folder, script(made))
    assert found[len(found) - len(arguments) :] == arguments


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
def test_bash_hands_settings_on_as_they_were(tmp_path: Path) -> None:
    value = "".join(NASTY)
    made = plan(Program("train.py", NASTY), cpu=True, num_processes=1)
    found, variables = run_script(tmp_path, script(replace_environment(made, {"X": value})))
    assert variables["X"] == value and variables["ACCELERATE_USE_CPU"] == "true"
    assert found[-len(NASTY) :] == list(NASTY)
    assert not (tmp_path / "pwned").exists()


def replace_environment(made: LaunchPlan, more: dict[str, str]) -> LaunchPlan:
    from accelerate.guests.clusters.slurm import batch_script

    wider = replace(made, environment={**made.environment, **more})
    start = script(made).splitlines()[-1].removeprefix("exec ")
    if not start.startswith("srun"):  # an argument has a line break
        start = script(made).partition("exec ")[2].rstrip("\n")
    chosen = settings(cpu=True, num_processes=1, launcher="slurm")
    return replace(made, files={"x": batch_script(chosen, wider, "x", 1, 1, start)})


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
def test_agents_of_a_batch_job_meet_where_the_job_runs(tmp_path: Path) -> None:
    made = plan(Program("train.py", NASTY), cpu=True, num_processes=2, num_machines=2, max_restarts=1)
    found, _ = run_script(tmp_path, script(made))
    options = dict(pairwise(found))
    assert (options["--rdzv-endpoint"], options["--rdzv-id"]) == ("gpu3:29500", "17")
    assert found[-len(NASTY) :] == list(NASTY)


def test_a_job_that_saves_on_signals_is_told_before_its_time_limit_and_queued_again() -> None:
    (script,) = plan(cpu=True, num_processes=2, num_machines=2, save_on_signal=True, grace_seconds=90.5).files.values()
    lines = script.splitlines()
    assert "#SBATCH --signal=USR1@91" in lines and "#SBATCH --requeue" in lines
    assert "#SBATCH --open-mode=append" in lines
    assert "export ACCELERATE_SAVE_ON_SIGNAL=true" in lines and "export ACCELERATE_GRACE_SECONDS=90.5" in lines
    assert lines[-4].startswith("srun ") and lines[-3] == "code=$?"
    assert lines[-2:] == ['case "$code" in 75 | 138) scontrol requeue "$SLURM_JOB_ID" ;; esac', 'exit "$code"']
