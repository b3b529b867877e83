"""DeepSpeed's engine: ZeRO's three stages, offload, and what else its configuration asks for. Real on CPU ranks too.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from ..checkpointing import Draft
from ..checkpointing.sharded import InPlace, StateAccess
from ..errors import PreparationError
from ..logging import get_logger
from ..names import engine_tag
from ..optional import require
from ..plugins.deepspeed import DeepSpeedPlugin, active_plugin
from ..plugins.parallelism import ParallelismConfig
from ..precision import Precision
from ..settings import env
from ..settings.labels import DistributedType
from ..world import World
from . import deepspeed_document, deepspeed_sequence
from .base import Strategy, StrategyOptions
from .bundle import Bundle, Role, Slot, is_prepared_optimizer
from .compile import compile_regions_deepspeed
from .deepspeed_document import Prepared
from .deepspeed_engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    map_pytorch_optim_to_deepspeed,
)
from .deepspeed_sequence import Ulysses
from .deepspeed_state import EngineState, whole_weights
from .rebind import canonical_name

logger = get_logger(__name__)

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


@final
class DeepSpeed(Strategy):
    """Model, optimizer and scheduler are handed to DeepSpeed together, and come back as its engine's."""

    takes_bundle = True
    steps_in_backward = True

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self.engine: DeepSpeedEngineWrapper | None = None
        self._engines: list[Any] = []
        self._ulysses: Ulysses | None = None
        self._follows_calls = False  # whether the clipping norm is that of clip_grad_norm_()
        self._has_warned = False
        if env.read("DS_ACCELERATOR") is None:  # DeepSpeed would look for a device by itself
            env.publish_for(self, {"DS_ACCELERATOR": world.device.type})
        if not torch.distributed.is_initialized():
            _form_group_of_one(world)

    @property
    def label(self) -> DistributedType:
        """DEEPSPEED."""
        return DistributedType.DEEPSPEED

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The DeepSpeedPlugin in use, as it is now."""
        return active_plugin(self.options.plugins["deepspeed_plugin"])

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, bundle: Bundle) -> None:
        """Raises unless one model comes with its optimizer and scheduler, as the configuration needs them."""
        super().check(bundle)
        models = list(_fresh(bundle, Role.MODEL))
        if len(models) > 1:
            raise AssertionError(  # the documented exception
                f"prepare() got {len(models)} models. You can't use same `Accelerator()` instance with multiple models "
                "when using DeepSpeed: make one Accelerator for each, and pass deepspeed_plugins by name to the first."
            )
        if bundle.has_placements:
            raise PreparationError(
                "You can't customize device placements with DeepSpeed or Megatron-LM: leave `device_placement` out."
            )
        for role in (Role.OPTIMIZER, Role.SCHEDULER):
            found = list(_fresh(bundle, role))
            if len(found) > 1:
                raise PreparationError(
                    f"prepare() got {len(found)} {role.value}s. DeepSpeed's engine has one: merge their parameter "
                    "groups, or make one Accelerator for each model."
                )
        if not models and any(_fresh(bundle, Role.OPTIMIZER)):
            raise PreparationError(
                "prepare() got an optimizer without its model. DeepSpeed takes them together: "
                "prepare(model, optimizer, loader)."
            )
        if models:
            deepspeed_document.check(self.plugin, self._prepared(bundle))
        if models and self._parts is not None:
            loaders = self.options.loaders
            even = loaders is None or loaders.even_batches
            deepspeed_sequence.check(self._parts, models[0].current, even_batches=even)

    def place(self, bundle: Bundle, precision: Precision) -> None:
        """The bundle's model is an engine, with the optimizer and the scheduler inside; loaders say the batch size."""
        slot = next(_fresh(bundle, Role.MODEL), None)
        if slot is None:
            return
        library = require("deepspeed", "deepspeed", purpose="this strategy")
        plugin, prepared, clock = self.plugin, self._prepared(bundle), self.options.clock
        assert clock is not None
        self._follows_calls = plugin.deepspeed_config.get("gradient_clipping") == "auto"
        deepspeed_document.complete(plugin, prepared, self.world, clock)
        model = precision.convert(slot.current)
        precision.patch_forward(model)
        plugin.set_moe_leaf_modules(model)
        arguments = self._arguments(plugin, prepared, bundle)
        with env.patched(LOCAL_RANK=env.read("LOCAL_RANK") or str(self.world.local_rank)):
            if self._parts is not None:
                library.init_distributed(self.world.backend, auto_mpi_discovery=False)
                micro = int(plugin.get_value("train_micro_batch_size_per_gpu"))
                self._ulysses = deepspeed_sequence.Ulysses(self._parts, model, micro, clock)
                arguments["mpu"] = self._ulysses.groups
            engine, optimizer, _, scheduler = library.initialize(model=model, **arguments)
        if self._ulysses is not None:
            self._ulysses.drive(engine)
        self._compile(engine)
        self._hold(engine, trains=prepared.optimizer is not None)
        slot.current = engine
        self._replace(bundle, optimizer, scheduler)

    def _prepared(self, bundle: Bundle) -> Prepared:
        def first(role: Role) -> Any:
            return next((slot.current for slot in _fresh(bundle, role)), None)

        loaders = self.options.loaders
        return Prepared(
            model=first(Role.MODEL),
            optimizer=first(Role.OPTIMIZER),
            scheduler=first(Role.SCHEDULER),
            loaders=[slot.original for slot in bundle.of(Role.LOADER)],
            split_batches=bool(loaders is not None and loaders.split_batches),
            num_shares=self.num_shares,
            ranks_per_batch=self._ranks_per_sequence,
        )

    @property
    def _parts(self) -> ParallelismConfig | None:
        return deepspeed_sequence.wanted(self.options.plugins.get("parallelism_config"))

    @property
    def _ranks_per_sequence(self) -> int:
        return 1 if self._parts is None else self._parts.sp_size

    @property
    def num_shares(self) -> int:
        """How many different micro-batches the ranks compute at the same time; each rank reads its own."""
        return super().num_shares // self._ranks_per_sequence

    def cut_sequences(self, loader: Any) -> Any:
        """``loader``, whose batches every rank gets its own part of, under sequence parallelism.

        Raises:
            PreparationError: the model has not been prepared.
        """
        if self._parts is None:
            return loader
        if self._ulysses is None:
            raise PreparationError(
                "deepspeed_ulysses_dl_adapter() has no groups to cut sequences for: call prepare(model, ...) first."
            )
        return self._ulysses.cut(loader, self.world.device)

    def _arguments(self, plugin: DeepSpeedPlugin, prepared: Prepared, bundle: Bundle) -> dict[str, Any]:
        """What ``deepspeed.initialize`` is given besides the model."""
        # DeepSpeed takes entries out of what it is given.
        arguments: dict[str, Any] = {"config_params": copy.deepcopy(plugin.deepspeed_config)}
        optimizer, scheduler = prepared.optimizer, prepared.scheduler
        if optimizer is not None and not prepared.takes_optimizer:
            arguments["model_parameters"] = _trainable(optimizer.params)
        elif optimizer is not None:
            if deepspeed_document.replaces_optimizer(plugin):
                chosen = map_pytorch_optim_to_deepspeed(optimizer)
                if getattr(scheduler, "optimizer", None) is optimizer:
                    scheduler.optimizer = chosen
                optimizer = chosen
            arguments["optimizer"] = optimizer
        if getattr(scheduler, "lr_scheduler_callable", None) is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
        own = _scheduler_of_deepspeed(bundle)
        if own is not None:
            arguments["lr_scheduler"] = own.current
        return arguments

    def _replace(self, bundle: Bundle, optimizer: Any, scheduler: Any) -> None:
        """The slots of optimizer and scheduler hold what the engine made of them."""
        wrapped: Any = None
        for slot in _fresh(bundle, Role.OPTIMIZER):
            slot.current = wrapped = DeepSpeedOptimizerWrapper(optimizer)
        if scheduler is None:
            return  # a schedule of the user's own is driven by the Accelerator, over the same parameter groups
        own = _scheduler_of_deepspeed(bundle)
        for slot in [*_fresh(bundle, Role.SCHEDULER), *([own] if own is not None else [])]:
            slot.current, slot.role = DeepSpeedSchedulerWrapper(scheduler, wrapped), Role.SCHEDULER

    def _compile(self, engine: Any) -> None:
        plugin = self.options.dynamo_plugin
        if plugin is None or str(plugin.backend) == "NO":
            return
        require("deepspeed", "deepspeed", purpose="compiling under DeepSpeed (dynamo_backend)", at_least="0.14.4")
        options = plugin.to_kwargs()
        if plugin.use_regional_compilation:
            compile_regions_deepspeed(engine.module, **options)
        else:
            engine.compile(backend=options.pop("backend"), compile_kwargs=options)

    def _hold(self, engine: Any, *, trains: bool) -> None:
        self._engines.append(engine)
        if not trains:  # for evaluation: no backward goes through it
            return
        if self.engine is None:
            self.engine = DeepSpeedEngineWrapper(engine)
        else:
            logger.warning(
                "A wrapped DeepSpeed engine reference is currently tied for this `Accelerator()` instance: backward() "
                "goes through the first engine. Prepare another model on another `Accelerator()`."
            )

    def held(self, model: torch.nn.Module, prepared: torch.nn.Module) -> torch.nn.Module:
        """The engine: it is what saves."""
        return prepared

    def release(self) -> None:
        """The engines are gone."""
        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        self.engine = None
        if self._ulysses is not None:
            self._ulysses.release()
            self._ulysses = None

    # -- training ------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward adds to the gradients, and doesn't step."""
        engine = self.engine
        return engine.hold() if engine is not None and engine.engine is model else nullcontext()

    def backward(self, loss: torch.Tensor, scaler: Any, **kwargs: Any) -> None:
        """Gradients are added; where the window is complete, the engine has also stepped."""
        if self.engine is None:
            raise PreparationError(
                "backward() has no engine to go through: call prepare(model, optimizer, ...) on this Accelerator first."
            )
        assert self.options.clock is not None
        if self._ulysses is not None:
            loss = self._ulysses.scaled(loss)
        self.engine.backward(loss, self.options.clock.sync_gradients, **kwargs)

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """What the norm was at the engine's last step, which has clipped to the configuration's `gradient_clipping`.

        Where the configuration says "auto", the norm asked for here counts from the next step on.
        """
        if self.engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite)
        if float(norm_type) != 2.0:
            raise PreparationError(f"norm_type={norm_type}: DeepSpeed clips by the 2-norm only, inside its own step.")
        self._compare_clipping(self.engine, float(max_norm))
        norm = self.engine.get_global_grad_norm()
        norm = torch.tensor(float("nan") if norm is None else float(norm), device=self.world.device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"The total norm of the gradients is {norm.item()}, so they could not be clipped.")
        return norm

    def _compare_clipping(self, engine: DeepSpeedEngineWrapper, max_norm: float) -> None:
        used = float(engine.engine.gradient_clipping())
        if max_norm in (used, float("inf")):  # inf: only the norm is wanted
            return
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "clip_grad_norm_(..., %s): DeepSpeed clips inside backward(), by gradient_clipping=%s of its config. "
                "Set DeepSpeedPlugin(gradient_clipping=%s), or the same in the DeepSpeed config%s.",
                max_norm,
                used,
                max_norm,
                f"; as it says 'auto', {max_norm} is used from the next update on" if self._follows_calls else "",
            )
        if self._follows_calls:
            engine.follow_clipping(max_norm)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Always refused.

        Raises:
            PreparationError: DeepSpeed has stepped already when this is called.
        """
        raise PreparationError(
            f"clip_grad_value_(..., {clip_value}): DeepSpeed clips by the norm only, inside its own step. Set "
            "gradient_clipping in its config."
        )

    # -- state ---------------------------------------------------------------------------------------------

    def has_whole(self, model: torch.nn.Module) -> bool:
        """Whether no engine keeps a part of ``model`` here."""
        engine: Any = model if any(engine is model for engine in self._engines) else None
        return engine is None or (
            not engine.zero_optimization_partition_weights() and self.plugin.tensor_parallel_size <= 1
        )

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict, in the dtype that the model computes in, on the CPU; in stage 3 on the main process.

        Raises:
            PreparationError: in stage 3, the configuration doesn't allow to gather the weights.
        """
        if not any(engine is model for engine in self._engines):
            return super().full_state_dict(model, unwrap)
        engine: Any = model
        if engine.zero_optimization_partition_weights() and not self._may_gather(engine):
            raise PreparationError(
                "Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save` in DeepSpeed "
                "config is False. Set it to True there, or set `zero3_save_16bit_model` to True in the plugin or with "
                "`accelerate config`. To save without gathering, use save_state(), or model.save_checkpoint(save_dir) "
                "and `zero_to_fp32.py`, which it leaves in the folder."
            )
        if self.plugin.tensor_parallel_size > 1:
            return engine._consolidated_16bit_state_dict() or {}
        is_whole = not engine.zero_optimization_partition_weights()
        return whole_weights(engine, self.world.is_main or is_whole, half=True)

    def _may_gather(self, engine: Any) -> bool:
        return not engine.zero_optimization_partition_weights() or bool(self.plugin.get_value(_GATHER, False))

    @property
    def access(self) -> StateAccess:
        """The engines' own folders, and whole weights."""
        return EngineState(InPlace(self.named_parameters, canonical_name))

    def saved(self, models: Sequence[Any], optimizers: Sequence[Any], *, model_only: bool = False) -> dict[str, Any]:
        """The engines' folders, and beside them the weights as every other strategy reads them.

        In stage 3 the latter are gathered where the configuration allows it, or where nothing else is saved.
        """
        engines = [model for model in models if any(engine is model for engine in self._engines)]
        writes_whole = model_only or all(map(self._may_gather, engines))
        writes_whole = writes_whole and self.plugin.tensor_parallel_size == 1
        access = self.access
        weights = [access.whole_model(model, self.world.is_local_main) for model in models] if writes_whole else []
        parts = {} if model_only else {"write_parts": _folders_of(engines, models)}
        return {"weights": weights, "optimizers": [], **parts}

    def restorable(self, optimizers: Sequence[Any]) -> Sequence[Any]:
        """None: the engine loads its own."""
        return [one for one in optimizers if not isinstance(one, DeepSpeedOptimizerWrapper)]


