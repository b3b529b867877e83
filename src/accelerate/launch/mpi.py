"""Through mpirun: Open MPI, MPICH, Intel MPI and MVAPICH make the ranks, on all hosts of a hostfile.

Only names of variables stand on the command line; mpirun takes their values from its own environment, so that
no value is seen in the process list or read by a shell.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from ..errors import SettingError
from ..ports import DEFAULT_PORT
from .engine import LaunchEngine, base_environment, device_notes, rendezvous_port
from .plan import LaunchPlan, Program
from .remote import hosts_of, named_file, run_command, spread, travelling

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .host import Host

_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
#: A word of `mpirun --version` -> the flavor; the first that is found.
_SIGNS: Final = (
    ("open mpi", "openmpi"),
    ("open-mpi", "openmpi"),
    ("openrte", "openmpi"),
    ("intel", "intel"),
    ("mvapich", "mvapich"),
    ("hydra", "mpich"),
    ("mpich", "mpich"),
)


def installed_flavor() -> str:
    """The flavor of the mpirun on the PATH; Open MPI's, the commonest, where there is none to ask."""
    try:
        answer = subprocess.check_output(["mpirun", "--version"], stderr=subprocess.STDOUT, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "openmpi"
    return flavor_of(answer.decode(errors="replace"))


def flavor_of(version: str) -> str:
    """Which MPI the answer to ``mpirun --version`` comes from.

    Raises:
        SettingError: it is none that is known.
    """
    text = version.lower()
    for sign, flavor in _SIGNS:
        if sign in text:
            return flavor
    raise SettingError(
        f"`mpirun --version` says {version.strip()[:80]!r}, which is no MPI that is known here. "
        "Name the one whose command line it understands: --mpi_flavor openmpi, mpich, intel or mvapich."
    )


@final
class Mpirun(LaunchEngine):
    """One mpirun for all hosts."""

    name = "mpirun"

    def __init__(self, installed: Callable[[], str] = installed_flavor) -> None:
        self._installed = installed

    def suits(self, settings: Settings, host: Host) -> bool:
        """A hostfile for mpirun was given, or mpirun itself was asked for."""
        launcher = settings.cluster.launcher
        return launcher == "mpirun" or (launcher is None and settings.mpi.mpirun_hostfile is not None)

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """The command line of the MPI that is named or installed."""
        hosts = self._hosts(settings)
        num_machines = _num_machines(settings, hosts)
        total, per_host = spread(settings, host, num_machines)
        address, port, notes = _meeting(settings, host, hosts)
        environment = {
            **base_environment(settings, host, per_host),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        flavor = settings.cluster.mpi_flavor or self._installed()
        names = sorted({**travelling(host.environment), **environment})
        return LaunchPlan(
            engine=f"{self.name} ({flavor}): {per_host} processes on each of {num_machines} machine(s)",
            argv=(
                "mpirun",
                *mpirun_words(flavor, settings.mpi.mpirun_hostfile, total, per_host),
                *_carrying(flavor, names),
                *program.argv(),
            ),
            environment=environment,
            rendezvous=f"{address}:{port}",
            notes=(*notes, *device_notes(settings, host, total)),
        )

    def _hosts(self, settings: Settings) -> list[str]:
        if settings.mpi.mpirun_hostfile is None:  # a scheduler tells mpirun
            return []
        path = named_file(settings.mpi.mpirun_hostfile, "mpi.mpirun_hostfile", settings)
        hosts = hosts_of(path.read_text(encoding="utf-8"))
        if not hosts:
            raise SettingError(f"{settings.quote('mpi.mpirun_hostfile')} lists no host. Write one host a line.")
        return hosts

    def run(self, plan: LaunchPlan) -> int:
        """mpirun's exit code: that of the rank that failed first."""
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


def _meeting(settings: Settings, host: Host, hosts: list[str]) -> tuple[str, int, tuple[str, ...]]:
    """(where the first host listens, at which port, notes)."""
    launch = settings.launch
    address = launch.main_process_ip or (hosts[0] if hosts else host.name)
    if set(hosts) <= {*_LOCAL, host.name}:
        port, notes = rendezvous_port(settings, host)
        return ("127.0.0.1" if address in _LOCAL else address), port, notes
    if address in _LOCAL:
        raise SettingError(
            f"{settings.quote('mpi.mpirun_hostfile')} lists {hosts[0]} first, where the other hosts would "
            "look for "
            "rank 0 and find themselves. Put its real name there, or give --main_process_ip."
        )
    return address, launch.main_process_port or DEFAULT_PORT, ()


def mpirun_words(flavor: str, hostfile: str | None, total: int, per_host: int) -> tuple[str, ...]:
    """Return the documented options of mpirun: where, and how many ranks in all and on each host."""
    if flavor == "openmpi":
        where = ("--hostfile", hostfile) if hostfile else ()
        return (*where, "--npernode", str(per_host), "-n", str(total), "--bind-to", "socket")
    where = ("-f", hostfile) if hostfile else ()
    return (*where, "-ppn", str(per_host), "-n", str(total))


def _carrying(flavor: str, names: list[str]) -> tuple[str, ...]:
    """The options that hand variables to ranks of other hosts, by name."""
    if flavor == "openmpi":
        return tuple(word for name in names for word in ("-x", name))
    return ("-genvlist", ",".join(names))
