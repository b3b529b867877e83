"""A run that goes on when ranks are lost, without a restart: `accelerate launch --keep_replicas`. Internal.

- `engine`: starts and supervises the ranks, and replaces lost ones.
- `launcher_members`: the launcher's part of the agreement: who lives.
- `membership`: the ranks' part of it, in place of a process group.
- `strategy`: gradients, averaged over those who gave theirs.
- `shared_epoch`: the samples of an epoch, shared by the living ranks.
- `loop`: where new processes join, and too few ranks save and end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Candidate, Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator

GUEST: Final = Guest(
    engines=(f"{__name__}.engine:FaultTolerantProcesses",),
    runs=(f"{__name__}:attach",),
    strategies=(
        Candidate(
            f"{__name__}.strategy",
            "KeptReplicas",
            lambda settings, world: world.members is not None,
            is_instead_of_others=True,
        ),
    ),
    members={"ACCELERATE_REPLICAS_FOLDER": f"{__name__}.membership:join"},
)


def attach(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook by which processes join ``run`` between its batches; None where no rank may be lost."""
    if run.world.members is None:
        return None
    from .loop import join_replicas

    return join_replicas(run)
