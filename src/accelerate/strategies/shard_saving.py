"""What a checkpoint of a sharded run is written from: shards by every rank, or gathered state by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch.distributed.fsdp import StateDictType

from ..checkpointing import Draft
from ..checkpointing.content import Part
from ..checkpointing.shard_files import Shards
from ..checkpointing.sharded import StateAccess, optimizer_folder, own_shards, weights_folder
from ..world import World
from .rebind import inner_optimizer


@final
class Gathered:
    """An optimizer's state, taken while all ranks were there."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """The state dict of an optimizer of whole tensors."""
        return self._state


def gathered(access: StateAccess, models: Sequence[Any], optimizers: Sequence[Any], keeps: bool) -> dict[str, Any]:
    """``weights`` and ``optimizers`` of a checkpoint with the same files as that of one process; a collective.

    Args:
        optimizers: as they are inside their wrappers.
        keeps: whether this rank gets the state; the others only take part.
    """
    return {
        "weights": [access.whole_model(model, keeps) for model in models],
        "optimizers": [Gathered(access.whole_optimizer(one, models, keeps)) for one in optimizers],
    }


def saved_as(
    plugin: Any,
    access: StateAccess,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    world: World,
    model_only: bool,
) -> dict[str, Any]:
    """``weights``, ``optimizers`` and ``write_parts`` of a checkpoint in the form that ``plugin`` says.

    Gathered state has the same files as that of one process; shards have folders of their own.
    """
    optimizers = [] if model_only else list(map(inner_optimizer, optimizers))
    if plugin.state_dict_type is StateDictType.FULL_STATE_DICT:
        keeps = world.is_local_main  # the writer of each node, where every node writes
        return gathered(access, models, optimizers, keeps)
    return {"weights": [], "optimizers": [], "write_parts": _shards_of(access, models, optimizers)}


def _shards_of(access: StateAccess, models: Sequence[Any], optimizers: Sequence[Any]) -> Callable[[Draft], list[Part]]:
    def parts(draft: Draft) -> list[Part]:
        weights = [
            Shards(
                weights_folder(draft.folder, index),
                {"model": own_shards(access.model_shards(model))},
                draft.ranks,
                draft,
            )
            for index, model in enumerate(models)
        ]
        return [
            *weights,
            *(
                Shards(
                    optimizer_folder(draft.folder, index),
                    {"optimizer": access.optimizer_shards(optimizer, models)},
                    draft.ranks,
                    draft,
                )
                for index, optimizer in enumerate(optimizers)
            ),
        ]

    return parts
