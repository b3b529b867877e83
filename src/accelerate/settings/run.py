"""Collecting the settings of a run: argument > flag > file > environment > default, then checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from ..errors import SettingError
from . import env
from .checks import check
from .document import FOREIGN, WARNINGS, read_layer
from .fp8 import AoOptions, MsampOptions, TeOptions
from .fsdp import HYBRID_IN_VERSION_2, ONLY_VERSION_1, RESHARDS, FsdpOptions
from .option import DEFAULT, OptionGroup, Source, options_of
from .run_options import ParadigmOptions
from .tree import CONDITIONS, ENGINES, GROUPS, PARADIGMS, ROWS, Layer, Settings, option_at

#: Constructor arguments -> options.
ARGUMENTS: Final = {
    "mixed_precision": "run.mixed_precision",
    "cpu": "run.use_cpu",
    "use_cpu": "run.use_cpu",
    "gradient_accumulation_steps": "run.gradient_accumulation_steps",
    "dynamo_backend": "compile.backend",
    "project_dir": "project.project_dir",
    "logging_dir": "project.logging_dir",
    "split_batches": "data.split_batches",
    "dispatch_batches": "data.dispatch_batches",
    "even_batches": "data.even_batches",
    "use_seedable_sampler": "data.use_seedable_sampler",
    **{row.keyword: f"{row.name}.{row.keyword}" for row in ROWS if row.keyword},
}
#: An argument that has its constructor default counts as not given (None always does).
CONSTRUCTOR_DEFAULTS: Final[dict[str, object]] = {"cpu": False, "use_cpu": False, "gradient_accumulation_steps": 1}
#: Constructor arguments that are whole groups.
_OBJECTS: Final = {argument: row for row in ROWS for argument in row.arguments}
#: What a distributed type in a file turns on.
_OPTION_OF_TYPE: Final = {**PARADIGMS, "MULTI_CPU": "run.use_cpu", "XLA": "launch.use_tpu", "TPU": "launch.use_tpu"}


def collect(
    arguments: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    file: Layer | str | Path | None = None,
    warn: bool = True,
) -> Settings:
    """Collect the settings of a run: of each option the value of highest priority, checked against all others.

    `arguments` are those of the Accelerator, `flags` those of `accelerate launch` by argparse name, `file` is a
    configuration file; `environment` is the process's own unless given. With flags or a file the settings are
    those of a launch, which has some defaults of its own. What was given and has no effect is named in one warning,
    unless ``warn`` is False. Raises SettingError.
    """
    environ = env.snapshot() if environment is None else environment
    if isinstance(file, (str, Path)):
        file = read_layer(file)
    given = _objects(arguments)
    layers = [
        _argument_layer(arguments, given),
        _flag_layer(flags or {}),
        _file_layer(file or {}, flags or {}),
        _environment_layer(environ),
    ]
    launching = flags is not None or file is not None
    _choose_paradigm(layers)
    settings = _build(layers, environ, given, launching)
    settings.foreign = dict((file or {}).get(FOREIGN, ({}, DEFAULT))[0])
    _set_dependent_values(settings, given, launching)
    unused = [*cast("list[str]", (file or {}).get(WARNINGS, ((), DEFAULT))[0]), *_unused_options(settings, layers)]
    converted = ""
    if settings.fsdp is not None and "fsdp" not in given:  # an object that the caller built has been checked
        unused += _unused_in_fsdp(settings, settings.fsdp)
        converted, overruled = _convert_sharding(settings, settings.fsdp)
        unused += overruled
    if converted and warn:
        warnings.warn(converted, stacklevel=2)
    if unused and warn:
        warnings.warn(f"Given without effect in this run: {'; '.join(unused)}. Remove what isn't meant.", stacklevel=2)
    _check_arguments(arguments, settings)
    check(settings)
    return settings


# ------------------------------------------------------------------------------------------------ the four layers


def _objects(arguments: Mapping[str, object]) -> dict[str, tuple[OptionGroup, str]]:
    """Return the arguments that are whole groups, by group, with the argument's name."""
    found: dict[str, tuple[OptionGroup, str]] = {}
    for argument, row in _OBJECTS.items():
        value = arguments.get(argument)
        if isinstance(value, Mapping):  # several plugins by name: the first is the active one
            value = next(iter(cast("Mapping[str, object]", value).values()), None)
        if value is None:
            continue
        if not isinstance(value, row.options):
            raise TypeError(
                f"`{argument}` must be a {row.plugin} object, not {type(value).__name__}: {value!r}. "
                f"Give {row.plugin}(...)."
            )
        found[row.name] = (value, argument)
    return found


