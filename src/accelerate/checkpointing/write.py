"""Everything a run needs to go on, in one committed folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ..errors import CheckpointError, SettingError
from ..meeting import Attendance
from ..seeding import began_alike, capture_rng_states
from ..settings.project import ProjectOptions
from ..world import current_world
from .agreement import Conversation, Ranks
from .background import Background
from .codec import encode
from .content import Late, Part, Pickled, State, Weights
from .draft import Draft, Store
from .hook_files import run_hooks
from .late import ABSENT_RANKS, LatePart
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
    Slot,
    to_classic_streams,
)
from .manifest import PIN_NAME, Manifest, read_manifest
from .meter import SILENT, Meter
from .place import LocalPlace, place_of
from .remote import open_store
from .selection import EVERYTHING, Selection
from .series import next_number, number_of, numbered_place, prune, series_place
from .store import CheckpointStore
from .weights import stale_weights, write_weights

if TYPE_CHECKING:
    from ..world import World

_log = logging.getLogger(__name__)

#: Writes what a strategy saves in its own way; or hands back parts that are written with the others, or a function that
#: does the writing later, from values that nobody changes meanwhile. An asynchronous save writes from another thread.
WriteParts = Callable[[Draft], Sequence[Part] | Callable[[], None] | None]


@dataclass
@final
class Contents:
    """The live objects of a run, as far as a checkpoint is made of them.

    Attributes:
        models: handed to the hooks.
        weights: one state dict per model, as the main process writes it. Hooks may take entries out.
        custom_objects: what the user registered.
        open_window: has the gradients of this rank, if it was saved between two updates.
        may_pickle: those of them that are saved as pickles.
    """

    models: Sequence[Any] = ()
    weights: Iterable[Mapping[str, Any]] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    scaler: Any = None
    custom_objects: Sequence[Any] = ()
    may_pickle: Sequence[Any] = ()
    open_window: Any = None
    step: int = 0
    classic: bool = False
    safe_serialization: bool = True

    # ------------------------------------------------------------------------------------------ as parts

    def of_weights(self, weights: Sequence[Mapping[str, Any]], selection: Selection) -> list[Part]:
        """The weights of every model."""
        chosen = [selection.of(state) for state in weights]
        if self.safe_serialization:
            return [Weights(state, index) for index, state in enumerate(chosen)]
        return [
            Pickled(partial(write_weights, state_dict=state, index=index, safe_serialization=False))
            for index, state in enumerate(chosen)
        ]

    def shared(self) -> list[Part]:
        """What all ranks have in common besides weights."""
        parts: list[Part] = []
        for slot, kind, objects in (
            (OPTIMIZER, "optimizer", self.optimizers),
            (SCHEDULER, "scheduler", self.schedulers),
            (CUSTOM, "registered object", self.custom_objects),
        ):
            for number, obj in enumerate(objects):
                what = f"{kind} {number} ({type(obj).__qualname__}).state_dict()"
                is_pickle = slot is CUSTOM and any(obj is one for one in self.may_pickle)
                parts.append(self._part(slot, obj.state_dict(), number, what, is_pickle))
        for number, loader in enumerate(self.dataloaders):
            if _keeps_state(loader):
                parts.append(self._part(LOADER, loader.state_dict(), number, f"data loader {number}.state_dict()"))
        if self.scaler is not None:
            parts.append(self._part(SCALER, self.scaler.state_dict(), 0, "scaler.state_dict()"))
        return parts

    def own(self, rank: int) -> list[Part]:
        """What only this rank has: random streams, its part of each loader's state, gradients of an open window."""
        streams = capture_rng_states(self.step)
        if self.classic:
            return [self._part(RANDOM, to_classic_streams(streams), rank, "random streams"), *self._of_window(rank)]
        states = [loader.state_dict() if _keeps_state(loader) else None for loader in self.dataloaders]
        own = [state.get("own") if isinstance(state, Mapping) else None for state in states]
        return [
            self._part(RANDOM, {"streams": streams, "loaders": own}, rank, "random streams"),
            *self._of_window(rank),
        ]

    def _of_window(self, rank: int) -> list[Part]:
        """The gradients, never as a pickle: the classic format has no name for them, so that nobody else reads them."""
        window = None if self.open_window is None else self.open_window.state_dict()
        return [] if window is None else [State(GRADIENTS.name(rank), encode(window, "gradients"), beside=True)]

    @property
    def has_open_window(self) -> bool:
        """Whether gradients of a window are a part of the checkpoint."""
        return self.open_window is not None and self.open_window.state_dict() is not None

    def epoch(self) -> int | None:
        """The epoch of the first loader that knows it."""
        states = (loader.state_dict() for loader in self.dataloaders if _keeps_state(loader))
        found = (state.get("epoch") for state in states if isinstance(state, Mapping))
        return next((epoch for epoch in found if isinstance(epoch, int)), None)

    def _part(self, slot: Slot, value: Any, number: int, what: str, is_pickle: bool = False) -> Part:
        if self.classic or is_pickle:
            return Pickled(partial(slot.write_pickle, value=value, number=number))
        return State(slot.name(number), encode(value, what), beside=slot.tensors_beside)


