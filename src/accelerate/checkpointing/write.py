"""Everything a run needs to go on, in one committed folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, SettingError
from ..seeding import capture_rng_states
from ..settings.project import ProjectOptions
from ..world import current_world
from .layout import CUSTOM, LOADER, OPTIMIZER, RANDOM, SCALER, SCHEDULER, to_classic_streams
from .manifest import Manifest
from .series import next_number, numbered_folder, prune, series_folder
from .store import CheckpointStore, Draft
from .weights import stale_weights, write_weights

if TYPE_CHECKING:
    from ..world import World

_log = logging.getLogger(__name__)


def write_checkpoint(
    output_dir: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    models: Sequence[Any] = (),
    weights: Iterable[Mapping[str, Any]] = (),
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Any] = (),
    dataloaders: Sequence[Any] = (),
    scaler: Any = None,
    custom_objects: Sequence[Any] = (),
    step: int = 0,
    strategy: str = "NO",
    safe_serialization: bool = True,
    pre_hooks: Iterable[Callable[..., None]] = (),
    write_parts: Callable[[Draft], None] | None = None,
    details: Mapping[str, Any] | None = None,
) -> str:
    """A committed checkpoint of all that is given, on every rank's return; its folder is handed back.

    A collective. With automatic naming the folder is the next number of the project's series and ``output_dir``
    is not used; ``project.iteration`` then moves on, and older checkpoints beyond ``total_limit`` are removed.

    Args:
        world: the processes that save together; None is this process alone.
        models: handed to the hooks.
        weights: one state dict per model, as the main process writes it. Hooks may take entries out.
        step: given back by :func:`read_checkpoint`.
        strategy: the label that the manifest records.
        pre_hooks: called as ``hook(models, weights, folder)`` with the *staging* folder, on every rank.
        write_parts: writes what a strategy saves in its own way, through the draft or into ``draft.folder``.
        details: JSON values that the manifest records: epoch, metrics.

    Raises:
        CheckpointError: on every rank, when any rank failed; whatever was there before still is.
        EncodingError: a state can't be written without pickle; the text names the object and the path.
    """
    project = project or ProjectOptions()
    classic = project.checkpoint_format == "classic"
    store, number = _target(output_dir, world, project)
    remaining = [dict(state) for state in weights]
    manifest = Manifest(
        {},
        step=step,
        strategy=strategy,
        checkpoint_format=project.checkpoint_format,
        details={**(details or {}), **({} if number is None else {"iteration": number})},
    )
    with store.draft(manifest) as draft:
        for hook in pre_hooks:
            hook(list(models), remaining, str(draft.folder))
        if write_parts is not None:
            write_parts(draft)
        if draft.is_writer:
            for index, state in enumerate(remaining):
                write_weights(draft.create, state, index=index, safe_serialization=safe_serialization)
            _write_shared(draft, optimizers, schedulers, dataloaders, scaler, custom_objects, classic)
        _write_own(draft, dataloaders, step, classic)
    _clear_stale_weights(store, len(remaining), classic)
    if number is not None:
        _close_number(store, project, number)
    return str(store.folder)


def _target(
    output_dir: str | PathLike[str] | None, world: World | None, project: ProjectOptions
) -> tuple[CheckpointStore, int | None]:
    on_each_node = project.save_on_each_node
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise SettingError(
                "save_state() needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        return CheckpointStore(output_dir, world, on_each_node=on_each_node), None
    if project.project_dir is None:
        raise SettingError(
            "automatic_checkpoint_naming needs a project_dir: give Accelerator(project_dir=...) or "
            "ProjectConfiguration(project_dir=...)."
        )
    root = series_folder(project.project_dir)
    numbers = CheckpointStore(root, world).ranks.everyone(next_number(root, project.iteration))
    return CheckpointStore(numbered_folder(root, numbers[0]), world, on_each_node=on_each_node), numbers[0]


def _write_shared(
    draft: Draft,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: Any,
    custom_objects: Sequence[Any],
    classic: bool,
) -> None:
    for slot, kind, objects in (
        (OPTIMIZER, "optimizer", optimizers),
        (SCHEDULER, "scheduler", schedulers),
        (CUSTOM, "registered object", custom_objects),
    ):
        for number, obj in enumerate(objects):
            what = f"{kind} {number} ({type(obj).__qualname__}).state_dict()"
            slot.write(draft.create, obj.state_dict(), number, what=what, classic=classic)
    for number, loader in enumerate(dataloaders):
        if _keeps_state(loader):
            what = f"data loader {number}.state_dict()"
            LOADER.write(draft.create, loader.state_dict(), number, what=what, classic=classic)
    if scaler is not None:
        SCALER.write(draft.create, scaler.state_dict(), what="scaler.state_dict()", classic=classic)


def _write_own(draft: Draft, dataloaders: Sequence[Any], step: int, classic: bool) -> None:
    """The random streams of this rank, and the part of each loader's state that only this rank has."""
    streams = capture_rng_states(step)
    if classic:
        RANDOM.write(draft.create, to_classic_streams(streams), draft.ranks.rank, what="random streams", classic=True)
        return
    own: list[Any] = []
    for loader in dataloaders:
        state = loader.state_dict() if _keeps_state(loader) else None
        own.append(state.get("own") if isinstance(state, Mapping) else None)
    value = {"streams": streams, "loaders": own}
    RANDOM.write(draft.create, value, draft.ranks.rank, what="random streams")


def _keeps_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _clear_stale_weights(store: CheckpointStore, num_models: int, classic: bool) -> None:
    """Weights that an unmanaged save left in the folder, and that would now be found beside ours, are gone."""
    if not store.ranks.is_local_main:
        return
    manifest = store.manifest()
    written = list(manifest.files) if manifest else []
    for index in range(num_models):
        for name in stale_weights(store.folder, index, written):
            (store.folder / name).unlink(missing_ok=True)


def _close_number(store: CheckpointStore, project: ProjectOptions, number: int) -> None:
    project.iteration = number + 1
    if project.total_limit is None:
        return
    if store.ranks.is_main or (store.ranks.is_local_main and store.on_each_node):
        try:
            prune(store.folder.parent, project.total_limit, store.folder)
        except OSError as error:  # the new checkpoint is safe; a full disk is for the next save to report
            _log.warning("Older checkpoints in %s could not be removed: %s", store.folder.parent, error)


def save_accelerator_state(
    output_dir: str | PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> str:
    """``output_dir`` holds the states as a committed checkpoint; a collective of the current world.

    ``process_index`` is checked against the world, which knows it.
    """
    world = current_world()
    rank = world.rank if world is not None else 0
    if world is not None and process_index != rank:
        raise CheckpointError(
            f"process_index={process_index} was given, but this process is rank {rank} of {world.size}"
        )
    return write_checkpoint(
        os.fspath(Path(output_dir)),
        world=world,
        project=ProjectOptions(save_on_each_node=save_on_each_node),
        weights=model_states,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        step=step,
        safe_serialization=safe_serialization,
    )