def _argument_layer(arguments: Mapping[str, object], given: Mapping[str, tuple[OptionGroup, str]]) -> Layer:
    layer: dict[str, tuple[Any, Source]] = {}
    for argument, address in ARGUMENTS.items():
        value = arguments.get(argument)
        if value is None or (argument in CONSTRUCTOR_DEFAULTS and value == CONSTRUCTOR_DEFAULTS[argument]):
            continue
        source = Source("argument", argument)
        layer[address] = (option_at(address).read(value, source), source)
    if arguments.get("fp16"):
        layer.setdefault("run.mixed_precision", ("fp16", Source("argument", "fp16")))
    for group, (_, argument) in given.items():
        condition = CONDITIONS.get(group, "")
        if condition.startswith("paradigm."):
            layer[condition] = (True, Source("argument", argument))
    plugin = given.get("accumulation")
    if plugin is not None and getattr(plugin[0], "num_steps", None) is not None:
        steps = cast("Any", plugin[0]).num_steps
        layer.setdefault("run.gradient_accumulation_steps", (steps, Source("argument", plugin[1])))
    return layer


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    layer: dict[str, tuple[Any, Source]] = {}
    for group, cls in GROUPS.items() if flags else ():
        for option in options_of(cls):
            if option.dest is None:
                continue
            raw = flags.get(option.dest)
            if raw is None or (option.switch and raw is False and option.off_flag is None):
                continue
            source = Source("flag", option.flag or "")
            value = option.read(raw, source)
            if value is not None:
                layer[f"{group}.{option.name}"] = (value, source)
    if flags.get("fp16"):
        layer.setdefault("run.mixed_precision", ("fp16", Source("flag", "--fp16")))
    return layer


def _file_layer(file: Layer, flags: Mapping[str, object]) -> Layer:
    """Return the file's values, with what its distributed_type implies, unless flags choose other hardware.

    `--cpu` takes FSDP to the CPU; the engines that choose their devices themselves are left out.
    """
    layer = dict(file)
    kind, source = layer.get("launch.distributed_type", (None, DEFAULT))
    if flags.get("multi_gpu") or flags.get("tpu"):
        layer.pop("run.use_cpu", None)
        return layer
    if kind is None or (flags.get("cpu") and kind in ENGINES and ENGINES[kind].engine):
        return layer
    address = _OPTION_OF_TYPE.get(kind)
    if address is None and kind.startswith("MULTI_"):
        address = "launch.multi_gpu"
    elif address is None and kind != "NO":
        raise SettingError(
            f"`distributed_type: {kind}` ({source}): this installation doesn't have the engine. Install all of "
            "accelerate, or choose another type."
        )
    if address is not None and not (address == "launch.multi_gpu" and flags.get("cpu")):
        layer.setdefault(address, (True, source))
    has_parallelism = [source for name, (_, source) in layer.items() if name.startswith("parallelism.")]
    if has_parallelism:
        layer.setdefault("paradigm.use_parallelism_config", (True, has_parallelism[0]))
    return layer


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    """Decode the groups that are always present; a bad value in an unused group does no harm."""
    layer: dict[str, tuple[Any, Source]] = {}
    for group, cls in GROUPS.items():
        if group not in CONDITIONS:
            for name, found in env.decode_with_sources(cls, environ).items():
                layer[f"{group}.{name}"] = found
    return layer


