"""Launch with Slurm: in an allocation with srun, on a login node with a batch script that is written and submitted.

The ranks are Slurm tasks, which find each other by Slurm's variables. With restarts, or an elastic rendezvous, srun
starts one torch agent per node instead.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from ...distributed.environment import in_batch_script, is_task
from ...errors import SettingError
from ...launch.engine import LaunchEngine, base_environment, is_cpu_run
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import job_name, run_command, spread, write_files
from ...ports import DEFAULT_PORT
from ...settings.preemption import PREEMPTED_EXIT_CODE

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

_SIGUSR1: Final = 10  # on Linux, where Slurm runs
_FIRST_HOST: Final = "ACCELERATE_FIRST_HOST"
#: Placeholders in a batch job's command line, for values that only the running job knows.
_PLACEHOLDER: Final = "@placeholder@"
#: The maximum number of hosts that the plan lists by name, and the length of that line.
_MAX_NAMED: Final = 16
_MAX_LINE: Final = 100


@final
class Slurm(LaunchEngine):
    """An srun in an allocation, or a batch job that calls it."""

    name = "slurm"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether Slurm is selected, or an allocation has several machines and no rendezvous address."""
        launcher, launch = settings.cluster.launcher, settings.launch
        if launcher is not None:
            return launcher == "slurm"
        in_script = in_batch_script(host.environment)
        is_local = launch.compute_environment == "LOCAL_MACHINE" and not launch.use_tpu
        knows_hosts = launch.main_process_ip is not None or settings.host_file is not None
        return in_script and is_local and launch.num_machines > 1 and not knows_hosts

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan srun's command line, or sbatch's with its script."""
        if is_task(host.environment):
            raise SettingError(
                f"{settings.quote('cluster.launcher')}, but this is already task "
                f"{host.environment['SLURM_PROCID']} of "
                "an srun. Call `accelerate launch` once, from the batch script; or leave --launcher out."
            )
        if "SLURM_JOB_ID" in host.environment:
            return self._in_allocation(settings, program, host)
        return self._from_login_node(settings, program, host)

    def run(self, plan: LaunchPlan) -> int:
        """Run srun or sbatch and return its exit code: that of a failed task, or of the submission."""
        write_files(plan)
        return run_command(plan, "Slurm's client programs aren't installed here")

    def _in_allocation(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        from ...distributed.environment import expand_host_list

        allocation = host.environment
        nodes = num_nodes(settings, allocation)
        total, per_node = _tasks(settings, host, nodes)
        environment = base_environment(settings, host, per_node)
        listed = allocation.get("SLURM_JOB_NODELIST", allocation.get("SLURM_NODELIST", ""))
        hosts = expand_host_list(listed)
        if not has_agents(settings):
            command, rendezvous = program.argv(), "the first node, by Slurm's variables"
        else:
            rendezvous = f"{hosts[0] if hosts else host.name}:{_port(settings)}"
            command = agent(settings, program, nodes, per_node, rendezvous, allocation["SLURM_JOB_ID"])
        return LaunchPlan(
            engine=f"{self.name}: {per_node} processes on each of {nodes} node(s) of job {allocation['SLURM_JOB_ID']}",
            argv=(*_srun(settings, nodes, total, per_node), *command),
            environment=environment,
            rendezvous=rendezvous,
            engine_options={"nodes": _shown(hosts, listed)} if hosts else {},
        )

    def _from_login_node(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        nodes = settings.launch.num_machines
        total, per_node = spread(settings, host, nodes)
        environment = environment_elsewhere(settings, host, per_node)
        name = settings.slurm.job_name or job_name(program)
        path = settings.slurm.script or f"{name}.sbatch"
        if has_agents(settings):
            endpoint = f'"${_FIRST_HOST}:{_port(settings)}"'
            command = agent(settings, program, nodes, per_node, _PLACEHOLDER, _PLACEHOLDER)
            quoted = [endpoint if part == _PLACEHOLDER else shlex.quote(part) for part in command]
            job = quoted.index("--rdzv-id") + 1
            quoted[job] = '"$SLURM_JOB_ID"'
        else:
            quoted = [shlex.quote(part) for part in program.argv()]
        start = " ".join([shlex.join(_srun(settings, nodes, total, per_node)), *quoted])
        plan = LaunchPlan(
            engine=f"{self.name}: a batch job of {per_node} processes on each of {nodes} node(s)",
            argv=("sbatch", *(["--wait"] if settings.slurm.wait else []), path),
            environment=environment,
            rendezvous="the first node",
            notes=("`squeue --me` shows the job, `scancel` ends it",),
        )
        text = batch_script(settings, plan, name, nodes, per_node, start)
        return replace(plan, files={path: text})


def _shown(hosts: Sequence[str], listed: str) -> str:
    """Return a few hosts by name, or many in Slurm's form, such as ``n[0001-2048]``, in at most one line."""
    text = ", ".join(hosts) if len(hosts) <= _MAX_NAMED else f"{len(hosts):,}: {listed}"
    return text if len(text) <= _MAX_LINE else f"{text[: _MAX_LINE - 3]}..."


