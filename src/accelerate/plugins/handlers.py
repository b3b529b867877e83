"""The base of the option classes, and those of most parts of a run.

They are for autocast, process groups, profiler, accumulation, data loaders, project, compiler and checkpointing.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import torch
from torch.profiler import ProfilerActivity

from ..callers import muted
from ..errors import SettingError
from ..names import PROFILE_PATTERN_NAME
from ..optional import require
from ..settings import env
from ..settings.labels import DynamoBackend
from ..settings.option import OptionGroup, Source, options_of
from ..settings.training import (
    AccumulationOptions,
    AutocastOptions,
    DataLoaderOptions,
    DynamoOptions,
    GradScalerOptions,
    ProcessGroupOptions,
    ProfileOptions,
    ProjectOptions,
    RecomputeOptions,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class KwargsHandler:
    """The base of option classes whose fields are keyword arguments of a torch function or class."""

    #: Our own fields, which are no arguments of the function in torch.
    own_fields: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments by name, as copies, so that changes don't affect the handler."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in self.own_fields}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from the defaults, without environment variables."""
        plain = _plain(type(self))
        return {name: value for name, value in self.to_dict().items() if plain.get(name) != value}


@functools.cache
def _plain(cls: type[KwargsHandler]) -> Mapping[str, object]:
    """Return the default arguments of a handler of this class, without environment variables."""
    with env.hidden(), muted():
        return cls().to_dict()


def canonicalize(options: OptionGroup, *names: str) -> None:
    """Convert the values of the named fields (all fields if none are named) to their canonical spelling.

    Raises:
        SettingError: a value is invalid for its option.
    """
    for info in options_of(type(options)):
        if not names or info.name in names:
            value = getattr(options, info.name)
            if value is not info.default:  # defaults are declared in canonical form
                setattr(options, info.name, info.read(value, argument(options, info.name)))


def argument(options: OptionGroup, name: str) -> Source:
    """Return the argument that sets the field ``name``, as error messages show it."""
    return Source("argument", f"{type(options).__name__}({name}=...)")


class LaunchedOptions(OptionGroup):
    """The base of option classes that fill unset fields from the launcher's environment variables."""

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
        """Check the options and convert them to their final types; ``given`` are the constructor's arguments."""


# --------------------------------------------------------------------------------------------------
# Autocast and gradient scaler


@dataclass(repr=False, eq=False)
class AutocastKwargs(AutocastOptions, KwargsHandler):
    """Arguments of ``torch.autocast``, and the dtype of a prepared model's outputs.

    With ``output_dtype=None``, outputs keep the dtype in which they were computed.
    """

    own_fields: ClassVar[frozenset[str]] = frozenset({"output_dtype"})

    output_dtype: torch.dtype | None = field(default=torch.float32)


@dataclass(repr=False, eq=False)
class GradScalerKwargs(GradScalerOptions, KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, which scales the loss to prevent underflow of fp16 gradients."""


# --------------------------------------------------------------------------------------------------
# Process group

_DEFAULT_BACKEND = "nccl"
_TIMEOUT = timedelta(seconds=1800)
_TIMEOUT_OF_DEFAULT_BACKEND = timedelta(seconds=600)


@dataclass(repr=False, eq=False)
class InitProcessGroupKwargs(ProcessGroupOptions, KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    The default ``timeout`` of a collective is torch's: 600 s on the default backend and 1800 s on any other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout is None:
            self.timeout: timedelta | None = (
                _TIMEOUT_OF_DEFAULT_BACKEND if self.backend == _DEFAULT_BACKEND else _TIMEOUT
            )


# --------------------------------------------------------------------------------------------------
# Profiler


@dataclass(repr=False, eq=False)
class ProfileKwargs(ProfileOptions, KwargsHandler):
    """Arguments of ``torch.profiler.profile``, with activities by name and the schedule as a dict.

    ``schedule_option`` takes ``wait``, ``warmup``, ``active``, ``repeat`` and ``skip_first``. With
    ``output_trace_dir`` each process writes its Chrome trace there when the profile ends.
    """

    def _get_profiler_activity(self, activity: str) -> ProfilerActivity:
        """Return the activity called ``name`` in the installed torch."""
        # The activities of this torch build by name, so that a new device needs no line here.
        known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        if activity not in known:
            raise SettingError(
                f"ProfileKwargs(activities=[{activity!r}]): this torch records none of that name. "
                f"It knows: {', '.join(sorted(known))}."
            )
        return known[activity]

    def build(self) -> torch.profiler.profile:
        """Return a new profiler that isn't started yet."""
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
        """Profile the block, and write the trace of this ``rank`` into ``output_trace_dir`` if it is set."""
        with self.build() as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=rank)
            profiler.export_chrome_trace(os.path.join(self.output_trace_dir, name))


