"""The Settings tree: all groups of options, and the source of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from .. import seams
from .cluster_options import ClusterOptions, KubernetesOptions, RayOptions, SageMakerOptions, SlurmOptions, TpuOptions
from .env import encode
from .fp8 import Fp8Options
from .fsdp import FsdpOptions
from .launch_options import LaunchOptions, MpiOptions
from .option import DEFAULT, Group, OptionGroup, OptionInfo, Source, SourceKind, option_of, options_of
from .parallelism import ContextParallelOptions, ParallelismOptions, SequenceParallelOptions, TensorParallelOptions
from .preemption import PreemptionOptions
from .run_options import ParadigmOptions, RunOptions, SwitchOptions
from .training import AccumulationOptions, DataLoaderOptions, DynamoOptions, ProjectOptions

#: A value with its source, by "group.option".
Layer = Mapping[str, tuple[Any, Source]]


def _rows_of_guests() -> tuple[Group, ...]:
    """Return the rows of guests, in the order of their folders."""
    return tuple(row for guest in seams.guests().values() if guest.settings for row in seams.load(guest.settings))


_OF_GUESTS: Final = {row.name: row for row in _rows_of_guests()}
#: In the order of help, files and exported variables.
ROWS: Final = (
    Group("run", RunOptions, decided=True),
    Group("paradigm", ParadigmOptions, decided=True),
    Group("switches", SwitchOptions),
    Group("launch", LaunchOptions, exported=False, decided=True),
    Group("preemption", PreemptionOptions),
    Group("mpi", MpiOptions, exported=False, host_file="mpirun_hostfile"),
    Group("cluster", ClusterOptions, exported=False),
    Group("slurm", SlurmOptions, exported=False),
    Group("kubernetes", KubernetesOptions, exported=False),
    Group("ray", RayOptions, exported=False),
    Group("compile", DynamoOptions, "", ("dynamo_plugin",), "TorchDynamoPlugin", decided=True),
    Group("data", DataLoaderOptions, "", ("dataloader_config",), "DataLoaderConfiguration"),
    Group("project", ProjectOptions, "", ("project_config",), "ProjectConfiguration", exported=False),
    Group(
        "accumulation", AccumulationOptions, "", ("gradient_accumulation_plugin",), "GradientAccumulationPlugin",
        exported=False,
    ),
    Group("fsdp", FsdpOptions, "paradigm.use_fsdp", ("fsdp_plugin",), "FullyShardedDataParallelPlugin", "FSDP"),
    *_OF_GUESTS.values(),
    Group(
        "parallelism", ParallelismOptions, "paradigm.use_parallelism_config", ("parallelism_config",),
        "ParallelismConfig",
    ),
    Group("tensor", TensorParallelOptions, "paradigm.use_parallelism_config", exported=False),
    Group("context", ContextParallelOptions, "paradigm.use_parallelism_config"),
    Group("sequence", SequenceParallelOptions, "paradigm.use_parallelism_config"),
    Group("fp8", Fp8Options, "run.mixed_precision"),
    Group("tpu", TpuOptions),
    Group("sagemaker", SageMakerOptions, "launch.compute_environment"),
)  # fmt: skip

GROUPS: Final[dict[str, type[OptionGroup]]] = {row.name: row.options for row in ROWS}
#: The option that turns a group on; the other groups are always there.
CONDITIONS: Final = {row.name: row.condition for row in ROWS if row.condition}
#: Of which a run has one at most: by distributed type, the group and the option that turns it on.
ENGINES: Final = {row.paradigm: row for row in sorted(ROWS, key=lambda row: row.paradigm) if row.paradigm}
PARADIGMS: Final = {paradigm: row.condition for paradigm, row in ENGINES.items()}

_Options = TypeVar("_Options", bound=OptionGroup)


def option_at(address: str) -> OptionInfo:
    """Return the declaration of "group.option"; raise KeyError when there is none."""
    group, _, name = address.partition(".")
    return option_of(GROUPS[group], name)


def _unconditional_of_guests() -> dict[str, OptionGroup]:
    return {row.name: row.options() for row in _OF_GUESTS.values() if not row.condition}


@dataclass
class Settings:
    """The settings of a run, complete and without contradictions; groups that are not in use are None."""

    run: RunOptions = field(default_factory=RunOptions)
    paradigm: ParadigmOptions = field(default_factory=ParadigmOptions)
    switches: SwitchOptions = field(default_factory=SwitchOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    preemption: PreemptionOptions = field(default_factory=PreemptionOptions)
    mpi: MpiOptions = field(default_factory=MpiOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    ray: RayOptions = field(default_factory=RayOptions)
    compile: DynamoOptions = field(default_factory=DynamoOptions)
    data: DataLoaderOptions = field(default_factory=DataLoaderOptions)
    project: ProjectOptions = field(default_factory=ProjectOptions)
    accumulation: AccumulationOptions = field(default_factory=AccumulationOptions)
    tpu: TpuOptions = field(default_factory=TpuOptions)
    fsdp: FsdpOptions | None = None
    parallelism: ParallelismOptions | None = None
    tensor: TensorParallelOptions | None = None
    context: ContextParallelOptions | None = None
    sequence: SequenceParallelOptions | None = None
    fp8: Fp8Options | None = None
    sagemaker: SageMakerOptions | None = None
    #: The groups in use that guests declare, by name; each can be read as an attribute too.
    of_guests: dict[str, OptionGroup] = field(default_factory=_unconditional_of_guests)
    #: By section of a file the keys that another program reads, kept as they were.
    foreign: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]], repr=False)
    sources: dict[str, Source] = field(default_factory=dict[str, Source], repr=False, compare=False)

    if not TYPE_CHECKING:  # a name that isn't there stays an error to the type checker; it finds groups by class

        def __getattr__(self, name: str) -> Any:
            if name in _OF_GUESTS:
                return self.of_guests.get(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def find(self, options: type[_Options]) -> _Options | None:
        """Return the group of a guest that ``options`` declares; None if it isn't in use."""
        return next((group for group in self.of_guests.values() if isinstance(group, options)), None)

    def put(self, name: str, options: OptionGroup | None) -> None:
        """Replace the group ``name``; None if it isn't in use any more."""
        if name not in _OF_GUESTS:
            setattr(self, name, options)
        elif options is None:
            self.of_guests.pop(name, None)
        else:
            self.of_guests[name] = options

    @property
    def engine(self) -> str:
        """The name of the group whose engine trains instead of torch; empty without one."""
        return next((row.name for row in ROWS if row.engine and getattr(self, row.name) is not None), "")

    @property
    def host_file(self) -> str | None:
        """The file that lists the hosts of the launch, for whichever launcher; None without one."""
        named: list[str | None] = [getattr(getattr(self, row.name), row.host_file) for row in ROWS if row.host_file]
        return next(filter(None, named), None)

    @classmethod
    def of(cls, groups: Mapping[str, OptionGroup], sources: dict[str, Source]) -> Settings:
        """Return the settings with these groups in use, by name."""
        own: dict[str, Any] = {name: options for name, options in groups.items() if name not in _OF_GUESTS}
        of_guests = {name: options for name, options in groups.items() if name in _OF_GUESTS}
        return cls(**own, of_guests=of_guests, sources=sources)

    def groups(self) -> Iterator[tuple[str, OptionGroup]]:
        """Yield the groups in use, by attribute."""
        for name in GROUPS:
            options = getattr(self, name)
            if options is not None:
                yield name, options

    def take_handlers(self) -> None:
        """Take a ParallelismConfig's handlers as the groups of tensor, context and sequence parallelism."""
        for group, handler in (("tensor", "tp_handler"), ("context", "cp_handler"), ("sequence", "sp_handler")):
            given = getattr(self.parallelism, handler)
            if given is not None:
                setattr(self, group, given)

    def source_of(self, name: str) -> Source:
        """Return the source of the value of "fsdp.cpu_offload"; a bare name means the first group that has it."""
        return self.sources.get(name) or self.sources.get(self.address_of(name), DEFAULT)

    def address_of(self, name: str) -> str:
        """Return the option's full name, "group.option"; raise KeyError when there is none."""
        if "." in name:
            option_at(name)
            return name
        for group, cls in GROUPS.items():
            if any(option.name == name for option in options_of(cls)):
                return f"{group}.{name}"
        raise KeyError(name)

    def option_at(self, name: str) -> OptionInfo:
        """Return the declaration of "group.option"."""
        return option_at(self.address_of(name))

    def was_given(self, name: str) -> bool:
        """Return whether somebody gave the value, so that it is not a default."""
        return self.source_of(name).kind != "default"

    def outranks(self, name: str, other: str) -> bool:
        """Return whether the value of ``name`` comes from a source of higher priority than that of ``other``."""
        ranks = get_args(SourceKind)
        return ranks.index(self.source_of(name).kind) < ranks.index(self.source_of(other).kind)

    def quote(self, name: str) -> str:
        """Format the option for an error message: as it was given, and where."""
        group, _, bare = self.address_of(name).partition(".")
        option, source, options = self.option_at(name), self.source_of(name), getattr(self, group)
        value = option.default if options is None else getattr(options, bare)
        shown = "***" if option.secret else option.write(value) or repr(value)
        return f"`{option.spell(shown, source)}` ({source})"

    def values_of_flags(self) -> dict[str, Any]:
        """Return the values of all given launch flags, and of those that every launch decides.

        A flag of several groups has the value that was given to one in use.
        """
        given: dict[str, Any] = {}
        decided: dict[str, Any] = {}
        decided_groups = {row.name for row in ROWS if row.decided}
        for group, options in self.groups():
            for option in options_of(GROUPS[group]):
                if option.flag is None:
                    continue
                value = getattr(options, option.name)
                if f"{group}.{option.name}" in self.sources:
                    given.setdefault(option.flag, value)
                elif group in decided_groups and (option.key is not None or value is True):
                    decided.setdefault(option.flag, value)
        return {**decided, **given}

    def explain(self) -> Explanation:
        """Return all values in use as rows (group, option, value, source) that print as a table; secrets are masked."""
        rows = Explanation()
        for group, options in self.groups():
            for option in options_of(GROUPS[group]):
                value = getattr(options, option.name)
                masked = "***" if option.secret and value is not None else value
                rows.append((group, option.name, masked, self.source_of(f"{group}.{option.name}")))
        return rows


