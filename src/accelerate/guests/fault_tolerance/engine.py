"""The processes of this machine in a run that continues when a process is lost; lost processes are replaced."""

from __future__ import annotations

import hashlib
import json
import math
import selectors
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...launch.choose import engines
from ...launch.engine import LaunchEngine, count_processes
from ...launch.local import LocalProcesses
from ...launch.plan import LaunchPlan, Program
from ...launch.streams import write_all
from ...launch.supervisor import Loss, LossPolicy, Reaper, Supervisor, start_command
from ...launch.torchrun import Torchrun
from ...ports import DEFAULT_PORT
from ...settings.preemption import PREEMPTED_EXIT_CODE
from ...wording import some_ranks
from .launcher_members import REPLICA_AXES, REPLICA_JOINS_VARIABLE, Hosts, LauncherMembers, ReplicaMembers
from .options import ReplicaOptions
from .other_hosts import RemoteMembers

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

_NUM_REPLACEMENTS: Final = "keep_replicas"
_MINIMUM: Final = "min_replicas"
_NUM_RESTARTS: Final = "max_restarts"
_LOST_AFTER: Final = "lost_after_seconds"
_REPLICA_SIZE: Final = "replica_size"
#: Settings that are for kept replicas only.
_NEEDS_REPLICAS: Final = ("launch.min_replicas", "replicas.lost_after_seconds")


