"""Launch with mpirun: Open MPI, MPICH, Intel MPI or MVAPICH starts the ranks on all hosts of a hostfile.

The command line has only the names of variables. mpirun takes their values from its own environment, so that no value
is visible in the process list or read by a shell.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...launch.engine import LaunchEngine, base_environment, device_notes, rendezvous_port
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import forwarded_environment, hosts_of, named_file, run_command, spread
from ...ports import DEFAULT_PORT

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
#: (text in the output of `mpirun --version`, flavor); the first that is found counts.
_VERSION_SIGNATURES: Final = (
    ("open mpi", "openmpi"),
    ("open-mpi", "openmpi"),
    ("openrte", "openmpi"),
    ("intel", "intel"),
    ("mvapich", "mvapich"),
    ("hydra", "mpich"),
    ("mpich", "mpich"),
)


def installed_flavor() -> str:
    """Return the flavor of the mpirun on the PATH; ``openmpi`` if there is none."""
    try:
        answer = subprocess.check_output(["mpirun", "--version"], stderr=subprocess.STDOUT, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "openmpi"
    return flavor_of(answer.decode(errors="replace"))


def flavor_of(version: str) -> str:
    """Return the MPI flavor of this output of ``mpirun --version``.

    Raises:
        SettingError: the flavor is unknown.
    """
    text = version.lower()
    for sign, flavor in _VERSION_SIGNATURES:
        if sign in text:
            return flavor
    raise SettingError(
        f"`mpirun --version` says {version.strip()[:80]!r}, which is an unknown MPI. "
        "Name the one with the same command line: --mpi_flavor openmpi, mpich, intel or mvapich."
    )


@final
class Mpirun(LaunchEngine):
    """One mpirun for all hosts."""

    name = "mpirun"

    def __init__(self, installed: Callable[[], str] = installed_flavor) -> None:
        self._installed = installed

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether a hostfile for mpirun was given, or mpirun was selected."""
        launcher = settings.cluster.launcher
        return launcher == "mpirun" or (launcher is None and settings.mpi.mpirun_hostfile is not None)

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the command line of the selected or installed mpirun."""
        hosts = self._hosts(settings)
        num_machines = _num_machines(settings, hosts)
        total, per_host = spread(settings, host, num_machines)
        address, port, notes = _rendezvous(settings, host, hosts)
        environment = {
            **base_environment(settings, host, per_host),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        flavor = settings.cluster.mpi_flavor or self._installed()
        names = sorted({**forwarded_environment(host.environment), **environment})
        return LaunchPlan(
            engine=f"{self.name} ({flavor}): {per_host} processes on each of {num_machines} machine(s)",
            argv=(
                *self.documented_command(settings, total, per_host),
                *_environment_options(flavor, names),
                *program.argv(),
            ),
            environment=environment,
            rendezvous=f"{address}:{port}",
            notes=(*notes, *device_notes(settings, host, total)),
        )

    def documented_command(self, settings: Settings, total: int, per_host: int) -> tuple[str, ...]:
        """Return mpirun with its documented options, for the number of ranks in all and per host."""
        flavor = settings.cluster.mpi_flavor or self._installed()
        return ("mpirun", *mpirun_options(flavor, settings.mpi.mpirun_hostfile, total, per_host))

    def _hosts(self, settings: Settings) -> list[str]:
        if settings.mpi.mpirun_hostfile is None:  # mpirun asks a scheduler
            return []
        path = named_file(settings.mpi.mpirun_hostfile, "mpi.mpirun_hostfile", settings)
        hosts = hosts_of(path.read_text(encoding="utf-8"))
        if not hosts:
            raise SettingError(f"{settings.quote('mpi.mpirun_hostfile')} lists no host. Write one host a line.")
        return hosts

    def run(self, plan: LaunchPlan) -> int:
        """Run mpirun and return its exit code, the one of the first failing rank."""
        return run_command(plan, "install Open MPI, MPICH, Intel MPI or MVAPICH")


def _num_machines(settings: Settings, hosts: list[str]) -> int:
    if not settings.was_given("launch.num_machines"):
        return max(1, len(hosts))
    asked = settings.launch.num_machines
    if hosts and asked > len(hosts):
        raise SettingError(
            f"{settings.quote('launch.num_machines')}, but {settings.quote('mpi.mpirun_hostfile')} lists "
            f"{len(hosts)} host(s). Add the others to the file, or lower num_machines."
        )
    return asked


def _rendezvous(settings: Settings, host: Host, hosts: list[str]) -> tuple[str, int, tuple[str, ...]]:
    """Return (address of the first host, port of the rendezvous, notes)."""
    launch = settings.launch
    address = launch.main_process_ip or (hosts[0] if hosts else host.name)
    if set(hosts) <= {*_LOCAL, host.name}:
        port, notes = rendezvous_port(settings, host)
        return ("127.0.0.1" if address in _LOCAL else address), port, notes
    if address in _LOCAL:
        raise SettingError(
            f"{settings.quote('mpi.mpirun_hostfile')} lists {hosts[0]} first, where the other hosts would look for "
            "rank 0 and find themselves. Put its real name there, or give --main_process_ip."
        )
    return address, launch.main_process_port or DEFAULT_PORT, ()


def mpirun_options(flavor: str, hostfile: str | None, total: int, per_host: int) -> tuple[str, ...]:
    """Return mpirun's documented options for the hosts, and for the number of ranks in all and per host."""
    if flavor == "openmpi":
        where = ("--hostfile", hostfile) if hostfile else ()
        return (*where, "--npernode", str(per_host), "-n", str(total), "--bind-to", "socket")
    where = ("-f", hostfile) if hostfile else ()
    return (*where, "-ppn", str(per_host), "-n", str(total))


def _environment_options(flavor: str, names: list[str]) -> tuple[str, ...]:
    """Return the options that forward variables, by name, to ranks on other hosts."""
    if flavor == "openmpi":
        return tuple(argument for name in names for argument in ("-x", name))
    return ("-genvlist", ",".join(names))
