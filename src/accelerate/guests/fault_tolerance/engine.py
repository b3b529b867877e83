"""The processes of one machine in a run that continues when a process is lost; lost processes are replaced."""

from __future__ import annotations

import selectors
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...launch.choose import engines
from ...launch.engine import LaunchEngine, count_processes
from ...launch.local import LocalProcesses
from ...launch.plan import LaunchPlan, Program
from ...launch.streams import write_all
from ...launch.supervisor import Loss, LossPolicy, Reaper, Supervisor, start_command
from ...launch.torchrun import Torchrun
from ...wording import some_ranks
from .launcher_members import REPLICA_JOINS_VARIABLE, ReplicaMembers

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

_NUM_REPLACEMENTS: Final = "keep_replicas"
_MINIMUM: Final = "min_replicas"
_NUM_RESTARTS: Final = "max_restarts"


@final
class FaultTolerantProcesses(LaunchEngine):
    """Ranks 0..N-1 of this host, supervised by this process, which replaces lost ranks."""

    name = "fault_tolerant"
    is_instead_of_others = True

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether to replace lost ranks, or the minimum number of living ranks was given."""
        return settings.launch.keep_replicas > 0 or settings.was_given("launch.min_replicas")

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the processes like `--launcher local`.

        Raises:
            SettingError: lost ranks aren't replaced, fewer ranks than the minimum are started, or another option
                needs another engine.
        """
        launch = settings.launch
        if not launch.keep_replicas:
            raise SettingError(
                f"{settings.quote('launch.min_replicas')} is for ranks that continue when others are lost. Give "
                "--keep_replicas N as well, or leave it out."
            )
        named = settings.cluster.launcher
        others = [engine for engine in engines() if engine is not self]
        chosen = next(engine for engine in others if (engine.name == named if named else engine.suits(settings, host)))
        is_here = launch.num_machines == 1 and launch.rdzv_backend == "static" and not launch.rdzv_conf
        restarts_here = not named and chosen.name == Torchrun.name and is_here and count_processes(settings, host) > 1
        if chosen.name != LocalProcesses.name and not restarts_here:
            raise SettingError(
                f"{settings.quote('launch.keep_replicas')} keeps several processes of one machine, which --launcher "
                f"local starts, but these settings start {chosen.name!r}. Give --num_processes of at least 2 on one "
                "machine, without a rendezvous, or leave --keep_replicas out."
            )
        plan = LocalProcesses().plan(settings, program, host)
        if launch.min_replicas > plan.num_processes:
            raise SettingError(
                f"{settings.quote('launch.min_replicas')} is more than the {plan.num_processes} processes of this "
                "launch, so too few would live from the start. Give at most as many."
            )
        return replace(
            plan,
            engine=f"{self.name}: {plan.num_processes} processes on this host, which continue when one is lost",
            engine_options={
                _NUM_REPLACEMENTS: launch.keep_replicas,
                _MINIMUM: launch.min_replicas,
                _NUM_RESTARTS: launch.max_restarts,
            },
            survives_lost_ranks=True,
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run all ranks and return 0 or the exit code of the first cause; restart a failed run as planned."""
        from ...settings import env

        num_replacements, minimum, num_restarts = (
            int(str(plan.engine_options[name])) for name in (_NUM_REPLACEMENTS, _MINIMUM, _NUM_RESTARTS)
        )
        number = 0
        while True:
            members = ReplicaMembers(plan.num_processes, num_replacements, minimum)
            plan = replace(plan, environment={**plan.environment, "TORCHELASTIC_RESTART_COUNT": str(number)})
            supervisor = Supervisor(
                plan,
                start_command(plan),
                env.snapshot(),
                stop_grace_seconds=plan.grace_seconds,
                losses=_Losses(members),
            )
            try:
                code = supervisor.run()
            finally:
                members.close()
            if code == 0 or supervisor.received is not None or members.is_preempted or number == num_restarts:
                return code
            number += 1
            text = f"accelerate launch: the run ended with code {code}; it is started again (restart {number} of "
            write_all(2, f"{text}{num_restarts}), and resumes where it calls `accelerator.resume()`.\n".encode())


@final
class _Losses(LossPolicy):
    """The supervisor's reaction to lost ranks: the other members continue, and a new process replaces the lost one."""

    def __init__(self, members: ReplicaMembers) -> None:
        self._members = members

    def begin(self, selector: selectors.BaseSelector, reaper: Reaper) -> None:
        """Register the members' connections with ``selector``, and remove their folder at the end."""
        reaper.remove_at_end(self._members.folder)
        self._members.register(selector)

    def environment(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a rank."""
        around = (REPLICA_JOINS_VARIABLE,)  # set by an outer launch
        return {name: value for name, value in plan.items() if name not in around} | self._members.environment

    def ended(self, rank: int, code: int, plan: Mapping[str, str], *, has_saved: bool, may_go_on: bool) -> Loss:
        """Tell the other members that ``rank`` has ended, and return whether they continue."""
        members = self._members
        was_member = rank in members.members
        members.lost(rank, has_failed=code != 0)
        given_up: set[int] = set()
        if was_member and (members.ending or not members.members):  # nobody is left to join
            given_up = set(range(members.size)) - members.members
        if not may_go_on or not members.members or (members.ending and has_saved):
            return Loss(given_up=given_up)
        living, left = some_ranks(members.members), members.num_replacements - members.num_replaced
        if members.ending:
            outlook = f"{members.ending}: the run saves and ends."
        elif left:
            outlook = f"the run continues with {living}. A new process takes its place ({left - 1} more may)."
        else:
            outlook = f"the run continues with {living}. No more processes may take its place."
        joins = self.environment(plan) | {REPLICA_JOINS_VARIABLE: "1"} if members.replace() else None
        return Loss(True, outlook, joins, given_up)

    def missed(self, well: Collection[int]) -> str:
        """Return a note that the main process was lost, if it was."""
        if 0 in well:
            return ""
        return (
            "the run came to its end without rank 0, which was lost: what the main process does after the loop (`if "
            "accelerator.is_main_process:`) wasn't done, so the exit code is 1."
        )
