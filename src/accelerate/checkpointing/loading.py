"""Loading: find a checkpoint, verify it, and load it into the live objects of a run."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final

from ..distributed.random import restore_rng_states, set_seed
from ..distributed.world import current_world
from ..errors import CheckpointError, CheckpointNotFound
from ..settings.training import ProjectOptions
from . import sharded
from .agreement import Ranks
from .codec import read_pickle
from .items import ABSENT_RANKS
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
from .manifest import OPTIMIZER_UPDATES, UNFINISHED_NAME, ByteProgress, Manifest
from .remote import open_store
from .run_state import RunState, StateDict, Stateful
from .series import is_classic, list_committed, numbered, series_storage
from .storage import Storage, storage_of
from .store import Store
from .tensor_files import raw_bytes
from .weights import Selection, holds_weights, load_weights

if TYPE_CHECKING:
    import torch
    from torch.serialization import MAP_LOCATION

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
    window: Mapping[str, object] | None = None

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


@dataclass
@final
class LoadOptions:
    """The options of a load.

    Attributes:
        map_location: None, ``"cpu"`` or ``"on_device"``; for old pickles anything ``torch.load`` takes.
        load_kwargs: for ``torch.load`` of old files; ``{"weights_only": False}`` lets their pickles run code.
        model_only: only the models are loaded, whatever else the checkpoint holds.
        of_models: for ``model.load_state_dict``: ``strict``, ``assign``.
    """

    map_location: MAP_LOCATION = None
    load_kwargs: Mapping[str, object] | None = None
    model_only: bool = False
    of_models: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        map_location: MAP_LOCATION = None,
        load_kwargs: Mapping[str, object] | None = None,
        model_only: bool = False,
        **of_models: object,
    ) -> LoadOptions:
        """Sort named arguments: those that are none of the fields are for ``model.load_state_dict``."""
        if isinstance(map_location, str) and map_location not in _MAP_LOCATIONS:
            raise TypeError(f"map_location={map_location!r}: expected None, 'cpu' or 'on_device'")
        return cls(map_location, load_kwargs, model_only, of_models)

    @property
    def of_pickles(self) -> dict[str, Any]:
        """The arguments for ``torch.load`` of old files."""
        location = "cpu" if self.map_location in _MAP_LOCATIONS else self.map_location
        return {**(self.load_kwargs or {}), "map_location": location}


def load_run(
    run: RunState, input_dir: str | PathLike[str] | None = None, options: LoadOptions | None = None
) -> LoadedCheckpoint:
    """Load a checkpoint into the objects of the run; a collective.

    Without ``input_dir`` it is the newest valid checkpoint of the project's series; newer ones that can't be loaded
    are named, with the reason, in the result and in one warning.

    Raises:
        CheckpointNotFound: nothing is there to load.
        CheckpointError: on every rank, when any rank failed.
    """
    store, found = _find(input_dir, Ranks(run.world), run.project)
    return Loading(found, store, run, options or LoadOptions()).load()


def resume_run(
    run: RunState, root: str | PathLike[str] | None = None, options: LoadOptions | None = None
) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint in ``root`` as :func:`load_run` does; return None where the run is new.

    ``root`` may be a folder of checkpoints, numbered or not, or one checkpoint; without it, it is the project's
    series. Saves that never finished don't count: a run that was killed during its first save starts anew.

    Raises:
        CheckpointError: there are checkpoints, and not one is whole: a fresh start would hide that.
    """
    if root is None and run.project.project_dir is None:
        raise CheckpointNotFound(
            "resume() needs a folder, or a project_dir whose checkpoints it then continues from: give "
            "Accelerator(project_dir=...) or ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    ranks = Ranks(run.world)
    storage = storage_of(root or run.project.project_dir or ".")
    located = _newest(_candidates(storage, ranks), ranks, where=str(storage))
    if located is None:
        return None
    store, found = located
    return Loading(found, store, run, options or LoadOptions()).load()


def read_checkpoint(
    input_dir: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    **objects: Any,
) -> LoadedCheckpoint:
    """Load a checkpoint into the given objects, as :func:`load_run` does; a collective.

    Args:
        objects: the fields of :class:`RunState` (``models=``, ``optimizers=``, ...; ``pre_hooks=`` for ``load_hooks``)
            and of :class:`LoadOptions`; and ``strict``, ``assign`` for ``model.load_state_dict``.
    """
    run, options = _named(world, project, objects)
    return load_run(run, input_dir, options)


def resume_checkpoint(
    root: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    **objects: Any,
) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint in ``root``, as :func:`resume_run` does, into objects as for
    :func:`read_checkpoint`.
    """
    run, options = _named(world, project, objects)
    return resume_run(run, root, options)


def _named(
    world: World | None, project: ProjectOptions | None, objects: dict[str, Any]
) -> tuple[RunState, LoadOptions]:
    given = sharded.GivenState(access=objects.pop("access", None) or sharded.InPlace())
    own = {"label": objects.pop("strategy", "NO"), "load_hooks": objects.pop("pre_hooks", ())}
    own |= {name: objects.pop(name) for name in RunState.__dataclass_fields__ if name in objects}
    return RunState(given, world, project or ProjectOptions(), **own), LoadOptions.of(**objects)


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


def _broadcast_addresses(found: Iterable[tuple[object, Storage]], ranks: Ranks) -> list[str]:
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
    found: Sequence[tuple[object, Storage]] = []
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
    files = f"{RANDOM.stem}_*.json"
    own = any(folder.glob(files)) or any(folder.glob(f"ranks_*/{files}")) or (folder / UNFINISHED_NAME).exists()
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


@dataclass
@final
class Loading:
    """One load under way: the checkpoint that was found, and what it is loaded into."""

    found: LoadedCheckpoint
    store: Store
    run: RunState
    options: LoadOptions

    def __post_init__(self) -> None:
        self.ranks: Ranks = self.store.ranks
        self.manifest: Manifest | None = self.found.manifest
        self.details: Mapping[str, Any] = {} if self.manifest is None else self.manifest.details
        self.absent: list[int] = self.details.get(ABSENT_RANKS, [])
        self.access: sharded.StateAccess = self.run.strategy.access

    def load(self) -> LoadedCheckpoint:
        """Load the checkpoint into all objects; on an error on any rank, raise on all."""
        error: Exception | None = None
        try:
            self._read()
        except Exception as problem:  # raised again below, once the other ranks know of it
            error = problem
        try:
            self.ranks.agree(error, f"load {self.found.folder}")
        finally:
            self.store.close()
        self._log_notes()
        return self.found

    def _read(self) -> None:
        run, folder, model_only = self.run, self.store.readable, self.options.model_only
        optimizers = run.strategy.restorable(run.optimizers)
        has_more = bool(optimizers or run.schedulers or run.custom_objects or run.scaler)
        if self.found.selection.model_only and not model_only and has_more:
            raise CheckpointError(
                "it holds models only (it was saved with Selection(model_only=True)); load it with model_only=True"
            )
        remaining = list(run.models)
        for hook in run.load_hooks:
            hook(remaining, str(folder))
        sizes = {} if self.manifest is None else {name: file.size for name, file in self.manifest.files.items()}
        with ByteProgress(f"Loading {folder.name}", sum(sizes.values()), shown=self.ranks.is_main) as progress:
            for index, model in enumerate(remaining):
                files = self._read_model(model, folder, index)
                progress.advance(sum([sizes.get(name, 0) for name in files]))
            if not model_only:
                self._read_optimizers(folder, optimizers)
                self._read_shared(folder)
                self._read_own(folder)
                self._read_gradients(folder)

    def _read_model(self, model: torch.nn.Module, folder: Path, index: int) -> list[str]:
        """Load the weights of ``model``, in whatever form they lie in ``folder``, and return the files read."""
        access, options, of_pickles = self.access, self.options.of_models, self.options.of_pickles
        if access.restore(model, folder, index, model_only=self.options.model_only, **options):
            return []
        shards = sharded.weights_folder(folder, index)
        if sharded.is_sharded(shards):
            sharded.read_model_shards(access, model, shards, **options)
            return [] if self.manifest is None else [n for n in self.manifest.files if n.startswith(f"{shards.name}/")]
        classic = sharded.classic_weights(folder, index)
        if classic.is_file():
            access.load_target(model).load_state_dict(read_pickle(classic, **of_pickles), **options)
            return [classic.name]
        if holds_engine_state(folder, index) and not holds_weights(folder, index):
            trusted = access.trusts_engine or of_pickles.get("weights_only") is False
            access.load_target(model).load_state_dict(read_engine_weights(folder, index, trusted=trusted), **options)
            return []
        loaded = load_weights(
            access.load_target(model),
            folder,
            index,
            load_kwargs={name: value for name, value in of_pickles.items() if name != "map_location"},
            may_lack=self.found.selection.leaves_out,
            **options,
        )
        return list(loaded.files)

    def _read_optimizers(self, folder: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for number, optimizer in enumerate(optimizers):
            shards = sharded.optimizer_folder(folder, number)
            if sharded.is_sharded(shards):
                sharded.read_optimizer_shards(self.access, optimizer, self.run.models, shards)
            elif holds_engine_state(folder) and not OPTIMIZER.holds(folder, number):
                self.found.notes.append(
                    "DeepSpeed saved it, so that only DeepSpeed can go on with its optimizer: ours is anew"
                )
            else:
                state = OPTIMIZER.read(folder, number, **self.options.of_pickles)
                self.access.load_full_optimizer_state(optimizer, self.run.models, state)
            if getattr(optimizer, "num_updates", None) is not None:  # not an engine's own
                setattr(optimizer, "num_updates", self._num_updates(number, optimizer))  # noqa: B010

    def _num_updates(self, number: int, optimizer: torch.optim.Optimizer) -> int:
        """Return the updates before this checkpoint: those it tells, else those that the optimizer's state counts."""
        counts = self.details.get(OPTIMIZER_UPDATES)
        told = counts[number] if isinstance(counts, list) and number < len(counts) else self.details.get("updates")
        if isinstance(told, int):
            return told
        return int(max((state["step"] for state in optimizer.state.values() if "step" in state), default=0))

    def _read_shared(self, folder: Path) -> None:
        run, of_pickles = self.run, self.options.of_pickles
        for number, scheduler in enumerate(run.schedulers):
            scheduler.load_state_dict(SCHEDULER.read(folder, number, **of_pickles))
        if run.scaler is not None:
            run.scaler.load_state_dict(SCALER.read(folder, **of_pickles))
        num_saved = _count(CUSTOM, folder)
        if num_saved != len(run.custom_objects):
            raise CheckpointError(
                f"{folder} holds {num_saved} registered objects, but {len(run.custom_objects)} are registered now. "
                "Call register_for_checkpointing with the same objects, in the same order, as the run that saved it."
            )
        for number, obj in enumerate(run.custom_objects):
            trusted = {"weights_only": False} if run.pickles(obj) else {}
            obj.load_state_dict(CUSTOM.read(folder, number, **{**of_pickles, **trusted}))

    def _read_own(self, folder: Path) -> None:
        """Load the states of loaders, with this rank's own part of them, and its random streams."""
        found, rank, of_pickles = self.found, self.ranks.rank, self.options.of_pickles
        own: dict[str, Any] = {}
        if rank not in self.absent and RANDOM.holds(folder, rank):  # else left by a late rank that was killed
            own = _streams_of(folder, rank, of_pickles)
        for number, loader in enumerate(self.run.dataloaders):
            if not LOADER.holds(folder, number):
                continue
            state = LOADER.read(folder, number, **of_pickles)
            loader_states = own.get("loaders") or []
            if number < len(loader_states) and loader_states[number] is not None and isinstance(state, dict):
                state["own"] = loader_states[number]
            cast("Stateful", loader).load_state_dict(state)
        if own:
            step = own["streams"].get("step")
            found.step = found.step if step is None else int(step)
            found.notes += [f"random stream not restored: {missed}" for missed in restore_rng_states(own["streams"])]
        elif RANDOM.holds(folder, 0):
            first = _streams_of(folder, 0, of_pickles)["streams"]
            found.step = int(first.get("step", found.step or 0))
            if self.details.get(STREAMS_ALIKE):
                restore_rng_states(first)  # as the saved run's ranks, this one draws what rank 0 draws
            else:
                set_seed(zlib.crc32(raw_bytes(first["torch"])) ^ rank)
            found.notes.append(self._why_derived(folder))  # the same text on all such ranks: logged once

    def _read_gradients(self, folder: Path) -> None:
        """Read the gradients of a window that was open, to be given to the models once its position is known."""
        window, manifest, ranks = self.run.open_window, self.manifest, self.ranks
        if window is None or manifest is None or not self.details.get(OPEN_WINDOW):
            return
        self.found.had_open_window = True
        is_same = manifest.world_size == ranks.world_size
        numbers = [ranks.rank] if is_same else list(range(manifest.world_size)) if ranks.is_main else []
        if not self.absent and numbers and all(GRADIENTS.holds(folder, number) for number in numbers):
            states = (GRADIENTS.read(folder, number) for number in numbers)
            self.found.window = next(states) if is_same else window.joined(states)

    def _why_derived(self, folder: Path) -> str:
        if self.ranks.rank in self.absent:
            ranks = ", ".join(map(str, self.absent[:8])) + (", ..." if len(self.absent) > 8 else "")
            return (
                f"the main process saved it alone, without the random streams of rank {ranks} and their own parts of "
                "loaders: they are derived from the main process's"
            )
        num_saved = _count(RANDOM, folder) if self.manifest is None else _count_listed(RANDOM, self.manifest.files)
        return f"random streams of rank {num_saved} and up are derived: the saved run didn't have them"

    def _log_notes(self) -> None:
        notes_of_all = [note for notes in self.ranks.all_gather(self.found.notes) for note in notes]
        if not self.ranks.is_main:
            return
        for name, reason in self.found.skipped.items():
            _log.warning("Checkpoint %s was skipped: %s", name, reason)
        for note in dict.fromkeys(notes_of_all):
            _log.warning("Checkpoint %s: %s", self.found.folder, note)


def _count(state_files: StateFiles, folder: Path) -> int:
    number = 0
    while state_files.holds(folder, number):
        number += 1
    return number


def _count_listed(state_files: StateFiles, names: Container[str]) -> int:
    """Return how many of ``state_files`` are among ``names``: a question to no file system for each rank."""
    number = 0
    while any(name in names for name in state_files.possible_names(number)):
        number += 1
    return number


def _streams_of(folder: Path, rank: int, options: Mapping[str, Any]) -> StateDict:
    value = RANDOM.read(folder, rank, **options)
    return value if "streams" in value else {"streams": from_classic_streams(value)}


def load_accelerator_state(
    input_dir: str | PathLike[str],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Stateful],
    dataloaders: Sequence[object],
    process_index: int,
    scaler: Stateful | None = None,
    map_location: MAP_LOCATION = None,
    load_kwargs: Mapping[str, object] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, int]:
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
