"""N processes of one host, under our own supervisor: no torch in the launcher, no agent, no restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from .engine import (
    LOOPBACK,
    LaunchEngine,
    base_environment,
    count_processes,
    device_notes,
    logs_of,
    rendezvous_port,
)
from .plan import LaunchPlan, Program

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .host import Host


@final
class LocalProcesses(LaunchEngine):
    """Ranks 0..N-1 of this host."""

    name = "local"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Several processes, or one whose output is wanted in files."""
        logs = settings.launch.log_dir is not None or settings.launch.tee != "0"
        return logs or count_processes(settings, host) > 1

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """The variables that torch reads, for each rank."""
        size = count_processes(settings, host)
        port, notes = rendezvous_port(settings, host)
        shared = {
            "MASTER_ADDR": settings.launch.main_process_ip or LOOPBACK,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            **_torchruns_words(settings.launch.role, size),
        }
        return LaunchPlan(
            engine=f"{self.name}: {size} processes on this host, supervised",
            argv=program.argv(),
            environment={**base_environment(settings, host, size), **shared},
            ranks=tuple({name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} for rank in range(size)),
            rendezvous=f"{shared['MASTER_ADDR']}:{port} (static)",
            logs=logs_of(settings),
            notes=(*notes, *device_notes(settings, host, size)),
        )

    def run(self, plan: LaunchPlan) -> int:
        """The exit code of the first cause, or 0; no process is left."""
        from ..settings import env
        from .supervise import supervise

        code, _ = supervise(plan, env.snapshot())
        return code


def _torchruns_words(role: str, size: int) -> dict[str, str]:
    """What else torchrun documents that a rank of its own finds: scripts read it, and a rank of another launcher, which
    this launch may have been started in, has handed down its own.
    """
    return {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 keeps the store
    }
