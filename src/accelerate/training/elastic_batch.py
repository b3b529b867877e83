"""The global batch size, and how a run that resumes on another number of ranks keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from ..distributed.world import World
from ..errors import CheckpointError
from ..logging import MultiProcessAdapter, get_logger
from .accumulation import GradientState

if TYPE_CHECKING:
    from ..checkpointing import LoadedCheckpoint
    from .open_window import OpenWindow

logger: MultiProcessAdapter = get_logger(__name__)


class GlobalBatchInfo(TypedDict):
    """The record of the global batch in a checkpoint."""

    ranks: int
    steps: int  # micro-batches per update
    samples: list[int | None]  # of all ranks together, per step of each loader


def global_batch_info(world: World, loaders: Sequence[object], gradient_state: GradientState) -> GlobalBatchInfo:
    """Return a checkpoint's record of the global batch: ranks, micro-batches per update, and samples per loader."""
    samples = [getattr(loader, "total_batch_size", None) for loader in loaders]
    return {"ranks": world.size, "steps": gradient_state.num_steps, "samples": samples}


def restore_accumulation(
    loaded: LoadedCheckpoint,
    world: World,
    loaders: Sequence[object],
    gradient_state: GradientState,
    window: OpenWindow,
    *,
    keep_global_batch: bool,
) -> None:
    """Continue the accumulation count from the checkpoint, and log on rank 0 the changes since the save.

    Args:
        window: loads the gradients of an incomplete update.
        keep_global_batch: change the micro-batches per update so that an update has the same number of samples as
            before.

    Raises:
        CheckpointError: no whole number of micro-batches has that number of samples, or the checkpoint has no record.
    """
    details = {} if loaded.manifest is None else loaded.manifest.details
    before: GlobalBatchInfo | None = details.get("pace")
    now: GlobalBatchInfo = global_batch_info(world, loaders, gradient_state)
    if loaded.step is not None:
        if gradient_state.open_window is not None:  # it has gradients of another update
            window.clear()
        gradient_state.step = loaded.step
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
            steps = _whole_number(needed)
            if steps is None:
                raise CheckpointError(_cannot_keep_message(before, now, str(loaded.folder)))
            gradient_state.num_steps = steps
            changes.append(f"gradient_accumulation_steps: {now['steps']} -> {steps}, which keeps the global batch")
            now = {**now, "steps": steps}
        elif needed != now["steps"]:
            changes.append(_suggestion(needed) if any(now["samples"]) else "no prepared loader tells its batch size")
    lost: str | None = None
    if loaded.had_open_window:
        lost = window.load_state_dict(loaded.window, partial(_count_of, before, now), before["ranks"], world)
    elif gradient_state.num_steps != before["steps"] and gradient_state.step % before["steps"]:
        lost = "its gradients were not saved"
    if lost is not None:
        changes.append(f"it was saved inside an update, whose first micro-batches are lost: {lost}")
    if lost is not None or (gradient_state.num_steps != before["steps"] and not loaded.had_open_window):
        # The next micro-batch begins a whole update.
        gradient_state.step = gradient_state.step // before["steps"] * gradient_state.num_steps
    if changes:
        logger.warning("Resuming from %s with changes:\n  %s", loaded.folder, "\n  ".join(changes))


def _count_of(before: GlobalBatchInfo, now: GlobalBatchInfo, count: int) -> int | None:
    """Convert ``count`` micro-batches of the saved run to micro-batches of this run.

    The result has the same number of updates and the same part of the current one. Return None if the rest of that
    update isn't a whole number of micro-batches.
    """
    if (before["ranks"], before["steps"]) == (now["ranks"], now["steps"]):
        return count
    updates, begun = divmod(count, before["steps"])
    if not begun:
        return updates * now["steps"]
    old, new = _samples_per_update(before), _samples_per_update(now)
    if old is None or old != new:
        return None
    left, rest = divmod((before["steps"] - begun) * now["steps"], before["steps"])
    return None if rest else (updates + 1) * now["steps"] - left


def _samples_per_update(info: GlobalBatchInfo) -> int | None:
    """Return the samples per update of the first loader that knows its batch size."""
    sizes = [size for size in info["samples"] if size]
    return sizes[0] * info["steps"] if sizes else None


def _steps_needed(before: GlobalBatchInfo, now: GlobalBatchInfo) -> float | None:
    wanted, sizes = _samples_per_update(before), [size for size in now["samples"] if size]
    return None if wanted is None or not sizes else wanted / sizes[0]


def _changes(before: GlobalBatchInfo, now: GlobalBatchInfo) -> list[str]:
    changes: list[str] = []
    if before["ranks"] != now["ranks"]:
        changes.append(f"ranks: {before['ranks']} -> {now['ranks']}")
    if before["steps"] != now["steps"]:
        changes.append(f"gradient_accumulation_steps: {before['steps']} -> {now['steps']}")
    old, new = _samples_per_update(before), _samples_per_update(now)
    if old != new and old is not None and new is not None:
        changes.append(f"global batch (samples per update): {old} -> {new}")
    return changes


def _whole_number(needed: float | None) -> int | None:
    return int(needed) if needed is not None and needed >= 1 and needed == int(needed) else None


def _suggestion(needed: float | None) -> str:
    steps = _whole_number(needed)
    if steps is None:
        return "the previous global batch size can't be reproduced with this number of processes"
    return f"load_state(keep_global_batch=True) would keep it, with gradient_accumulation_steps={steps}"


def _cannot_keep_message(before: GlobalBatchInfo, now: GlobalBatchInfo, folder: str) -> str:
    saved, current = _samples_per_update(before), _samples_per_update(now)
    return (
        f"keep_global_batch=True: {folder} was saved with {saved} samples per update by {before['ranks']} ranks. "
        f"{now['ranks']} ranks take {current} samples in {now['steps']} micro-batches, and no whole number of "
        "micro-batches makes as many. Choose a batch size per rank that divides them, or leave keep_global_batch out."
    )