def _choose_paradigm(layers: list[Layer]) -> None:
    """Drop the engine options of all layers but the one of highest priority that names an engine."""
    chosen: str | None = None
    for position, layer in enumerate(layers):
        named = [address for address in PARADIGMS.values() if layer.get(address, (False,))[0]]
        if len(named) > 1 and chosen is None:
            spelled = " and ".join(f"`{address.partition('.')[2]}` ({layer[address][1]})" for address in named)
            raise SettingError(f"{spelled} exclude each other: one run has one engine. Keep one of them.")
        if chosen is not None:
            layers[position] = {name: value for name, value in layer.items() if name not in PARADIGMS.values()}
        elif named:
            chosen = named[0]


# --------------------------------------------------------------------------------------------------------- groups


def _build(
    layers: list[Layer], environ: Mapping[str, str], given: Mapping[str, tuple[OptionGroup, str]], launching: bool
) -> Settings:
    """Create the groups in use, each option with its value of highest priority; an object that was given is kept."""
    values = {address: found for layer in reversed(layers) for address, found in layer.items()}
    groups: dict[str, OptionGroup] = {}
    sources: dict[str, Source] = {}
    for name, cls in GROUPS.items():
        if name in given:
            groups[name], argument = given[name]
            source = Source("argument", argument)
            sources.update({f"{name}.{option.name}": source for option in options_of(cls)})
            continue
        own: dict[str, tuple[Any, Source]] = {}
        if name in CONDITIONS:
            if not _is_on(name, groups):
                continue
            own = env.decode_with_sources(cls, environ)
        options: dict[str, Any] = {}
        for option in options_of(cls):
            address = f"{name}.{option.name}"
            found = values.get(address) or own.get(option.name)
            if found is not None:
                options[option.name], sources[address] = found
            elif launching and option.launch_default is not ...:
                options[option.name] = option.launch_default
        groups[name] = cls(**options)
    return Settings.of(groups, sources)


def _is_on(name: str, groups: Mapping[str, OptionGroup]) -> bool:
    """Return whether the options that come before the conditional group `name` ask for it."""
    group, _, option = CONDITIONS[name].partition(".")
    value: object = getattr(groups[group], option)
    if name == "fp8":
        return value == "fp8"
    if name == "sagemaker":
        return value == "AMAZON_SAGEMAKER" or cast("ParadigmOptions", groups["paradigm"]).use_sagemaker
    return bool(value)


def _set_dependent_values(settings: Settings, given: Mapping[str, tuple[OptionGroup, str]], launching: bool) -> None:
    """Set the values that follow from several others together."""
    if launching:
        _set_distributed_type(settings)
    for row in ROWS:
        if row.keys_of_file and getattr(settings, row.name) is None:
            group, _, option = row.keys_of_file.partition(".")
            setattr(getattr(settings, group), option, None)
    if "accumulation" not in given:
        settings.accumulation.num_steps = settings.run.gradient_accumulation_steps
    if settings.parallelism is not None:
        settings.take_handlers()


def _set_distributed_type(settings: Settings) -> None:
    """Set the launch's distributed_type according to its engine and hardware."""
    launch, kind = settings.launch, settings.launch.distributed_type
    on = (label for label, option in PARADIGMS.items() if getattr(settings.paradigm, option.partition(".")[2]))
    chosen = next(on, None)
    if chosen is not None:
        address = PARADIGMS[chosen]
    elif launch.use_tpu:
        chosen, address = "XLA", "launch.use_tpu"
    elif launch.multi_gpu:
        is_named = kind is not None and kind.startswith("MULTI_") and kind != "MULTI_CPU"
        chosen, address = kind if is_named else "MULTI_GPU", "launch.multi_gpu"
    elif settings.run.use_cpu and (kind == "MULTI_CPU" or (launch.num_processes or 1) > 1):
        chosen, address = "MULTI_CPU", "run.use_cpu"
    else:
        chosen, address = ("NO" if settings.run.use_cpu else kind), "launch.distributed_type"
    if chosen != kind:
        launch.distributed_type = chosen
        settings.sources["launch.distributed_type"] = settings.source_of(address)
    if chosen == "NO" and launch.num_processes is None:
        launch.num_processes = 1


