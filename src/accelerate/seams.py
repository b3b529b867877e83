"""The seams: how guests extend the core.

A guest is a feature whose name the core doesn't contain: a folder in ``accelerate.guests``, or a package of another
distribution with an entry point in the group ``accelerate.guests``. Its module defines ``GUEST``, which lists what it
adds. Without its folder, the core and all other guests work as before.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from typing import Any, Final, Protocol, TypeVar, final

from .errors import SettingError

_GROUP: Final = "accelerate.guests"


@final
@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of ``accelerate``.

    Args:
        name: the name on the command line.
        parser: ``module:function`` that creates the parser, imported when the command runs. The parser's default for
            ``func`` is called with the parsed arguments, and returns the exit code, or None for 0.
        help: one line.
    """

    name: str
    parser: str
    help: str


@final
@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """A flag of ``accelerate launch`` that wraps the run on the launching machine in a context.

    Args:
        flag: ``--name``.
        help: one line.
        begin: ``module:function``, called with the parsed arguments before the launch is planned. It returns a
            function that takes the plan and returns a context; the context's value is the plan to run.
        value: an optional value as the help shows it, such as ``[=FOLDER]``; empty if the flag takes none.
    """

    flag: str
    help: str
    begin: str
    value: str = ""

    @property
    def dest(self) -> str:
        """The attribute in which argparse stores it."""
        return self.flag[2:].replace("-", "_")


