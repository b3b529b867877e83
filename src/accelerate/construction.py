"""Construction of the Accelerator: check its arguments, add those of the environment, and create its objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeVar, final, get_args, get_type_hints

from .callers import warn_of_old_spelling
from .devices.hardware import is_bf16_available
from .distributed.mesh import Mesh
from .distributed.random import check_stream_name
from .distributed.world import World, expected_backend
from .errors import ArgumentError, SettingError
from .lazy import function_in_use
from .logging import install_rich_tracebacks
from .plugins import Plugins
from .plugins.ddp import DistributedDataParallelKwargs
from .plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from .plugins.handlers import (
    ActivationCheckpointing,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from .precision import Precision
from .precision import choose as choose_precision
from .seams import LoopHook, LoopHooks, check_is_there, load, loop_hooks
from .settings import env
from .settings.option import nearest
from .settings.tree import ROWS

if TYPE_CHECKING:
    import torch

    from .plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from .precision.fp8 import Fp8Request
    from .settings.labels import RNGType
    from .settings.preemption import PreemptionOptions
    from .settings.run import Settings


Config = TypeVar("Config")

#: Names that libraries on top read from ``accelerate.accelerator``, or replace there: file -> names, imported lazily.
NAMES_OF_ACCELERATOR: Final = {
    "data_loader": "prepare_data_loader skip_first_batches",
    "devices.hardware": "is_bf16_available",
    "hooks.align": "get_state_dict_offloaded_model",
    "parallel.fsdp.files": "fsdp2_prepare_model",
    "plugins.handlers": "AutocastKwargs DataLoaderConfiguration ProfileKwargs ProjectConfiguration TorchDynamoPlugin",
    "plugins.fp8": "TERecipeKwargs",
    "plugins.fsdp": "FullyShardedDataParallelPlugin",
    "plugins.parallelism": "ParallelismConfig TorchTensorParallelPlugin",
    "precision.fp8_ao": "convert_model_to_fp8_ao",
    "precision.fp8_te": "apply_fp8_autowrap convert_model",
    "utils": "DeepSpeedPlugin MegatronLMPlugin",
}


@final
@dataclass
class Handlers:
    """The keyword handlers, one per kind."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    recompute: ActivationCheckpointing | None = None
    fp8: FP8RecipeKwargs | None = None
    ao: AORecipeKwargs | None = None
    te: TERecipeKwargs | None = None
    msamp: MSAMPRecipeKwargs | None = None


#: The classes of handlers by their names here, in this order: a recipe class inherits from two others.
_KINDS: Final[Mapping[str, type]] = {name: get_args(kind)[0] for name, kind in get_type_hints(Handlers).items()}


