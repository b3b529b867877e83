"""One process: the program takes this process's place, so that nothing stays behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, final

from ..errors import LaunchError
from .engine import LOOPBACK, LaunchEngine, base_environment, count_processes, device_notes
from .plan import LaunchPlan, Program

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .host import Host


class ProcessFailed(LaunchError, subprocess.CalledProcessError):
    """The launched program ended with another exit code than 0."""

    def __init__(self, returncode: int, command: tuple[str, ...]) -> None:
        subprocess.CalledProcessError.__init__(self, returncode, list(command))


@final
class OneProcess(LaunchEngine):
    """The program, once, with the settings in its environment."""

    name = "simple"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Always: it is the last of the engines."""
        return True

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """One process without ranks of its own."""
        count_processes(settings, host)
        alone, notes = _among_ranks(settings, host)
        return LaunchPlan(
            engine=f"{self.name}: one process",
            argv=program.argv(),
            environment={**base_environment(settings, host, 1), **alone},
            notes=(*notes, *device_notes(settings, host, 1)),
        )

    def run(self, plan: LaunchPlan) -> int:
        """The exit code of the program, run as a child; for callers who want to live on."""
        from ..settings import env

        environment = next(iter(plan.environments(env.snapshot())))
        try:
            process = subprocess.Popen(plan.argv, env=environment, cwd=plan.cwd)
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} can't be started: {error}") from error
        # Ctrl-C reaches the child by the terminal; SIGTERM to us is passed on.
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
        except ValueError:  # not the main thread: Python keeps the handlers as they are
            before = {}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code

    def become(self, plan: LaunchPlan) -> int:
        """Doesn't return where the system can replace a process; elsewhere like :meth:`run`."""
        if sys.platform == "win32":
            return self.run(plan)
        from ..settings import env

        environment = next(iter(plan.environments(env.snapshot())))
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]  (started without it: `>&-`)
                stream.flush()
        try:
            os.execvpe(plan.argv[0], plan.argv, environment)
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} can't be started: {error}") from error


def _among_ranks(settings: Settings, host: Host) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables, notes) for a launch from inside a rank of another launcher, whose variables it has inherited."""
    around = host.environment
    is_in_rank = all(around.get(name) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"))  # only launchers set them all
    if not is_in_rank or around.get("WORLD_SIZE", "1") == "1":
        return {}, ()
    if settings.source_of("launch.num_processes").kind == "flag":
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"), "0")
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
        own = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(host.free_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return {**ranks, **sizes, **own}, ()
    return {}, (
        f"this process joins as rank {around['RANK']} of {around['WORLD_SIZE']}, as the launcher around it says (RANK, "
        "WORLD_SIZE); for a world of its own give --num_processes 1",
    )
