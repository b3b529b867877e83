"""The constructor's arguments, as the objects that the Accelerator owns: handlers sorted, old spellings mapped."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from .errors import SettingError
from .health.failure import record_uncaught
from .logging import install_rich_tracebacks
from .mesh import Mesh
from .plugins.base import KwargsHandler
from .plugins.data import DataLoaderConfiguration
from .plugins.ddp import DistributedDataParallelKwargs
from .plugins.dynamo import TorchDynamoPlugin
from .plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from .plugins.fsdp import FullyShardedDataParallelPlugin
from .plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from .plugins.precision import AutocastKwargs, GradScalerKwargs
from .plugins.process_group import InitProcessGroupKwargs
from .plugins.profile import ProfileKwargs
from .plugins.project import ProjectConfiguration
from .precision import Precision
from .precision import choose as choose_precision
from .settings import env
from .settings.run import Settings
from .world import World


@final
@dataclass
class Handlers:
    """The keyword handlers, one per kind."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: Any = None
    ao: AORecipeKwargs | None = None
    te: TERecipeKwargs | None = None
    msamp: MSAMPRecipeKwargs | None = None


# The order matters: a recipe class may inherit from another.
_KINDS: tuple[tuple[str, type], ...] = (
    ("ddp", DistributedDataParallelKwargs),
    ("scaler", GradScalerKwargs),
    ("init", InitProcessGroupKwargs),
    ("autocast", AutocastKwargs),
    ("profile", ProfileKwargs),
    ("fp8", FP8RecipeKwargs),
    ("ao", AORecipeKwargs),
    ("te", TERecipeKwargs),
    ("msamp", MSAMPRecipeKwargs),
)


def sort_handlers(kwargs_handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """``kwargs_handlers`` by kind.

    Raises:
        AssertionError: an entry is no KwargsHandler (the documented exception).
        SettingError: two entries of one kind.
    """
    handlers = Handlers()
    for handler in kwargs_handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise AssertionError(
                f"Unsupported kwargs handler passed: {handler!r}. kwargs_handlers takes objects like "
                "DistributedDataParallelKwargs(), one of each kind."
            )
        for name, kind in _KINDS:
            if isinstance(handler, kind):
                if getattr(handlers, name) is not None:
                    raise SettingError(
                        f"You can only pass one {kind.__name__} in kwargs_handlers; got a second one: {handler!r}."
                    )
                setattr(handlers, name, handler)
                break
    return handlers


def explain_failures() -> None:
    """An exception that ends this process is written where its launcher looks, and shown as the user likes it."""
    install_rich_tracebacks()  # first: it replaces the hook that the other one extends
    record_uncaught(env.read)


_LOADER_SPELLINGS = ("split_batches", "even_batches", "dispatch_batches", "use_seedable_sampler")


def old_spellings(given: dict[str, Any], mixed_precision: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """``given`` keyword arguments of older versions, as (loader options, project options, mixed precision).

    Raises:
        TypeError: an argument that no version knew.
        SettingError: ``fp16=True`` beside another ``mixed_precision``.
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
    if given:
        raise TypeError(f"Accelerator.__init__() got an unexpected keyword argument {next(iter(given))!r}")
    if used:
        warnings.warn(
            f"Accelerator({', '.join(f'{name}=' for name in used)}) is an old spelling. Use "
            "dataloader_config=DataLoaderConfiguration(...), project_config=ProjectConfiguration(logging_dir=...) and "
            "mixed_precision='fp16'.",
            FutureWarning,
            stacklevel=4,
        )
    return loader, project, mixed_precision


def loader_configuration(config: Any, old: dict[str, Any]) -> DataLoaderConfiguration:
    """``config``, or a fresh one, with the ``old`` spellings applied."""
    config = config if config is not None else DataLoaderConfiguration()
    for name, value in old.items():
        setattr(config, name, value)
    return config


def project_configuration(config: Any, project_dir: Any, old: dict[str, Any]) -> ProjectConfiguration:
    """``config``, or a fresh one, with ``project_dir`` filled in where it has none."""
    config = config if config is not None else ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    if "logging_dir" in old:
        config.logging_dir = old["logging_dir"]
    return config


def dynamo_plugin(plugin: Any, backend: Any) -> TorchDynamoPlugin:
    """``plugin``, or one for ``backend``, or one from the environment."""
    if plugin is not None:
        return plugin
    return TorchDynamoPlugin(backend=backend) if backend is not None else TorchDynamoPlugin()


def complete_plugins(plugins: dict[str, Any], settings: Settings, known: Mapping[str, Any]) -> None:
    """``plugins`` has those that the launcher asked for through the environment, in the run's precision.

    Args:
        known: those of the first Accelerator of this process, which a second one shares.
    """
    if settings.fsdp is not None:
        plugin = plugins["fsdp_plugin"] or known.get("fsdp_plugin") or FullyShardedDataParallelPlugin()
        if settings.run.mixed_precision != "no":
            plugin.set_mixed_precision(settings.run.mixed_precision)
        env.publish({"ACCELERATE_USE_FSDP": True, "FSDP_VERSION": plugin.fsdp_version})
        plugins["fsdp_plugin"] = plugin
    plugins["parallelism_config"] = plugins["parallelism_config"] or known.get("parallelism_config")
    if settings.parallelism is not None and plugins["parallelism_config"] is None:
        plugins["parallelism_config"] = ParallelismConfig()


def mesh(accelerator: Any, config: ParallelismConfig | None) -> Mesh:
    """The processes along the axes of ``config``; without one they are replicas.

    Raises:
        SettingError: the axes don't fit the processes, or ask to shard without FSDP.
    """
    if config is None:
        return Mesh.of(accelerator.world)
    config._validate_accelerator(accelerator)
    if config.dp_shard_size > 1 and accelerator.state.fsdp_plugin is None:
        raise SettingError(
            f"dp_shard_size={config.dp_shard_size} shards the model, which takes FSDP2: give Accelerator("
            f"fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), or set dp_shard_size=1 "
            f"({config.equation()})."
        )
    return config.mesh(accelerator.world)


def precision(label: str, world: World, handlers: Handlers, plugins: dict[str, Any]) -> Precision:
    """The precision that ``label`` means in ``world``, with the handlers' options."""
    is_sharded = plugins["fsdp_plugin"] is not None and world.backend is not None
    return choose_precision(
        label,
        world.device.type,
        autocast_handler=handlers.autocast,
        scaler_handler=handlers.scaler,
        shards_over=world if is_sharded else None,
    )


def parallelism(config: Any, torch_tp_plugin: Any) -> Any:
    """``config``, or one with the degree of the deprecated ``torch_tp_plugin``."""
    if torch_tp_plugin is None:
        return config
    if not isinstance(torch_tp_plugin, TorchTensorParallelPlugin):
        raise TypeError(f"`torch_tp_plugin` must be a TorchTensorParallelPlugin, got {torch_tp_plugin!r}.")
    warnings.warn(
        "torch_tp_plugin is an old spelling. Use parallelism_config=ParallelismConfig(tp_size=...).",
        FutureWarning,
        stacklevel=4,
    )
    return ParallelismConfig(tp_size=torch_tp_plugin.tp_size) if config is None else config


def process_group_options(handler: InitProcessGroupKwargs | None) -> dict[str, Any]:
    """What ``join_world`` passes on to the process group."""
    return {} if handler is None else handler.to_kwargs()
