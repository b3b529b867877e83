"""The Settings tree: all groups of options, and the source of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final, get_args

from .cluster_options import ClusterOptions, KubernetesOptions, RayOptions, SageMakerOptions, SlurmOptions, TpuOptions
from .deepspeed import DeepSpeedLaunchOptions, DeepSpeedOptions
from .env import encode
from .fp8 import Fp8Options
from .fsdp import FsdpOptions
from .launch_options import LaunchOptions, MpiOptions
from .megatron import MegatronOptions
from .option import DEFAULT, OptionGroup, OptionInfo, Source, SourceKind, option_of, options_of
from .parallelism import ContextParallelOptions, ParallelismOptions, SequenceParallelOptions, TensorParallelOptions
from .preemption import PreemptionOptions
from .run_options import ParadigmOptions, RunOptions, SwitchOptions
from .training import AccumulationOptions, DataLoaderOptions, DynamoOptions, ProjectOptions

#: A value with its source, by "group.option".
Layer = Mapping[str, tuple[Any, Source]]


@final
@dataclass(frozen=True, slots=True)
class Group:
    """One group of options; the tables about groups are derived from these rows.

    Args:
        name: the attribute of Settings.
        options: the class that declares the options.
        condition: the option that turns the group on; empty if the group is always there.
        arguments: the Accelerator's arguments that are the whole group.
        plugin: the class that users construct for them.
        paradigm: the distributed type that the group stands for.
        is_engine: whether the plugin and the strategy come from a guest.
        exported: whether the ranks get its variables; only the launcher needs the others.
        decided: whether every launch decides its values.
    """

    name: str
    options: type[OptionGroup]
    condition: str = ""
    arguments: tuple[str, ...] = ()
    plugin: str = ""
    paradigm: str = ""
    is_engine: bool = False
    exported: bool = True
    decided: bool = False


#: In the order of help, files and exported variables.
ROWS: Final = (
    Group("run", RunOptions, decided=True),
    Group("paradigm", ParadigmOptions, decided=True),
    Group("switches", SwitchOptions),
    Group("launch", LaunchOptions, exported=False, decided=True),
    Group("preemption", PreemptionOptions),
    Group("mpi", MpiOptions, exported=False),
    Group("cluster", ClusterOptions, exported=False),
    Group("slurm", SlurmOptions, exported=False),
    Group("kubernetes", KubernetesOptions, exported=False),
    Group("ray", RayOptions, exported=False),
    Group("compile", DynamoOptions, "", ("dynamo_plugin",), "TorchDynamoPlugin", decided=True),
    Group("data", DataLoaderOptions, "", ("dataloader_config",), "DataLoaderConfiguration", exported=False),
    Group("project", ProjectOptions, "", ("project_config",), "ProjectConfiguration", exported=False),
    Group(
        "accumulation", AccumulationOptions, "", ("gradient_accumulation_plugin",), "GradientAccumulationPlugin",
        exported=False,
    ),
    Group("fsdp", FsdpOptions, "paradigm.use_fsdp", ("fsdp_plugin",), "FullyShardedDataParallelPlugin", "FSDP"),
    Group(
        "deepspeed", DeepSpeedOptions, "paradigm.use_deepspeed", ("deepspeed_plugin", "deepspeed_plugins"),
        "DeepSpeedPlugin", "DEEPSPEED", is_engine=True,
    ),
    Group("deepspeed_launch", DeepSpeedLaunchOptions),
    Group(
        "megatron", MegatronOptions, "paradigm.use_megatron_lm", ("megatron_lm_plugin",),
        "MegatronLMPlugin", "MEGATRON_LM", is_engine=True,
    ),
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
#: Of which a run has one at most: by distributed type, the option that turns it on.
PARADIGMS: Final = {row.paradigm: row.condition for row in sorted(ROWS, key=lambda row: row.paradigm) if row.paradigm}


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
    deepspeed_launch: DeepSpeedLaunchOptions = field(default_factory=DeepSpeedLaunchOptions)
    tpu: TpuOptions = field(default_factory=TpuOptions)
    fsdp: FsdpOptions | None = None
    deepspeed: DeepSpeedOptions | None = None
    megatron: MegatronOptions | None = None
    parallelism: ParallelismOptions | None = None
    tensor: TensorParallelOptions | None = None
    context: ContextParallelOptions | None = None
    sequence: SequenceParallelOptions | None = None
    fp8: Fp8Options | None = None
    sagemaker: SageMakerOptions | None = None
    #: Keys of a DeepSpeed section that are not ours, kept as they were.
    foreign: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    sources: dict[str, Source] = field(default_factory=dict[str, Source], repr=False, compare=False)

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
            group, _, bare = name.partition(".")
            option_of(GROUPS[group], bare)
            return name
        for group, cls in GROUPS.items():
            if any(option.name == name for option in options_of(cls)):
                return f"{group}.{name}"
        raise KeyError(name)

    def option_at(self, name: str) -> OptionInfo:
        """Return the declaration of "group.option"."""
        group, _, bare = self.address_of(name).partition(".")
        return option_of(GROUPS[group], bare)

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

    def value_of(self, option: OptionInfo) -> Any:
        """Return the value of an option from any group; its default if the group is not in use."""
        for group, options in self.groups():
            if option in options_of(GROUPS[group]):
                return getattr(options, option.name)
        return option.default

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
    option = option_of(GROUPS[group], name)
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
