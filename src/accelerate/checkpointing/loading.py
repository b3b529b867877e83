"""Loading: find a checkpoint, verify it, and load it into the live objects of a run."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ..distributed.random import restore_rng_states, set_seed
from ..distributed.world import current_world
from ..errors import CheckpointError, CheckpointNotFound
from ..settings.training import ProjectOptions
from . import sharded
from .added_items import ABSENT_RANKS
from .agreement import Ranks
from .codec import read_pickle
from .layout import (
    CUSTOM,
    GRADIENTS,
    LOADER,
    OPEN_WINDOW,
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    STREAMS_ALIKE,
    StateFiles,
    from_classic_streams,
    holds_engine_state,
    read_engine_weights,
)
from .manifest import UNFINISHED_NAME, ByteProgress, Manifest
from .remote import open_store
from .series import is_classic, list_committed, numbered, series_storage
from .storage import Storage, storage_of
from .store import Store
from .tensor_files import raw_bytes
from .weights import Selection, holds_weights, load_weights

if TYPE_CHECKING:
    from ..distributed.world import World

_log = logging.getLogger(__name__)
_MAP_LOCATIONS: Final = (None, "cpu", "on_device")


@dataclass
@final
class LoadedCheckpoint:
    """The result of loading: which checkpoint, its manifest, and what could not be restored exactly.

    Attributes:
        folder: its address.
        step: the step that was saved with it; None when none was.
        manifest: what was saved; None for a folder of another program.
        skipped: newer checkpoints that can't be loaded, each with the reason.
        notes: state that could not be restored exactly, and changes since the save.
        had_open_window: it was saved between two updates, with the gradients of the micro-batches so far.
        window: those gradients, of this rank; or, where another number of ranks saved, of all on the main process.
    """

    folder: str
    step: int | None = None
    manifest: Manifest | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    had_open_window: bool = False
    window: Mapping[str, Any] | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch that was saved with it."""
        return None if self.manifest is None else self.manifest.details.get("epoch")

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were saved with it."""
        return {} if self.manifest is None else self.manifest.details.get("metrics", {})

    @property
    def selection(self) -> Selection:
        """The selection with which it was saved."""
        return Selection.from_details({} if self.manifest is None else self.manifest.details)


def read_checkpoint(
    input_dir: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    **objects: Any,
) -> LoadedCheckpoint:
    """Load a checkpoint into the given objects; a collective.

    Without ``input_dir`` it is the newest valid checkpoint of the project's series; newer ones that can't be loaded
    are named, with the reason, in the result and in one warning.

    Args:
        objects: the fields of :class:`LoadTargets`: ``models=``, ``optimizers=``, ...; and ``strict``, ``assign`` for
            ``model.load_state_dict``.

    Raises:
        CheckpointNotFound: nothing is there to load.
        CheckpointError: on every rank, when any rank failed.
    """
    targets = LoadTargets.of(objects)
    store, found = _find(input_dir, Ranks(world), project or ProjectOptions())
    return _load(store, found, targets)


def resume_checkpoint(
    root: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    **objects: Any,
) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint in ``root`` as :func:`read_checkpoint` does; return None where the run is new.

    ``root`` may be a folder of checkpoints, numbered or not, or one checkpoint; without it, it is the project's
    series. Saves that never finished don't count: a run that was killed during its first save starts anew.

    Raises:
        CheckpointError: there are checkpoints, and not one is whole: a fresh start would hide that.
    """
    targets = LoadTargets.of(objects)
    project = project or ProjectOptions()
    if root is None and project.project_dir is None:
        raise CheckpointNotFound(
            "resume() needs a folder, or a project_dir whose checkpoints it then continues from: give "
            "Accelerator(project_dir=...) or ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    ranks = Ranks(world)
    storage = storage_of(root or project.project_dir or ".")
    located = _newest(_candidates(storage, ranks), ranks, where=str(storage))
    if located is None:
        return None
    return _load(*located, targets)


@dataclass
@final
class LoadTargets:
    """The live objects that a checkpoint is loaded into, and the options of loading.

    Attributes:
        pre_hooks: called as ``hook(models, folder)`` on every rank; a hook may take models out of the list.
        open_window: adds up the gradients of several ranks, if the run was saved between two updates.
        may_pickle: those of the registered objects whose saved state may be a pickle that runs code.
        map_location: None, ``"cpu"`` or ``"on_device"``; for old pickles anything ``torch.load`` takes.
        load_kwargs: for ``torch.load`` of old files; ``{"weights_only": False}`` lets their pickles run code.
        read_strategy_state: reads the files that a strategy writes itself.
        model_only: only the models are loaded, whatever else the checkpoint holds.
        strategy: how the run is distributed, as manifests record it.
        access: loads state that is sharded over the ranks into models and optimizers.
    """

    models: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    scaler: Any = None
    custom_objects: Sequence[Any] = ()
    may_pickle: Sequence[Any] = ()
    open_window: Any = None
    pre_hooks: Iterable[Callable[..., None]] = ()
    map_location: Any = None
    load_kwargs: Mapping[str, Any] | None = None
    read_strategy_state: Callable[[Path, Manifest | None], None] | None = None
    model_only: bool = False
    strategy: str = "NO"
    access: sharded.StateAccess = field(default_factory=sharded.InPlace)
    load_model_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: dict[str, Any]) -> LoadTargets:
        """Sort named arguments: those that are none of the fields are for ``model.load_state_dict``."""
        own = {name: value for name, value in objects.items() if name in cls.__dataclass_fields__}
        targets = cls(**own, load_model_options={k: v for k, v in objects.items() if k not in own})
        location = targets.map_location
        if isinstance(location, str) and location not in _MAP_LOCATIONS:
            raise TypeError(f"map_location={location!r}: expected None, 'cpu' or 'on_device'")
        return targets

    @property
    def pickle_options(self) -> dict[str, Any]:
        """The arguments for ``torch.load`` of old files."""
        location = "cpu" if self.map_location in _MAP_LOCATIONS else self.map_location
        return {**(self.load_kwargs or {}), "map_location": location}


