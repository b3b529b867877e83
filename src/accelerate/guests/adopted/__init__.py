"""Models that were sharded before ``prepare``: they are trained in their own layout. Internal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Candidate, Guest

if TYPE_CHECKING:
    from ...distributed.world import World
    from ...settings.tree import Settings


def _awaits_shards(settings: Settings, world: World) -> bool:
    """Return True if the settings shard parameters; it is asked last, so nothing else does: the model comes sharded."""
    config = settings.parallelism
    return world.size > 1 and config is not None and (config.dp_shard_size > 1 or config.tp_size > 1)


GUEST: Final = Guest(strategies=(Candidate(f"{__name__}.strategy", "Adopted", _awaits_shards, takes_shards=True),))