def _folders_of(engines: Sequence[Any], models: Sequence[Any]) -> Callable[[Draft], None]:
    def write(draft: Draft) -> None:
        for index, model in enumerate(models):
            if any(engine is model for engine in engines):
                model.save_checkpoint(str(draft.folder), tag=engine_tag(index))

    return write


def _fresh(bundle: Bundle, role: Role) -> Iterator[Slot]:
    """The slots of one role that no ``prepare`` has seen before."""
    for slot in bundle.of(role):
        obj = slot.current
        is_prepared = getattr(obj, "__dict__", {}).get("_is_accelerate_prepared", False) or is_prepared_optimizer(obj)
        if not is_prepared and not isinstance(obj, DeepSpeedSchedulerWrapper):
            yield slot


def _scheduler_of_deepspeed(bundle: Bundle) -> Slot | None:
    """The slot of one of DeepSpeed's own schedules, which are no torch schedulers."""
    names: Sequence[str] = require("deepspeed.runtime.lr_schedules", "deepspeed").VALID_LR_SCHEDULES
    return next((slot for slot in bundle.of(Role.FOREIGN) if type(slot.current).__name__ in names), None)


def _trainable(params: Any) -> Any:
    """The parameters, or groups of them, that have gradients."""
    given = list(params)
    if given and isinstance(given[0], dict):
        return given
    return [parameter for parameter in given if parameter.requires_grad]


def _form_group_of_one(world: World) -> None:
    """DeepSpeed finds a process group, of this process alone; nobody is listened to."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group(world.kind.backend or "gloo", store=store, rank=0, world_size=1)
