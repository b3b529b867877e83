"""How many samples make one update, and how a run that goes on with other ranks keeps to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .checkpointing import LoadedCheckpoint
from .errors import CheckpointError
from .gradients import GradientState
from .logging import get_logger
from .world import World

logger = get_logger(__name__)


def pace_of(world: World, loaders: Sequence[Any], clock: GradientState) -> dict[str, Any]:
    """What a checkpoint notes: ranks, micro-batches per update, and per loader the samples of all ranks at once."""
    samples = [getattr(loader, "total_batch_size", None) for loader in loaders]
    return {"ranks": world.size, "steps": clock.num_steps, "samples": samples}


def go_on(
    loaded: LoadedCheckpoint, world: World, loaders: Sequence[Any], clock: GradientState, *, keep_global_batch: bool
) -> None:
    """The clock counts on from the checkpoint, and what changed since the save has been said once, by rank 0.

    Args:
        keep_global_batch: change the micro-batches per update so that an update is made of as many samples as before.

    Raises:
        CheckpointError: that many samples can't be had from whole micro-batches, or the checkpoint doesn't say.
    """
    details = {} if loaded.manifest is None else loaded.manifest.details
    before, now = details.get("pace"), pace_of(world, loaders, clock)
    if loaded.step is not None:
        clock.step = loaded.step
    if before is None:
        if keep_global_batch:
            raise CheckpointError(
                f"keep_global_batch=True: {loaded.folder} doesn't say how many samples made an update (it was saved "
                "by an older version or another program). Set gradient_accumulation_steps yourself."
            )
        return
    if before == now:
        return
    needed = _steps_needed(before, now)
    changes = _changes(before, now)
    if keep_global_batch and needed != now["steps"]:
        steps = _whole(needed)
        if steps is None:
            raise CheckpointError(_cant_keep(before, now, str(loaded.folder)))
        windows, begun = divmod(clock.step, before["steps"])
        clock.num_steps = steps
        clock.step = windows * steps
        changes.append(f"gradient_accumulation_steps: {now['steps']} -> {steps}, which keeps the global batch")
        if begun:
            changes.append("it was saved inside an update, whose first micro-batches are lost")
    elif needed != now["steps"]:
        changes.append(_offer(needed))
    if changes:
        logger.warning("Goes on from %s with changes:\n  %s", loaded.folder, "\n  ".join(changes))


def _batch(pace: Mapping[str, Any]) -> int | None:
    """Samples per update of the first loader that knows."""
    sizes = [size for size in pace["samples"] if size]
    return sizes[0] * pace["steps"] if sizes else None


def _steps_needed(before: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    wanted, sizes = _batch(before), [size for size in now["samples"] if size]
    return None if wanted is None or not sizes else wanted / sizes[0]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes: list[str] = []
    if before["ranks"] != now["ranks"]:
        changes.append(f"ranks: {before['ranks']} -> {now['ranks']}")
    if before["steps"] != now["steps"]:
        changes.append(f"gradient_accumulation_steps: {before['steps']} -> {now['steps']}")
    old, new = _batch(before), _batch(now)
    if old != new and old is not None and new is not None:
        changes.append(f"global batch (samples per update): {old} -> {new}")
    return changes


def _whole(needed: float | None) -> int | None:
    return int(needed) if needed is not None and needed >= 1 and needed == int(needed) else None


def _offer(needed: float | None) -> str:
    steps = _whole(needed)
    if steps is None:
        return "no whole number of micro-batches gives the global batch of before"
    return f"load_state(keep_global_batch=True) would keep it, with gradient_accumulation_steps={steps}"


def _cant_keep(before: Mapping[str, Any], now: Mapping[str, Any], folder: str) -> str:
    return (
        f"keep_global_batch=True: {folder} was saved with {_batch(before)} samples per update by {before['ranks']} "
        f"ranks. {now['ranks']} ranks take {_batch(now)} samples in {now['steps']} micro-batches, and no whole number "
        "of micro-batches makes as many. Choose a batch size per rank that divides them, or leave keep_global_batch "
        "out."
    )
