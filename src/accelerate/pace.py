"""How many samples make one update, and how a run that goes on with other ranks keeps to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError
from .gradients import GradientState
from .logging import get_logger
from .world import World

if TYPE_CHECKING:
    from .checkpointing import LoadedCheckpoint
    from .open_window import OpenWindow

logger = get_logger(__name__)


def pace_of(world: World, loaders: Sequence[Any], clock: GradientState) -> dict[str, Any]:
    """What a checkpoint notes: ranks, micro-batches per update, and per loader the samples of all ranks at once."""
    samples = [getattr(loader, "total_batch_size", None) for loader in loaders]
    return {"ranks": world.size, "steps": clock.num_steps, "samples": samples}


def go_on(
    loaded: LoadedCheckpoint,
    world: World,
    loaders: Sequence[Any],
    clock: GradientState,
    window: OpenWindow,
    *,
    keep_global_batch: bool,
) -> None:
    """The clock counts on from the checkpoint, and what changed since the save has been said once, by rank 0.

    Args:
        window: takes the gradients of an update that was begun.
        keep_global_batch: change the micro-batches per update so that an update is made of as many samples as before.

    Raises:
        CheckpointError: that many samples can't be had from whole micro-batches, or the checkpoint doesn't say.
    """
    details = {} if loaded.manifest is None else loaded.manifest.details
    before, now = details.get("pace"), pace_of(world, loaders, clock)
    if loaded.step is not None:
        if clock.open_window is not None:  # in a program that goes back: those are of another update
            window.clear()
        clock.step = loaded.step
    if before is None:
        if keep_global_batch:
            raise CheckpointError(
                f"keep_global_batch=True: {loaded.folder} doesn't say how many samples made an update (it was saved "
                "by an older version or another program). Set gradient_accumulation_steps yourself."
            )
        return
    changes: list[str] = []
    if before != now:
        needed = _steps_needed(before, now)
        changes = _changes(before, now)
        if keep_global_batch and needed != now["steps"]:
            steps = _whole(needed)
            if steps is None:
                raise CheckpointError(_cant_keep(before, now, str(loaded.folder)))
            clock.num_steps = steps
            changes.append(f"gradient_accumulation_steps: {now['steps']} -> {steps}, which keeps the global batch")
            now = {**now, "steps": steps}
        elif needed != now["steps"]:
            changes.append(_offer(needed))
    lost: str | None = None
    if loaded.had_open_window:
        lost = window.load_state_dict(loaded.window, partial(_count_of, before, now), before["ranks"], world)
    elif clock.num_steps != before["steps"] and clock.step % before["steps"]:
        lost = "its gradients were not saved"
    if lost is not None:
        changes.append(f"it was saved inside an update, whose first micro-batches are lost: {lost}")
    if lost is not None or (clock.num_steps != before["steps"] and not loaded.had_open_window):
        # The next micro-batch begins the update that is due, a whole one.
        clock.step = clock.step // before["steps"] * clock.num_steps
    if changes:
        logger.warning("Goes on from %s with changes:\n  %s", loaded.folder, "\n  ".join(changes))


def _count_of(before: Mapping[str, Any], now: Mapping[str, Any], count: int) -> int | None:
    """How many micro-batches of today are as many updates, and as much of the one that is due, as ``count`` of before.

    None where what is left of that update is no whole number of them.
    """
    if (before["ranks"], before["steps"]) == (now["ranks"], now["steps"]):
        return count
    updates, begun = divmod(count, before["steps"])
    if not begun:
        return updates * now["steps"]
    old, new = _batch(before), _batch(now)
    if old is None or old != new:
        return None
    left, rest = divmod((before["steps"] - begun) * now["steps"], before["steps"])
    return None if rest else (updates + 1) * now["steps"] - left


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
