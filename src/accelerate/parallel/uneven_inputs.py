"""Uneven inputs: torch's Join around replicas that run out of batches at different times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.algorithms.join import Join, Joinable

from ..data_loader import BatchSamplerShard, DataLoaderShard
from ..data_loader.sampling import unskipped
from ..distributed.world import World
from ..logging import MultiProcessAdapter, get_logger
from .ddp import replica_in

logger: MultiProcessAdapter = get_logger(__name__)


@contextmanager
def join_uneven_inputs(
    world: World,
    joinables: Sequence[object],
    loaders: Sequence[object],
    *,
    configured: bool,
    override: bool | None,
) -> Iterator[None]:
    """Enter a context in which a rank without further batches joins the other ranks' collectives.

    Args:
        joinables: prepared models (and other ``Joinable`` objects).
        loaders: the prepared loaders; inside the block, their ``even_batches`` is ``override``.
        configured: the Accelerator's ``even_batches``.
        override: ``even_batches`` for this block; None keeps it. With even batches, all ranks end together.
    """
    if world.size == 1:
        yield
        return
    even = configured if override is None else override
    inner = [replica_in(joinable) or joinable for joinable in joinables]
    can_join = [joinable for joinable in inner if isinstance(joinable, Joinable)]
    if len(can_join) < len(inner):
        logger.warning(
            "join_uneven_inputs(): only models replicated by DistributedDataParallel can be joined; "
            "the others take part as they are."
        )
    restore = [] if override is None else _override_even_batches(loaders, override)
    try:
        if even or not can_join:
            yield
        else:
            with Join(can_join, enable=True, throw_on_early_termination=False):
                yield
    finally:
        for sampler, value in restore:
            sampler.even_batches = value


def _override_even_batches(loaders: Sequence[object], value: bool) -> list[tuple[BatchSamplerShard, bool]]:
    changed: list[tuple[BatchSamplerShard, bool]] = []
    for loader in loaders:
        batches = loader.batch_sampler if isinstance(loader, DataLoaderShard) else None
        sampler = None if batches is None else unskipped(batches)[0]
        if not isinstance(sampler, BatchSamplerShard):
            logger.warning_once(
                "join_uneven_inputs(even_batches=...) leaves iterable and dispatched loaders as they are."
            )
            continue
        changed.append((sampler, sampler.even_batches))
        sampler.even_batches = value
    return changed
