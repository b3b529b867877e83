"""Loading: find a checkpoint, verify it, and load it into the live objects of a run."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final
from weakref import WeakKeyDictionary

import torch

from ..distributed.random import restore_rng_states, set_seed
from ..errors import CheckpointError, CheckpointNotFound
from ..names import engine_tag
from ..settings.training import ProjectOptions
from ..wording import by_number, some_ranks
from . import sharded
from .agreement import Ranks, world_of
from .codec import read_pickle
from .dcp import is_distributed_checkpoint
from .fit import by_name
from .items import ABSENT_RANKS
from .layout import (
    BUFFERS,
    CUSTOM,
    GRADIENTS,
    LOADER,
    OPEN_WINDOW,
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    STREAMS_ALIKE,
    from_classic_streams,
    holds_engine_state,
    read_engine_weights,
)
from .manifest import OPTIMIZER_UPDATES, UNFINISHED_NAME, ByteProgress, Manifest, WithManifest
from .remote import open_store
from .run_state import RunState, StateDict, Stateful
from .series import is_classic, list_committed, numbered, series_storage
from .storage import LocalStorage, Storage, storage_of
from .store import Store
from .tensor_files import raw_bytes
from .weights import Selection, holds_weights, loader_of, open_weights

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION
    from torch.utils.hooks import RemovableHandle

    from ..distributed.world import World

_log = logging.getLogger(__name__)
#: Notes that need no action; each is logged once per run.
_minor_notes_of_run: set[str] = set()
_MAP_LOCATIONS: Final = (None, "cpu", "on_device")


@dataclass
@final
class LoadedCheckpoint(WithManifest):
    """The result of loading: the checkpoint, its manifest, and notes on state not restored exactly.

    Attributes:
        folder: the checkpoint's path or URL.
        step: the step that was saved with it; None if none was saved.
        manifest: its manifest; None for a folder of another program.
        skipped: newer checkpoints that can't be loaded, with the reasons.
        notes: state that could not be restored exactly, and changes since the save.
        had_open_window: it was saved between two optimizer updates, with the gradients of the micro-batches so far.
        window: those gradients of this rank; if another number of ranks saved, those of all ranks, on the main process.
    """

    folder: str
    step: int | None = None
    manifest: Manifest | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    had_open_window: bool = False
    window: Mapping[str, object] | None = None

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
        model_only: load only the models, whatever else the checkpoint holds.
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
        """Make the options from named arguments; those that aren't fields are for ``model.load_state_dict``."""
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

    Without ``input_dir``, load the newest valid checkpoint of the project's series. The result and one warning name
    newer ones that can't be loaded, with the reasons.

    Raises:
        CheckpointNotFound: there is nothing to load.
        CheckpointError: on every rank, if any rank failed.
    """
    store, found = _find(input_dir, Ranks(run.world), run.project)
    return Loading(found, store, run, options or LoadOptions()).load()


def resume_run(
    run: RunState, root: str | PathLike[str] | None = None, options: LoadOptions | None = None
) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint in ``root`` as :func:`load_run` does; return None for a new run.

    ``root`` is a folder of checkpoints, numbered or not, or one checkpoint; by default the project's series. Unfinished
    saves don't count: a run that was killed during its first save starts from the beginning.

    Raises:
        CheckpointError: there are checkpoints, but none is valid; a fresh start would hide that.
    """
    if root is None and run.project.project_dir is None:
        raise CheckpointNotFound(
            "resume() needs a folder, or a project_dir whose checkpoints it then continues from: give "
            "Accelerator(project_dir=...) or ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    ranks = Ranks(run.world)
    storage = storage_of(root or run.project.project_dir or ".")
    located = _newest(storage, list_committed, ranks)
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
    own = {"label": objects.pop("strategy", "NO"), "load_hooks": objects.pop("pre_hooks", ())}
    own |= {name: objects.pop(name) for name in RunState.__dataclass_fields__ if name in objects}
    run = RunState(sharded.GivenState(), world, project or ProjectOptions(), **own)
    return load_run(run, input_dir, LoadOptions.of(**objects))


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
    newest = _newest(root, numbered, ranks)
    if newest is None:
        raise CheckpointNotFound(f"no checkpoint in {root}")
    return newest


def _newest(
    root: Storage, checkpoints: Callable[[Storage], Sequence[tuple[object, Storage]]], ranks: Ranks
) -> tuple[Store, LoadedCheckpoint] | None:
    """Return the newest valid one of ``checkpoints(root)``, which are in order, as the main process sees them."""
    addresses = ranks.on_main(f"look for checkpoints in {root}", lambda: [str(one) for _, one in checkpoints(root)])
    skipped: dict[str, str] = {}
    for address in reversed(addresses):
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
    raise CheckpointError(f"no valid checkpoint in {root}: {reasons}")


def _is_foreign(store: Store) -> bool:
    """Return whether another program saved the folder: it has no manifest, and no files that only we write."""
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
    """One load in progress: the checkpoint found, and the run to load it into."""

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
        self._loads: list[tuple[Callable[[], object], Iterable[str]]] = []
        self._files = ExitStack()
        self._minor: set[str] = set()  # the notes that need no action

    def load(self) -> LoadedCheckpoint:
        """Load the checkpoint into all objects, if it fits all of them; an error on any rank raises on all."""
        try:
            with ExitStack() as self._files:
                for phase in (self._read, self._load):
                    with self.ranks.fail_together(f"load {self.found.folder}"):
                        phase()
        finally:
            self.store.close()
        forget(self.run.optimizers)
        self._log_notes()
        return self.found

    def _read(self) -> None:
        """Read and check the states, without changing any object; only hooks may load here."""
        run, folder, model_only = self.run, self.store.readable, self.options.model_only
        optimizers = run.strategy.restorable(run.optimizers)
        has_more = bool(optimizers or run.schedulers or run.custom_objects or run.scaler)
        if self.found.selection.model_only and not model_only and has_more:
            raise CheckpointError(
                "it holds models only (it was saved with Selection(model_only=True)); load it with model_only=True"
            )
        self._require_prepared(folder)
        remaining = list(run.models)
        for hook in run.load_hooks:
            hook(remaining, str(folder))
        for index, model in enumerate(remaining):
            self._read_model(model, folder, index)
        self._read_buffers(folder)
        if not model_only:
            self._read_optimizers(folder, optimizers)
            self._read_shared(folder)
            self._note_unclaimed(folder)
            self._read_own(folder)
            self._read_gradients(folder)

    def _require_prepared(self, folder: Path) -> None:
        """Raise CheckpointError if no object is prepared to load into; hooks may load models themselves."""
        run = self.run
        if run.models or run.load_hooks or not _holds_model(folder):
            return
        if run.optimizers or run.schedulers or run.dataloaders or run.custom_objects:
            self.found.notes.append(
                "no model is prepared, so the weights that it holds aren't loaded; call prepare() before load_state()"
            )
            return
        raise CheckpointError(
            "nothing is prepared or registered that it could be loaded into: call prepare(), with the model and what "
            "else was saved, before load_state()"
        )

    def _load(self) -> None:
        sizes = {} if self.manifest is None else {name: file.size for name, file in self.manifest.files.items()}
        shown = f"Loading {self.store.readable.name}"
        with ByteProgress(shown, sum(sizes.values()), shown=self.ranks.is_main) as progress:
            while self._loads:
                load, files = self._loads.pop(0)  # frees the state once it is loaded
                load()
                progress.advance(sum([sizes.get(name, 0) for name in files]))

    def _later(self, load: Callable[[], object], files: Iterable[str] = ()) -> None:
        """Call ``load()``, for the content of ``files``, after all states have been checked on every rank."""
        self._loads.append((load, files))

    def _read_model(self, model: torch.nn.Module, folder: Path, index: int) -> None:
        """Read the weights of ``model`` from ``folder``, in any format."""
        access, options, of_pickles = self.access, self.options.of_models, self.options.of_pickles
        restore = access.restorer(model, folder, index, model_only=self.options.model_only, **options)
        if restore is not None:
            self._later(restore)
            return
        shards, classic = sharded.weights_folder(folder, index), sharded.classic_weights(folder, index)
        if is_distributed_checkpoint(shards):
            names = [] if self.manifest is None else list(self.manifest.files)
            load = sharded.read_model_shards(access, model, shards, **options)
            self._later(load, [name for name in names if name.startswith(f"{shards.name}/")])
            return
        may_lack = None
        if classic.is_file():
            state, files = read_pickle(classic, **of_pickles), [classic.name]
        elif holds_engine_state(folder, index) and not holds_weights(folder, index):
            trusted = access.trusts_engine or of_pickles.get("weights_only") is False
            state, files = read_engine_weights(folder, index, trusted=trusted), list[str]()
        else:
            load_kwargs = {name: value for name, value in of_pickles.items() if name != "map_location"}
            weights = self._files.enter_context(open_weights(folder, index, **load_kwargs))
            state, files = weights.state_dict(), list(weights.files)
            may_lack = self.found.selection.leaves_out
        target, source = access.load_target(model), f"{', '.join(files) or engine_tag(index)} in {folder}"
        self._later(loader_of(target, state, source, may_lack=may_lack, **options), files)

    def _read_buffers(self, folder: Path) -> None:
        """Read this rank's own buffers; the weights contain those of the first rank."""
        manifest, rank = self.manifest, self.ranks.rank
        if manifest is None or not any(name.rpartition("/")[2].startswith("buffers_") for name in manifest.files):
            return
        if manifest.world_size != self.ranks.world_size:
            self.found.notes.append(
                f"the models' buffers (such as the statistics of BatchNorm) differed between its {manifest.world_size} "
                "ranks, and all ranks now have those of the first"
            )
        elif BUFFERS.holds(folder, rank):
            states: list[dict[str, torch.Tensor]] = BUFFERS.read(folder, rank)
            for model, buffers in zip(self.run.models, states, strict=False):
                self._later(partial(self._load_buffers, model, buffers))

    def _load_buffers(self, model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        if buffers:
            self.access.keep_buffers(model)
        for name, buffer in self.access.buffers(model).items():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.detach().copy_(buffers[name])

    def _read_optimizers(self, folder: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        models, access = self.run.models, self.access
        for number, optimizer in enumerate(optimizers):
            shards = sharded.optimizer_folder(folder, number)
            if is_distributed_checkpoint(shards):
                self._later(sharded.read_optimizer_shards(access, optimizer, models, shards))
            elif holds_engine_state(folder) and not OPTIMIZER.holds(folder, number):
                self.found.notes.append(
                    "DeepSpeed saved it, and only DeepSpeed can load its optimizer state: the optimizer starts fresh"
                )
            else:
                state = OPTIMIZER.read(folder, number, **self.options.of_pickles)
                layout, known = access.optimizer_layout(optimizer, models), access.parameter_names(models)
                state, remark = by_name(state, layout, optimizer, known, f"optimizer {number}")
                self.found.notes += [remark] * bool(remark and self.manifest)
                self._later(partial(access.load_full_optimizer_state, optimizer, models, state))
            if getattr(optimizer, "num_updates", None) is not None:  # not an engine's own
                self._later(partial(self._set_num_updates, number, optimizer))

    def _set_num_updates(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Set the updates before this checkpoint: as the manifest says, else as the optimizer's state counts."""
        counts = self.details.get(OPTIMIZER_UPDATES)
        told = counts[number] if isinstance(counts, list) and number < len(counts) else self.details.get("updates")
        if not isinstance(told, int):
            told = int(max((state["step"] for state in optimizer.state.values() if "step" in state), default=0))
        setattr(optimizer, "num_updates", told)  # noqa: B010

    def _note_unclaimed(self, folder: Path) -> None:
        """Note optimizers and schedulers in the checkpoint for which none is prepared here."""

        def holds_optimizer(number: int) -> bool:
            shards = sharded.optimizer_folder(folder, number)
            return OPTIMIZER.holds(folder, number) or is_distributed_checkpoint(shards)

        prepared = len(self.run.optimizers)
        counts = {
            "optimizer": (_count(lambda number: number < prepared or holds_optimizer(number)), prepared),
            "scheduler": (_count(partial(SCHEDULER.holds, folder)), len(self.run.schedulers)),
        }
        for kind, (num_saved, num_prepared) in counts.items():
            if num_saved > num_prepared:
                self.found.notes.append(
                    f"{kind}s in it: {num_saved}, prepared here: {num_prepared}. The state of the others isn't loaded: "
                    "call prepare() before load_state(), or load with model_only=True"
                )

    def _read_shared(self, folder: Path) -> None:
        run, of_pickles = self.run, self.options.of_pickles
        for number, scheduler in enumerate(run.schedulers):
            self._later(partial(scheduler.load_state_dict, SCHEDULER.read(folder, number, **of_pickles)))
        if run.scaler is not None:
            state = SCALER.read(folder, **of_pickles)
            if not state and getattr(run.scaler, "is_enabled", bool)():
                raise CheckpointError("it was saved with a gradient scaler that was disabled; this run's is enabled")
            self._later(partial(run.scaler.load_state_dict, state))
        num_saved = _count(partial(CUSTOM.holds, folder))
        if num_saved != len(run.custom_objects):
            raise CheckpointError(
                f"{folder} holds {num_saved} registered objects, but {len(run.custom_objects)} are registered now. "
                "Call register_for_checkpointing with the same objects, in the same order, as the run that saved it."
            )
        for number, obj in enumerate(run.custom_objects):
            trusted = {"weights_only": False} if run.pickles(obj) else {}
            state = CUSTOM.read(folder, number, **{**of_pickles, **trusted})
            if type(obj).load_state_dict is torch.nn.Module.load_state_dict:
                self._later(loader_of(cast("torch.nn.Module", obj), state, f"registered object {number} in {folder}"))
            else:
                self._later(partial(obj.load_state_dict, state))

    def _read_own(self, folder: Path) -> None:
        """Read the states of loaders, with this rank's part, and this rank's random streams."""
        found, rank, of_pickles = self.found, self.ranks.rank, self.options.of_pickles
        own: dict[str, Any] = {}
        if rank not in self.absent and RANDOM.holds(folder, rank):  # else a killed late rank left them
            own = _streams_of(folder, rank, of_pickles)
        for number, loader in enumerate(self.run.dataloaders):
            if not LOADER.holds(folder, number):
                continue
            state = LOADER.read(folder, number, **of_pickles)
            loader_states = own.get("loaders") or []
            if number < len(loader_states) and loader_states[number] is not None and isinstance(state, dict):
                state["own"] = loader_states[number]
            check = getattr(loader, "check_state_dict", None)
            if callable(check):
                check(state)
            self._later(partial(cast("Stateful", loader).load_state_dict, state))
        if own:
            step = own["streams"].get("step")
            found.step = found.step if step is None else int(step)
            self._later(partial(self._restore_streams, own["streams"]))
        elif RANDOM.holds(folder, 0):
            of_main = _streams_of(folder, 0, of_pickles)
            first = of_main["streams"]
            found.step = int(first.get("step", found.step or 0))
            if self.details.get(STREAMS_ALIKE):
                self._later(partial(restore_rng_states, first))  # as in the saved run, all ranks draw the same
            else:
                self._later(partial(set_seed, zlib.crc32(raw_bytes(first["torch"])) ^ rank))
            self._note_derived(folder, has_positions=_has_positions_of_ranks(of_main))

    def _restore_streams(self, streams: StateDict) -> None:
        self.found.notes += [f"random stream not restored: {missed}" for missed in restore_rng_states(streams)]

    def _read_gradients(self, folder: Path) -> None:
        """Read the gradients of an open window; the models get them later, once the position is known."""
        window, manifest, ranks = self.run.open_window, self.manifest, self.ranks
        if window is None or manifest is None or not self.details.get(OPEN_WINDOW):
            return
        self.found.had_open_window = True
        is_same = manifest.world_size == ranks.world_size
        numbers = [ranks.rank] if is_same else list(range(manifest.world_size)) if ranks.is_main else []
        if not self.absent and numbers and all(GRADIENTS.holds(folder, number) for number in numbers):
            states = (GRADIENTS.read(folder, number) for number in numbers)
            self.found.window = next(states) if is_same else window.joined(states)

    def _note_derived(self, folder: Path, *, has_positions: bool) -> None:
        """Note that this rank's random streams are derived, with the same text on all such ranks, to log it once.

        It is logged as info if the main process saved alone and no loader keeps a position per rank, because then only
        random streams differ.
        """
        if self.ranks.rank in self.absent:
            own = by_number(self.absent, "its own", "their own")
            positions = f" and {own} positions in loaders" if has_positions else ""
            note = (
                f"the main process saved it alone, without the random streams of {some_ranks(self.absent)}{positions}: "
                "they are derived from the main process's"
            )
            is_minor = not has_positions
        else:
            names = None if self.manifest is None else self.manifest.files.keys()

            def is_saved(number: int) -> bool:
                if names is None:
                    return RANDOM.holds(folder, number)
                return not names.isdisjoint(RANDOM.possible_names(number))  # no file system request per rank

            num_saved = _count(is_saved)
            note = f"random streams of rank {num_saved} and up are derived: the saved run didn't have them"
            is_minor = self.manifest is None and num_saved == 1 and not has_positions
        self.found.notes.append(note)
        if is_minor:
            self._minor.add(note)

    def _log_notes(self) -> None:
        own_notes = [(note, note in self._minor) for note in self.found.notes]
        notes_of_all = [note for notes in self.ranks.all_gather(own_notes) for note in notes]
        if not self.ranks.is_main:
            return
        for name, reason in self.found.skipped.items():
            _log.warning("Checkpoint %s was skipped: %s", name, reason)
        for note, is_minor in dict.fromkeys(notes_of_all):
            if not is_minor:
                _log.warning("Checkpoint %s: %s", self.found.folder, note)
            elif note not in _minor_notes_of_run:
                _minor_notes_of_run.add(note)
                _log.info("Checkpoint %s: %s", self.found.folder, note)


def _has_positions_of_ranks(of_main: Mapping[str, Any]) -> bool:
    """Return whether a loader keeps more state per rank than random streams."""
    return any(set(part or ()) - {"rank", "workers", "ahead"} for part in of_main.get("loaders") or ())


def _holds_model(folder: Path) -> bool:
    shards, classic = sharded.weights_folder(folder), sharded.classic_weights(folder)
    return holds_weights(folder) or is_distributed_checkpoint(shards) or classic.is_file() or holds_engine_state(folder)


def _count(is_saved: Callable[[int], bool]) -> int:
    """Return how many objects are saved; they are numbered from 0."""
    return next(number for number in count() if not is_saved(number))


def _streams_of(folder: Path, rank: int, options: Mapping[str, Any]) -> StateDict:
    value = RANDOM.read(folder, rank, **options)
    return value if "streams" in value else {"streams": from_classic_streams(value)}


# ------------------------------------------------------------------------- a warning of a load that is missing
#
# Some programs open ``optimizer.bin`` in a checkpoint themselves, and many continue silently if it is missing.

_waiting: Final[WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]] = WeakKeyDictionary()


def watch_first_step(optimizer: torch.optim.Optimizer, project_dir: str | None) -> None:
    """Warn at the first step of ``optimizer`` if ``project_dir`` has a checkpoint and none has been loaded.

    Later steps have no overhead.
    """
    folder = None if project_dir is None else _newest_of_project(project_dir)
    if folder is None:
        return

    def warn(*_: object) -> None:
        forget(list(_waiting))
        _log.warning(
            "This run makes its first update without load_state(), although %s is there: optimizers, schedulers and "
            "loaders start anew. A program that opens optimizer.bin itself finds none there: call load_state() or "
            "resume(), or save with ProjectConfiguration(checkpoint_format='classic').",
            folder,
        )

    with suppress(AttributeError):  # not torch's class, or its __init__ wasn't run
        _waiting[optimizer] = optimizer.register_step_pre_hook(warn)


def forget(optimizers: Iterable[object]) -> None:
    """Remove the warning at the first step of these optimizers, because a checkpoint has been loaded."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        handle = _waiting.pop(inner, None) if isinstance(inner, torch.optim.Optimizer) else None
        if handle is not None:
            handle.remove()


def _newest_of_project(project_dir: str) -> str | None:
    """Return the newest checkpoint in ``project_dir`` with the state of an optimizer that isn't ``optimizer.bin``."""
    storage = storage_of(project_dir)
    if not isinstance(storage, LocalStorage):
        return None  # no program opens files there by their names
    with suppress(OSError, CheckpointError, IndexError):  # there is none, or it can't be read
        folder = Path(str(list_committed(storage)[-1][1]))
        has_json = (folder / f"{OPTIMIZER.name()}.json").is_file()
        if has_json or is_distributed_checkpoint(sharded.optimizer_folder(folder)):
            return str(folder)
    return None


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
    """Load ``input_dir`` into the objects; return ``{"step": n}``, the step to resume at (empty without one)."""
    found = read_checkpoint(
        input_dir,
        world=world_of(process_index),
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