def _convert_sharding(settings: Settings, fsdp: FsdpOptions) -> tuple[str, list[str]]:
    """Give the chosen version its own name of what is sharded, and reset the other version's name.

    The value from the source of higher priority counts; of equal sources, the version's own. Returns a remark that a
    strategy was converted for version 2 ("" if none), and descriptions of overruled values.
    """
    is_version_2 = fsdp.fsdp_version == 2
    own, other = "sharding_strategy", "reshard_after_forward"
    if is_version_2:
        own, other = other, own
    given: Any = getattr(fsdp, other)
    if not settings.was_given(f"fsdp.{other}"):
        given = None  # the launcher's own default for the other version
    is_overruled = settings.was_given(f"fsdp.{own}") and not settings.outranks(f"fsdp.{other}", f"fsdp.{own}")
    if is_version_2 and given == "NO_SHARD" and not is_overruled:
        return "", []  # there is no equal: refused by the checks
    quoted = "" if given is None else settings.quote(f"fsdp.{other}")
    is_launchers = _is_exported_default(settings, other)
    setattr(fsdp, other, None)
    if given is None:
        return "", []
    if is_version_2:
        meant: Any = RESHARDS.get(given)
    else:
        meant = given if isinstance(given, str) else "FULL_SHARD" if given else "SHARD_GRAD_OP"
    is_hybrid = is_version_2 and given.startswith("HYBRID") and not _has_copies(settings)
    if is_overruled:
        if is_launchers or (meant == getattr(fsdp, own) and not is_hybrid):
            return "", []
        return "", [f"{quoted}: version {fsdp.fsdp_version} reads {settings.quote(f'fsdp.{own}')}"]
    differs = settings.was_given(f"fsdp.{own}") and getattr(fsdp, own) != meant
    overruled = settings.quote(f"fsdp.{own}") if differs and not _is_exported_default(settings, own) else ""
    setattr(fsdp, own, meant)
    settings.sources[f"fsdp.{own}"] = settings.source_of(f"fsdp.{other}")
    if not is_version_2 or is_launchers:
        return "", [f"{overruled}: {quoted} comes before it"] if overruled else []
    word, before = ("true" if meant else "false"), (f", which comes before {overruled}" if overruled else "")
    hint = f" {HYBRID_IN_VERSION_2}." if is_hybrid else ""
    remark = f"{quoted} is a name of version 1. In version 2 it is `fsdp_reshard_after_forward: {word}`{before}.{hint}"
    return remark, []


def _is_exported_default(settings: Settings, name: str) -> bool:
    """Return whether the environment has the FSDP option as launchers export it for both versions."""
    value = getattr(settings.fsdp, name)
    address = f"fsdp.{name}"
    return settings.source_of(address).kind == "environment" and value == settings.option_at(address).launched


def _has_copies(settings: Settings) -> bool:
    """Return whether the mesh has several copies of the shards, as a hybrid strategy asks for."""
    return settings.parallelism is not None and settings.parallelism.dp_replicate_size > 1