def sort_handlers(kwargs_handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Sort ``kwargs_handlers`` by kind.

    Raises:
        AssertionError: an entry isn't a KwargsHandler (the documented exception).
        SettingError: two entries have the same kind.
    """
    handlers = Handlers()
    if isinstance(kwargs_handlers, KwargsHandler):
        raise TypeError(
            f"kwargs_handlers={kwargs_handlers!r} is one handler. Give a list of them: kwargs_handlers=[...]."
        )
    for handler in kwargs_handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise AssertionError(
                f"Unsupported kwargs handler passed: {handler}, must be one that inherits "
                "`accelerate.utils.KwargsHandler`. kwargs_handlers takes objects like "
                "DistributedDataParallelKwargs(), one of each kind."
            )
        for name, kind in _KINDS.items():
            # A library on top may have replaced TERecipeKwargs.
            if isinstance(handler, (kind, function_in_use(kind.__name__)) if name == "te" else kind):
                if getattr(handlers, name) is not None:
                    raise SettingError(
                        f"You can only pass one {kind.__name__} in `kwargs_handlers`; got a second one: {handler!r}."
                    )
                setattr(handlers, name, handler)
                break
    return handlers


def install_exception_hooks() -> None:
    """Install hooks that format an uncaught exception and record it for the launcher."""
    from .distributed.failures import record_uncaught

    install_rich_tracebacks()  # first, because it replaces the hook that the next call extends
    record_uncaught(env.read)


_LOADER_SPELLINGS = ("split_batches", "even_batches", "dispatch_batches", "use_seedable_sampler")
_NEW_SPELLINGS = {
    **{name: f"dataloader_config=DataLoaderConfiguration({name}=...)" for name in _LOADER_SPELLINGS},
    "logging_dir": "project_config=ProjectConfiguration(logging_dir=...)",
    "fp16": "mixed_precision='fp16'",
}


def deprecated_arguments(
    create: Callable[..., None], given: dict[str, object], mixed_precision: str | None
) -> tuple[dict[str, object], dict[str, object], str | None]:
    """Remove deprecated arguments from ``given``; return (loader options, project options, mixed precision).

    Args:
        create: the constructor, for the names of its arguments.
        given: the other arguments; it keeps those of guests.

    Raises:
        ArgumentError: an argument is unknown in all versions.
        SettingError: ``fp16=True`` contradicts ``mixed_precision``.
    """
    loader = {name: given.pop(name) for name in _LOADER_SPELLINGS if name in given}
    project = {name: given.pop(name) for name in ("logging_dir",) if name in given}
    used = [*loader, *project]
    if "fp16" in given:
        used.append("fp16")
        if given.pop("fp16"):
            if mixed_precision not in (None, "fp16"):
                raise SettingError(f"fp16=True and mixed_precision={mixed_precision!r} contradict. Drop fp16.")
            mixed_precision = "fp16"
    of_guests = {row.keyword for row in ROWS}
    unknown = [name for name in given if name not in of_guests]
    if unknown:
        name = unknown[0]
        near = nearest(name, [*signature(create).parameters, *_NEW_SPELLINGS, *of_guests])
        hint = f"Did you mean {near!r}?" if near else "The reference page of Accelerator explains all that it has."
        raise ArgumentError(f"Accelerator() got an unexpected keyword argument {name!r}. {hint}")
    if used:
        warn_of_old_spelling(
            f"Accelerator({', '.join(f'{name}=' for name in used)}) is an old spelling. Use "
            f"{', '.join(_NEW_SPELLINGS[name] for name in used)}."
        )
    return loader, project, mixed_precision


def loader_configuration(config: DataLoaderConfiguration | None, old: Mapping[str, object]) -> DataLoaderConfiguration:
    """Return ``config``, or a new one; with ``old`` spellings, a copy that applies them."""
    config = _of_class("dataloader_config", config, DataLoaderConfiguration) or DataLoaderConfiguration()
    if old:
        config = copy(config)
    for name, value in old.items():
        setattr(config, name, value)
    return config


def project_configuration(
    config: ProjectConfiguration | None, project_dir: str | PathLike[str] | None, old: Mapping[str, Any]
) -> ProjectConfiguration:
    """Return ``config``, or a new one, with ``project_dir`` filled in if it has none."""
    if project_dir is not None and not isinstance(project_dir, (str, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"`project_dir` has to be the path of a folder, not {type(project_dir).__name__}: {project_dir!r}."
        )
    config = _of_class("project_config", config, ProjectConfiguration) or ProjectConfiguration()
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    if "logging_dir" in old:
        config.logging_dir = old["logging_dir"]
    return config


def _of_class(argument: str, config: Config | None, kind: type[Config]) -> Config | None:
    if config is not None and not isinstance(config, kind):
        raise TypeError(
            f"`{argument}` has to be a {kind.__name__}, not {type(config).__name__}: {config!r}. "
            f"Give {kind.__name__}(...)."
        )
    return config


def stream_names(rng_types: Sequence[str | RNGType] | None) -> list[str | RNGType]:
    """Return the random generators that loaders synchronise, by default the sampler's, after checking their names.

    Raises:
        SettingError: a name is unknown, or a single name was given instead of a list.
    """
    if rng_types is None:
        return ["generator"]
    if isinstance(rng_types, (str, Enum)):
        raise SettingError(f"rng_types={rng_types!r} is one name. Give a list of them: rng_types=[{rng_types!r}].")
    names = list(rng_types)
    for name in names:
        check_stream_name(name)
    return names


def settings_and_plugins(
    owner: object, arguments: Mapping[str, object], parameter_dtype: torch.dtype | None, known: Mapping[str, Any]
) -> tuple[Settings, Plugins]:
    """Return the settings of a run and its plugins, which are also groups of the settings.

    Args:
        owner: the Accelerator; while it lives, the environment tells libraries its engine.
        arguments: the constructor's arguments that become settings.
        known: the values of the first Accelerator of this process, as in AcceleratorState; empty for the first one.
    """
    from .settings.run import collect

    settings = collect(arguments)
    inherit_from_first(settings, arguments, known)
    resolve_precision(settings, parameter_dtype)
    return settings, complete_plugins(owner, settings, arguments, known)


def inherit_from_first(settings: Settings, arguments: Mapping[str, object], known: Mapping[str, Any]) -> None:
    """Set all values that a further Accelerator wasn't given as arguments to the first one's values.

    Values from the environment are the launcher's defaults, or those that another Accelerator published. They would
    contradict a first Accelerator made with arguments. The first one's precision is already among the arguments.
    """
    if not known:
        return
    if settings.source_of("run.use_cpu").kind != "argument":
        settings.run.use_cpu = known["_world_cpu"]
    if settings.source_of("compile.backend").kind != "argument":
        settings.compile = known["dynamo_plugin"] or settings.compile
    for row in ROWS:
        if row.condition and row.arguments and not any(arguments[name] for name in row.arguments):
            earlier = known.get(row.arguments[-1])
            settings.put(row.name, next(iter(earlier.values()), None) if isinstance(earlier, Mapping) else earlier)


def complete_plugins(
    owner: object, settings: Settings, arguments: Mapping[str, object], known: Mapping[str, Any]
) -> Plugins:
    """Return the plugins of a run, including those that the launcher requests, and set them in ``settings``."""
    settings.compile = dynamo = TorchDynamoPlugin.of(settings.compile)
    plugins = Plugins(dynamo=dynamo)
    if settings.fsdp is not None:
        from .plugins.fsdp import FullyShardedDataParallelPlugin

        settings.fsdp = plugins.fsdp = plugin = FullyShardedDataParallelPlugin.of(settings.fsdp)
        if settings.run.mixed_precision != "no":
            plugin.set_mixed_precision(settings.run.mixed_precision)
        variables = {"ACCELERATE_USE_FSDP": True, "FSDP_VERSION": plugin.fsdp_version}
        env.set_variables_for(owner, {**variables, "FSDP_CPU_RAM_EFFICIENT_LOADING": plugin.cpu_ram_efficient_loading})
    for row in ROWS:
        if row.engine and getattr(settings, row.name) is not None:
            plugins.engines[row.name], active = load(row.engine)(settings, arguments, known)
            settings.put(row.name, active)
            env.set_variables_for(owner, {str(settings.option_at(row.condition).env): True})
    if settings.parallelism is not None:
        from .plugins.parallelism import ParallelismConfig

        settings.parallelism = plugins.parallelism = ParallelismConfig.of(settings.parallelism)
        settings.take_handlers()
    return plugins


def mesh(world: World, plugins: Plugins) -> Mesh:
    """Return the mesh of the ParallelismConfig in ``plugins``; without one, all processes are replicas.

    Raises:
        SettingError: the axes don't fit the processes, or shard without FSDP.
    """
    config = plugins.parallelism
    if config is None:
        axes = {} if plugins.engine is None else plugins.engine.mesh_axes
        tp, pp, cp = (axes.get(axis, 1) for axis in ("tp", "pp", "cp"))
        return Mesh.of(world, dp_replicate=max(1, world.size // (tp * pp * cp)), tp=tp, pp=pp, cp=cp)
    config.fit(world.size, plugins.fsdp)
    _check_engines(config, plugins.fsdp is not None, plugins.engine is not None)
    return config.mesh(world)


def _check_engines(config: ParallelismConfig, has_fsdp: bool, has_engine: bool) -> None:
    """Raise unless there is an engine for every axis of ``config``."""
    sharding = "give Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
    has_shards = has_fsdp or has_engine
    for axis in config._active("pp", "cp", "tp") if has_engine else ():
        raise SettingError(
            f"{axis}_size={getattr(config, f'{axis}_size')} beside a DeepSpeedPlugin: its engine lays out the model "
            "itself. It has tensor parallelism of its own ('tensor_parallel': {'autotp_size': ...} in its config) and "
            f"sequence parallelism (sp_size); or take FSDP2 in its place ({config.equation()})."
        )
    if config.cp_enabled and not has_shards and not env.flag("ACCELERATE_ALLOW_CP_STANDALONE"):
        raise SettingError(
            f"cp_size={config.cp_size}: context parallelism needs an FSDP2 plugin, which averages gradients over its "
            f"ranks: {sharding}; or let replicas do it with ACCELERATE_ALLOW_CP_STANDALONE=true ({config.equation()})."
        )
    if config.ep_enabled and not has_fsdp:
        raise SettingError(
            f"ep_size={config.ep_size} shards experts, and the rest of the model is sharded over the same ranks, which "
            f"takes FSDP2: {sharding} ({config.equation()})."
        )
    if config.tp_enabled and config._active("cp", "sp") and not has_shards:  # others: until a model comes whole
        raise SettingError(
            f"tp_size={config.tp_size} beside other axes takes FSDP2: {sharding}, or give all processes to one of them "
            f"({config.equation()})."
        )
    if config.sp_enabled and (config.sp_backend == "deepspeed") != has_engine:
        raise SettingError(
            f"sp_size={config.sp_size} with sp_backend={config.sp_backend!r} "
            + (
                "takes a DeepSpeedPlugin. Give one, or set sp_backend='torch', which needs none."
                if config.sp_backend == "deepspeed"
                else "excludes a DeepSpeedPlugin. Leave the plugin out, or set sp_backend='deepspeed'."
            )
        )


def resolve_precision(settings: Settings, parameter_dtype: torch.dtype | None) -> None:
    """Replace fp8 by fp16 (CUDA) or bf16 in ``settings`` if this hardware doesn't support it.

    Raises:
        SettingError: ``parameter_dtype`` is combined with mixed precision, or with an engine that has its own.
    """
    asked = settings.run.mixed_precision
    if parameter_dtype is not None:
        engine = settings.engine
        if asked != "no" or engine:
            other = f"{engine}, which decides the dtype itself" if engine else settings.quote("run.mixed_precision")
            raise SettingError(f"parameter_dtype={parameter_dtype} contradicts {other}. Keep one of them.")
        return
    if asked != "fp8":
        return
    kind = expected_backend(cpu=settings.run.use_cpu)[1]
    if kind.supports_fp8():
        return
    logging.getLogger(__name__).warning(
        "%s: this %s device does not multiply 8-bit floats (NVIDIA: compute capability 8.9 and later do). The run "
        "computes in %s; set mixed_precision='%s' to silence this.",
        settings.quote("run.mixed_precision"), kind.name, kind.fp8_fallback, kind.fp8_fallback,
    )  # fmt: skip
    settings.run.mixed_precision = kind.fp8_fallback


def _fp8_request(settings: Settings, world: World, handlers: Handlers) -> Fp8Request:
    """Return the fp8 options of arguments and settings.

    Raises:
        SettingError: torchao is combined with FSDP's loading from rank 0.
    """
    from .precision.fp8 import Fp8Request, choose_backend

    named = {"AO": handlers.ao, "TE": handlers.te, "MSAMP": handlers.msamp}
    recipes = {name: recipe for name, recipe in named.items() if recipe is not None}
    if handlers.fp8 is not None:
        recipes[handlers.fp8.backend] = handlers.fp8
    fsdp = settings.fsdp if world.backend is not None else None
    request = Fp8Request(
        settings.fp8.backend if settings.fp8 is not None else "NO",
        settings.quote("fp8.backend"),
        function_in_use,
        recipes,
        gathers=fsdp is not None and fsdp.fsdp_version == 2,
    )
    request.backend = choose_backend(request)
    if fsdp is not None and request.backend == "AO" and fsdp.cpu_ram_efficient_loading:
        raise SettingError(
            f"mixed_precision='fp8' by torchao doesn't work with {settings.quote('fsdp.cpu_ram_efficient_loading')}: "
            "converted weights can't be sent from rank 0. Set fsdp_cpu_ram_efficient_loading to false."
        )
    return request


def precision(
    label: str,
    settings: Settings,
    world: World,
    plugins: Plugins,
    handlers: Handlers,
    parameter_dtype: torch.dtype | None,
) -> Precision:
    """Return the Precision of mixed precision ``label`` in ``world``, with the handlers' options."""
    config = plugins.parallelism
    holders = world.holders
    is_sharded = (
        holders is not None
        and holders.backend is not None
        and not world.kind.runtime
        and (plugins.fsdp is not None or (config is not None and (config.tp_enabled or config.pp_enabled)))
    )
    has_bf16 = function_in_use("is_bf16_available")  # a library may have replaced it
    chosen = choose_precision(
        label,
        world.device.type,
        has_bf16=None if has_bf16 is is_bf16_available else bool(has_bf16(True)),
        autocast_handler=handlers.autocast,
        scaler_handler=handlers.scaler,
        shards_over=holders if is_sharded else None,
        fp8=_fp8_request(settings, world, handlers) if label == "fp8" else None,
        parameter_dtype=parameter_dtype,
    )
    if plugins.engine is not None:
        chosen.scaler = None  # the engine scales losses itself
    return chosen


def parallelism(
    config: ParallelismConfig | None, torch_tp_plugin: TorchTensorParallelPlugin | None
) -> ParallelismConfig | None:
    """Return ``config``, or one with the degree of the deprecated ``torch_tp_plugin``."""
    if torch_tp_plugin is None:
        return config
    from .plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin

    if not isinstance(torch_tp_plugin, TorchTensorParallelPlugin):
        raise TypeError(f"`torch_tp_plugin` must be a TorchTensorParallelPlugin, got {torch_tp_plugin!r}.")
    warn_of_old_spelling("torch_tp_plugin is an old spelling. Use parallelism_config=ParallelismConfig(tp_size=...).")
    return ParallelismConfig(tp_size=torch_tp_plugin.tp_size) if config is None else config


def add_loop_hooks(run: object, preemption: PreemptionOptions | None) -> None:
    """Add the hooks of guests to the loop of ``run``, an Accelerator."""
    held: Any = run
    hooks: LoopHooks = held.gradient_state.hooks
    if held.project_configuration.compare_replicas == "raise":
        check_is_there("checks", "ProjectConfiguration(compare_replicas='raise')")
    options: PreemptionOptions = held.settings.preemption
    asked = options if preemption is None and options.save_on_signal else preemption
    for hook in loop_hooks(run, {"preemption": asked, "balance": held.dataloader_config.balance or None}):
        hooks.add(hook)


def add_loop_hooks_to_copy(run: object) -> None:
    """Add the hooks that are always active to the loop of ``run``, a copy in another process."""
    held: Any = run
    hooks: LoopHooks = held.gradient_state.hooks
    if not hooks.of(LoopHook):  # else it shares the loop of an Accelerator of this process
        for hook in loop_hooks(run, {}):
            hooks.add(hook)