# ------------------------------------------------------------------------------------------------- finding


def _find(
    input_dir: str | PathLike[str] | None, ranks: Ranks, project: ProjectOptions
) -> tuple[Store, LoadedCheckpoint]:
    if input_dir is not None:
        store = open_store(input_dir, ranks)
        store.require()
        reason = store.problem()
        if reason is not None and not _is_foreign(store):
            store.close()
            raise CheckpointError(f"{store.address} can't be loaded: {reason}")
        return store, _found(store)
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise CheckpointNotFound(
            "load_state() needs an input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True) with a "
            "project_dir, whose newest valid checkpoint it then takes."
        )
    root = series_storage(project.project_dir)
    newest = _newest(_broadcast_addresses(numbered(root), ranks), ranks, where=str(root))
    if newest is None:
        raise CheckpointNotFound(f"no checkpoint in {root}")
    return newest


def _broadcast_addresses(found: Iterable[tuple[Any, Storage]], ranks: Ranks) -> list[str]:
    """Return the addresses that the main process sees, newest first, on every rank."""
    return ranks.all_gather([str(storage) for _, storage in found][::-1] if ranks.is_main else [])[0]


def find_newest(root: str | PathLike[str], world: World | None = None) -> LoadedCheckpoint | None:
    """Return the newest checkpoint in ``root`` that is whole on every rank; None when ``root`` has none at all.

    Raises:
        CheckpointError: there are some, and not one is whole; the text says why, one by one.
    """
    ranks = Ranks(world)
    located = _newest(_candidates(root, ranks), ranks, where=str(root))
    if located is None:
        return None
    located[0].close()
    return located[1]


def _candidates(root: str | PathLike[str] | Storage, ranks: Ranks) -> list[str]:
    """Return the addresses of all committed checkpoints in ``root``, newest first."""
    error: Exception | None = None
    found: list[tuple[Any, Storage]] = []
    try:
        if ranks.is_main:
            found = list_committed(root)
    except Exception as problem:  # a network's errors have many names; raised again on every rank
        error = problem
    ranks.agree(error, f"look for checkpoints in {root}")
    return _broadcast_addresses(found, ranks)


def _newest(addresses: Iterable[str], ranks: Ranks, *, where: str) -> tuple[Store, LoadedCheckpoint] | None:
    skipped: dict[str, str] = {}
    for address in addresses:
        store = open_store(address, ranks)
        try:
            store.require()
            reason = store.problem()
        except CheckpointNotFound as error:
            reason = str(error)
        if reason is None or (is_classic(storage_of(store.readable)) and _is_foreign(store)):
            found = _found(store)
            found.skipped = skipped
            return store, found
        store.close()
        skipped[address.rpartition("/")[2]] = reason
    if not skipped:
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise CheckpointError(f"no valid checkpoint in {where}: {reasons}")


