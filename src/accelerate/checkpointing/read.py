"""A run goes on from a checkpoint: found, checked, and given back to the objects it was taken from."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ..errors import CheckpointError, CheckpointNotFound
from ..seeding import restore_rng_states, set_seed
from ..settings.project import ProjectOptions
from ..world import current_world
from .agreement import Ranks
from .layout import CUSTOM, LOADER, OPTIMIZER, RANDOM, SCALER, SCHEDULER, Slot, from_classic_streams
from .manifest import Manifest, read_manifest
from .series import is_classic, numbered, series_folder
from .store import CheckpointStore
from .tensor_files import raw_bytes
from .weights import load_weights

if TYPE_CHECKING:
    from ..world import World

_log = logging.getLogger(__name__)
_MAP_LOCATIONS: Final = (None, "cpu", "on_device")


@dataclass
@final
class LoadedCheckpoint:
    """What was loaded, and what the person who resumes should know.

    Attributes:
        folder: where it lies.
        step: the step that was saved with it; None when none was.
        manifest: what was saved; None for a folder of another program.
        skipped: newer checkpoints that were passed over, each with the reason.
        notes: what could not be restored exactly, and what changed since the save.
    """

    folder: Path
    step: int | None = None
    manifest: Manifest | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_checkpoint(
    input_dir: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    models: Sequence[Any] = (),
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Any] = (),
    dataloaders: Sequence[Any] = (),
    scaler: Any = None,
    custom_objects: Sequence[Any] = (),
    pre_hooks: Iterable[Callable[..., None]] = (),
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    read_parts: Callable[[Path, Manifest | None], None] | None = None,
    **load_model_options: Any,
) -> LoadedCheckpoint:
    """Every given object has the state that the checkpoint holds; a collective.

    Without ``input_dir`` it is the newest valid checkpoint of the project's series; those that were passed over
    are named, with the reason, in the result and in one warning.

    Args:
        pre_hooks: called as ``hook(models, folder)`` on every rank; a hook may take models out of the list.
        map_location: None, ``"cpu"`` or ``"on_device"``; for old pickles anything ``torch.load`` takes.
        load_kwargs: for ``torch.load`` of old files; ``{"weights_only": False}`` lets their pickles run code.
        read_parts: reads what a strategy saved in its own way.
        load_model_options: for ``model.load_state_dict``: ``strict``, ``assign``.

    Raises:
        CheckpointNotFound: nothing is there to load.
        CheckpointError: on every rank, when any rank failed.
    """
    if isinstance(map_location, str) and map_location not in _MAP_LOCATIONS:
        raise TypeError(f"map_location={map_location!r}: expected None, 'cpu' or 'on_device'")
    found = _find(input_dir, world, project or ProjectOptions())
    ranks = Ranks(world)
    options = dict(load_kwargs or {})
    options["map_location"] = "cpu" if map_location in _MAP_LOCATIONS else map_location
    error: Exception | None = None
    try:
        remaining = list(models)
        for hook in pre_hooks:
            hook(remaining, str(found.folder))
        if read_parts is not None:
            read_parts(found.folder, found.manifest)
        for index, model in enumerate(remaining):
            pickle_options = {key: value for key, value in options.items() if key != "map_location"}
            load_weights(model, found.folder, index, load_kwargs=pickle_options, **load_model_options)
        _read_shared(found.folder, optimizers, schedulers, scaler, custom_objects, options)
        _read_own(found, ranks, dataloaders, options)
    except Exception as problem:  # raised again below, once the other ranks know of it
        error = problem
    ranks.agree(error, f"load {found.folder}")
    _tell(found, ranks)
    return found


# ------------------------------------------------------------------------------------------------- finding


def _find(input_dir: str | PathLike[str] | None, world: World | None, project: ProjectOptions) -> LoadedCheckpoint:
    if input_dir is not None:
        store = CheckpointStore(input_dir, world)
        store.require()
        reason = store.problem()
        if reason is not None and not _is_foreign(store):
            raise CheckpointError(f"{store.folder} can't be loaded: {reason}")
        return _found(store)
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise CheckpointNotFound(
            "load_state() needs an input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True) with a "
            "project_dir, whose newest valid checkpoint it then takes."
        )
    newest = find_newest(series_folder(project.project_dir), world)
    if newest is None:
        raise CheckpointNotFound(f"no checkpoint in {series_folder(project.project_dir)}")
    return newest


def find_newest(root: str | PathLike[str], world: World | None = None) -> LoadedCheckpoint | None:
    """The newest numbered checkpoint in ``root`` that is whole on every rank; None when ``root`` has none at all.

    Raises:
        CheckpointError: there are some, and not one is whole; the text says why, one by one.
    """
    folder = Path(root)
    folders = Ranks(world).everyone([path.name for _, path in reversed(numbered(folder))])[0]
    skipped: dict[str, str] = {}
    for name in folders:
        store = CheckpointStore(folder / name, world)
        try:
            store.require()
            reason = store.problem()
        except CheckpointNotFound as error:
            reason = str(error)
        if reason is None or (is_classic(folder / name) and _is_foreign(store)):
            found = _found(store)
            found.skipped = skipped
            return found
        skipped[name] = reason
    if not skipped:
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise CheckpointError(f"no valid checkpoint in {folder}: {reasons}")


def _is_foreign(store: CheckpointStore) -> bool:
    """A folder that another program saved: it has no manifest, and none of the files that only we write."""
    try:
        managed = store.manifest() is not None
    except CheckpointError:
        managed = True
    own = any(store.folder.glob(f"{RANDOM.stem}_*.json"))
    return all(store.ranks.everyone(not managed and not own and any(store.folder.iterdir())))


def _found(store: CheckpointStore) -> LoadedCheckpoint:
    manifest = read_manifest(store.folder)
    found = LoadedCheckpoint(store.folder, None if manifest is None else manifest.step, manifest)
    if manifest is None:
        found.notes.append("it has no manifest (another program wrote it), so nothing could be verified")
    elif manifest.world_size != store.ranks.size:
        found.notes.append(f"saved by {manifest.world_size} processes, loaded by {store.ranks.size}")
    return found


# ------------------------------------------------------------------------------------------------- reading


def _read_shared(
    folder: Path,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    scaler: Any,
    custom_objects: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(OPTIMIZER.read(folder, number, **options))
    for number, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(SCHEDULER.read(folder, number, **options))
    if scaler is not None:
        scaler.load_state_dict(SCALER.read(folder, **options))
    num_saved = _count(CUSTOM, folder)
    if num_saved != len(custom_objects):
        raise CheckpointError(
            f"{folder} holds {num_saved} registered objects, but {len(custom_objects)} are registered now. Call "
            "register_for_checkpointing with the same objects, in the same order, as the run that saved it."
        )
    for number, obj in enumerate(custom_objects):
        obj.load_state_dict(CUSTOM.read(folder, number, **options))


def _count(slot: Slot, folder: Path) -> int:
    number = 0
    while slot.holds(folder, number):
        number += 1
    return number


def _read_own(found: LoadedCheckpoint, ranks: Ranks, dataloaders: Sequence[Any], options: Mapping[str, Any]) -> None:
    folder = found.folder
    own: dict[str, Any] = {}
    if RANDOM.holds(folder, ranks.rank):
        own = _streams_of(folder, ranks.rank, options)
    for number, loader in enumerate(dataloaders):
        if not LOADER.holds(folder, number):
            continue
        state = LOADER.read(folder, number, **options)
        parts = own.get("loaders") or []
        if number < len(parts) and parts[number] is not None and isinstance(state, dict):
            state["own"] = parts[number]
        loader.load_state_dict(state)
    if own:
        step = own["streams"].get("step")
        found.step = found.step if step is None else int(step)
        found.notes += [f"random stream not restored: {missed}" for missed in restore_rng_states(own["streams"])]
    elif RANDOM.holds(folder, 0):
        first = _streams_of(folder, 0, options)["streams"]
        found.step = int(first.get("step", found.step or 0))
        set_seed(zlib.crc32(raw_bytes(first["torch"])) ^ ranks.rank)
        found.notes.append(f"rank {ranks.rank} was not in the saved run: its random streams are derived from it")


def _streams_of(folder: Path, rank: int, options: Mapping[str, Any]) -> dict[str, Any]:
    value = RANDOM.read(folder, rank, **options)
    return value if "streams" in value else {"streams": from_classic_streams(value)}


def _tell(found: LoadedCheckpoint, ranks: Ranks) -> None:
    told = [note for notes in ranks.everyone(found.notes) for note in notes]
    if not ranks.is_main:
        return
    for name, reason in found.skipped.items():
        _log.warning("Checkpoint %s was skipped: %s", name, reason)
    for note in dict.fromkeys(told):
        _log.warning("Checkpoint %s: %s", found.folder, note)


def load_accelerator_state(
    input_dir: str | PathLike[str],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """The objects have the states in ``input_dir``; hands back ``{"step": n}``, what the Accelerator resumes at."""
    world = current_world()
    if world is not None and process_index != world.rank:
        raise CheckpointError(
            f"process_index={process_index} was given, but this process is rank {world.rank} of {world.size}"
        )
    found = read_checkpoint(
        input_dir,
        world=world,
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        map_location=map_location,
        load_kwargs=load_kwargs,
        **load_model_func_kwargs,
    )
    return {} if found.step is None else {"step": found.step}
