"""The Settings tree: all groups of options, and the source of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .cluster_options import ClusterOptions, KubernetesOptions, RayOptions, SageMakerOptions, SlurmOptions, TpuOptions
from .deepspeed import DeepSpeedLaunchOptions, DeepSpeedOptions
from .env import encode
from .fp8 import Fp8Options
from .fsdp import FsdpOptions
from .launch_options import LaunchOptions, MpiOptions
from .megatron import MegatronOptions
from .option import DEFAULT, OptionGroup, OptionInfo, Source, option_of, options_of
from .parallelism import ContextParallelOptions, ParallelismOptions, SequenceParallelOptions, TensorParallelOptions
from .preemption import PreemptionOptions
from .run_options import ParadigmOptions, RunOptions, SwitchOptions
from .training import AccumulationOptions, DataLoaderOptions, DynamoOptions, ProjectOptions

#: A value with its source, by "group.option".
Layer = Mapping[str, tuple[Any, Source]]

#: The groups by their attribute of Settings, in the order of help, files and exported variables.
GROUPS: Final[dict[str, type[OptionGroup]]] = {
    "run": RunOptions,
    "paradigm": ParadigmOptions,
    "switches": SwitchOptions,
    "launch": LaunchOptions,
    "preemption": PreemptionOptions,
    "mpi": MpiOptions,
    "cluster": ClusterOptions,
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
    "ray": RayOptions,
    "compile": DynamoOptions,
    "data": DataLoaderOptions,
    "project": ProjectOptions,
    "accumulation": AccumulationOptions,
    "fsdp": FsdpOptions,
    "deepspeed": DeepSpeedOptions,
    "deepspeed_launch": DeepSpeedLaunchOptions,
    "megatron": MegatronOptions,
    "parallelism": ParallelismOptions,
    "tensor": TensorParallelOptions,
    "context": ContextParallelOptions,
    "sequence": SequenceParallelOptions,
    "fp8": Fp8Options,
    "tpu": TpuOptions,
    "sagemaker": SageMakerOptions,
}

#: The option that turns a group on; the other groups are always there.
CONDITIONS: Final = {
    "fsdp": "paradigm.use_fsdp",
    "deepspeed": "paradigm.use_deepspeed",
    "megatron": "paradigm.use_megatron_lm",
    "parallelism": "paradigm.use_parallelism_config",
    "tensor": "paradigm.use_parallelism_config",
    "context": "paradigm.use_parallelism_config",
    "sequence": "paradigm.use_parallelism_config",
    "fp8": "run.mixed_precision",
    "sagemaker": "launch.compute_environment",
}

#: Groups whose values are decided by every launch.
DECIDED: Final = ("run", "paradigm", "launch", "compile")
#: Groups that only the launcher needs.
_NOT_EXPORTED: Final = (
    "launch",
    "mpi",
    "cluster",
    "slurm",
    "kubernetes",
    "ray",
    "data",
    "project",
    "accumulation",
    "tensor",
)


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

    def was_given(self, name: str) -> bool:
        """Return whether somebody gave the value, so that it is not a default."""
        return self.source_of(name).kind != "default"

    def quote(self, name: str) -> str:
        """Format the option for an error message: as it was given, and where."""
        group, _, bare = self.address_of(name).partition(".")
        option, source, options = option_of(GROUPS[group], bare), self.source_of(name), getattr(self, group)
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
        for group, options in self.groups():
            for option in options_of(GROUPS[group]):
                if option.flag is None:
                    continue
                value = getattr(options, option.name)
                if f"{group}.{option.name}" in self.sources:
                    given.setdefault(option.flag, value)
                elif group in DECIDED and (option.key is not None or value is True):
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
    for group, options in settings.groups():
        if group not in _NOT_EXPORTED:
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
