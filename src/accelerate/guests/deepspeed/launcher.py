"""Launch with DeepSpeed's own launcher, which reaches the hosts of a hostfile by pdsh, MPI or Slurm.

DeepSpeed writes its arguments and variables unquoted on remote shells' command lines. So the program, its arguments and
the settings are passed as one encoded command without characters that a shell expands. The launching shell's
environment is never written to a file, and variables that look like secrets are omitted. DeepSpeed still reads the
user's own ``.deepspeed_env``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...launch.engine import LaunchEngine, base_environment
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import forwarded_environment, hosts_of, named_file, run_command, spread
from ...ports import DEFAULT_PORT
from .options import DeepSpeedLaunchOptions, DeepSpeedOptions

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

#: Decodes and runs the command on every host; DeepSpeed, too, needs the same Python at the same path everywhere.
DECODER: Final = str(Path(__file__).with_name("encoded_command.py"))
#: Launchers of DeepSpeed that start on all that the hostfile lists, and refuse to be limited.
_WHOLE_HOSTFILE: Final = ("openmpi", "mpich", "mvapich")
_DEFAULT_HOSTFILE: Final = "/job/hostfile"


@final
class DeepSpeedLauncher(LaunchEngine):
    """One command ``deepspeed`` for all hosts."""

    name = "deepspeed"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether DeepSpeed's launcher was selected, or its hostfile was given without another launcher."""
        if settings.cluster.launcher is not None:
            return settings.cluster.launcher == "deepspeed"
        if settings.find(DeepSpeedOptions) is None or settings.launch.num_machines == 1:
            return False
        options = _options(settings)
        named = options.deepspeed_multinode_launcher
        return named != "standard" if named else options.deepspeed_hostfile is not None

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan one ``deepspeed`` command that runs the encoded command of this launch."""
        from .encoded_command import encode_command

        launch = settings.launch
        launcher = _options(settings).deepspeed_multinode_launcher or "pdsh"
        total, per_host = spread(settings, host, launch.num_machines)
        where, first = _where(settings)
        address, port = launch.main_process_ip or first, launch.main_process_port or DEFAULT_PORT
        rendezvous = ("--master_addr", address) if address else ()
        environment = base_environment(settings, host, per_host)
        encoded = encode_command(program.argv(), {**forwarded_environment(host.environment), **environment})
        limits = _limits(settings, launcher, launch.num_machines, per_host)
        argv = (
            "deepspeed",
            *where,
            *(
                ("--no_ssh", "--node_rank", str(launch.machine_rank))
                if launcher == "nossh"
                else ("--launcher", launcher)
            ),
            *limits,
            *rendezvous,
            "--master_port",
            str(port),
            "--no_local_rank",
            DECODER,
            encoded,
        )
        return LaunchPlan(
            engine=f"{self.name} ({launcher}): {per_host} processes on each of {launch.num_machines} machine(s)",
            argv=argv,
            environment=environment,
            rendezvous=f"{address or 'the first host'}:{port}",
            engine_options={"encoded program": " ".join(program.argv()), "processes": total},
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run ``deepspeed`` and return its exit code."""
        return run_command(plan, "pip install deepspeed")


def _options(settings: Settings) -> DeepSpeedLaunchOptions:
    found = settings.find(DeepSpeedLaunchOptions)
    assert found is not None  # settings always have this group
    return found


def _where(settings: Settings) -> tuple[tuple[str, ...], str | None]:
    """Return (the option that names the hostfile, its first host)."""
    given = _options(settings).deepspeed_hostfile
    if given is None:
        if Path(_DEFAULT_HOSTFILE).is_file():
            return (), None
        raise SettingError(
            "DeepSpeed's launcher needs a list of hosts: give --deepspeed_hostfile (one `host slots=N` a line). To "
            "start the command on every machine by hand, say --deepspeed_multinode_launcher standard."
        )
    path = named_file(given, "deepspeed_launch.deepspeed_hostfile", settings)
    hosts = hosts_of(path.read_text(encoding="utf-8"))
    if len(hosts) < settings.launch.num_machines:
        raise SettingError(
            f"{settings.quote('launch.num_machines')}, but "
            f"{settings.quote('deepspeed_launch.deepspeed_hostfile')} lists {len(hosts)} host(s). "
            "Add the others to the file, or lower num_machines."
        )
    return ("--hostfile", given), hosts[0]


def _limits(settings: Settings, launcher: str, num_machines: int, per_host: int) -> tuple[str, ...]:
    options = _options(settings)
    filters = (("--include", options.deepspeed_inclusion_filter), ("--exclude", options.deepspeed_exclusion_filter))
    given = tuple(argument for name, value in filters if value for argument in (name, value))
    if launcher in _WHOLE_HOSTFILE:
        if given:
            raise SettingError(
                f"DeepSpeed's {launcher} launcher starts on all hosts of the hostfile and has no {given[0]}. "
                "Leave the filter out, or use --deepspeed_multinode_launcher pdsh."
            )
        return ()
    return given or ("--num_nodes", str(num_machines), "--num_gpus", str(per_host))
