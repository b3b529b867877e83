"""Single objects in files, registered objects in a checkpoint, and the hooks of saving."""

from __future__ import annotations

import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final
from uuid import uuid4

import torch
from torch.utils.hooks import RemovableHandle

from ..distributed.world import current_world
from ..errors import CheckpointError, SettingError
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .codec import encode, read_pickle, write_pickle
from .layout import CUSTOM, write_encoded
from .manifest import UNFINISHED_NAME, Manifest, read_manifest
from .run_state import Hook, Saved, Stateful
from .storage import fsync_path, inside
from .store import CheckpointStore, DurableFile, StagingDirectory, Store, file_names
from .tensor_files import open_tensors, write_tensors
from .weights import clean_state_dict_for_safetensors

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

_log = logging.getLogger(__name__)


@final
class Hooks(OrderedDict[int, Hook]):
    """Functions to run before saving or loading, by number, in the order of their registration."""

    def add(self, hook: Hook) -> RemovableHandle:
        """Register ``hook``; ``remove()`` of the returned handle unregisters it."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


def check_registrable(objects: Iterable[object], *, first: int = 0, may_pickle: bool = False) -> None:
    """Raise if an object can't be saved with a checkpoint; ``first`` is the number of the first object.

    Raises:
        SettingError: some lack ``state_dict`` or ``load_state_dict``; the text lists them.
        EncodingError: a state can't be written without pickle, and ``may_pickle`` is false; the text names the object
            and the path in its state.
    """
    objects = list(objects)
    offenders = [
        f"item {number}: {type(obj).__module__}.{type(obj).__qualname__}"
        for number, obj in enumerate(objects)
        if not isinstance(obj, Stateful)
    ]
    if offenders:
        raise SettingError(
            "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The following "
            f"inputs of register_for_checkpointing are invalid: {', '.join(offenders)}. Add the methods, or register "
            "the object that has them."
        )
    if may_pickle:
        return
    for number, obj in enumerate(objects, start=first):
        assert isinstance(obj, Stateful)
        try:
            state = obj.state_dict()
        except Exception:  # an object without a state yet is checked when it is saved
            continue
        encode(state, f"registered object {number} ({type(obj).__qualname__}).state_dict()")


# ------------------------------------------------------------------------------------ state files of a folder


@contextmanager
def atomic_file(folder: Path, name: str, *, pickle: bool = False) -> Iterator[DurableFile]:
    """Yield a file that appears in ``folder`` atomically, and fsynced, at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{name}.{uuid4().hex}"
    file = DurableFile(beside)
    try:
        yield file
        file.fsync_and_close()
        os.replace(beside, folder / name)
        fsync_path(folder)
    finally:
        file.close()
        beside.unlink(missing_ok=True)


# ------------------------------------------------------------------------------- registered objects of the user