@final
class FaultTolerantProcesses(LaunchEngine):
    """Ranks 0..N-1 of this host, supervised by this process, which replaces lost ranks."""

    name = "fault_tolerant"
    is_instead_of_others = True

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether to replace lost ranks, or the minimum number of living ranks was given."""
        return settings.launch.keep_replicas > 0 or any(map(settings.was_given, _NEEDS_REPLICAS))

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the processes like `--launcher local`.

        Raises:
            SettingError: lost ranks aren't replaced, fewer ranks than the minimum are started, or another option
                needs another engine.
        """
        launch = settings.launch
        if not launch.keep_replicas:
            given = next(filter(settings.was_given, _NEEDS_REPLICAS))
            raise SettingError(
                f"{settings.quote(given)} is for ranks that continue when others are lost. Give --keep_replicas N as "
                "well, or leave it out."
            )
        named = settings.cluster.launcher
        others = [engine for engine in engines() if engine is not self]
        chosen = next(engine for engine in others if (engine.name == named if named else engine.suits(settings, host)))
        is_static, size = launch.rdzv_backend == "static" and not launch.rdzv_conf, count_processes(settings, host)
        if chosen.name != LocalProcesses.name and not (
            not named and chosen.name == Torchrun.name and is_static and size > 1
        ):
            raise SettingError(
                f"{settings.quote('launch.keep_replicas')} keeps several processes, which --launcher local starts, but "
                f"these settings start {chosen.name!r}. Give --num_processes of at least 2, without a rendezvous, or "
                "leave --keep_replicas out."
            )
        options = settings.find(ReplicaOptions)
        plan = _plan_here(settings, program, host)
        replica_size = _replica_size(settings, size, len(plan.ranks))
        if launch.min_replicas > size // replica_size:
            raise SettingError(
                f"{settings.quote('launch.min_replicas')} is more than the {size // replica_size} replicas of this "
                "launch, so too few would live from the start. Give at most as many."
            )
        return replace(
            plan,
            engine=f"{self.name}: {len(plan.ranks)} processes on this host, which continue when one is lost",
            engine_options={
                _NUM_REPLACEMENTS: launch.keep_replicas,
                _MINIMUM: launch.min_replicas,
                _NUM_RESTARTS: launch.max_restarts,
                _LOST_AFTER: 0 if options is None else options.lost_after_seconds,
                _REPLICA_SIZE: replica_size,
            },
            survives_lost_ranks=True,
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run all ranks and return 0 or the exit code of the first cause; restart a failed run as planned."""
        from ...settings import env

        num_restarts, number = int(str(plan.engine_options[_NUM_RESTARTS])), 0
        while True:
            members = _members_of(plan)
            plan = replace(plan, environment={**plan.environment, "TORCHELASTIC_RESTART_COUNT": str(number)})
            supervisor = Supervisor(
                plan,
                start_command(plan),
                env.snapshot(),
                stop_grace_seconds=plan.grace_seconds,
                losses=_Losses(members, has_main=plan.environment["GROUP_RANK"] == "0"),
            )
            try:
                code = supervisor.run()
                if members.ending:  # the ranks of other hosts save and end too
                    members.wait_for_hosts()
                if isinstance(members, RemoteMembers) and members.is_cut_off:
                    code = PREEMPTED_EXIT_CODE  # an engine that starts it again lets it join
            finally:
                members.close()
            is_over = supervisor.received is not None or members.is_preempted or members.has_finished
            if code == 0 or is_over or number == num_restarts:
                return code
            number += 1
            text = f"accelerate launch: the run ended with code {code}; it is started again (restart {number} of "
            write_all(2, f"{text}{num_restarts}), and resumes where it calls `accelerator.resume()`.\n".encode())


def _plan_here(settings: Settings, program: Program, host: Host) -> LaunchPlan:
    """Return the plan of this machine's processes."""
    number, machine = settings.launch.num_machines, settings.launch.machine_rank
    if number == 1:
        return LocalProcesses().plan(settings, program, host)
    meeting = Torchrun().plan(settings, program, host)  # checks the address and the port
    size = count_processes(settings, host)
    here = copy(settings)
    here.launch = replace(settings.launch, num_machines=1, num_processes=size // number, main_process_port=0)
    plan = LocalProcesses().plan(here, program, host)
    port = settings.launch.main_process_port or DEFAULT_PORT
    whole = {"GROUP_RANK": machine, "GROUP_WORLD_SIZE": number, "WORLD_SIZE": size, "ROLE_WORLD_SIZE": size}
    ranks = tuple(
        {**own, **dict.fromkeys(("RANK", "ROLE_RANK"), str(machine * size // number + local))}
        for local, own in enumerate(plan.ranks)
    )
    environment = {**plan.environment, **{name: str(value) for name, value in whole.items()}, "MASTER_PORT": str(port)}
    return replace(
        plan, environment=environment, ranks=ranks, is_here=False, rendezvous=meeting.rendezvous, notes=meeting.notes
    )


def _replica_size(settings: Settings, size: int, num_here: int) -> int:
    """Return the number of ranks that hold a copy of the model together.

    Raises:
        SettingError: they share it out in another way than by FSDP 2 or a pipeline, or a part of a machine is left.
    """
    axes, fsdp = settings.parallelism, settings.fsdp
    has_stages = axes is not None and axes.pp_size > 1
    if fsdp is None and not has_stages:
        return 1
    shards = 1 if axes is None else axes.dp_shard_size
    ranks = 1 if axes is None else math.prod(getattr(axes, f"{axis}_size") for axis in REPLICA_AXES)
    others = [name for name in ("ep", "sp") if axes is not None and getattr(axes, f"{name}_size") > 1]
    asked = f"{settings.quote('launch.keep_replicas')} with {'a pipeline' if has_stages else 'FSDP'}"
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise SettingError(f"{asked} shards by version 2, and {settings.quote('fsdp.fsdp_version')}. Set it to 2.")
    if others:
        name = f"parallelism.{others[0]}_size"
        raise SettingError(
            f"{asked} combines it with FSDP, tensor and context parallelism, but {settings.quote(name)}. Leave that "
            "out."
        )
    if (shards < 2 and not has_stages) or ranks == size or (num_here % ranks and ranks % num_here):
        raise SettingError(
            f"{asked} keeps two or more replicas of several ranks each. A replica lies on one machine or on several "
            f"whole ones, but it has {ranks} ranks and each machine has {num_here} of the {size} ranks. Got "
            f"dp_shard_size={shards}. Give --use_parallelism_config, "
            "--parallelism_config_dp_shard_size (shards of a replica) and --parallelism_config_dp_replicate_size "
            "(replicas)."
        )
    return ranks


def _members_of(plan: LaunchPlan) -> ReplicaMembers | RemoteMembers:
    """Return the launcher's part of the run: the members themselves, or a connection with machine 0, which has them."""
    options = (int(str(plan.engine_options[name])) for name in (_NUM_REPLACEMENTS, _MINIMUM, _REPLICA_SIZE))
    num_replacements, minimum, replica_size = options
    lost_after_seconds, here = float(str(plan.engine_options[_LOST_AFTER])), plan.environment
    size, number, machine = (int(here[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK"))
    hosts = None
    if number > 1:
        same = [size, number, minimum, replica_size, *(Path(word).name for word in plan.argv[1:2])]
        token = hashlib.sha256(json.dumps(same).encode()).hexdigest()
        hosts = Hosts(number, machine, size // number, here["MASTER_ADDR"], int(here["MASTER_PORT"]), token)
        if machine:
            return RemoteMembers(hosts, size, num_replacements, minimum, replica_size)
    return ReplicaMembers(
        size, num_replacements, minimum, replica_size, lost_after_seconds=lost_after_seconds, hosts=hosts
    )


@final
class _Losses(LossPolicy):
    """The supervisor's reaction to lost ranks: the other members continue, and a new process replaces the lost one."""

    def __init__(self, members: LauncherMembers, *, has_main: bool) -> None:
        self._members, self._has_main = members, has_main

    def begin(self, selector: selectors.BaseSelector, reaper: Reaper) -> None:
        """Register the members' connections with ``selector``, and remove their folder at the end."""
        reaper.remove_at_end(self._members.folder)
        self._members.register(selector)

    def environment(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a rank."""
        around = (REPLICA_JOINS_VARIABLE,)  # set by an outer launch
        joins = {REPLICA_JOINS_VARIABLE: "1"} if self._members.joins else {}
        own = self._members.environment | self._members.variables_of(int(plan["RANK"])) | joins
        return {name: value for name, value in plan.items() if name not in around} | own

    def ended(self, rank: int, code: int, plan: Mapping[str, str], *, has_saved: bool, may_go_on: bool) -> Loss:
        """Tell the other members that ``rank`` has ended, and return whether they continue."""
        members = self._members
        if isinstance(members, RemoteMembers) and members.is_cut_off:
            return Loss(True, "its launcher ended it.")
        if rank in members.given_up:
            return Loss(True, "all others have come to the end of the script, so there is nobody to join.")
        was_member, is_ended = rank in members.members, members.is_ended(rank)
        members.lost(rank, has_failed=code != 0)
        given_up: set[int] = set()
        if was_member and (members.ending or not members.members):  # nobody is left to join
            given_up = set(range(members.size)) - members.members
        if not may_go_on or not members.members or (members.ending and has_saved):
            return Loss(given_up=given_up)
        living, left = some_ranks(members.members), members.num_replacements - members.num_replaced
        started = members.replace(rank)
        if started and left == members.num_replacements - members.num_replaced:
            outlook = "its replica is started again."
        elif members.ending:
            outlook = f"{members.ending}: the run saves and ends."
        elif left:
            outlook = f"the run continues with {living}. A new process takes its place ({left - 1} more may)."
        else:
            outlook = f"the run continues with {living}. No more processes may take its place."
        if is_ended:
            outlook = f"it was ended with the rest of its replica; {outlook}"
        return Loss(True, outlook, None if started is None else self.environment(plan) | started, given_up)

    def missed(self, well: Collection[int]) -> str:
        """Wait for the ranks of other hosts, and return a note on lost ranks whose work is missing."""
        self._members.wait_for_hosts()
        if not well and not self._has_main and not self._members.has_finished:
            return "all ranks of this machine were lost and none may be replaced any more, so the exit code is 1."
        if 0 in well or not self._has_main:
            return ""
        return (
            "the run came to its end without rank 0, which was lost: what the main process does after the loop (`if "
            "accelerator.is_main_process:`) wasn't done, so the exit code is 1."
        )
