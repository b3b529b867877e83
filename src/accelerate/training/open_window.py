"""Save and load an open accumulation window: each rank's gradients before reduction, as an item of a checkpoint.

A run that resumes on another number of ranks continues inside the window, and may keep its global batch size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict, cast, final

import torch

from ..distributed.collectives import gather_object
from ..errors import CheckpointError, ResumeWarning
from ..logging import MultiProcessAdapter, get_logger
from ..settings.labels import DistributedType
from .accumulation import numbers_in
from .window_weights import wide

if TYPE_CHECKING:
    from ..checkpointing import LoadedCheckpoint
    from ..distributed.world import World
    from .accumulation import GradientState
    from .window_weights import WindowWeights

logger: MultiProcessAdapter = get_logger(__name__)

#: The layout of strategies in which every rank has the gradients of all parameters.
REPLICAS: Final = "replicas"


class WindowRecord(TypedDict):
    """One open window: its models (a ``WindowKey``), its micro-batches so far, and their weight."""

    models: list[Any]
    count: int
    weight: torch.Tensor | float | None


class WindowState(TypedDict):
    """The open windows of one rank, as saved in a checkpoint; ``gradients`` has those of each model by name."""

    layout: str
    gradients: list[dict[str, Any]]
    windows: list[WindowRecord]


class GradientHolder(Protocol):
    """The interface of a strategy to save and load the gradients between two optimizer updates."""

    @property
    def layout(self) -> str:
        """The placement of gradients over the ranks, for any model."""
        ...

    @property
    def named_parameters(self) -> Callable[[torch.nn.Module], Iterable[tuple[str, torch.nn.Parameter]]]:
        """The function that returns the trainable parameters under every name in the user's own model."""
        ...

    def read(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return this rank's gradients of ``model`` between two optimizer updates."""
        ...

    def load(self, model: torch.nn.Module, gradients: Mapping[str, Any] | None) -> None:
        """Set the gradients of ``model`` to those from :meth:`read` on this rank; None clears them."""
        ...


@final
class OpenWindow:
    """The gradients of one rank between two optimizer updates, as an item of a checkpoint.

    Args:
        gradients: reads and loads the models' gradients; None if an engine (named by ``kind``) keeps them.
        models: the Accelerator's models.
    """

    def __init__(
        self,
        gradient_state: GradientState,
        gradients: GradientHolder | None,
        weights: WindowWeights,
        models: Sequence[torch.nn.Module],
        kind: DistributedType,
    ) -> None:
        self._gradient_state, self._gradients, self._weights = gradient_state, gradients, weights
        self._models, self._kind = models, kind

    # -- saving --------------------------------------------------------------------------------------------

    def state_dict(self) -> WindowState | None:
        """Return gradients by model and name, and micro-batches and weight by window; None if no window is open."""
        if self._gradient_state.open_window is None or self._gradients is None:
            return None
        gradients = [self._gradients.read(model) for model in self._models]
        windows: list[WindowRecord] = [
            {
                "models": [one if isinstance(one, int) else list(one) for one in key],
                "count": count,
                "weight": self._weights.pending.get(key),
            }
            for key, count in self._gradient_state.windows.items()
            if isinstance(key, tuple)
        ]
        return {"layout": self._gradients.layout, "gradients": gradients, "windows": windows}

    def warn_if_lost(self) -> None:
        """Warn if a save inside the window loses its gradients, because an engine holds them."""
        window = self._gradient_state.open_window
        if window is None or self.state_dict() is not None:
            return
        warnings.warn(
            f"save_state() inside a window of gradient accumulation: the gradients of {window[0]} of its {window[1]} "
            f"micro-batches lie inside the engine ({DistributedType(self._kind).value}), and are not in the "
            "checkpoint. A resumed run makes that update from its other micro-batches only. "
            "Save where accelerator.sync_gradients is True.",
            ResumeWarning,
            stacklevel=4,
        )

    # -- loading -------------------------------------------------------------------------------------------

    @staticmethod
    def joined(states: Iterable[Mapping[str, Any]]) -> WindowState | None:
        """Return one state for those of several ranks, with gradients and weights summed in rank order.

        Return None if the gradients can't be summed, because they are sharded or sparse.
        """
        total: WindowState | None = None
        for state in states:
            values = [value for gradients in state["gradients"] for value in gradients.values()]
            if state["layout"] != REPLICAS or not all(isinstance(value, torch.Tensor) for value in values):
                return None
            if total is None:
                total = cast("WindowState", dict(state))
                continue
            for mine, other in zip(total["gradients"], state["gradients"], strict=True):
                mine.update({name: mine[name] + value if name in mine else value for name, value in other.items()})
            for mine, other in zip(total["windows"], state["windows"], strict=True):
                if other["weight"] is not None:  # then every rank's window has one
                    mine["weight"] = wide(mine["weight"]) + wide(other["weight"])  # pyright: ignore[reportArgumentType]
        return total

    def load_state_dict(
        self, state: Mapping[str, Any] | None, count_of: Callable[[int], int | None], num_ranks: int, world: World
    ) -> str | None:
        """Continue inside the saved windows, or return the reason why not, the same on every rank; a collective.

        Args:
            state: this rank's state; if another number of ranks saved, that of all of them, on rank 0 only.
            count_of: converts a saved window's count to this run's micro-batches; None if that isn't a whole number.
            num_ranks: the number of ranks that saved.
        """
        own = cast("WindowState | None", state)
        if num_ranks != world.size:
            own = self._shared_out(own, num_ranks, world)
        reason = self._take(own, count_of)
        reason = next((one for one in gather_object([reason], world=world) if one is not None), None)
        if reason is not None:
            self.clear()
        return reason

    def clear(self) -> None:
        """Clear the gradients, except those that an engine has, and the weights of micro-batches."""
        self._weights.pending.clear()
        if self._gradients is not None:
            for model in self._models:
                self._gradients.load(model, None)

    def _take(self, state: WindowState | None, count_of: Callable[[int], int | None]) -> str | None:
        if state is None:
            return "not every rank's gradients are there, or they can't be added up"
        holder = self._gradients
        if holder is None or state["layout"] != holder.layout or len(state["gradients"]) != len(self._models):
            return "its gradients lie in another way over the ranks"
        found = [
            count_of(count) for count in [self._gradient_state.step, *(window["count"] for window in state["windows"])]
        ]
        step, *counts = [count or 0 for count in found]
        if None in found:
            return "an update is made of other samples now, or what is left of it is no whole number of micro-batches"
        errors: list[str] = []
        for model, gradients in zip(self._models, state["gradients"], strict=True):
            try:  # continue with the next model: other ranks may have no error, and loading may be a collective
                holder.load(model, gradients)
            except CheckpointError as error:
                errors.append(str(error))
        if errors:
            return errors[0]
        named = [self._key(window) for window in state["windows"]]
        self._gradient_state.step = step
        self._gradient_state.continue_windows(dict(zip(named, counts, strict=True)))
        for key, window in zip(named, state["windows"], strict=True):
            if window["weight"] is not None:
                self._weights.pending[key] = window["weight"]
        return None

    def _shared_out(self, state: WindowState | None, num_ranks: int, world: World) -> WindowState | None:
        """Return all gradients on rank 0 and zeros on the others, with the same average as on the saved ranks.

        Gradients that :class:`WindowWeights` will divide by the window's weight are sums, and need no factor.
        """
        outline: Any = None
        holder = self._gradients
        if state is not None and holder is not None and holder.layout == REPLICAS:
            weighted = [number for number in range(len(self._models)) if self._is_weighted(state, number)]
            for number, gradients in enumerate(state["gradients"]):
                if number not in weighted:
                    gradients.update({name: value * (world.size / num_ranks) for name, value in gradients.items()})
            outline = {
                "layout": state["layout"],
                "gradients": [list(gradients) for gradients in state["gradients"]],
                "windows": [
                    {**window, "weight": None if window["weight"] is None else 0} for window in state["windows"]
                ],
            }
        outline = gather_object([outline], world=world)[0]
        if outline is None or state is not None or holder is None:
            return state if outline is not None else None
        named = [dict(holder.named_parameters(model)) for model in self._models]
        outline["gradients"] = [
            {name: torch.zeros_like(parameters[name]) for name in names if name in parameters}
            for parameters, names in zip(named, outline["gradients"], strict=False)
        ]
        return outline

    def _is_weighted(self, state: WindowState, number: int) -> bool:
        windows = [self._key(window) for window in state["windows"] if window["weight"] is not None]
        return any(not key or number in numbers_in(key) for key in windows)

    def _key(self, window: WindowRecord) -> tuple[Any, ...]:
        """Return the key of a saved window; older checkpoints number the results of each ``prepare`` separately."""
        count = len(self._models)
        return tuple(one % count if isinstance(one, int) else tuple(one) for one in window["models"])


# -- the global batch --------------------------------------------------------------------------------------


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