def save_custom_state(obj: Saved, path: str | PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Save the state of ``obj`` to folder ``path`` as object ``index``, on the main process.

    Raises:
        EncodingError: its state can't be written without pickle; the text has the path.
    """
    if not _is_writer(save_on_each_node):
        return
    encoded = encode(obj.state_dict(), f"{type(obj).__qualname__}.state_dict()")
    write_encoded(partial(atomic_file, Path(path)), CUSTOM.name(index), encoded, beside=True)


def load_custom_state(obj: Stateful, path: str | PathLike[str], index: int = 0, *, allow_pickle: bool = False) -> None:
    """Load the state of object ``index`` in folder ``path`` into ``obj``.

    Old ``.pkl`` files are read through an allow-list of data classes; ``allow_pickle`` lets them run code.

    Raises:
        CheckpointNotFound: there is no such state.
        CheckpointError: it can't be read.
    """
    obj.load_state_dict(CUSTOM.read(Path(path), index, allow_pickle=allow_pickle))


# --------------------------------------------------------------------------- save() and load() of single objects


def _is_writer(save_on_each_node: bool) -> bool:
    world = current_world()
    if world is not None and world.members is not None:
        return world.members.writes_files
    ranks = Ranks(world)
    return ranks.is_main or (save_on_each_node and ranks.is_local_main)


def save(
    obj: object,
    f: str | PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save ``obj`` to ``f`` on the main process (of each node with ``save_on_each_node``).

    With ``safe_serialization``, ``obj`` is a dict of tensors and the file is safetensors; else it is a ``torch.save``
    file, which is a pickle. Files are written atomically. For a link, its target is written. Devices and pipes
    (``/dev/null``) are written to directly.
    """
    if not _is_writer(save_on_each_node):
        return
    if not isinstance(f, (str, os.PathLike)):
        _write_object(obj, f, safe_serialization)
        return
    path = Path(os.path.realpath(f))
    is_device = path.exists() and not path.is_file() and not path.is_dir()
    with open(path, "wb") if is_device else atomic_file(path.parent, path.name) as file:
        _write_object(obj, file, safe_serialization)


def _write_object(obj: object, file: IO[bytes] | DurableFile, safe_serialization: bool) -> None:
    if not safe_serialization:
        write_pickle(obj, file)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
        raise CheckpointError(
            f"safe_serialization=True needs a dict of tensors, this is a {type(obj)}. "
            "Save with safe_serialization=False, or give a state dict."
        )
    write_tensors(file, clean_state_dict_for_safetensors(obj), {"format": "pt"})


def load(f: str | PathLike[str] | IO[bytes], map_location: MAP_LOCATION = None, **kwargs: Any) -> Any:
    """Load what :func:`save` wrote; pickles go through an allow-list unless ``weights_only=False`` is given.

    Raises:
        CheckpointError: the file is broken, or reading it could run code.
    """
    if isinstance(f, (str, os.PathLike)) and str(f).endswith(".safetensors"):
        with open_tensors(f) as tensors:
            return {name: _placed(tensors.owned(name), map_location) for name in tensors.keys()}  # noqa: SIM118
    return read_pickle(f, map_location=map_location, **kwargs)


def _placed(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    return tensor if map_location is None else tensor.to(map_location)


# -------------------------------------------------------------------------------------------------- save hooks
#
# Save hooks get the checkpoint's final folder; the files that they write there are moved to the staging directory. If
# the folder doesn't exist, it is made for the hooks, marked as unfinished, and removed before the commit. If it has a
# checkpoint, that is first moved aside, its manifest before its files, so that hooks can't overwrite it. After a crash
# the next reader restores it (:meth:`CheckpointStore.recover`).


def run_hooks(store: Store, staging: StagingDirectory, hooks: Sequence[Callable[[str], None]]) -> None:
    """Run every hook with the checkpoint's folder, and stage the files that it writes there; a collective.

    For remote storage, hooks get the staging directory, because their files must be on a local disk first.
    """
    if not any(store.ranks.all_gather(bool(hooks))):
        return
    if not isinstance(store, CheckpointStore):
        for hook in hooks:
            hook(str(staging.folder))
        return
    what = f"save {store.folder}"
    hook_folder = _HookFolder(store, staging)
    try:
        with store.ranks.fail_together(what):
            if staging.is_committer:
                hook_folder.prepare()
        with store.ranks.fail_together(what):
            for hook in hooks:
                hook(str(store.folder))
    finally:
        if staging.is_committer:
            hook_folder.close()


@final
class _HookFolder:
    """The folder of a checkpoint while hooks write into it."""

    def __init__(self, store: CheckpointStore, staging: StagingDirectory) -> None:
        self._folder, self._store, self._staging = store.folder, store, staging
        self._is_new = False
        self._aside: Path | None = None
        self._before: dict[str, tuple[int, ...]] | None = None  # until the folder is ready for hooks
        self._folders_before: set[str] = set()

    def prepare(self) -> None:
        """Make the folder, or move the checkpoint in it aside, and note which files are there."""
        if (self._folder / UNFINISHED_NAME).exists() and not (self._folder / MANIFEST_NAME).exists():
            shutil.rmtree(self._folder, ignore_errors=True)  # left by hooks that were killed
        if not self._folder.exists():
            self._folder.mkdir()
            self._is_new = True
            (self._folder / UNFINISHED_NAME).touch()
        elif (manifest := read_manifest(self._folder)) is not None:
            self._set_aside(manifest)
        self._folders_before = {parent for parent, _, _ in os.walk(self._folder)}
        self._before = {name: self._stamp(name) for name in self._names()}

    def _set_aside(self, manifest: Manifest) -> None:
        for name in manifest.files:
            inside(self._folder, name, self._folder / MANIFEST_NAME, is_replaced=True)
        self._aside = self._store.make_beside(self._staging)
        for name in (MANIFEST_NAME, *manifest.files):
            if (self._folder / name).exists():
                (self._aside / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._folder / name, self._aside / name)
        fsync_path(self._aside)

    def close(self) -> None:
        """Move the hooks' files into the staging directory, and restore the folder."""
        if self._before is not None:
            self._collect(self._before)
        if self._is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif self._aside is not None:
            self._store.restore(self._aside)

    def _collect(self, before: dict[str, tuple[int, ...]]) -> None:
        """Move files written by hooks into the staging directory; copy those that existed before."""
        for name in self._names():
            if before.get(name) == self._stamp(name):
                continue
            target = self._staging.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in before:
                shutil.copy2(self._folder / name, target)  # another program's file: it stays, also if the save fails
            else:
                os.replace(self._folder / name, target)
        if self._is_new:
            return
        for parent, _, _ in os.walk(self._folder, topdown=False):
            if parent not in self._folders_before:
                with suppress(OSError):  # not empty
                    os.rmdir(parent)

    def _names(self) -> list[str]:
        """Return the files in the folder, except those of staging directories inside it."""
        own = f".{self._folder.name}.tmp-"
        found = file_names(self._folder) if self._folder.is_dir() else []
        return [name for name in found if name != UNFINISHED_NAME and not name.startswith(own)]

    def _stamp(self, name: str) -> tuple[int, ...]:
        found = (self._folder / name).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