def _is_foreign(store: Store) -> bool:
    """Return whether another program saved the folder: no manifest, and none of the files that only we write."""
    folder = store.readable
    try:
        managed = store.manifest() is not None
    except CheckpointError:
        managed = True
    own = any(folder.glob(f"{RANDOM.stem}_*.json")) or (folder / UNFINISHED_NAME).exists()
    return all(store.ranks.all_gather(not managed and not own and folder.is_dir() and any(folder.iterdir())))


def _found(store: Store) -> LoadedCheckpoint:
    manifest = store.manifest()
    found = LoadedCheckpoint(store.address, None if manifest is None else manifest.step, manifest)
    if manifest is None:
        found.notes.append("it has no manifest (another program wrote it), so nothing could be verified")
    elif manifest.world_size != store.ranks.size:
        found.notes.append(f"saved by {manifest.world_size} processes, loaded by {store.ranks.size}")
    return found


# ------------------------------------------------------------------------------------------------- reading


def _load(store: Store, found: LoadedCheckpoint, targets: LoadTargets) -> LoadedCheckpoint:
    """Load the checkpoint into all targets; on an error on any rank, raise on all."""
    error: Exception | None = None
    try:
        _read(found, store, targets)
    except Exception as problem:  # raised again below, once the other ranks know of it
        error = problem
    try:
        store.ranks.agree(error, f"load {found.folder}")
    finally:
        store.close()
    _log_notes(found, store.ranks)
    return found


def _read(found: LoadedCheckpoint, store: Store, targets: LoadTargets) -> None:
    folder, selection = store.readable, found.selection
    if selection.model_only and not targets.model_only and _has_more_targets(targets):
        raise CheckpointError(
            "it holds models only (it was saved with Selection(model_only=True)); load it with model_only=True"
        )
    remaining = list(targets.models)
    for hook in targets.pre_hooks:
        hook(remaining, str(folder))
    if targets.read_strategy_state is not None:
        targets.read_strategy_state(folder, found.manifest)
    sizes = {} if found.manifest is None else {name: file.size for name, file in found.manifest.files.items()}
    with ByteProgress(f"Loading {folder.name}", sum(sizes.values()), shown=store.ranks.is_main) as progress:
        for index, model in enumerate(remaining):
            files = _read_model(model, folder, index, targets, selection)
            progress.advance(sum(sizes.get(name, 0) for name in files))
        if not targets.model_only:
            _read_shared(found, folder, targets)
            _read_own(found, folder, store.ranks, targets)
            _read_gradients(found, folder, store.ranks, targets)


def _read_model(model: Any, folder: Path, index: int, targets: LoadTargets, selection: Selection) -> list[str]:
    """Load the weights of ``model``, in whatever form they lie in ``folder``, and return the files that were read."""
    access, options = targets.access, targets.load_model_options
    if access.restore(model, folder, index, model_only=targets.model_only, **options):
        return []
    shards = sharded.weights_folder(folder, index)
    if sharded.is_sharded(shards):
        sharded.read_model_shards(access, model, shards, **options)
        return [f"{shards.name}/{path.name}" for path in shards.iterdir()]
    classic = sharded.classic_weights(folder, index)
    if classic.is_file():
        state = read_pickle(classic, **targets.pickle_options)
        access.load_target(model).load_state_dict(state, **options)
        return [classic.name]
    if holds_engine_state(folder, index) and not holds_weights(folder, index):
        trusted = access.trusts_engine or targets.pickle_options.get("weights_only") is False
        access.load_target(model).load_state_dict(read_engine_weights(folder, index, trusted=trusted), **options)
        return []
    loaded = load_weights(
        access.load_target(model),
        folder,
        index,
        load_kwargs={k: v for k, v in targets.pickle_options.items() if k != "map_location"},
        may_lack=selection.leaves_out,
        **options,
    )
    return list(loaded.files)


def _has_more_targets(targets: LoadTargets) -> bool:
    return bool(targets.optimizers or targets.schedulers or targets.custom_objects or targets.scaler)