def _keeps_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


@dataclass
@final
class Saving:
    """One save on its way: where to, and what follows the commit."""

    store: Store
    project: ProjectOptions
    number: int | None
    selection: Selection
    pin: bool
    attendance: Attendance = field(default_factory=Attendance)
    parts: list[Part] = field(default_factory=list)
    num_models: int = 0

    @contextmanager
    def sealing(self, draft: Draft) -> Iterator[None]:
        """A block after which the draft is a checkpoint."""
        with ExitStack() as held, self.store.sealing(draft):
            yield
            held.enter_context(self.attendance.turn())  # a late rank may be adding its part to what lies there

    def write(self, draft: Draft, *, shown: bool) -> None:
        """Every part is a file of the draft."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for part in self.parts for tensor in part.tensors())
        name = self.store.address.rpartition("/")[2]
        with Meter(f"Saving {name}", num_bytes, shown=shown and draft.ranks.is_main) as draft.meter:
            for part in self.parts:
                part.write(draft.create)
        draft.meter = SILENT

    def close(self) -> None:
        """After the commit: late ranks know of it; no stale files, no checkpoints beyond the limits."""
        if not self.attendance.has_all and self.attendance.is_main:
            self.attendance.finish(self.store.identity)
        if isinstance(self.store, CheckpointStore):
            _clear_stale_weights(self.store, self.num_models)
        if self.number is not None and self.project.total_limit is not None:
            with self.attendance.turn():
                _prune(self.store, self.project)

    def finish_in_background(self, draft: Draft) -> None:
        """The kept parts are a committed checkpoint; runs in a thread of its own."""
        try:
            with _reporting(self.attendance, self.store.ranks):
                with self.sealing(draft):
                    self.write(draft, shown=False)
                self.close()
        finally:
            self.parts.clear()
            self.store.ranks.close()


def write_checkpoint(
    output_dir: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    step: int = 0,
    strategy: str = "NO",
    safe_serialization: bool = True,
    pre_hooks: Iterable[Callable[..., None]] = (),
    write_parts: WriteParts | None = None,
    details: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    select: Selection | None = None,
    pin: bool = False,
    background: Background | None = None,
    asynchronous: bool = False,
    attendance: Attendance | None = None,
    **objects: Any,
) -> str:
    """A committed checkpoint of all that is given, on every rank's return; its folder is handed back.

    A collective, unless ``attendance`` says that the main process calls it alone. With automatic naming the folder is
    the next number of the project's series and ``output_dir`` is not used; ``project.iteration`` then
    moves on, and older checkpoints beyond the project's limits are removed.

    Args:
        world: the processes that save together; None is this process alone.
        step: given back by :func:`read_checkpoint`.
        strategy: the label that the manifest records.
        pre_hooks: called as ``hook(models, weights, folder)`` on every rank, with the folder that is handed back (of a
            checkpoint behind a network, the local one that is uploaded); what they write there is committed too.
        write_parts: writes what a strategy saves in its own way, through the draft or into ``draft.folder``.
        details: JSON values that the manifest records; ``epoch`` is shown in listings.
        metrics: numbers that the manifest records; the best checkpoints by one of them can be kept.
        select: leaves a part out, or converts it.
        pin: the checkpoint is kept, whatever the limits say.
        background: where a save may still be under way: this one begins when that one is committed.
        asynchronous: return as soon as the state is copied to host memory, and write in the background.
        attendance: who calls this, as :func:`attend_save` found out; by default every rank of ``world``.
        objects: the fields of :class:`Contents`: ``weights=``, ``optimizers=``, ...

    Raises:
        CheckpointError: on every rank, when any rank failed; whatever was there before still is. An asynchronous
            save raises when the next one begins, from ``background.wait()``, or ends the program with status 1.
        EncodingError: a state can't be written without pickle; the text names the object and the path.
    """
    if background is not None:
        background.wait()
    project, select, attendance = project or ProjectOptions(), select or EVERYTHING, attendance or Attendance()
    contents = Contents(
        step=step, classic=project.checkpoint_format == "classic", safe_serialization=safe_serialization, **objects
    )
    writer = background if asynchronous else None
    if not attendance.has_all and not attendance.is_main and not _writes_for_its_node(attendance, project, world):
        address = _save_late(attendance, Ranks(world, alone=True), contents, select, list(pre_hooks), writer)
        if project.automatic_checkpoint_naming:
            project.iteration = number_of(address) + 1
        return address
    ranks = _ranks(world, writer is not None, alone=not attendance.has_all)
    with _reporting(attendance, ranks):
        saving = _saving(output_dir, ranks, project, select, pin, attendance)
        manifest = Manifest(
            {},
            step=step,
            strategy=strategy,
            checkpoint_format=project.checkpoint_format,
            details=_details(details, metrics, saving, contents, world),
        )
        draft = saving.store.begin(manifest)
        collect = partial(_collect, saving, contents, draft, list(pre_hooks), write_parts)
        if writer is not None:
            with saving.store.together(draft):
                collect()
                writer.memory.keep(saving.parts)
            writer.start(partial(saving.finish_in_background, draft))
        else:
            with saving.sealing(draft):
                collect()
                saving.write(draft, shown=True)
            saving.close()
    if saving.number is not None:
        project.iteration = saving.number + 1
    return saving.store.address


def attend_save(
    output_dir: str | PathLike[str] | None,
    *,
    world: World | None,
    project: ProjectOptions,
    needs_all: bool = False,
    moment: str = "",
) -> Attendance:
    """Find out which ranks make this call of ``save_state``, before any of them talks in a collective.

    Args:
        needs_all: the state lies over the ranks, so that the main process can't save it alone.
        moment: what tells this save from others that are made from the same line.

    Raises:
        SettingError: there is nowhere to save to.
        CollectiveError: a rank that is needed doesn't come.
    """
    _check_target(output_dir, project)
    if world is None or world.meeting is None or not world.is_distributed:
        return Attendance()
    if needs_all:
        world.meeting.require_all("save_state")
        return Attendance(is_main=world.is_main)
    target = "" if project.automatic_checkpoint_naming or output_dir is None else os.fspath(output_dir)
    return world.meeting.calls.meet("save_state", target, moment=moment)


@contextmanager
def _reporting(attendance: Attendance, ranks: Ranks) -> Iterator[None]:
    """A block whose error ends the conversation, and is told to the ranks that come late to a save of this one."""
    try:
        yield
    except BaseException as error:  # whatever ended the save, the others are told
        ranks.close()
        if not attendance.has_all and attendance.is_main:
            attendance.finish(error=error)
        raise


def _writes_for_its_node(attendance: Attendance, project: ProjectOptions, world: World | None) -> bool:
    """Whether this rank, which came late, is the first of a node whose folder nobody has written."""
    if not project.save_on_each_node or world is None or not world.is_local_main:
        return False
    identity = attendance.wait_for_outcome()
    manifest = read_manifest(place_of(attendance.address))
    return manifest is None or manifest.identity != identity


def _save_late(
    attendance: Attendance,
    ranks: Ranks,
    contents: Contents,
    select: Selection,
    pre_hooks: Sequence[Callable[..., None]],
    writer: Background | None,
) -> str:
    """This rank's part is in the checkpoint that the main process has made alone."""
    late = LatePart(attendance, ranks)
    try:
        weights = [dict(state) for state in contents.weights]
        for hook in pre_hooks:
            hook(list(contents.models), weights, str(late.draft.folder))
        if not select.model_only:
            late.parts += contents.own(ranks.rank)
        if writer is not None:
            writer.memory.keep(late.parts)
            writer.start(late.add)
    except BaseException:  # also when the program is being ended
        late.close()
        raise
    if writer is None:
        late.add()
    return attendance.address


