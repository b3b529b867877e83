"""Launch on one host: N ranks under the supervisor, without torch, agent or restarts; or one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, final

from ..errors import LaunchError
from ..seams import members
from ..settings import env
from .engine import LOOPBACK, LaunchEngine, base_environment, count_processes, device_notes, logs_of, rendezvous_port
from .plan import LaunchPlan, Program

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .preflight import Host


@final
class LocalProcesses(LaunchEngine):
    """Ranks 0..N-1 of this host, supervised by this process."""

    name = "local"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether several processes are wanted, or one whose output goes to files."""
        logs = settings.launch.log_dir is not None or settings.launch.tee != "0"
        return logs or count_processes(settings, host) > 1

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan one process per rank with the variables that torch reads."""
        size = count_processes(settings, host)
        port, notes = rendezvous_port(settings, host)
        shared = {
            "MASTER_ADDR": settings.launch.main_process_ip or LOOPBACK,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            **_torchrun_environment(settings.launch.role, size),
        }
        return LaunchPlan(
            engine=f"{self.name}: {size} processes on this host, supervised",
            argv=program.argv(),
            environment={**base_environment(settings, host, size), **shared},
            ranks=tuple({name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} for rank in range(size)),
            is_here=True,
            rendezvous=f"{shared['MASTER_ADDR']}:{port} (static)",
            logs=logs_of(settings),
            notes=(*notes, *device_notes(settings, host, size)),
            grace_seconds=settings.preemption.grace_seconds,
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run all ranks and return 0 or the exit code of the first cause."""
        from .supervisor import supervise

        code, _ = supervise(plan, env.snapshot())
        return code


def _torchrun_environment(role: str, size: int) -> dict[str, str]:
    """Return the further variables that torchrun documents for its ranks.

    Scripts read them, and a launch from inside another launcher's rank would inherit that rank's values.
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


# -------------------------------------------------------------------------------------- one process


class ProcessFailed(LaunchError, subprocess.CalledProcessError):
    """The launched program ended with a nonzero exit code."""

    def __init__(self, returncode: int, command: tuple[str, ...]) -> None:
        subprocess.CalledProcessError.__init__(self, returncode, list(command))


@final
class OneProcess(LaunchEngine):
    """The program once, with the settings in its environment."""

    name = "simple"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return True: it is the last of the engines."""
        return True

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan one process without ranks of its own."""
        count_processes(settings, host)
        alone, notes = _nested_launch_environment(settings, host)
        return LaunchPlan(
            engine=f"{self.name}: one process",
            argv=program.argv(),
            environment={**base_environment(settings, host, 1), **alone},
            is_here=True,
            notes=(*notes, *device_notes(settings, host, 1)),
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the program as a child process and return its exit code."""
        environment = next(iter(plan.environments(env.snapshot())))
        try:
            process = subprocess.Popen(plan.argv, env=environment, cwd=plan.cwd)
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} can't be started: {error}") from error
        # Ctrl-C reaches the child by the terminal; these to us are passed on.
        passed_on = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *passed_on)}
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in passed_on:
                signal.signal(number, lambda received, _frame: process.send_signal(received))
        except ValueError:  # not the main thread: Python keeps the handlers as they are
            before = {}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code

    def replace_process(self, plan: LaunchPlan) -> int:
        """Replace this process by the program; where the system can't, run it as a child and return its exit code."""
        if sys.platform == "win32":
            return self.run(plan)
        environment = next(iter(plan.environments(env.snapshot())))
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]  (started without it: `>&-`)
                stream.flush()
        try:
            os.execvpe(plan.argv[0], plan.argv, environment)
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} can't be started: {error}") from error


def _nested_launch_environment(settings: Settings, host: Host) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (variables, notes) for a launch inside a rank of another launcher, whose variables it has inherited."""
    around = host.environment
    is_in_rank = all(around.get(name) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"))  # only launchers set them all
    if not is_in_rank or around.get("WORLD_SIZE", "1") == "1":
        return {}, ()
    if settings.source_of("launch.num_processes").kind == "flag":
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"), "0")
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
        own = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(host.free_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        around_only = dict.fromkeys(members(), "")  # its ranks aren't those of the launch around it
        return {**ranks, **sizes, **own, **around_only}, ()
    return {}, (
        f"this process joins as rank {around['RANK']} of {around['WORLD_SIZE']}, as the launcher around it says (RANK, "
        "WORLD_SIZE); for a world of its own give --num_processes 1",
    )
