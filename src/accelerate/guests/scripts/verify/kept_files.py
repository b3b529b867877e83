"""A mirror of the disk for the files written during a run: the user's own files don't change.

The mirror begins as a link to the root of the disk. Where something is written, each folder above it becomes a folder
of the mirror, with a link to each entry of the original. So a link stands for what hasn't changed, and is read in its
place. All processes of a run share the mirror, and see what another has written.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from ....accelerator import Accelerator
from ....settings.env import read
from .wrapping import Call, with_hook

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

#: What a function does with a path: the name of the method of `_Mirror` that says where.
_READ, _LINK, _ENTRY, _REMOVE, _CHANGE, _NEW = "read", "link", "entry", "remove", "change", "new"

#: Functions by module: their names, and what they do with each argument, in order.
REDIRECTED: Final[tuple[tuple[object, str, dict[str, str]], ...]] = (
    (os, "stat listdir access chdir listxattr getxattr statvfs", {"path": _READ}),
    (os, "lstat readlink", {"path": _LINK}),
    (os, "mkdir mkfifo mknod", {"path": _ENTRY}),
    (os, "remove unlink rmdir", {"path": _REMOVE}),
    (os, "chmod chown lchown utime truncate setxattr removexattr", {"path": _CHANGE}),
    (os, "rename replace", {"src": _REMOVE, "dst": _ENTRY}),
    (os, "link", {"src": _CHANGE, "dst": _ENTRY}),
    ("torch", "save", {"obj": "", "f": _NEW}),
    ("torch", "load", {"f": _READ}),
    ("torch.jit", "save", {"m": "", "f": _NEW}),
    ("torch.jit", "load", {"f": _READ}),
    ("safetensors.torch", "save_file", {"tensors": "", "filename": _NEW}),
    ("safetensors.torch", "load_file", {"filename": _READ}),
    ("safetensors.torch", "safe_open", {"filename": _READ}),
    (Accelerator, "save_state", {"self": "", "output_dir": _CHANGE}),
    (Accelerator, "load_state", {"self": "", "input_dir": _READ}),
)
_CACHES: Final = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")
_SYSTEM: Final = ("/dev", "/proc", "/sys")


def keep_files(folder: Path) -> None:
    """Keep what this process writes in `folder`; temporary files, caches and the folder beside it stay as they are."""
    caches = [os.path.expanduser("~/.cache"), *filter(None, map(read, _CACHES))]
    mirror = _Mirror(str(folder / "files"), [str(folder.parent), *_SYSTEM, *caches])
    sys.dont_write_bytecode = True
    hooks: list[tuple[Any, str, Call]] = [
        (builtins, "open", mirror.opening),
        (os, "open", mirror.opening_descriptor),
        (os, "scandir", mirror.scanning),
        (os, "symlink", mirror.symlinking),
        (os, "getcwd", lambda call: mirror.shown(call())),
        (shutil, "rmtree", mirror.removing_tree),
    ]
    for owner, names, kinds in REDIRECTED:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(owner) if isinstance(owner, str) else owner
            hooks += [(module, name, partial(mirror.redirecting, kinds)) for name in names.split()]
    replaced: dict[int, Any] = {}
    for owner, name, hook in hooks:
        before = getattr(owner, name, None)
        if before is not None:
            replaced[id(before)] = with_hook(before, hook)
            setattr(owner, name, replaced[id(before)])
    _replace_everywhere(replaced)


def _replace_everywhere(replaced: Mapping[int, object]) -> None:
    """Replace functions, by their identity, wherever a module holds one: `builtins.open` is `io.open` too."""
    for module in [one for key, one in sys.modules.items() if key not in ("posix", "nt")]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
    accessor: object = getattr(pathlib, "_normal_accessor", None)  # of Python 3.10
    for name in dir(accessor):
        if id(getattr(accessor, name)) in replaced:
            setattr(accessor, name, replaced[id(getattr(accessor, name))])


@final
class _Mirror(threading.local):
    """The mirror of the disk at the path `root`; paths in `free` aren't mirrored.

    Its methods for one path expect an absolute one, and return the path to use in its place.
    """

    is_inside = False  # in this thread: what the mirror itself does isn't redirected

    def __init__(self, root: str, free: Sequence[str]) -> None:
        self._root, self._free = root, free
        with contextlib.suppress(FileExistsError):  # another process of this run was first
            os.symlink(os.sep, root)

    def read(self, path: str) -> str:
        """Return where a file or folder is read."""
        place, rest = self._root, path.strip(os.sep).split(os.sep)
        while not os.path.islink(place):
            if not os.path.lexists(place):
                return place if self._was_removed(path) else path
            if not any(rest):
                return place
            place = os.path.join(place, rest.pop(0))
        target = os.path.join(os.readlink(place), *rest)
        return self.read(self.shown(target)) if self._is_own(target) else target

    def link(self, path: str) -> str:
        """Return the place of a link made by the script, or else that of the file."""
        place = os.path.join(self.read(os.path.dirname(path)), os.path.basename(path))
        return place if self._is_own(_target(place)) else self.read(path)

    def entry(self, path: str) -> str:
        """Return the place of a path in the mirror, which stays as it is, in a folder of the mirror."""
        if path == os.sep:
            return self._root
        place = os.path.join(self._folder(os.path.dirname(path)), os.path.basename(path))
        if not os.path.lexists(place) and os.path.lexists(path) and not self._was_removed(path):
            with contextlib.suppress(OSError):  # written by another program since its folder was mirrored
                os.symlink(path, place)
        return place

    def remove(self, path: str) -> str:
        """Return the place of what is to be removed or moved away."""
        place = self.entry(path)
        if not self._is_own(_target(place)) and not os.path.islink(_target(place)):  # else a link is removed
            place = self._folder(path)
        os.makedirs(f"{self._root}.removed", exist_ok=True)
        Path(self._mark(path)).touch()
        return place

    def change(self, path: str, *, keeps: bool = True) -> str:
        """Return the place of a file to be changed: a copy, if the change `keeps` its content."""
        place = self.entry(path)
        target = _target(place)
        if not target:
            return place
        if self._is_own(target):
            return self.change(self.shown(target), keeps=keeps)
        if os.path.isdir(target):
            return self._folder(path)
        if os.path.exists(target) and not os.path.isfile(target):  # a pipe
            return target
        os.unlink(place)
        if keeps and os.path.exists(target):
            shutil.copy2(target, place)
        return place

    def new(self, path: str) -> str:
        """Return the place of a file that is to be written anew."""
        return self.change(path, keeps=False)

    def shown(self, path: str) -> str:
        """Return a path of the mirror as the script knows it; others as they are."""
        return (path[len(self._root) :] or os.sep) if self._is_own(path) else path

    def _is_own(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + os.sep)

    def _folder(self, path: str) -> str:
        """Return the place of a folder, which becomes one of the mirror; a file stays as it is."""
        place = self.entry(path)
        target = _target(place)
        if self._is_own(target):
            return self._folder(self.shown(target))
        if target and os.path.isdir(target):
            with self._lock():
                if os.path.islink(place):
                    fresh = tempfile.mkdtemp(dir=os.path.dirname(self._root))
                    with contextlib.suppress(PermissionError):
                        for name in os.listdir(target):
                            os.symlink(os.path.join(target, name), os.path.join(fresh, name))
                    os.unlink(place)
                    os.rename(fresh, place)
        return place

    def _mark(self, path: str) -> str:
        return os.path.join(f"{self._root}.removed", hashlib.sha256(path.encode(errors="replace")).hexdigest())

    def _was_removed(self, path: str) -> bool:
        return any(os.path.exists(self._mark(str(one))) for one in (path, *Path(path).parents))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with open(f"{self._root}.lock", "w") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- functions that are redirected -----------------------------------------------------------------

    def placed(self, path: object, kind: str) -> object:
        """Return the path to use in place of one that the script gives."""
        if self.is_inside or not isinstance(path, (str, bytes, os.PathLike)) or not os.fspath(path):
            return path
        absolute = self.shown(os.path.abspath(os.fsdecode(path)))
        if self._is_free(absolute):
            return path
        with self._inside():
            direct = self._direct(absolute, follows=kind in (_READ, _CHANGE, _NEW))
            place = direct if self._is_free(direct) else getattr(self, kind)(direct)
        if place == absolute:
            return path
        return os.fsencode(place) if isinstance(os.fspath(path), bytes) else place

    def _is_free(self, path: str) -> bool:
        return any(path == free or path.startswith(free + os.sep) for free in self._free)

    def _direct(self, path: str, *, follows: bool = True, links: int = 40) -> str:
        """Return a path without the links that were there before the run; the last one only if it `follows` them."""
        if os.path.realpath(path) == path or not links:  # a ring of links has no end
            return path
        folder, name = os.path.split(path)
        path = os.path.join(self._direct(folder, links=links - 1), name)
        if not follows or not os.path.islink(path) or self.read(path) != path:
            return path
        to = os.path.join(os.path.dirname(path), os.readlink(path))
        return self._direct(os.path.normpath(to), links=links - 1)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def redirecting(self, kinds: Mapping[str, str], call: Call, *args: object, **kwargs: object) -> object:
        """Call a function with these kinds of paths, redirected."""
        if self.is_inside or any(value is not None for key, value in kwargs.items() if key.endswith("dir_fd")):
            return call(*args, **kwargs)
        given = list(args)
        for number, (name, kind) in enumerate(kinds.items()):
            if kind and number < len(given):
                given[number] = self.placed(given[number], kind)
            elif kind and name in kwargs:
                kwargs[name] = self.placed(kwargs[name], kind)
        found = call(*given, **kwargs)
        return self.shown(found) if isinstance(found, str) else found

    def opening(self, call: Call, file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
        """Call `open`, redirected."""
        if len(args) < 6 and kwargs.get("opener") is None:  # which opens by `os.open`
            kinds = {"x": _ENTRY, "w": _NEW, "a": _CHANGE, "+": _CHANGE}
            file = self.placed(file, next((kind for sign, kind in kinds.items() if sign in mode), _READ))
        return call(file, mode, *args, **kwargs)

    def opening_descriptor(self, call: Call, path: object, flags: int, *args: object, **kwargs: object) -> int:
        """Call `os.open`, redirected."""
        if kwargs.get("dir_fd") is None:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            kind = _ENTRY if flags & os.O_EXCL else _CHANGE if writes else _READ
            path = self.placed(path, kind)
        return call(path, flags, *args, **kwargs)

    def scanning(self, call: Call, path: object = ".") -> object:
        """Call `os.scandir`, redirected: an entry that hasn't changed is the original's."""
        place = self.placed(path, _READ)
        if not isinstance(place, str) or not self._is_own(place):
            return call(place)
        original = self.shown(place)
        with self._inside():
            unchanged = {one.name: one for one in call(original)} if os.path.isdir(original) else {}
            return _Entries(
                unchanged.get(one.name, one) if _target(one.path) == os.path.join(original, one.name) else one
                for one in list(call(place))
            )

    def symlinking(self, call: Call, src: str | bytes, dst: str | bytes, *args: object, **kwargs: object) -> None:
        """Call `os.symlink`, redirected: the link of a script points into the mirror."""
        place = dst if kwargs.get("dir_fd") is not None else self.placed(dst, _ENTRY)
        if place is not dst:
            folder = os.path.dirname(os.path.abspath(os.fsdecode(dst)))
            src = self._root + self.shown(os.path.abspath(os.path.join(folder, os.fsdecode(src))))
        call(src, place, *args, **kwargs)

    def removing_tree(self, call: Call, path: object, *args: object, **kwargs: object) -> None:
        """Call `shutil.rmtree`, redirected."""
        place = self.placed(path, _REMOVE)
        with self._inside():
            call(place, *args, **kwargs)


@final
class _Entries(Iterator[object], contextlib.AbstractContextManager["_Entries"]):
    """The entries of a folder, as `os.scandir` gives them: an iterator that can be closed."""

    def __init__(self, entries: Iterable[object]) -> None:
        self._entries = iter(list(entries))

    def __next__(self) -> object:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more entries."""
        self._entries = iter(())


def _target(place: str) -> str:
    """Return the target of a link; "" for a path without one."""
    return os.readlink(place) if os.path.islink(place) else ""
