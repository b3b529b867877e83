"""The seams: how guests attach to the core.

A guest is a capability that the core never names: a folder of ``accelerate.guests``, or a package of another
distribution that is an entry point of the group ``accelerate.guests``. Its module holds ``GUEST``, the rows by which it
attaches. Without its folder, the core and all other guests work as before.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol, TypeVar, final

from .errors import SettingError

_GROUP: Final = "accelerate.guests"


@final
@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand of ``accelerate``.

    Args:
        name: what is typed.
        module: of the function ``main(arguments) -> int``, imported when the command runs.
        parser: the function of that module that creates the parser.
        help: one line.
    """

    name: str
    module: str
    parser: str
    help: str


@final
@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """One flag of ``accelerate launch`` that does something around the run, on the launching machine.

    Args:
        flag: ``--name``.
        help: one line.
        begin: ``module:function``, called with the parsed arguments before the launch is planned; it returns a
            function that takes the plan and returns a context, whose value is the plan to run.
    """

    flag: str
    help: str
    begin: str

    @property
    def dest(self) -> str:
        """The name under which argparse stores it."""
        return self.flag[2:].replace("-", "_")


class LoopHook:
    """The base class of what a guest does at the moments of a training loop.

    Methods that a subclass doesn't override are never called. The others are called on every rank, in the thread that
    runs the loop; an exception in one ends the run, as anywhere in the loop.
    """

    def begin_pass(self, loader: object) -> None:
        """Run before the first batch of a pass over a prepared ``loader`` is read."""

    def between_batches(self, loader: object) -> None:
        """Run where the loop has used a batch of ``loader`` and asks for another one.

        A loop without a prepared loader comes here as each of its micro-batches begins, with None.
        """

    def before_backward(self, loss: object, weight: object) -> None:
        """Run before a backward pass; the loss is None where the pass is computed together with the forward.

        Args:
            loss: of the micro-batch, not scaled.
            weight: how many items it sums over; None where it is a mean.
        """

    def after_backward(self, loss: object, weight: object) -> None:
        """Run after a backward pass; see :meth:`before_backward`."""

    def before_step(self, optimizer: object) -> None:
        """Run before a prepared ``optimizer`` steps at the end of an accumulation window."""

    def after_step(self, optimizer: object) -> None:
        """Run after a prepared ``optimizer`` has stepped."""

    def after_clip(self, norm: object) -> None:
        """Run after gradients were clipped; ``norm`` is the one before, on the device."""

    def before_save(self) -> None:
        """Run where all ranks are about to save a checkpoint."""

    def details_of_save(self, alone: bool) -> Mapping[str, object]:
        """Return JSON values by name that the manifest of the next checkpoint is to record.

        Args:
            alone: the other ranks don't save with this one.
        """
        return {}

    def after_save(self, folder: str, seconds: float, details: Mapping[str, object]) -> None:
        """Run after a checkpoint was saved, or copied to be saved; ``details`` are those of whoever asked for it."""

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Run after a checkpoint was loaded whose manifest records ``details``."""

    def free_memory(self) -> None:
        """Run where the Accelerator drops what it has prepared."""

    def asks_to_end(self) -> bool:
        """Return whether the script is to save and end, the same on all ranks (``Accelerator.preempted``)."""
        return False

    def end_run(self) -> None:
        """Run where the script calls ``end_training``."""


Hook = TypeVar("Hook", bound=LoopHook)


@final
class LoopHooks:
    """The hooks of one training loop, as one tuple of methods for each moment; it is empty where no hook asked for it.

    The tuples are made where a hook is added, so that the loop reads one attribute.
    """

    begin_pass: tuple[Callable[[object], None], ...]
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
        """Call ``hook`` at its moments from now on, after the hooks that were added before."""
        self._hooks = (*self._hooks, hook)
        self._list()

    def remove(self, hook: LoopHook) -> None:
        """Call ``hook`` no more."""
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
    """Notices to this process that all ranks shall save and end."""

    def take(self, seconds: float) -> str | None:
        """Wait for a notice that long, and return its reason."""
        ...

    def ignore(self) -> None:
        """Take no more notices, because the ranks end."""
        ...


class Members(ABC):
    """The base class of how ranks agree in a world without a process group, any of whose ranks may be lost.

    A guest makes the object where a process joins such a world (`Guest.members`); `World.members` holds it.
    """

    @property
    @abstractmethod
    def writes_files(self) -> bool:
        """Whether this process writes what one rank writes for all."""

    @abstractmethod
    def wait_for_everyone(self) -> None:
        """Wait until every living rank makes this call."""

    @abstractmethod
    def why_not(self, operation: str) -> str:
        """Return why ``operation``, a collective of a process group, can't run in such a world."""

    @abstractmethod
    def save(self, save: Callable[[], str], *, is_window_open: bool) -> str:
        """Call ``save`` on one rank, and return the checkpoint's folder, its result, on all ranks.

        Args:
            is_window_open: gradients of an accumulation window are to be saved too.
        """

    @abstractmethod
    def prepare_data_loader(
        self,
        dataloader: object,
        arguments: Mapping[str, object],
        data_seed: int | None,
        common: Mapping[str, object],
    ) -> object:
        """Return a prepared loader over the same data.

        Args:
            arguments: those of `prepare_data_loader` that only a process group can follow, by name.
            common: the arguments of every prepared loader.
        """

    @abstractmethod
    def end_on(self, start_notices: Callable[[], NoticeSource], exit_code: int) -> None:
        """Let all ranks save, and end with ``exit_code``, after a notice to this process.

        Args:
            start_notices: begins to listen for notices; called once in a process.
        """


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """One parallelism strategy, imported when it is chosen.

    Args:
        module: of the class, an absolute name.
        name: of the class.
        suits: ``(settings, world) -> bool``, whether the strategy trains such a run.
        is_instead_of_others: it trains the run also where others suit; what they are asked for, it refuses.
    """

    module: str
    name: str
    suits: Callable[..., bool]
    is_instead_of_others: bool = False

    def load(self) -> Any:
        """Import and return the class."""
        return load(f"{self.module}:{self.name}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """The rows by which one guest attaches; modules are absolute names, imported when they are needed.

    Args:
        commands: subcommands of ``accelerate``.
        launch_flags: flags of ``accelerate launch``.
        engines: launch engines, each as ``module:class``; they are asked before the core's own.
        runs: functions, each as ``module:function``, that are called once with each Accelerator as soon as it is
            constructed, and with what it was asked for under the name of the guest's folder (None: nothing). They
            return a :class:`LoopHook`, or None.
        functions: by names, functions that methods of the Accelerator call, each as ``module:function``.
        strategies: parallelism strategies.
        members: by the environment variables with which a launcher asks for it, functions, each as
            ``module:function``, called with the rank of a process that joins such a world. They return its
            :class:`Members`.
        plugin: of an engine that trains in the core's place, ``module:function``, called with the settings, the
            Accelerator's arguments and the state of the first Accelerator. It returns the plugin, or several by name,
            and the one in use, in the run's precision. The engine's group of settings has the name of the folder.
    """

    commands: tuple[Command, ...] = ()
    launch_flags: tuple[LaunchFlag, ...] = ()
    engines: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    functions: Mapping[str, str] = field(default_factory=dict[str, str])
    strategies: tuple[Candidate, ...] = ()
    members: Mapping[str, str] = field(default_factory=dict[str, str])
    plugin: str = ""


@cache
def guests() -> dict[str, Guest]:
    """Return the guests of this package, by the names of their folders."""
    folder = importlib.import_module("accelerate.guests")
    names = sorted(found.name for found in pkgutil.iter_modules(folder.__path__) if found.ispkg)
    return {name: importlib.import_module(f"{folder.__name__}.{name}").GUEST for name in names}


def launch_flags() -> tuple[LaunchFlag, ...]:
    """Return the flags that guests add to ``accelerate launch``."""
    return tuple(flag for guest in guests().values() for flag in guest.launch_flags)


def loop_hooks(run: object, asked: Mapping[str, object]) -> Iterator[LoopHook]:
    """Yield the hooks by which guests take part in the loop of ``run``, an Accelerator.

    Args:
        asked: by the names of guests' folders, what the run was asked for; None: nothing.

    Raises:
        SettingError: the run was asked for what a guest does that isn't there.
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
    """Return a function of the guest ``name``, for what was ``asked``.

    Raises:
        SettingError: the guest isn't there.
    """
    check_is_there(name, asked)
    return load(guests()[name].functions[function])


def check_is_there(name: str, asked: str) -> None:
    """Raise unless the guest ``name`` is there, which is needed for what was ``asked``.

    Raises:
        SettingError: its folder isn't there.
    """
    if name not in guests():
        raise SettingError(
            f"{asked} needs the folder accelerate/guests/{name}, which this installation doesn't have. Leave it out, "
            "or install all of accelerate."
        )


def strategies() -> tuple[Candidate, ...]:
    """Return the strategies that guests bring, first those that are chosen instead of others."""
    found = [candidate for guest in guests().values() for candidate in guest.strategies]
    return tuple(sorted(found, key=lambda candidate: not candidate.is_instead_of_others))


def members() -> dict[str, str]:
    """Return the functions that make the :class:`Members` of a world, by the variables that ask for them."""
    return {variable: target for guest in guests().values() for variable, target in guest.members.items()}


def guests_of_others() -> Iterator[Guest]:
    """Yield the guests of other distributions, found by their entry points."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=_GROUP):
        yield entry.load()


def load(target: str) -> Any:
    """Import ``module:attribute`` and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