def has_agents(settings: Settings) -> bool:
    """Return whether torch's agents start the ranks, because srun can't restart them."""
    return settings.launch.max_restarts > 0 or settings.launch.rdzv_backend not in ("static", "")


def num_nodes(settings: Settings, allocation: Mapping[str, str]) -> int:
    """Return the number of nodes to use: the given one, else that of the allocation.

    Raises:
        SettingError: the allocation has fewer nodes.
    """
    text = allocation.get("SLURM_JOB_NUM_NODES", allocation.get("SLURM_NNODES", "1"))
    there, asked = int(text), settings.launch.num_machines
    if not settings.was_given("launch.num_machines"):
        return there
    if asked > there:
        raise SettingError(
            f"{settings.quote('launch.num_machines')}, but the allocation {allocation['SLURM_JOB_ID']} has {there} "
            f"node(s) (SLURM_JOB_NUM_NODES={text}). Ask Slurm for more, or lower num_machines."
        )
    return asked


def _tasks(settings: Settings, host: Host, nodes: int) -> tuple[int, int]:
    """Return (all tasks, tasks per node); Slurm's numbers if the settings don't give any."""
    allocation = host.environment
    per_node = allocation.get("SLURM_NTASKS_PER_NODE", "")
    if not settings.was_given("launch.num_processes") and is_cpu_run(settings) and per_node.isdigit():
        return nodes * int(per_node), int(per_node)
    devices = allocation.get("SLURM_GPUS_ON_NODE", "")
    return spread(settings, host, nodes, devices=int(devices) if devices.isdigit() else None)


def _port(settings: Settings) -> int:
    return settings.launch.main_process_port or DEFAULT_PORT


def _srun(settings: Settings, nodes: int, total: int, per_node: int) -> tuple[str, ...]:
    tasks, per_node = (nodes, 1) if has_agents(settings) else (total, per_node)
    argv = ["srun", "--nodes", str(nodes), "--ntasks", str(tasks), "--ntasks-per-node", str(per_node)]
    argv += ["--kill-on-bad-exit=1"]
    if settings.slurm.cpus_per_task is not None:  # srun doesn't take it over from the job
        argv += ["--cpus-per-task", str(settings.slurm.cpus_per_task)]
    if settings.launch.tee != "0":
        argv += ["--label"]
    if settings.launch.log_dir is not None:
        folder = settings.launch.log_dir
        argv += ["--output", f"{folder}/%t.stdout.log", "--error", f"{folder}/%t.stderr.log"]
    return tuple(argv)


