"""Continue a run without a restart when ranks are lost: `accelerate launch --keep_replicas`. Internal.

- `engine`: start and supervise the ranks, and replace lost ones.
- `launcher_members`: the launcher's part of the membership protocol.
- `other_hosts`: the same for the launchers of machines other than 0.
- `connections`: a launcher's connections with ranks and other launchers.
- `membership`: the ranks' part of it, instead of a process group.
- `collectives`: gather, reduce and broadcast over the living ranks.
- `strategy`: average gradients over the ranks that contributed theirs.
- `sharded_strategy`: the same for replicas of several ranks.
- `shards`: the process group of such a replica, and its shards in messages.
- `shared_epoch`: divide the samples of an epoch among the living ranks.
- `loop`: let new processes join between batches, or save and end if too few ranks live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Candidate, Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...distributed.world import World


def _has_shares(world: World) -> bool:
    """Return whether the ranks of a replica share out its copy of the model."""
    return world.members is not None and world.members.replica is not None


GUEST: Final = Guest(
    engines=(f"{__name__}.engine:FaultTolerantProcesses",),
    runs=(f"{__name__}:attach",),
    strategies=(
        Candidate(
            f"{__name__}.sharded_strategy",
            "KeptPipeline",
            lambda settings, world: _has_shares(world) and getattr(settings.parallelism, "pp_size", 1) > 1,
            is_instead_of_others=True,
        ),
        Candidate(
            f"{__name__}.sharded_strategy", "KeptShards", lambda _, world: _has_shares(world), is_instead_of_others=True
        ),
        Candidate(
            f"{__name__}.strategy",
            "KeptReplicas",
            lambda settings, world: world.members is not None,
            is_instead_of_others=True,
        ),
    ),
    settings=f"{__name__}.options:GROUPS",
    members={"ACCELERATE_REPLICAS_FOLDER": f"{__name__}.membership:join"},
)


def attach(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook that lets processes join ``run`` between batches; None if the run can't survive lost ranks."""
    if run.world.members is None:
        return None
    from .loop import join_replicas

    return join_replicas(run)
