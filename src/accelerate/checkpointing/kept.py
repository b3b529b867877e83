"""Saving with kept replicas: the lowest living rank writes, and all ranks get the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from ..errors import CheckpointError
from .run_state import RunState
from .series import number_of

Arguments = ParamSpec("Arguments")


def by_lowest_member(
    save: Callable[Concatenate[RunState, Arguments], str],
) -> Callable[Concatenate[RunState, Arguments], str]:
    """Return a function that calls ``save``; with kept replicas, on the lowest member, or the next if it is lost.

    All members call it, and get the folder, or the error.
    """

    @wraps(save)
    def saved(run: RunState, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        members = None if run.world is None else run.world.replicas
        if members is None:
            return save(run, *args, **kwargs)
        if run.open_window is not None and run.open_window.state_dict() is not None:
            raise CheckpointError(
                "save_state() inside a window of gradient accumulation under `accelerate launch --keep_replicas`: one "
                "rank writes for all, and the others' gradients would be lost. Save where accelerator.sync_gradients "
                "is True."
            )

        if members.is_behind:
            return members.last_saved  # the others have been here before

        def attempt() -> dict[str, str]:
            try:
                return {"address": save(run, *args, **kwargs)}
            except Exception as error:  # whatever it is, all members raise it
                return {"error": f"{type(error).__name__}: {error}"}

        found, _ = members.made_by_lowest("save_state", attempt)
        if "error" in found:
            raise CheckpointError(f"can't save: {found['error']}")
        members.last_saved = found["address"]
        if run.project.automatic_checkpoint_naming:
            run.project.iteration = number_of(found["address"]) + 1
        return found["address"]

    return saved