def agent(
    settings: Settings, program: Program, nodes: int, per_node: int, endpoint: str, run_id: str
) -> tuple[str, ...]:
    """Return the command line of torch's agent, the same on every node."""
    launch = settings.launch
    backend = launch.rdzv_backend if launch.rdzv_backend != "static" else "c10d"
    options = {
        "nnodes": str(nodes),
        "nproc-per-node": str(per_node),
        "rdzv-backend": backend,
        "rdzv-endpoint": endpoint,
        "rdzv-id": run_id,
        "max-restarts": str(launch.max_restarts),
        "monitor-interval": str(launch.monitor_interval),
        **({"rdzv-conf": launch.rdzv_conf} if launch.rdzv_conf else {}),
    }
    return tuple(agent_command(sys.executable, options, program))


def environment_elsewhere(settings: Settings, host: Host, per_machine: int) -> dict[str, str]:
    """Return the run's environment for other machines, which may have another number of cores than this one."""
    environment = base_environment(settings, host, per_machine)
    if settings.launch.num_cpu_threads_per_process is None:
        environment.pop("OMP_NUM_THREADS", None)
    return environment


def agent_command(python: str, options: Mapping[str, str], program: Program) -> list[str]:
    """Return the command line of torch's agent with these options, which runs the program."""
    kind = {"module": ["--module"], "command": ["--no-python"], "script": []}[program.kind]
    flags = [argument for name, value in options.items() for argument in (f"--{name}", value)]
    return [python, "-m", "accelerate.launch.agent", *flags, *kind, program.target, *program.arguments]


def batch_script(settings: Settings, plan: LaunchPlan, name: str, nodes: int, per_node: int, start: str) -> str:
    """Return the script for sbatch: the job's options, the run's environment, and one srun."""
    slurm = settings.slurm
    tasks = 1 if has_agents(settings) else per_node
    asked = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": str(tasks),
        "gpus-per-node": None if is_cpu_run(settings) else str(per_node),
        "cpus-per-task": None if slurm.cpus_per_task is None else str(slurm.cpus_per_task),
        "mem": slurm.memory,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "output": slurm.output,
        "chdir": str(plan.cwd),
    }
    saves, grace = settings.preemption.save_on_signal, math.ceil(settings.preemption.grace_seconds)
    asked["signal"] = f"USR1@{grace}" if saves else None  # before the time limit, to the ranks
    lines = ["#!/bin/bash", "# Written by `accelerate launch`."]
    lines += [f"#SBATCH --{key}={_quoted(value, key)}" for key, value in asked.items() if value is not None]
    # A requeued job would otherwise overwrite the output of its earlier starts.
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"] if saves else []
    lines += [f"#SBATCH {_argument(text)}" for text in slurm.arguments or ()]
    lines += ["", *(slurm.setup or ())]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(plan.environment.items())]
    if settings.launch.log_dir is not None:
        lines.append(f"mkdir -p -- {shlex.quote(settings.launch.log_dir)}")
    if has_agents(settings):
        lines.append(f'{_FIRST_HOST}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
    if not saves:
        return "\n".join([*lines, f"exec {start}", ""])
    # A signal that arrives before the script listens kills it, but then there is nothing to save yet.
    codes = f"{PREEMPTED_EXIT_CODE} | {128 + _SIGUSR1}"
    again = f'case "$code" in {codes}) scontrol requeue "$SLURM_JOB_ID" ;; esac'
    return "\n".join([*lines, start, "code=$?", again, 'exit "$code"', ""])


def _quoted(value: str, key: str) -> str:
    """Format a value for an sbatch comment: one line, quoted if needed."""
    if not value.isprintable():
        raise SettingError(f"The Slurm option {key} can't be {value!r}: it has to be one line of printable text.")
    return value if not set(value) & set(" '\"\\#") else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _argument(text: str) -> str:
    """Check and format an additional argument for sbatch: --name or --name=value."""
    name, equals, value = text.partition("=")
    if not name.startswith("-") or not name.lstrip("-").replace("-", "").isalnum():
        raise SettingError(f"--slurm_argument {text!r} is no argument of sbatch. Give it whole, such as --exclusive.")
    return name + equals + (_quoted(value, name) if equals else "")
