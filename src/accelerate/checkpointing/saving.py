"""Saving: write the state of a run as one committed checkpoint, by all ranks or the main process alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, SupportsFloat, final

from ..distributed.call_rendezvous import CallParticipants
from ..distributed.collectives import require_group
from ..distributed.random import has_common_seed
from ..errors import SettingError
from ..settings.training import ProjectOptions
from ..wording import by_number, some_ranks
from .agreement import Ranks, StoreCollectives, world_of
from .background import Background
from .items import ABSENT_RANKS, AddedItems, CheckpointItem, RunItems, TensorsItem
from .layout import OPEN_WINDOW, STREAMS_ALIKE
from .manifest import OPTIMIZER_UPDATES, PIN_NAME, SILENT, ByteProgress, Manifest, read_manifest
from .objects import run_hooks
from .remote import open_store
from .run_state import Hook, RunState, Saved, StateDict, Stateful, StrategyState, WriteStrategyState
from .series import next_number, number_of, numbered_storage, prune, series_storage
from .sharded import GivenState
from .storage import LocalStorage, storage_of
from .store import CheckpointStore, StagingDirectory, Store
from .weights import EVERYTHING, Selection, stale_weights

if TYPE_CHECKING:
    import torch

    from ..distributed.world import World

_log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")


@dataclass
@final
class Saving:
    """One running save: its target, its items, and the options that apply after the commit."""

    store: Store
    project: ProjectOptions
    number: int | None
    selection: Selection
    pin: bool
    participants: CallParticipants = field(default_factory=CallParticipants)
    items: list[CheckpointItem] = field(default_factory=list)
    num_models: int = 0

    @contextmanager
    def committing(self, staging: StagingDirectory) -> Iterator[None]:
        """Enter a context at whose end the staging directory is committed as the checkpoint."""
        with ExitStack() as held, self.store.committing(staging):
            yield
            if not self.participants.has_all:  # a late rank may be adding items to the checkpoint there
                held.enter_context(self.participants.exclusive())

    def write(self, staging: StagingDirectory, *, shown: bool) -> None:
        """Write every item into the staging directory."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for item in self.items for tensor in item.tensors())
        name = self.store.address.rpartition("/")[2]
        with ByteProgress(f"Saving {name}", num_bytes, shown=shown and staging.ranks.is_main) as staging.progress:
            for item in self.items:
                item.write(staging.create)
        staging.progress = SILENT

    def close(self) -> None:
        """Finish after the commit: inform late ranks, remove stale weights, prune checkpoints beyond the limits."""
        if not self.participants.has_all and self.participants.is_main:
            self.participants.finish(self.store.identity)
        if isinstance(self.store, CheckpointStore):
            _clear_stale_weights(self.store, self.num_models)
        if self.number is not None and self.project.total_limit is not None:
            with self.participants.exclusive():
                _prune(self.store, self.project)

    def finish_in_background(self, staging: StagingDirectory) -> None:
        """Write and commit the snapshot, in the background thread."""
        try:
            with _reporting_errors(self.participants, self.store.ranks):
                with self.committing(staging):
                    self.write(staging, shown=False)
                self.close()
        finally:
            self.items.clear()
            self.store.ranks.close()