def _read_shared(found: LoadedCheckpoint, folder: Path, targets: LoadTargets) -> None:
    options = targets.pickle_options
    for number, optimizer in enumerate(targets.optimizers):
        shards = sharded.optimizer_folder(folder, number)
        if sharded.is_sharded(shards):
            sharded.read_optimizer_shards(targets.access, optimizer, targets.models, shards)
            continue
        if holds_engine_state(folder) and not OPTIMIZER.holds(folder, number):
            found.notes.append("DeepSpeed saved it, so that only DeepSpeed can go on with its optimizer: ours is anew")
            continue
        state = OPTIMIZER.read(folder, number, **options)
        targets.access.load_full_optimizer_state(optimizer, targets.models, state)
    for number, scheduler in enumerate(targets.schedulers):
        scheduler.load_state_dict(SCHEDULER.read(folder, number, **options))
    if targets.scaler is not None:
        targets.scaler.load_state_dict(SCALER.read(folder, **options))
    num_saved, objects = _count(CUSTOM, folder), targets.custom_objects
    if num_saved != len(objects):
        raise CheckpointError(
            f"{folder} holds {num_saved} registered objects, but {len(objects)} are registered now. Call "
            "register_for_checkpointing with the same objects, in the same order, as the run that saved it."
        )
    for number, obj in enumerate(objects):
        trusted = {"weights_only": False} if any(obj is one for one in targets.may_pickle) else {}
        obj.load_state_dict(CUSTOM.read(folder, number, **{**options, **trusted}))


def _count(state_files: StateFiles, folder: Path) -> int:
    number = 0
    while state_files.holds(folder, number):
        number += 1
    return number


def _read_own(found: LoadedCheckpoint, folder: Path, ranks: Ranks, targets: LoadTargets) -> None:
    options = targets.pickle_options
    own: dict[str, Any] = {}
    absent = [] if found.manifest is None else found.manifest.details.get(ABSENT_RANKS, [])
    if ranks.rank not in absent and RANDOM.holds(folder, ranks.rank):  # else left by a late rank that was killed
        own = _streams_of(folder, ranks.rank, options)
    for number, loader in enumerate(targets.dataloaders):
        if not LOADER.holds(folder, number):
            continue
        state = LOADER.read(folder, number, **options)
        loader_states = own.get("loaders") or []
        if number < len(loader_states) and loader_states[number] is not None and isinstance(state, dict):
            state["own"] = loader_states[number]
        loader.load_state_dict(state)
    if own:
        step = own["streams"].get("step")
        found.step = found.step if step is None else int(step)
        found.notes += [f"random stream not restored: {missed}" for missed in restore_rng_states(own["streams"])]
    elif RANDOM.holds(folder, 0):
        first = _streams_of(folder, 0, options)["streams"]
        found.step = int(first.get("step", found.step or 0))
        if found.manifest is not None and found.manifest.details.get(STREAMS_ALIKE):
            restore_rng_states(first)  # as the saved run's ranks, this one draws what rank 0 draws
        else:
            set_seed(zlib.crc32(raw_bytes(first["torch"])) ^ ranks.rank)
        found.notes.append(_why_derived(found, folder, ranks.rank))  # the same text on all such ranks: logged once


def _read_gradients(found: LoadedCheckpoint, folder: Path, ranks: Ranks, targets: LoadTargets) -> None:
    """Read the gradients of a window that was open, to be given to the models once its position in the run is known."""
    manifest = found.manifest
    if targets.open_window is None or manifest is None or not manifest.details.get(OPEN_WINDOW):
        return
    found.had_open_window = True
    is_same = manifest.world_size == ranks.world_size
    numbers = [ranks.rank] if is_same else list(range(manifest.world_size)) if ranks.is_main else []
    absent = manifest.details.get(ABSENT_RANKS, [])
    if not absent and numbers and all(GRADIENTS.holds(folder, number) for number in numbers):
        states = (GRADIENTS.read(folder, number) for number in numbers)
        found.window = next(states) if is_same else targets.open_window.joined(states)


def _why_derived(found: LoadedCheckpoint, folder: Path, rank: int) -> str:
    absent = [] if found.manifest is None else found.manifest.details.get(ABSENT_RANKS, [])
    if rank in absent:
        ranks = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        return (
            f"the main process saved it alone, without the random streams of rank {ranks} and their own parts of "
            "loaders: they are derived from the main process's"
        )
    return f"random streams of rank {_count(RANDOM, folder)} and up are derived: the saved run didn't have them"


def _streams_of(folder: Path, rank: int, options: Mapping[str, Any]) -> dict[str, Any]:
    value = RANDOM.read(folder, rank, **options)
    return value if "streams" in value else {"streams": from_classic_streams(value)}


def _log_notes(found: LoadedCheckpoint, ranks: Ranks) -> None:
    notes_of_all = [note for notes in ranks.all_gather(found.notes) for note in notes]
    if not ranks.is_main:
        return
    for name, reason in found.skipped.items():
        _log.warning("Checkpoint %s was skipped: %s", name, reason)
    for note in dict.fromkeys(notes_of_all):
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
    """Load ``input_dir`` into the objects; return ``{"step": n}``, the step that the Accelerator resumes at."""
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