def _ranks(world: World | None, asynchronous: bool, *, alone: bool) -> Ranks:
    if alone or not asynchronous or world is None or not world.is_distributed:
        return Ranks(world, alone=alone)
    if world.meeting is None:
        raise SettingError(
            "asynchronous saving needs the key-value store of a process group, which this runtime doesn't have; "
            "save with asynchronous=False."
        )
    number = world.meeting.begin("save_state")
    return Ranks(world, Conversation(world.meeting, f"save/{number}"))


def _check_target(output_dir: str | PathLike[str] | None, project: ProjectOptions) -> None:
    if not project.automatic_checkpoint_naming and output_dir is None:
        raise SettingError(
            "save_state() needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    if project.automatic_checkpoint_naming and project.project_dir is None:
        raise SettingError(
            "automatic_checkpoint_naming needs a project_dir: give Accelerator(project_dir=...) or "
            "ProjectConfiguration(project_dir=...)."
        )


def _saving(
    output_dir: str | PathLike[str] | None,
    ranks: Ranks,
    project: ProjectOptions,
    select: Selection,
    pin: bool,
    attendance: Attendance,
) -> Saving:
    _check_target(output_dir, project)
    number, place = None, output_dir
    if project.automatic_checkpoint_naming:
        assert project.project_dir is not None
        root = series_place(project.project_dir)
        number = _on_main(ranks, f"look into {root}", lambda: next_number(root, project.iteration))
        place = numbered_place(root, number)
    assert place is not None
    store = open_store(place, ranks, on_each_node=project.save_on_each_node)
    if not attendance.has_all and attendance.is_main:
        attendance.begin(store.address)
        _warn_of_absence(attendance, store)
    return Saving(store, project, number, select, pin, attendance)


def _warn_of_absence(attendance: Attendance, store: Store) -> None:
    if attendance.is_first:
        others = ", ".join(map(str, range(1, min(store.ranks.world_size, 9))))
        _log.warning(
            "save_state() was called by the main process alone: %s lacks the random streams of the other ranks (%s%s) "
            "and their own parts of loaders, unless they come too. A run that continues from it derives them from the "
            "main process's. Call save_state() on every rank for an exact continuation.",
            store.address,
            others,
            ", ..." if store.ranks.world_size > 9 else "",
        )


def _on_main(ranks: Ranks, what: str, ask: Callable[[], int]) -> int:
    """What the main process found, on every rank."""
    error: Exception | None = None
    found = 0
    try:
        found = ask() if ranks.is_main else 0
    except Exception as problem:  # a network's errors have many names; raised again on every rank
        error = problem
    ranks.agree(error, what)
    return ranks.everyone(found)[0]


def _details(
    details: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    saving: Saving,
    contents: Contents,
    world: World | None,
) -> dict[str, Any]:
    found, ranks = dict(details or {}), saving.store.ranks
    if found.get("epoch") is None and (epoch := contents.epoch()) is not None:
        found["epoch"] = epoch
    if not saving.selection.model_only and contents.has_open_window:
        found[OPEN_WINDOW] = True
    if metrics:
        found["metrics"] = {name: float(value) for name, value in metrics.items()}
    if saving.selection != EVERYTHING:
        found["selection"] = saving.selection.to_details()
    if saving.number is not None:
        found["iteration"] = saving.number
    if not saving.attendance.has_all and not saving.selection.model_only:
        found[ABSENT_RANKS] = [r for r in range(ranks.world_size) if r != ranks.rank]
        found[STREAMS_ALIKE] = world is not None and began_alike(world)
    return {name: value for name, value in found.items() if value is not None}


def _collect(
    saving: Saving,
    contents: Contents,
    draft: Draft,
    pre_hooks: Iterable[Callable[..., None]],
    write_parts: WriteParts | None,
) -> None:
    """The parts that this rank writes are known; nothing of them is written but what hooks write themselves."""
    weights = [dict(state) for state in contents.weights]
    run_hooks(saving.store, draft, [partial(hook, list(contents.models), weights) for hook in pre_hooks])
    saving.num_models = len(weights)
    later = write_parts(draft) if write_parts is not None else None
    if callable(later):
        saving.parts.append(Late(later))
    elif later is not None:
        saving.parts += later
    if draft.is_writer:
        saving.parts += contents.of_weights(weights, saving.selection)
        if not saving.selection.model_only:
            saving.parts += contents.shared()
        if saving.pin:
            (draft.folder / PIN_NAME).touch()
    if not saving.selection.model_only:
        saving.parts += contents.own(draft.ranks.rank)


def _clear_stale_weights(store: CheckpointStore, num_models: int) -> None:
    """Weights that an unmanaged save left in the folder, and that would now be found beside ours, are gone."""
    if not store.ranks.is_local_main:
        return
    manifest = store.manifest()
    written = list(manifest.files) if manifest else []
    for index in range(num_models):
        for name in stale_weights(store.folder, index, written):
            (store.folder / name).unlink(missing_ok=True)


def _prune(store: Store, project: ProjectOptions) -> None:
    is_local = isinstance(store, CheckpointStore)
    if not (store.ranks.is_main or (is_local and store.ranks.is_local_main and store.on_each_node)):
        return
    assert project.project_dir is not None
    root = LocalPlace(store.folder.parent) if is_local else series_place(project.project_dir)
    try:
        prune(root, project, Path(store.address).name)
    except Exception as error:  # the new checkpoint is safe; a disk or a network that fails is for the next save
        _log.warning("Older checkpoints in %s could not be removed: %s", root, error)


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
    """``output_dir`` holds the states as a committed checkpoint; called by the main process, or by all ranks.

    ``process_index`` is checked against the world, which knows it.
    """
    world = current_world()
    rank = world.rank if world is not None else 0
    if world is not None and process_index != rank:
        raise CheckpointError(
            f"process_index={process_index} was given, but this process is rank {rank} of {world.size}"
        )
    project = ProjectOptions(save_on_each_node=save_on_each_node)
    return write_checkpoint(
        os.fspath(Path(output_dir)),
        world=world,
        project=project,
        attendance=attend_save(output_dir, world=world, project=project),
        weights=model_states,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        step=step,
        safe_serialization=safe_serialization,
    )
