"""The base of the option classes, and the options of autocast, process groups, profiler, project and compiler."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.profiler import ProfilerActivity

from ..callers import muted
from ..errors import SettingError
from ..names import PROFILE_PATTERN_NAME
from ..settings import env
from ..settings.labels import DynamoBackend
from ..settings.option import OptionGroup, Source, options_of
from ..settings.training import (
    AccumulationOptions,
    AutocastOptions,
    DynamoOptions,
    GradScalerOptions,
    ProcessGroupOptions,
    ProfileOptions,
    ProjectOptions,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class KwargsHandler:
    """The base of option classes whose fields are keyword arguments of something in torch."""

    #: Fields that are ours: the callee in torch does not know them.
    own_fields: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments by name, as copies: changing them does not change the handler."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in self.own_fields}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from those of a handler made with nothing given and nothing set."""
        plain = _plain(type(self))
        return {name: value for name, value in self.to_dict().items() if plain.get(name) != value}


@functools.cache
def _plain(cls: type[KwargsHandler]) -> Mapping[str, object]:
    """Return the arguments of a handler of this class with nothing given and nothing set in the environment."""
    with env.hidden(), muted():
        return cls().to_dict()


def canonicalize(options: OptionGroup, *names: str) -> None:
    """Replace the values of the named fields (of all, if none are named) by their canonical spelling.

    Raises:
        SettingError: a value is none of those that the option takes.
    """
    for info in options_of(type(options)):
        if not names or info.name in names:
            value = getattr(options, info.name)
            if value is not info.default:  # a default is canonical as it is declared
                setattr(options, info.name, info.read(value, argument(options, info.name)))


def argument(options: OptionGroup, name: str) -> Source:
    """Return the source of the field ``name`` as an argument, as error messages show it."""
    return Source("argument", f"{type(options).__name__}({name}=...)")


class LaunchedOptions(OptionGroup):
    """The base of option classes that take unset values from the launcher's environment."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        env.fill_unset(self)
        self._resolve(given)

    @classmethod
    def of(cls, options: OptionGroup) -> Self:
        """Return collected ``options`` as an object of this class, without reading the environment again."""
        if isinstance(options, cls):
            return options
        made = cls.__new__(cls)
        vars(made).update(vars(options))
        made._resolve({})
        return made

    def _resolve(self, given: Mapping[str, object]) -> None:
        """Check the options and convert them to what is read later; ``given`` are the constructor's arguments."""


# --------------------------------------------------------------------------------------------------
# Autocast and gradient scaler


@dataclass
class AutocastKwargs(AutocastOptions, KwargsHandler):
    """Arguments of ``torch.autocast``, and the precision in which a prepared model hands back its outputs.

    ``output_dtype=None`` leaves outputs in the precision in which they were computed.
    """

    own_fields: ClassVar[frozenset[str]] = frozenset({"output_dtype"})

    output_dtype: torch.dtype | None = field(default=torch.float32)


@dataclass
class GradScalerKwargs(GradScalerOptions, KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, which scales the loss to prevent underflow of fp16 gradients."""


# --------------------------------------------------------------------------------------------------
# Process group

_DEFAULT_BACKEND = "nccl"
_TIMEOUT = timedelta(seconds=1800)
_TIMEOUT_OF_DEFAULT_BACKEND = timedelta(seconds=600)


@dataclass
class InitProcessGroupKwargs(ProcessGroupOptions, KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Without a ``timeout`` a collective may take 600 s on the default backend and 1800 s on any other:
    torch's own rule.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout is None:
            self.timeout: timedelta | None = (
                _TIMEOUT_OF_DEFAULT_BACKEND if self.backend == _DEFAULT_BACKEND else _TIMEOUT
            )


# --------------------------------------------------------------------------------------------------
# Profiler


@dataclass
class ProfileKwargs(ProfileOptions, KwargsHandler):
    """Arguments of ``torch.profiler.profile``, with activities by name and the schedule as a dictionary.

    ``schedule_option`` takes ``wait``, ``warmup``, ``active``, ``repeat`` and ``skip_first``. With
    ``output_trace_dir`` each process writes its Chrome trace there when the profile ends.
    """

    def _get_profiler_activity(self, activity: str) -> ProfilerActivity:
        """Return the activity of this name in the installed torch."""
        # What this torch build can record, whatever it calls it: a new device needs no line here.
        known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        if activity not in known:
            raise SettingError(
                f"ProfileKwargs(activities=[{activity!r}]): this torch records none of that name. "
                f"It knows: {', '.join(sorted(known))}."
            )
        return known[activity]

    def build(self) -> torch.profiler.profile:
        """Return a new profiler, not started yet."""
        activities = None if self.activities is None else [self._get_profiler_activity(one) for one in self.activities]
        schedule = None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    @contextmanager
    def record(self, rank: int) -> Iterator[torch.profiler.profile]:
        """Profile the block, and write the trace of this ``rank`` into ``output_trace_dir`` if there is one."""
        with self.build() as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=rank)
            profiler.export_chrome_trace(os.path.join(self.output_trace_dir, name))


# --------------------------------------------------------------------------------------------------
# How many micro-batches make one optimizer step


@dataclass
class GradientAccumulationPlugin(AccumulationOptions, KwargsHandler):
    """The number of micro-batches per step, and its effect on schedulers and loader ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self, "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


# --------------------------------------------------------------------------------------------------
# Where a run keeps its files


@dataclass
class ProjectConfiguration(ProjectOptions):
    """The project's folder, its logging folder, and how its checkpoints are named, limited and written.

    ``checkpoint_format="safe"`` writes files that hold no pickle; ``"classic"`` the names and layout that
    other tools know from before. Both are read.

    Of numbered checkpoints the newest ``total_limit`` are kept (None: all), and besides: every ``keep_every``-th, the
    ``keep_best`` by ``best_metric``, and those that were saved with ``pin=True``.

    ``save_state`` compares what replicas hold; ``compare_replicas`` says whether it warns or raises if they differ.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(
            self,
            "total_limit",
            "iteration",
            "checkpoint_format",
            "keep_every",
            "best_mode",
            "keep_best",
            "compare_replicas",
        )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and its logging folder unless one was given."""
        self.project_dir: str | None = cast("str | None", project_dir)
        if self.logging_dir is None:
            self.logging_dir: str | None = self.project_dir


# --------------------------------------------------------------------------------------------------
# torch.compile


@dataclass
class TorchDynamoPlugin(LaunchedOptions, DynamoOptions, KwargsHandler):
    """Arguments of ``torch.compile``, and whether a model is compiled whole or by its repeated blocks.

    ``backend="no"``, the default, compiles nothing.
    """

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "backend")
        self.backend: str = DynamoBackend(self.backend)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, the backend spelled as torch spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for ``torch.compile`` that differ from its defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs
