"""The interface of launch engines, and what their plans share: processes, devices, ports, environment."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..cores import threads_per_rank
from ..errors import SettingError
from ..ports import DEFAULT_PORT
from ..settings.tree import encode_settings
from .plan import LaunchPlan, Logs, Program, parse_tee

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .preflight import Host


#: The address of the rendezvous of one host's processes.
LOOPBACK = "127.0.0.1"


class PortInUse(SettingError, ConnectionError):
    """The port of the rendezvous is in use already."""


class LaunchEngine(ABC):
    """One way to start processes: a pure plan, and the only code that starts anything."""

    #: The name in plans and messages.
    name: str
    #: Whether it runs where it suits, also where another launcher was named.
    is_instead_of_others: bool = False

    @abstractmethod
    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether this is the engine for the given settings on this host."""

    @abstractmethod
    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan what :meth:`run` does, from the arguments alone; nothing is started."""

    @abstractmethod
    def run(self, plan: LaunchPlan) -> int:
        """Run the plan until every process has ended and return the exit code."""

    def dry_run(self, plan: LaunchPlan) -> None:
        """Print the plan, for ``--dry-run``."""
        print(plan.show())


#: Options that not every engine follows.
_OF_SOME_ENGINES: Final = ("tee", "log_dir", "role", "max_restarts", "rdzv_backend", "rdzv_conf")


def without_effect(
    engine: LaunchEngine, settings: Settings, program: Program, host: Host, plan: LaunchPlan
) -> tuple[str, ...]:
    """Return a note for each given option without effect: ``engine`` makes the same ``plan`` without it."""
    notes: list[str] = []
    for option in _OF_SOME_ENGINES:
        name = f"launch.{option}"
        if not settings.was_given(name):
            continue
        without = copy(settings)
        without.launch = copy(settings.launch)
        setattr(without.launch, option, settings.option_at(name).default)
        if without.launch != settings.launch and engine.plan(without, program, host) == plan:
            notes.append(f"{settings.quote(name)} has no effect: {plan.engine.partition(':')[0]} doesn't follow it")
    return tuple(notes)


def is_cpu_run(settings: Settings) -> bool:
    """Return whether the run is to use the CPU."""
    return settings.run.use_cpu or settings.launch.distributed_type == "MULTI_CPU"


def count_processes(settings: Settings, host: Host) -> int:
    """Return the number of processes over all machines: the given one, else one per device.

    Raises:
        SettingError: the number can't be spread over the machines, the devices don't suffice, or `--tee` names a rank
            that no machine has.
    """
    launch = settings.launch
    asked = launch.num_processes
    if asked is None:
        per_host = 1 if is_cpu_run(settings) else max(1, len(device_ids(settings)) or host.num_devices)
        asked = per_host * launch.num_machines
    if asked % launch.num_machines:
        source = settings.source_of("launch.num_processes")
        raise SettingError(
            f"num_processes={asked} ({source}) can't be spread evenly over "
            f"num_machines={launch.num_machines}. "
            "num_processes is the total over all machines: give a multiple of num_machines."
        )
    if launch.multi_gpu and asked < 2 and launch.num_processes is None:
        raise SettingError(
            f"{settings.quote('launch.multi_gpu')} needs at least 2 processes, but {host.name} has {host.num_devices} "
            "accelerator(s), and no other number was asked for. Give --num_processes, or don't ask for several devices."
        )
    _check_devices(settings, host, asked // launch.num_machines)
    _check_tee(settings, asked // launch.num_machines)
    return asked


def _check_tee(settings: Settings, per_host: int) -> None:
    missing = [rank for rank in parse_tee(settings.launch.tee) if rank is not None and rank >= per_host]
    if missing:
        raise SettingError(
            f"{settings.quote('launch.tee')} names rank {min(missing)}, but a machine of this run has {per_host} "
            f"process(es): its last local rank is {per_host - 1}."
        )


def _check_devices(settings: Settings, host: Host, per_host: int) -> None:
    if is_cpu_run(settings) or host.num_devices == 0:
        return
    ids = device_ids(settings)
    available = len(ids) if ids else host.num_devices
    if per_host > available:
        where = f"gpu_ids={settings.launch.gpu_ids} names" if ids else f"host {host.name} has"
        source = settings.source_of("launch.num_processes")
        raise SettingError(
            f"{per_host} processes on this machine ({source}) need {per_host} devices, but {where} {available}. Lower "
            "num_processes, or run on the CPU with --cpu."
        )


def device_ids(settings: Settings) -> tuple[str, ...]:
    """Return the ids of the devices that were named, () for all."""
    text = settings.launch.gpu_ids
    if text is None or text.strip().lower() in ("", "all"):
        return ()
    return tuple(part.strip() for part in str(text).split(",") if part.strip())


def base_environment(settings: Settings, host: Host, per_host: int) -> dict[str, str]:
    """Return the documented variables that every worker reads."""
    environment = encode_settings(settings)
    cpu = is_cpu_run(settings)
    environment["ACCELERATE_USE_CPU"] = "true" if cpu else "false"
    threads = settings.launch.num_cpu_threads_per_process
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in host.environment:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(per_host, host.num_cores) if cpu else 1)
    if settings.preemption.save_on_signal:  # torch's agents pass on only the signals that they are told
        signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
        environment |= dict.fromkeys(("TORCHELASTIC_SIGNALS_TO_HANDLE", "PET_SIGNALS_TO_HANDLE"), signals)
        environment["PET_SHUTDOWN_TIMEOUT"] = str(math.ceil(settings.preemption.grace_seconds))
    if cpu:
        # Read by Intel's OpenMP only. Threads are pinned for one process only; several would share their cores.
        environment.update({"KMP_BLOCKTIME": "1"} if "KMP_BLOCKTIME" not in host.environment else {})
        if per_host == 1 and "KMP_AFFINITY" not in host.environment:
            environment["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
    if host.lacks_links:
        switches = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
        environment.update({name: "1" for name in switches if name not in host.environment})
    ids = device_ids(settings)
    if ids:
        # Where no device was found or looked for, the processes may still run on another host that has some.
        environment[host.visible_devices or "CUDA_VISIBLE_DEVICES"] = ",".join(ids)
    return environment


def rendezvous_port(settings: Settings, host: Host) -> tuple[int, tuple[str, ...]]:
    """Return (the port of the rendezvous of one host's processes, notes for the user about it).

    Raises:
        PortInUse: the user named a port on the command line, and something listens there.
    """
    port = settings.launch.main_process_port
    if port == 0:
        return host.free_port, ()
    wanted = DEFAULT_PORT if port is None else port
    if not host.is_busy(wanted):
        return wanted, ()
    source = settings.source_of("launch.main_process_port")
    if source.kind in ("flag", "argument"):
        raise PortInUse(
            f"Port {wanted} ({source}) is in use on this host, maybe by another run. "
            "Give another one with --main_process_port, or 0 for any free port."
        )
    return host.free_port, (f"port {wanted} is in use on this host; the processes meet at {host.free_port} instead",)


def logs_of(settings: Settings) -> Logs:
    """Return where the outputs go by ``--log_dir``, ``--tee`` and ``--role``."""
    launch = settings.launch
    directory = Path(launch.log_dir) if launch.log_dir else None
    return Logs(directory, {} if launch.tee == "0" else parse_tee(launch.tee), launch.role)


def device_notes(settings: Settings, host: Host, num_processes: int) -> tuple[str, ...]:
    """Return notes on the devices that the user may not expect."""
    asked = settings.launch.multi_gpu or str(settings.launch.distributed_type or "").startswith("MULTI_")
    if (asked or device_ids(settings)) and not is_cpu_run(settings) and host.num_devices == 0:
        return (f"no accelerator was found on {host.name}: the {num_processes} process(es) run on the CPU",)
    return ()
