"""Launch by torch's elastic agent: several hosts, restarts, an explicit rendezvous.

torch is imported where the agent runs, never for planning.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ..distributed.failures import (
    Failure,
    ScriptEnd,
    ended_preempted,
    first_cause,
    left_early,
    parse_traceback,
    report,
    shorten,
)
from ..errors import LaunchError, SettingError
from ..ports import DEFAULT_PORT
from ..settings import env
from ..wording import some_ranks
from .engine import LaunchEngine, PortInUse, base_environment, count_processes, device_notes
from .plan import LaunchPlan, Program
from .records import EndRecords

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .preflight import Host


_LINE_WIDTH: Final = 240
#: Signals that may be notices of a preemption; others end a run that isn't to be started again.
_NOTICES: Final = ("SIGTERM", "SIGUSR1", "SIGUSR2")


@final
class Torchrun(LaunchEngine):
    """One torch elastic agent per host; the agents find each other at the rendezvous."""

    name = "torchrun"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether there are several hosts, restarts, or a rendezvous other than the static one."""
        launch = settings.launch
        return (
            launch.num_machines > 1
            or launch.max_restarts > 0
            or launch.rdzv_backend != "static"
            or bool(launch.rdzv_conf)
        )

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the ``torchrun`` command line of this host."""
        launch = settings.launch
        per_host = count_processes(settings, host) // launch.num_machines
        options, rendezvous, notes = _rendezvous(settings, host)
        options = {
            "nproc-per-node": str(per_host),
            "nnodes": str(launch.num_machines),
            **options,
            "max-restarts": str(launch.max_restarts),
            "monitor-interval": str(launch.monitor_interval),
            "role": launch.role,
            "tee": launch.tee,
        }
        if launch.log_dir is not None:
            options["log-dir"] = launch.log_dir
            options["redirects"] = "0" if launch.tee != "0" else "3"
        if launch.rdzv_conf:
            options["rdzv-conf"] = launch.rdzv_conf
        switches = {"module": ["--module"], "command": ["--no-python"], "script": []}[program.kind]
        flags = [argument for name, value in options.items() for argument in (f"--{name}", value)]
        argv = (sys.executable, "-m", "torch.distributed.run", *flags, *switches, program.target, *program.arguments)
        return LaunchPlan(
            engine=f"{self.name}: {per_host} processes on each of {launch.num_machines} machine(s)",
            argv=argv,
            environment=base_environment(settings, host, per_host),
            is_here=launch.num_machines == 1,
            rendezvous=rendezvous,
            engine_options=options,
            notes=(*notes, *device_notes(settings, host, per_host)),
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the agent of this host and return its exit code: the first cause's where it knows one."""
        return run_agent(plan.argv[3:], plan.environment)