# --------------------------------------------------------------------------------------------------
# How many micro-batches make one optimizer step


@dataclass(repr=False, eq=False)
class GradientAccumulationPlugin(AccumulationOptions, KwargsHandler):
    """The number of micro-batches per step, and its effect on schedulers and on the end of a loader."""

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self, "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


# --------------------------------------------------------------------------------------------------
# Prepared data loaders


@dataclass(repr=False, eq=False)
class DataLoaderConfiguration(DataLoaderOptions):
    """The options of prepared loaders: how they form, split, pad, order and move batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self)
        if self.use_stateful_dataloader:
            require("torchdata", purpose="DataLoaderConfiguration(use_stateful_dataloader=True)", at_least="0.8.0")
        if self.token_budget is None and (self.length_of is not None or self.packed):
            raise SettingError(
                "DataLoaderConfiguration(length_of=..., packed=...) say what fills a batch of token_budget tokens, and "
                "token_budget isn't given. Give it, or leave them out."
            )
        if self.token_budget is not None and self.length_of is None:
            raise SettingError(
                f"DataLoaderConfiguration(token_budget={self.token_budget}) needs the lengths of the samples: give "
                "length_of, a function of a sample, the lengths of all samples or the name of a column of them."
            )


# --------------------------------------------------------------------------------------------------
# Where a run keeps its files


@dataclass(repr=False, eq=False)
class ProjectConfiguration(ProjectOptions):
    """The project's folder, its logging folder, and how its checkpoints are named, limited and written.

    ``checkpoint_format="safe"`` writes files without pickle; ``"classic"`` writes the file names and layout that older
    tools expect. Both can be loaded.

    The newest ``total_limit`` numbered checkpoints are kept (None: all). So are every ``keep_every``-th one, the
    ``keep_best`` ones by ``best_metric``, and those saved with ``pin=True``.

    ``save_state`` compares replicas; ``compare_replicas`` says whether it warns or raises if they differ.
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
        """Set the project's folder, and the logging folder unless one was given."""
        self.project_dir: str | None = cast("str | None", project_dir)
        if self.logging_dir is None:
            self.logging_dir: str | None = self.project_dir


# --------------------------------------------------------------------------------------------------
# torch.compile


@dataclass(repr=False, eq=False)
class TorchDynamoPlugin(LaunchedOptions, DynamoOptions, KwargsHandler):
    """Arguments of ``torch.compile``, and whether to compile whole models or only repeated blocks.

    The default, ``backend="no"``, disables compilation.
    """

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "backend")
        self.backend: str = DynamoBackend(self.backend)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, with the backend in torch's spelling."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for ``torch.compile`` that differ from its defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs


# --------------------------------------------------------------------------------------------------
# Activation checkpointing

#: (torch's SelectiveCheckpointContext, operator, its arguments) -> torch's CheckpointPolicy for the result.
SavePolicy: TypeAlias = Callable[..., object]


@dataclass(repr=False, eq=False)
class ActivationCheckpointing(RecomputeOptions, KwargsHandler):
    """Activation checkpointing: the modules to recompute in the backward pass, and the results to keep.

    ``modules`` is a regular expression for full module names, or a list of modules, classes and class names; None
    chooses FSDP's wrap units, or the repeated blocks of the model. ``save_ops`` lists operators whose results are kept
    ("mm", "sdpa", "conv", names like "aten.mm", or operators), or is a policy function for torch's
    ``create_selective_checkpoint_contexts``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self, "offload")
        if isinstance(self.save_ops, str):
            raise SettingError(
                f"ActivationCheckpointing(save_ops={self.save_ops!r}): give a list of names, as ({self.save_ops!r},)."
            )
        if isinstance(self.modules, (list, tuple, set)) and not self.modules:
            raise SettingError("ActivationCheckpointing(modules=[]) chooses no module: leave it out, or name some.")
