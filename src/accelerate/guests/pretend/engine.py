"""Simulate one rank of a job: run the program once, on this host's CPU, and print a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...launch.engine import LOOPBACK, LaunchEngine, base_environment
from ...launch.local import OneProcess
from ...launch.plan import LaunchPlan, Program
from ...ports import DEFAULT_PORT

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

#: The processes per host if the number of machines isn't given: the GPUs per host of most clusters.
_PER_HOST: Final = 8


@final
class PretendedRank(LaunchEngine):
    """The engine that runs the program as one rank of ``--pretend`` many."""

    name = "pretended"
    is_instead_of_others = True

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether ``--pretend`` was given."""
        return settings.launch.pretend is not None

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan one process with the environment variables of that rank.

        Raises:
            SettingError: the rank doesn't exist, the hosts can't have equally many ranks, or the program isn't Python.
        """
        size, rank = settings.launch.pretend, settings.launch.rank
        assert size is not None
        if rank >= size:
            raise SettingError(
                f"{settings.quote('launch.rank')}: a world of {size} ({settings.quote('launch.pretend')}) has "
                f"the ranks 0 to {size - 1}. Give one of them."
            )
        if program.kind == "command":
            raise SettingError(
                f"{settings.quote('launch.pretend')} runs Python in its own process, which contradicts "
                f"{settings.quote('launch.no_python')}. Give the script, or -m and the module."
            )
        local_size = _per_host(settings, size)
        shared = {
            "WORLD_SIZE": str(size),
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            "LOCAL_RANK": str(rank % local_size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(DEFAULT_PORT),  # unused
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_HANG_SECONDS": "0",  # there are no other ranks to wait for
        }
        steps, kind = str(settings.launch.num_steps), ("-m",) if program.kind == "module" else ()
        runner = Program("accelerate.guests.pretend", (steps, *kind, program.target, *program.arguments), "module")
        return LaunchPlan(
            engine=f"{self.name}: rank {rank} of {size}, alone and without values",
            argv=runner.argv(),
            environment={**base_environment(settings, host, 1), **shared},
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the program until its steps are done and return its exit code."""
        return OneProcess().run(plan)


def _per_host(settings: Settings, size: int) -> int:
    """Return the number of processes per host."""
    num_machines = settings.launch.num_machines
    if not settings.was_given("launch.num_machines"):
        return _PER_HOST if size % _PER_HOST == 0 else size
    if size % num_machines:
        raise SettingError(
            f"{settings.quote('launch.pretend')}: {size} processes can't be spread evenly over "
            f"{settings.quote('launch.num_machines')}. Give a multiple."
        )
    return size // num_machines