def _rendezvous(settings: Settings, host: Host) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Return (torchrun's rendezvous options, their text in the plan, notes)."""
    launch = settings.launch
    several = launch.num_machines > 1
    if several and launch.main_process_ip is None:
        raise SettingError(
            f"num_machines={launch.num_machines} ({settings.source_of('launch.num_machines')}) needs the address of "
            "machine 0: give --main_process_ip (and --main_process_port, default 29500) on every machine."
        )
    address = launch.main_process_ip or "127.0.0.1"
    port = DEFAULT_PORT if launch.main_process_port is None else launch.main_process_port
    notes: tuple[str, ...] = ()
    if (not several or launch.machine_rank == 0) and (port == 0 or host.is_busy(port)):
        if several:
            raise PortInUse(
                f"Port {port} is in use on {host.name}, where machine 0 has to listen. Choose another "
                "--main_process_port, the same on every machine."
            )
        notes = (f"port {port} is in use on this host; the processes meet at {host.free_port} instead",) if port else ()
        port = host.free_port
    if several:
        notes = (
            *notes,
            f"machine {launch.machine_rank} of {launch.num_machines} waits for the others at {address}:{port}",
        )
    if launch.rdzv_backend == "static":
        options = {"node-rank": str(launch.machine_rank), "master-addr": address, "master-port": str(port)}
        return options, f"{address}:{port} (static), machine {launch.machine_rank}", notes
    options = {
        "rdzv-backend": launch.rdzv_backend,
        "rdzv-endpoint": f"{address}:{port}",
        "rdzv-id": f"accelerate_{port}",
    }
    return options, f"{address}:{port} ({launch.rdzv_backend})", notes


def run_agent(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run torch's agent of this host with torchrun's ``arguments``, and report failures; return the exit code."""
    records = EndRecords()
    try:
        with env.patched(**environment, **records.environment):
            return _run(arguments, records)
    finally:
        records.close()


def _run(arguments: Sequence[str], records: EndRecords) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    started = time.time()
    options = run.parse_args(list(arguments))
    records.note_logs(options.log_dir)
    try:
        run.run(options)
    except ChildFailedError as error:
        failures = failures_of(error.failures, started, records)
        records.write(failures)
        num_hosts = int(str(options.nnodes).rpartition(":")[2])
        if preempted := ended_preempted(failures):
            print(f"accelerate launch: {preempted}", file=sys.stderr)
        first = first_cause(failures)
        if first is None or not first.is_preempted:
            num_processes = num_hosts * int(options.nproc_per_node)
            absent = set(range(num_processes if num_hosts == 1 else 0)) - error.failures.keys()  # with code 0
            ended = records.script_ends(started, [ScriptEnd(rank, 0.0) for rank in sorted(absent)])
            print(report_of_host(failures, num_hosts, num_processes, ended), file=sys.stderr)
        return first.exit_code if first is not None else 1
    except SignalException as error:
        return exit_code_after(error.sigval, records)
    return 0


def exit_code_after(received: int, records: EndRecords) -> int:
    """Return the exit code of an agent ended by a signal: "start me again" if a rank has saved after a notice.

    Ctrl-C, a time limit before the save was done and an agreement that failed give the shell's code.
    """
    code = records.saved_exit_code if signal.Signals(received).name in _NOTICES else None
    return 128 + int(received) if code is None else code


def report_of_host(
    failures: Sequence[Failure], num_hosts: int, num_processes: int, ended: Sequence[ScriptEnd] = ()
) -> str:
    """Report the failures of one host's ranks: in one line where they only follow from one of another host's.

    Thousands of hosts may write to one log, in which the one that failed first has to be found. Only what torch or this
    package raised, and a stop by the agent, are told so: a script's own lost connection is a cause.
    """
    is_lost = bool(failures) and all(failure.stopped or failure.is_lost_peer for failure in failures)
    if num_hosts == 1 or not is_lost or left_early(failures, ended) is not None:
        return report(failures, num_processes, ended=ended)
    first = failures[0]
    reason = f" ({first.traceback.exception})" if first.traceback is not None else ""
    text = (
        f"{some_ranks(failure.rank for failure in failures).capitalize()} of {num_processes} (host {first.host}) "
        f"ended after {first.seconds:.1f} s because a rank of another host was gone: see that host's report{reason}."
    )
    return shorten(text, _LINE_WIDTH)


def failures_of(found: Mapping[int, Any], started: float, records: EndRecords) -> list[Failure]:
    """Convert torch's records of failed ranks, the earliest first; ``started`` is when the run began."""
    environment = env.snapshot()
    failures: list[Failure] = []
    first = next(iter(found), None)  # the agent stopped the others because of it
    for rank, failure in found.items():
        recorded = _recorded_by_rank(failure)
        traceback = parse_traceback(recorded.get("py_callstack", ""))
        signals = (-signal.SIGTERM, -signal.SIGKILL) if traceback is not None else (-signal.SIGTERM,)
        is_agents = rank != first and failure.exitcode in signals  # without a traceback, SIGKILL may be the kernel's
        failures.append(
            Failure(
                rank=rank,
                host=socket.gethostname(),
                pid=failure.pid,
                returncode=failure.exitcode,
                seconds=max(0.0, float(recorded.get("seconds", failure.timestamp)) - started),
                traceback=traceback,
                stopped=is_agents and traceback is None,
                was_leaving=is_agents and traceback is not None,
                log=_stderr_log(failure.error_file),
                is_preempted=records.is_preempted(rank, failure.exitcode, environment, _attempt_of(failure.error_file)),
            )
        )
    return sorted(failures, key=lambda failure: (failure.stopped, failure.is_consequence, failure.seconds))


def _attempt_of(error_file: str) -> str:
    """Return the attempt's own error file, known to the rank too; empty if the agent keeps none."""
    return error_file if Path(error_file).name == "error.json" else ""


def _stderr_log(error_file: str) -> Path | None:
    """Return the log of the rank's standard error, where the agent keeps it (--log_dir)."""
    log = Path(error_file).with_name("stderr.log")
    return log if log.is_file() else None


def _recorded_by_rank(failure: Any) -> dict[str, Any]:
    """Return the traceback and the time of the failure, as the rank wrote them to its error file; empty without any."""
    details = failure.error_file_data.get("message", {})
    return details.get("extraInfo", {}) if isinstance(details, dict) else {}


def elastic_call(
    function: Callable[..., object], args: Sequence[object], *, mixed_precision: str, **options: Any
) -> list[Any]:
    """Run ``function(*args)`` on each rank of this host by torch's agent and return the results.

    Args:
        options: arguments of torch's ``LaunchConfig``.

    Raises:
        LaunchError: a rank failed for good; the text is the report of the first cause.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from .fork import fork_is_safe

    config = LaunchConfig(start_method="fork" if fork_is_safe() else "spawn", **options)
    with env.patched(ACCELERATE_MIXED_PRECISION=mixed_precision, FORK_LAUNCHED="1"):
        started = time.time()
        try:
            results = elastic_launch(config, function)(*args)
        except ChildFailedError as error:
            failures = failures_of(error.failures, started, EndRecords())
            raise LaunchError(report(failures, config.nproc_per_node * config.max_nodes)) from error
    return [results[rank] for rank in sorted(results)]