class Explanation(list[tuple[str, str, Any, Source]]):
    """Rows of (group, option, value, source), printed as a table: what was given first, under the flags' names."""

    def __str__(self) -> str:
        lines = [(_flag_or_address(group, name), str(value), str(source)) for group, name, value, source in self]
        lines = list(dict.fromkeys(lines))  # a flag may belong to several groups
        first, second = (max((len(line[column]) for line in lines), default=0) for column in (0, 1))
        second = min(second, 40)
        lines.sort(key=lambda line: line[2] == str(DEFAULT))
        return "\n".join(f"{name:<{first}}  {value:<{second}}  {source}".rstrip() for name, value, source in lines)


def _flag_or_address(group: str, name: str) -> str:
    option = option_at(f"{group}.{name}")
    return option.flag or option.key or f"{group}.{name}"


def encode_settings(settings: Settings) -> dict[str, str]:
    """Return the variables that hand the settings to a worker; collecting from them gives the same settings."""
    variables: dict[str, str] = {}
    for row in ROWS:
        options = getattr(settings, row.name)
        if row.exported and options is not None:
            variables.update(encode(options))
    return variables


def launch_options_of() -> tuple[OptionInfo, ...]:
    """Return all options with a launch flag, each flag once, in the order of the help."""
    found: dict[str, OptionInfo] = {}
    for cls in GROUPS.values():
        for option in options_of(cls):
            if option.flag is not None:
                found.setdefault(option.flag, option)
    return tuple(found.values())