def _unused_options(settings: Settings, layers: list[Layer]) -> list[str]:
    """Describe options given to `accelerate launch` for an unused engine."""
    _, flags, file, _ = layers
    unused: dict[str, list[str]] = {}
    for address, (_, source) in (*flags.items(), *file.items()):
        group = address.partition(".")[0]
        if group not in GROUPS or _is_used(group, settings) or group == "sagemaker":
            continue
        option = option_at(address)
        if option.key is None and option.flag is None:
            continue  # derived from the file, not written in it
        shared = source.kind == "flag" and any(
            _is_used(other, settings) and _has_flag(other, source.where) for other in GROUPS if other != group
        )
        if not shared:
            location = f" ({source.where})" if source.kind == "file" else ""
            unused.setdefault(_engine_of(group), []).append(f"`{option.spelling(source)}`{location}")
    remarks = [
        f"{', '.join(names)}: {GROUPS[group].option_group.title} is not used ({_how_to_turn_on(group)})"
        for group, names in unused.items()
    ]
    launch = settings.launch
    on_tpu = launch.use_tpu or launch.distributed_type in ("TPU", "XLA")
    of_tpu = [f"`{source.where}`" for address, (value, source) in flags.items() if address.startswith("tpu.") and value]
    if of_tpu and not on_tpu:
        remarks.append(f"{', '.join(of_tpu)}: no TPU is used (it is turned on by `--tpu`)")
    names_devices = (launch.gpu_ids or "all").strip().lower() != "all"
    if names_devices and (settings.run.use_cpu or launch.distributed_type == "MULTI_CPU"):
        remarks.append(f"{settings.quote('launch.gpu_ids')}: the run is on the CPU")
    of_file = [settings.source_of(f"launch.{name}").kind == "file" for name in ("distributed_type", "num_processes")]
    if launch.distributed_type == "NO" and all(of_file) and (launch.num_processes or 1) > 1:
        remarks.append(
            f"{settings.quote('launch.num_processes')}: {settings.quote('launch.distributed_type')} starts one process "
            "(several are MULTI_CPU, MULTI_GPU or the like)"
        )
        launch.num_processes = 1
    return remarks


def _unused_in_fsdp(settings: Settings, fsdp: FsdpOptions) -> list[str]:
    """Describe FSDP options without effect beside the others; reset those that the chosen version doesn't have."""
    found: list[str] = []
    for name, why in ONLY_VERSION_1.items() if fsdp.fsdp_version == 2 else ():
        if settings.was_given(f"fsdp.{name}") and not _is_exported_default(settings, name):
            found.append(f"{settings.quote(f'fsdp.{name}')}: {why}")
        setattr(fsdp, name, None)
    by_class = fsdp.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    given = fsdp.transformer_cls_names_to_wrap and settings.was_given("fsdp.auto_wrap_policy")
    if given and not by_class:
        classes, policy = (
            settings.quote(f"fsdp.{name}") for name in ("transformer_cls_names_to_wrap", "auto_wrap_policy")
        )
        found.append(f"{classes}: there is {policy}, which doesn't look at classes")
    return found


def _engine_of(group: str) -> str:
    """Return the first group with the same title: its condition turns on both."""
    return next(name for name, cls in GROUPS.items() if cls.option_group.title == GROUPS[group].option_group.title)


def _is_used(group: str, settings: Settings) -> bool:
    return getattr(settings, _engine_of(group)) is not None


def _has_flag(group: str, flag: str) -> bool:
    return any(option.flag == flag for option in options_of(GROUPS[group]))


def _how_to_turn_on(group: str) -> str:
    if group == "fp8":
        return "it is turned on by `--mixed_precision fp8`"
    return f"it is turned on by `--{CONDITIONS[group].partition('.')[2]}`"


def _check_arguments(arguments: Mapping[str, object], settings: Settings) -> None:
    """Refuse arguments that exclude each other."""
    of_two_names = (row.arguments for row in ROWS if len(row.arguments) > 1)
    for one, other in (("dynamo_backend", "dynamo_plugin"), *of_two_names):
        if arguments.get(one) is not None and arguments.get(other) is not None:
            raise SettingError(
                f"You cannot pass in both `{other}` and `{one}`, please only pass in one: they set the same options."
            )
    steps = arguments.get("gradient_accumulation_steps", 1)
    if arguments.get("gradient_accumulation_plugin") is not None and steps not in (None, 1):
        raise SettingError(
            "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`, but "
            f"gradient_accumulation_steps={steps!r} was given beside a plugin. The plugin has `num_steps`."
        )
    sharded = settings.paradigm.use_fsdp or settings.paradigm.use_deepspeed
    for handler in cast("Iterable[object]", arguments.get("kwargs_handlers") or ()):
        is_fp8 = isinstance(handler, (AoOptions, TeOptions, MsampOptions))
        if is_fp8 and settings.run.mixed_precision != "fp8" and not sharded:
            raise SettingError(
                f"A {type(handler).__name__} was given, but the precision is "
                f"{settings.quote('run.mixed_precision')}. "
                "Give `mixed_precision='fp8'`, or leave the handler out."
            )