class LoopHook:
    """The base class for a guest's code that runs at certain points of a training loop.

    Only overridden methods are called, on every rank, in the loop's thread. An exception ends the run, as anywhere in
    the loop.
    """

    def begin_pass(self, loader: object) -> None:
        """Run before the first batch of a pass over a prepared ``loader`` is read."""

    def begin_batch(self, loader: object) -> None:
        """Run when a batch of a prepared ``loader`` was read, and before the loop gets it."""

    def end_pass(self, loader: object) -> None:
        """Run when the loop over a prepared ``loader`` has ended, also by ``break`` or an exception."""

    def between_batches(self, loader: object) -> None:
        """Run after a batch of ``loader`` was used and before the next one is read.

        A loop without a prepared loader calls it with None at the start of each micro-batch.
        """

    def before_backward(self, loss: object, weight: object) -> None:
        """Run before a backward pass; the loss is None if forward and backward are computed together.

        Args:
            loss: the unscaled loss of the micro-batch.
            weight: the number of items in the sum; None if the loss is a mean.
        """

    def after_backward(self, loss: object, weight: object) -> None:
        """Run after a backward pass, with the arguments of :meth:`before_backward`."""

    def before_step(self, optimizer: object) -> None:
        """Run before a prepared ``optimizer`` steps at the end of an accumulation window."""

    def after_step(self, optimizer: object) -> None:
        """Run after a prepared ``optimizer`` has stepped."""

    def after_clip(self, norm: object) -> None:
        """Run after gradients were clipped; ``norm`` is the norm before clipping, on the device."""

    def before_save(self) -> None:
        """Run when all ranks are about to save a checkpoint."""

    def details_of_save(self, alone: bool) -> Mapping[str, object]:
        """Return JSON values by name for the manifest of the next checkpoint.

        Args:
            alone: the other ranks don't save with this one.
        """
        return {}

    def after_save(self, folder: str, seconds: float, details: Mapping[str, object]) -> None:
        """Run after a checkpoint was saved, or copied to be saved; ``details`` are those given to the save."""

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Run after a checkpoint was loaded; its manifest has the ``details``."""

    def free_memory(self) -> None:
        """Run when the Accelerator drops its prepared objects."""

    def asks_to_end(self) -> bool:
        """Return whether the script should save and end, the same on all ranks (``Accelerator.preempted``)."""
        return False

    def end_run(self) -> None:
        """Run when the script calls ``end_training``."""


Hook = TypeVar("Hook", bound=LoopHook)


@final
class LoopHooks:
    """The hooks of one training loop, as one tuple of methods for each point; empty if no hook overrides the method.

    Adding a hook creates the tuples, so that the loop only reads one attribute.
    """

    begin_pass: tuple[Callable[[object], None], ...]
    begin_batch: tuple[Callable[[object], None], ...]
    end_pass: tuple[Callable[[object], None], ...]
    between_batches: tuple[Callable[[object], None], ...]
    before_backward: tuple[Callable[[object, object], None], ...]
    after_backward: tuple[Callable[[object, object], None], ...]
    before_step: tuple[Callable[[object], None], ...]
    after_step: tuple[Callable[[object], None], ...]
    after_clip: tuple[Callable[[object], None], ...]
    before_save: tuple[Callable[[], None], ...]
    details_of_save: tuple[Callable[[bool], Mapping[str, object]], ...]
    after_save: tuple[Callable[[str, float, Mapping[str, object]], None], ...]
    after_load: tuple[Callable[[str, Mapping[str, object]], None], ...]
    free_memory: tuple[Callable[[], None], ...]
    asks_to_end: tuple[Callable[[], bool], ...]
    end_run: tuple[Callable[[], None], ...]

    def __init__(self) -> None:
        self._hooks: tuple[LoopHook, ...] = ()
        self._list()

    def add(self, hook: LoopHook) -> None:
        """Call ``hook`` from now on, after the hooks added before."""
        self._hooks = (*self._hooks, hook)
        self._list()

    def remove(self, hook: LoopHook) -> None:
        """Stop calling ``hook``."""
        self._hooks = tuple(one for one in self._hooks if one is not hook)
        self._list()

    def of(self, kind: type[Hook]) -> tuple[Hook, ...]:
        """Return the hooks of one class."""
        return tuple(hook for hook in self._hooks if isinstance(hook, kind))

    def _list(self) -> None:
        for moment in LoopHooks.__annotations__:
            default = getattr(LoopHook, moment)
            asked = (hook for hook in self._hooks if getattr(type(hook), moment) is not default)
            setattr(self, moment, tuple(getattr(hook, moment) for hook in asked))


class NoticeSource(Protocol):
    """A source of notices to this process that all ranks should save and end."""

    def take(self, seconds: float) -> str | None:
        """Wait up to the given time for a notice, and return its reason."""
        ...

    def ignore(self) -> None:
        """Ignore further notices, because the ranks end."""
        ...


class Members(ABC):
    """The base class for the agreement of ranks in a world without a process group, in which any rank may be lost.

    A guest creates the object when a process joins such a world (`Guest.members`); it is stored in `World.members`.
    """

    #: The world of the ranks that hold a copy of the model together with this one; None: each holds one by itself.
    replica: Any = None
    #: Whether replicas train without each other's gradients, and call `exchange_apart`.
    trains_apart: bool = False
    #: Objects with ``state_dict()`` and ``load_state_dict()``, equal on all ranks, whose state a new process gets.
    joint_states: list[Any]

    @property
    @abstractmethod
    def writes_files(self) -> bool:
        """Whether this process writes the files that one rank writes for all."""

    @abstractmethod
    def wait_for_everyone(self) -> None:
        """Wait until every living rank calls this."""

    @abstractmethod
    def why_not(self, operation: str) -> str:
        """Return why ``operation``, which needs a process group, can't run in such a world."""

    @abstractmethod
    def collective(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the collective ``name`` of `accelerate.utils` over the living ranks."""

    @abstractmethod
    def gather_for_metrics(self, data: object, loader: object, as_objects: bool, is_receiver: bool) -> object:
        """Return the joined values that the living ranks computed from the current batch of ``loader``."""

    @abstractmethod
    def exchange_apart(self, operation: str, own: object) -> list[Any]:
        """Return the objects of this rank and its counterparts in the other living replicas, in the order of ranks.

        The samples that a replica has read since the last call count as trained once it has sent its object. A process
        that hasn't reached the others' position yet gets its own object alone.
        """

    @abstractmethod
    def save(self, save: Callable[[], str], *, is_window_open: bool) -> str:
        """Call ``save`` on one rank; return its result, the checkpoint's folder, on all ranks.

        Args:
            is_window_open: the gradients of an unfinished accumulation window have to be saved too.
        """

    @abstractmethod
    def prepare_data_loader(
        self, dataloader: object, arguments: Mapping[str, object], data_seed: int | None, common: Mapping[str, object]
    ) -> object:
        """Return a prepared loader over the same data.

        Args:
            arguments: arguments of `prepare_data_loader` that need a process group, by name.
            common: the arguments of every prepared loader.
        """

    @abstractmethod
    def end_on(self, start_notices: Callable[[], NoticeSource], exit_code: int) -> None:
        """After a notice to this process, make all ranks save and end with ``exit_code``.

        Args:
            start_notices: starts to listen for notices; called once in a process.
        """


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """A parallelism strategy, imported when it is chosen.

    Args:
        module: the absolute name of the class's module.
        name: the name of the class.
        suits: ``(settings, world) -> bool``, whether the strategy can train such a run.
        is_instead_of_others: it takes precedence over other strategies, and raises for their settings.
        takes_shards: it takes over from replicas when ``prepare`` gets a model that is already sharded; it is asked
            after all others.
    """

    module: str
    name: str
    suits: Callable[..., bool]
    is_instead_of_others: bool = False
    takes_shards: bool = False

    def load(self) -> Any:
        """Import and return the class."""
        return load(f"{self.module}:{self.name}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """The features that one guest adds; modules are absolute names, imported when they are needed.

    Args:
        commands: subcommands of ``accelerate``.
        launch_flags: flags of ``accelerate launch``.
        engines: launch engines, each as ``module:class``; they take precedence over the core's own.
        runs: functions, each as ``module:function``, called once with each Accelerator after its construction, and
            with the option of the Accelerator that has the name of the guest's folder (None: not given). They return
            a :class:`LoopHook`, or None.
        functions: functions by name that methods of the Accelerator call, each as ``module:function``.
        strategies: parallelism strategies.
        members: environment variable that a launcher sets -> ``module:function``, called with the rank of a process
            that joins such a world. It returns its :class:`Members`.
        settings: ``module:name`` of the rows of its groups of settings (``accelerate.settings.option.Group``).
            The module is imported with the settings, so it imports neither torch nor an engine.
    """

    commands: tuple[Command, ...] = ()
    launch_flags: tuple[LaunchFlag, ...] = ()
    engines: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    functions: Mapping[str, str] = field(default_factory=dict[str, str])
    strategies: tuple[Candidate, ...] = ()
    members: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: str = ""


@cache
def guests() -> dict[str, Guest]:
    """Return the guests of this package by the names of their folders."""
    folder = importlib.import_module("accelerate.guests")
    names = sorted(found.name for found in pkgutil.iter_modules(folder.__path__) if found.ispkg)
    return {name: importlib.import_module(f"{folder.__name__}.{name}").GUEST for name in names}


def launch_flags() -> tuple[LaunchFlag, ...]:
    """Return the flags that guests add to ``accelerate launch``."""
    return tuple(flag for guest in guests().values() for flag in guest.launch_flags)


def loop_hooks(run: object, asked: Mapping[str, object]) -> Iterator[LoopHook]:
    """Yield the hooks of guests for the loop of ``run``, an Accelerator.

    Args:
        asked: the run's options by the names of guests' folders; None if an option isn't given.

    Raises:
        SettingError: an option is given whose guest is missing.
    """
    for name, value in asked.items():
        if value is not None:
            check_is_there(name, f"Accelerator({name}=...), or the launcher's option of that name,")
    for name, guest in guests().items():
        for target in guest.runs:
            hook = load(target)(run, asked.get(name))
            if hook is not None:
                yield hook


def function_of(name: str, function: str, asked: str) -> Callable[..., Any]:
    """Return a function of the guest ``name``; ``asked`` is the requested feature, for the message.

    Raises:
        SettingError: the guest is missing.
    """
    check_is_there(name, asked)
    return load(guests()[name].functions[function])


def check_is_there(name: str, asked: str) -> None:
    """Raise if the guest ``name``, which the requested feature ``asked`` needs, is missing.

    Raises:
        SettingError: its folder is missing.
    """
    if name not in guests():
        raise SettingError(
            f"{asked} needs the folder accelerate/guests/{name}, which this installation doesn't have. Leave it out, "
            "or install all of accelerate."
        )


def strategies() -> tuple[Candidate, ...]:
    """Return the strategies of guests; first those that take precedence over others."""
    found = [candidate for guest in guests().values() for candidate in guest.strategies]
    return tuple(sorted(found, key=lambda candidate: not candidate.is_instead_of_others))


def members() -> dict[str, str]:
    """Return the functions that create the :class:`Members` of a world, by environment variable."""
    return {variable: target for guest in guests().values() for variable, target in guest.members.items()}


def guests_of_others() -> Iterator[Guest]:
    """Yield the guests of other distributions, found by their entry points."""
    finders = (finder for finder in sys.meta_path if finder is not PathFinder)
    if any(map(_may_have_guests, sys.path)) or any(getattr(finder, "find_distributions", None) for finder in finders):
        from importlib.metadata import entry_points  # its import and its parser take longer than the whole help

        for entry in entry_points(group=_GROUP):
            yield entry.load()


def _may_have_guests(folder: str) -> bool:
    """Return whether a distribution in this entry of `sys.path` names guests; True for an archive, not looked into."""
    if os.path.isfile(folder):
        return True
    for path in glob.iglob(os.path.join(glob.escape(folder), "*-[iI][nN][fF][oO]", "entry_points.txt")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if _GROUP.encode() in file.read():
                return True
    return False


def load(target: str) -> Any:
    """Import ``module:attribute`` and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