def _by_members(
    save: Callable[Concatenate[RunState, Arguments], str],
) -> Callable[Concatenate[RunState, Arguments], str]:
    """Let the members of a world without a process group decide which of them calls ``save``."""

    @wraps(save)
    def saved(run: RunState, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        if run.world is None or run.world.members is None:
            return save(run, *args, **kwargs)
        is_window_open = run.open_window is not None and run.open_window.state_dict() is not None
        folder = run.world.members.save(partial(save, run, *args, **kwargs), is_window_open=is_window_open)
        if run.project.automatic_checkpoint_naming:
            run.project.iteration = number_of(folder) + 1
        return folder

    return saved


@_by_members
def save_run(
    run: RunState,
    output_dir: str | PathLike[str] | None = None,
    *,
    participants: CallParticipants | None = None,
    safe_serialization: bool = True,
    details: Mapping[str, object] | None = None,
    metrics: Mapping[str, SupportsFloat] | None = None,
    select: Selection | None = None,
    pin: bool = False,
    asynchronous: bool = False,
) -> str:
    """Save the run as one committed checkpoint, and return its folder.

    A collective, unless only the main process is in ``participants``. With automatic naming, the folder is the next
    number of the project's series, and ``output_dir`` isn't used. Then ``project.iteration`` increases, and older
    checkpoints beyond the project's limits are removed.

    Args:
        participants: the ranks that call this, from :func:`participants_of_save`; by default every rank of the world.
        details: JSON values that the manifest records; ``epoch`` is shown in listings.
        metrics: numbers that the manifest records; the project can keep the best checkpoints by one of them.
        select: what to leave out, and the dtype of the weights.
        pin: never prune this checkpoint.
        asynchronous: return as soon as the state is copied to CPU memory, and write it in a background thread.

    Raises:
        CheckpointError: on every rank, if any rank failed; an existing checkpoint is kept. The error of an asynchronous
            save is raised when the next save begins or by ``background.wait()``; else the program exits with status 1.
        EncodingError: a state can't be written without pickle; the text has the object and the path.
    """
    if run.background is not None:
        run.background.wait()
    select, participants, project = select or EVERYTHING, participants or CallParticipants(), run.project
    parts = run.strategy.checkpoint_state(run.models, run.optimizers, model_only=select.model_only)
    items = RunItems(run, parts, select, safe_serialization)
    writer = run.background if asynchronous else None
    if not participants.has_all and not participants.is_main and not _writes_for_its_node(participants, run):
        address = _add_to_checkpoint(participants, Ranks(run.world, alone=True), items, writer)
        if project.automatic_checkpoint_naming:
            project.iteration = number_of(address) + 1
        return address
    ranks = _ranks(run.world, writer is not None, alone=not participants.has_all)
    with _reporting_errors(participants, ranks):
        saving = _prepare(output_dir, ranks, project, select, pin, participants)
        manifest = Manifest(
            {},
            step=run.step,
            strategy=run.label,
            checkpoint_format=project.checkpoint_format,
            details=_details(details, metrics, saving, run.world),
        )
        staging = saving.store.begin(manifest)
        if writer is not None:
            with saving.store.abandon_on_error(staging):
                _collect(saving, items, staging)
                writer.memory.snapshot(saving.items)
            writer.start(partial(saving.finish_in_background, staging))
        else:
            with saving.committing(staging):
                _collect(saving, items, staging)
                saving.write(staging, shown=True)
            saving.close()
    if saving.number is not None:
        project.iteration = saving.number + 1
    return saving.store.address


def write_checkpoint(
    output_dir: str | PathLike[str] | None = None,
    *,
    world: World | None = None,
    project: ProjectOptions | None = None,
    weights: Iterable[StateDict] = (),
    optimizers: Sequence[Saved] = (),
    strategy: str = "NO",
    pre_hooks: Iterable[Hook] = (),
    write_strategy_state: WriteStrategyState | None = None,
    **objects: Any,
) -> str:
    """Save the given objects as one committed checkpoint, as :func:`save_run` does, and return its folder.

    Args:
        weights: one state dict per model, as the main process writes it. Hooks may take entries out.
        strategy: the label that the manifest records.
        pre_hooks: the ``save_hooks`` of :class:`RunState`.
        write_strategy_state: writes the state that a strategy saves in its own format, into ``staging``.
        objects: the other fields of :class:`RunState` (``models=``, ``schedulers=``, ``step=``, ``background=``, ...),
            and the options of :func:`save_run` (``details=``, ``select=``, ``asynchronous=``, ...).
    """
    given = GivenState(StrategyState(weights, optimizers, write_strategy_state))
    own = {name: objects.pop(name) for name in RunState.__dataclass_fields__ if name in objects}
    run = RunState(given, world, project or ProjectOptions(), label=strategy, save_hooks=pre_hooks, **own)
    return save_run(run, output_dir, **objects)


def participants_of_save(
    output_dir: str | PathLike[str] | None,
    *,
    world: World | None,
    project: ProjectOptions,
    needs_all: bool = False,
    moment: str = "",
) -> CallParticipants:
    """Find out which ranks make this ``save_state`` call, before any of them enters a collective.

    Args:
        needs_all: the state is sharded over the ranks, so the main process can't save it alone.
        moment: tells apart saves that are made from the same line.

    Raises:
        SettingError: no folder to save to is known.
        CollectiveError: a rank that is needed doesn't make the call.
    """
    _check_target(output_dir, project)
    if world is None or world.coordinator is None or not world.is_distributed:
        return CallParticipants()
    if needs_all:
        world.coordinator.require_all("save_state")
        return CallParticipants(is_main=world.is_main)
    target = "" if project.automatic_checkpoint_naming or output_dir is None else os.fspath(output_dir)
    participants = world.coordinator.calls.find_participants("save_state", target, moment=moment)
    if participants.has_all:
        require_group("save_state")
    return participants


@contextmanager
def _reporting_errors(participants: CallParticipants, ranks: Ranks) -> Iterator[None]:
    """Enter a context that, on an error, closes the exchange between ranks and reports the error to late ranks."""
    try:
        yield
    except BaseException as error:  # the others must know, whatever ended the save
        ranks.close()
        if not participants.has_all and participants.is_main:
            participants.finish(error=error)
        raise


def _writes_for_its_node(participants: CallParticipants, run: RunState) -> bool:
    """Return whether this late rank is the first on a node without a copy of this checkpoint."""
    if not run.project.save_on_each_node or run.world is None or not run.world.is_local_main:
        return False
    identity = participants.wait_for_outcome()
    manifest = read_manifest(storage_of(participants.address))
    return manifest is None or manifest.identity != identity


def _add_to_checkpoint(participants: CallParticipants, ranks: Ranks, items: RunItems, writer: Background | None) -> str:
    """Add this rank's items to the checkpoint that the main process saves alone."""
    addition = AddedItems(participants, ranks)
    try:
        weights = items.weights()
        for hook in items.run.save_hooks:
            hook(list(items.run.models), weights, str(addition.staging.folder))
        if not items.selection.model_only:
            addition.items += items.of_rank(ranks.rank, items.buffers)
        if writer is not None:
            writer.memory.snapshot(addition.items)
            writer.start(addition.add)
    except BaseException:  # also when the program is being ended
        addition.close()
        raise
    if writer is None:
        addition.add()
    return participants.address


def _ranks(world: World | None, asynchronous: bool, *, alone: bool) -> Ranks:
    if alone or not asynchronous or world is None or not world.is_distributed:
        return Ranks(world, alone=alone)
    if world.coordinator is None:
        raise SettingError(
            "asynchronous saving needs the key-value store of a process group, which this runtime doesn't have; "
            "save with asynchronous=False."
        )
    number = world.coordinator.begin("save_state")
    return Ranks(world, StoreCollectives(world.coordinator, f"save/{number}"))


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


def _prepare(
    output_dir: str | PathLike[str] | None,
    ranks: Ranks,
    project: ProjectOptions,
    select: Selection,
    pin: bool,
    participants: CallParticipants,
) -> Saving:
    _check_target(output_dir, project)
    number, storage = None, output_dir
    if project.automatic_checkpoint_naming:
        assert project.project_dir is not None
        root = series_storage(project.project_dir)
        number = ranks.on_main(f"look into {root}", lambda: next_number(root, project.iteration))
        storage = numbered_storage(root, number)
    assert storage is not None
    store = open_store(storage, ranks, on_each_node=project.save_on_each_node)
    if not participants.has_all and participants.is_main:
        participants.begin(store.address)
        _warn_of_absent_ranks(participants, store)
    return Saving(store, project, number, select, pin, participants)


def _warn_of_absent_ranks(participants: CallParticipants, store: Store) -> None:
    if participants.is_first:
        others = range(1, store.ranks.world_size)
        _log.warning(
            "save_state() was called by the main process alone: %s lacks the random streams of %s "
            "and %s parts of loaders, unless %s too. A run that continues from it derives them from the main "
            "process's. Call save_state() on every rank for an exact continuation.",
            store.address,
            some_ranks(others),
            by_number(others, "its own", "their own"),
            by_number(others, "it comes", "they come"),
        )


def _details(
    details: Mapping[str, object] | None,
    metrics: Mapping[str, SupportsFloat] | None,
    saving: Saving,
    world: World | None,
) -> dict[str, object]:
    found, ranks = dict(details or {}), saving.store.ranks
    if metrics:
        found["metrics"] = {name: float(value) for name, value in metrics.items()}
    if saving.selection != EVERYTHING:
        found["selection"] = saving.selection.to_details()
    if saving.number is not None:
        found["iteration"] = saving.number
    if not saving.participants.has_all and not saving.selection.model_only:
        found[ABSENT_RANKS] = [r for r in range(ranks.world_size) if r != ranks.rank]
        found[STREAMS_ALIKE] = world is not None and has_common_seed(world)
    return {name: value for name, value in found.items() if value is not None}


def _collect(saving: Saving, items: RunItems, staging: StagingDirectory) -> None:
    """Run the hooks, which write their files immediately; collect this rank's items."""
    weights, run, everything = items.weights(), items.run, not saving.selection.model_only
    run_hooks(saving.store, staging, [partial(hook, list(run.models), weights) for hook in run.save_hooks])
    # An exchange between the ranks, so before anything that may fail on one of them.
    differing = items.differing_buffers(staging.ranks) if everything else None
    saving.num_models = len(weights)
    later = items.parts.write(staging) if items.parts.write is not None else None
    if callable(later):
        saving.items.append(TensorsItem({}, lambda *_: later()))  # it has its own copies of the values
    elif later is not None:
        saving.items += later
    if staging.is_writer:
        saving.items += items.of_weights(weights)
        if everything:
            saving.items += items.shared()
        if saving.pin:
            (staging.folder / PIN_NAME).touch()
    if differing is not None:
        saving.items += items.of_rank(staging.ranks.rank, differing)
    if staging.is_committer:
        told = staging.description.details  # the program's own keys stay as they are
        if told.get("epoch") is None and (epoch := items.epoch()) is not None:
            staging.details["epoch"] = epoch
        if updates := items.updates():
            staging.details[OPTIMIZER_UPDATES] = updates
            if any(updates) and "updates" not in told:
                staging.details["updates"] = max(updates)
        if everything and items.window is not None:
            staging.details[OPEN_WINDOW] = True


def _clear_stale_weights(store: CheckpointStore, num_models: int) -> None:
    """Remove older weight files without a manifest from the folder, because readers would find them beside ours."""
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
    root = LocalStorage(store.folder.parent) if is_local else series_storage(project.project_dir)
    try:
        prune(root, project, Path(store.address).name)
    except Exception as error:  # the new checkpoint is safe; the next save tries again
        _log.warning("Older checkpoints in %s could not be removed: %s", root, error)


def save_accelerator_state(
    output_dir: str | PathLike[str],
    model_states: Sequence[StateDict],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Stateful],
    dataloaders: Sequence[object],
    process_index: int,
    step: int,
    scaler: Stateful | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> str:
    """Save the states in ``output_dir`` as a committed checkpoint, on the main process or on all ranks.

    ``process_index`` has to be this process's rank.
    """
    world, project = world_of(process_index), ProjectOptions(save_on_each_node=save_on_each_node)
    return write_checkpoint(
        os.fspath(Path(output_dir)),
        world=world,
        project=project,
        participants=participants_of_save(output_dir, world=world, project=project),
        weights=model_states,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler=scaler,
        step=step,
        safe_serialization=safe_serialization,
    )
