"""DeepSpeed's engine: ZeRO's stages, offload, and the other features of its configuration. Works on CPU ranks too.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...checkpointing import StagingDirectory
from ...checkpointing.run_state import Stateful, StrategyState
from ...checkpointing.sharded import StateAccess
from ...distributed.world import World
from ...errors import NotBuilt, PreparationError
from ...logging import MultiProcessAdapter, get_logger
from ...names import engine_tag
from ...optional import require
from ...parallel.base import (
    Clipping,
    PreparedArgument,
    PreparedArguments,
    Reduction,
    Role,
    Strategy,
    StrategyOptions,
    refuse_placeholders,
)
from ...parallel.compile import compile_regions_deepspeed
from ...parallel.rebind import canonical_name
from ...parallel.state import HeldTensor, ModelState
from ...plugins.parallelism import ParallelismConfig
from ...precision import Precision
from ...settings import env
from ...settings.labels import DistributedType
from ...training.optimizer import AcceleratedOptimizer
from . import document, sequence
from .document import PreparedObjects
from .engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    Engine,
    map_pytorch_optim_to_deepspeed,
)
from .plugin import DeepSpeedPlugin
from .sequence import Ulysses
from .state import EngineState, full_weights

logger: MultiProcessAdapter = get_logger(__name__)

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


@final
class DeepSpeed(Strategy):
    """The strategy for DeepSpeed's engine, which takes model, optimizer and scheduler together."""

    reduction: ClassVar[Reduction] = Reduction(
        one_backward="DeepSpeed's engine updates the parameters inside the last backward of an update"
    )

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self.engine: DeepSpeedEngineWrapper | None = None
        self._engines: list[Engine] = []
        self._ulysses: Ulysses | None = None
        self._clips_as_called = False  # whether the clipping norm is that of clip_grad_norm_()
        self._has_warned = False
        if env.read("DS_ACCELERATOR") is None:  # otherwise DeepSpeed would choose a device
            env.set_variables_for(self, {"DS_ACCELERATOR": world.device.type})
        if not torch.distributed.is_initialized():
            _init_single_process_group(world)

    @property
    def label(self) -> DistributedType:
        """The distributed type: DEEPSPEED."""
        return DistributedType.DEEPSPEED

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The active DeepSpeedPlugin."""
        plugin = self.options.plugins.engine
        assert isinstance(plugin, DeepSpeedPlugin)  # this strategy is chosen for it
        return plugin

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise unless one model comes with its optimizer and scheduler, as the configuration requires."""
        refuse_placeholders(arguments, "DeepSpeed")
        models = list(_fresh(arguments, Role.MODEL))
        if len(models) > 1:
            raise AssertionError(  # the documented exception
                f"prepare() got {len(models)} models. You can't use same `Accelerator()` instance with multiple models "
                "when using DeepSpeed: make one Accelerator for each, and pass deepspeed_plugins by name to the first."
            )
        if arguments.has_placements:
            raise PreparationError(
                "You can't customize device placements with DeepSpeed or Megatron-LM: leave `device_placement` out."
            )
        for role in (Role.OPTIMIZER, Role.SCHEDULER):
            found = list(_fresh(arguments, role))
            if len(found) > 1:
                raise PreparationError(
                    f"prepare() got {len(found)} {role.value}s. DeepSpeed's engine has one: merge their parameter "
                    "groups, or make one Accelerator for each model."
                )
        if not models and any(_fresh(arguments, Role.OPTIMIZER)):
            raise PreparationError(
                "prepare() got an optimizer without its model. DeepSpeed takes them together: "
                "prepare(model, optimizer, loader)."
            )
        if models:
            document.check(self.plugin, self._prepared(arguments))
        if models and self._parts is not None:
            loaders = self.options.loaders
            even = loaders is None or loaders.even_batches
            sequence.check(self._parts, models[0].current, even_batches=even)

    def place(self, arguments: PreparedArguments, precision: Precision) -> None:
        """Replace the model by an engine, and optimizer and scheduler by the engine's; loaders give the batch size."""
        argument = next(_fresh(arguments, Role.MODEL), None)
        if argument is None:
            return
        library = require("deepspeed", "deepspeed", purpose="this strategy")
        plugin, prepared, gradient_state = self.plugin, self._prepared(arguments), self.options.gradient_state
        assert gradient_state is not None
        self._clips_as_called = plugin.deepspeed_config.get("gradient_clipping") == "auto"
        document.complete(plugin, prepared, self.world, gradient_state)
        model = precision.convert(argument.current)
        self.recompute(model)
        precision.patch_forward(model)
        plugin.set_moe_leaf_modules(model)
        kwargs = self._initialize_kwargs(plugin, prepared, arguments)
        with env.patched(LOCAL_RANK=env.read("LOCAL_RANK") or str(self.world.local_rank)):
            if self._parts is not None:
                library.init_distributed(self.world.backend, auto_mpi_discovery=False)
                micro = int(plugin.get_value("train_micro_batch_size_per_gpu"))
                self._ulysses = sequence.Ulysses(self._parts, model, micro, gradient_state)
                kwargs["mpu"] = self._ulysses.groups
            engine, optimizer, _, scheduler = library.initialize(model=model, **kwargs)
        if self._ulysses is not None:
            self._ulysses.set_loss_scaling(engine)
        self._compile(engine)
        self._register_engine(engine, trains=prepared.optimizer is not None)
        argument.current = engine
        self._replace(arguments, optimizer, scheduler)

    def _prepared(self, arguments: PreparedArguments) -> PreparedObjects:
        def first(role: Role) -> Any:
            return next((argument.current for argument in _fresh(arguments, role)), None)

        loaders = self.options.loaders
        return PreparedObjects(
            model=first(Role.MODEL),
            optimizer=first(Role.OPTIMIZER),
            scheduler=first(Role.SCHEDULER),
            loaders=[argument.original for argument in arguments.of(Role.LOADER)],
            split_batches=bool(loaders is not None and loaders.split_batches),
            data_parallel_size=self.data_parallel_size,
            ranks_per_batch=self._ranks_per_sequence,
        )

    @property
    def _parts(self) -> ParallelismConfig | None:
        """The configuration of parallelism if it selects DeepSpeed's sequence parallelism, else None."""
        config = self.options.plugins.parallelism
        return config if config is not None and config.sp_enabled and config.sp_backend == "deepspeed" else None

    @property
    def _ranks_per_sequence(self) -> int:
        return 1 if self._parts is None else self._parts.sp_size

    @property
    def data_parallel_size(self) -> int:
        """The number of different micro-batches that the ranks compute at the same time."""
        return super().data_parallel_size // self._ranks_per_sequence

    def shard_sequences(self, loader: object) -> object:
        """Wrap ``loader`` to give every rank its part of each sequence, under sequence parallelism.

        Raises:
            PreparationError: the model has not been prepared.
        """
        if self._parts is None:
            return loader
        if self._ulysses is None:
            raise PreparationError(
                "deepspeed_ulysses_dl_adapter() has no groups to shard sequences over: call prepare(model, ...) first."
            )
        return self._ulysses.shard_loader(loader, self.world.device)

    def _initialize_kwargs(
        self, plugin: DeepSpeedPlugin, prepared: PreparedObjects, arguments: PreparedArguments
    ) -> dict[str, object]:
        """Return the arguments of ``deepspeed.initialize`` except the model."""
        # DeepSpeed removes entries from its argument.
        kwargs: dict[str, Any] = {"config_params": copy.deepcopy(plugin.deepspeed_config)}
        optimizer, scheduler = prepared.optimizer, prepared.scheduler
        if optimizer is not None and not prepared.takes_optimizer:
            kwargs["model_parameters"] = _trainable(optimizer.params)
        elif optimizer is not None:
            if document.replaces_optimizer(plugin):
                chosen = map_pytorch_optim_to_deepspeed(optimizer)
                if getattr(scheduler, "optimizer", None) is optimizer:
                    scheduler.optimizer = chosen
                optimizer = chosen
            kwargs["optimizer"] = optimizer
        if getattr(scheduler, "lr_scheduler_callable", None) is not None:
            kwargs["lr_scheduler"] = scheduler.lr_scheduler_callable
        own = _scheduler_of_deepspeed(arguments)
        if own is not None:
            kwargs["lr_scheduler"] = own.current
        return kwargs

    def _replace(
        self, arguments: PreparedArguments, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
    ) -> None:
        """Replace optimizer and scheduler in the arguments by wrappers of the engine's."""
        wrapped: Any = None
        for argument in _fresh(arguments, Role.OPTIMIZER):
            argument.current = wrapped = DeepSpeedOptimizerWrapper(optimizer)
        if scheduler is None:
            return  # the Accelerator steps the user's own schedule, over the same parameter groups
        own = _scheduler_of_deepspeed(arguments)
        for argument in [*_fresh(arguments, Role.SCHEDULER), *([own] if own is not None else [])]:
            argument.current, argument.role = DeepSpeedSchedulerWrapper(scheduler, wrapped), Role.SCHEDULER

    def _compile(self, engine: Engine) -> None:
        plugin = self.options.plugins.dynamo
        if plugin is None or str(plugin.backend) == "NO":
            return
        require("deepspeed", "deepspeed", purpose="compiling under DeepSpeed (dynamo_backend)", at_least="0.14.4")
        options = plugin.to_kwargs()
        if plugin.use_regional_compilation:
            compile_regions_deepspeed(engine.module, **options)
        else:
            engine.compile(backend=options.pop("backend"), compile_kwargs=options)

    def _register_engine(self, engine: Engine, *, trains: bool) -> None:
        self._engines.append(engine)
        if not trains:  # for evaluation, without a backward
            return
        if self.engine is None:
            self.engine = DeepSpeedEngineWrapper(engine)
        else:
            logger.warning(
                "A wrapped DeepSpeed engine reference is currently tied for this `Accelerator()` instance: backward() "
                "goes through the first engine. Prepare another model on another `Accelerator()`."
            )

    def release(self) -> None:
        """Destroy the engines."""
        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        self.engine = None
        if self._ulysses is not None:
            self._ulysses.release()
            self._ulysses = None

    # -- training ------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward accumulates gradients and never steps."""
        engine = self.engine
        return engine.no_boundary() if engine is not None and engine.engine is model else nullcontext()

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float = 1, **kwargs: object
    ) -> None:
        """Accumulate the gradients of ``loss / num_steps``; the engine steps when the window is complete."""
        if self.engine is None:
            raise PreparationError(
                "backward() has no engine to go through: call prepare(model, optimizer, ...) on this Accelerator first."
            )
        gradient_state = self.options.gradient_state
        assert gradient_state is not None
        if num_steps != gradient_state.num_steps:  # the engine would divide by its own
            kwargs["scale_wrt_gas"] = False
        if self._ulysses is not None:
            loss = self._ulysses.scaled(loss)
        self.engine.backward(loss, gradient_state.sync_gradients, **kwargs)

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Return the norm at the engine's last step, which clips to the configuration's `gradient_clipping`.

        If the configuration says "auto", ``clipping.max_norm`` applies from the next step on.
        """
        if self.engine is None:
            return super().clip_grad_norm(parameters, clipping)
        if clipping.norm_type != 2.0:
            raise PreparationError(
                f"norm_type={clipping.norm_type}: DeepSpeed clips by the 2-norm only, inside its own step."
            )
        self._compare_clipping(self.engine, float(clipping.max_norm))
        norm = self.engine.get_global_grad_norm()
        norm = torch.tensor(float("nan") if norm is None else float(norm), device=self.world.device)
        if clipping.error_if_nonfinite and not bool(norm.isfinite()):
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
                f"; as it says 'auto', {max_norm} is used from the next update on" if self._clips_as_called else "",
            )
        if self._clips_as_called:
            engine.set_gradient_clipping(max_norm)

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Raise, because DeepSpeed clips only by the norm.

        Raises:
            PreparationError: DeepSpeed has already stepped when this is called.
        """
        raise PreparationError(
            f"clip_grad_value_(..., {clip_value}): DeepSpeed clips by the norm only, inside its own step. Set "
            "gradient_clipping in its config."
        )

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[DeepSpeed]:
        """The state of engines, and of models without one."""
        return _DeepSpeedState(self)

    def engine_of(self, model: torch.nn.Module) -> Engine | None:
        """Return ``model`` if it is an engine of this strategy; None for a model without one."""
        return next((engine for engine in self._engines if engine is model), None)

    def may_gather(self, engine: Engine) -> bool:
        """Return False if the configuration doesn't allow to gather the sharded weights of ``engine``."""
        return not engine.zero_optimization_partition_weights() or bool(self.plugin.get_value(_GATHER, False))


@final
class _DeepSpeedState(ModelState[DeepSpeed]):
    """The state of engines, which save themselves, and of models without an engine."""

    def saved_model(self, model: torch.nn.Module, prepared: torch.nn.Module) -> torch.nn.Module:
        """Return the engine, because it saves itself."""
        return prepared

    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return True unless an engine has sharded ``model``."""
        if model is None:
            return False
        engine = self.strategy.engine_of(model)
        return engine is None or (
            not engine.zero_optimization_partition_weights() and self.strategy.plugin.tensor_parallel_size <= 1
        )

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict in the model's dtype, on the CPU; in stage 3 on the main process only.

        Raises:
            PreparationError: in stage 3, the configuration doesn't allow to gather the weights.
        """
        strategy, engine = self.strategy, self.strategy.engine_of(model)
        if engine is None:
            return super().full_state_dict(model, unwrap)
        if not strategy.may_gather(engine):
            raise PreparationError(
                "Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save` in DeepSpeed "
                "config is False. Set it to True there, or set `zero3_save_16bit_model` to True in the plugin or with "
                "`accelerate config`. To save without gathering, use save_state(), or model.save_checkpoint(save_dir) "
                "and `zero_to_fp32.py`, which it leaves in the folder."
            )
        if strategy.plugin.tensor_parallel_size > 1:
            return engine._consolidated_16bit_state_dict() or {}
        is_whole = not engine.zero_optimization_partition_weights()
        return full_weights(engine, strategy.world.is_main or is_whole, half=True)

    def held_tensors(self, model: torch.nn.Module) -> list[HeldTensor]:
        """Return the tensors of ``model``; this rank holds all of them.

        Raises:
            NotBuilt: an engine has sharded the model.
        """
        if not self.is_whole(model):
            raise NotBuilt(
                "stream_weights() doesn't read the weights that DeepSpeed's stage 3 (or its tensor parallelism) has "
                "sharded. Use get_state_dict(), FSDP, or stage 1 or 2."
            )
        return super().held_tensors(model)

    @property
    def access(self) -> StateAccess:
        """The access to the engines' own folders and full weights."""
        return EngineState(self.named_parameters, canonical_name)

    def checkpoint_state(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Stateful], *, model_only: bool = False
    ) -> StrategyState:
        """Return the engines' folders, and the weights in the format of all other strategies.

        In stage 3, the weights are gathered if the configuration allows it, or if only they are saved.
        """
        engines = [engine for engine in map(self.strategy.engine_of, models) if engine is not None]
        writes_whole = model_only or all(map(self.strategy.may_gather, engines))
        writes_whole = writes_whole and self.strategy.plugin.tensor_parallel_size == 1
        access = self.access
        weights = (
            [access.full_model_state(model, self.strategy.world.is_local_main) for model in models]
            if writes_whole
            else []
        )
        return StrategyState(weights, write=None if model_only else _folders_of(engines, models))

    def restorable(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers that no engine restores."""
        return [one for one in optimizers if not isinstance(one, DeepSpeedOptimizerWrapper)]


def _folders_of(engines: Sequence[Engine], models: Sequence[torch.nn.Module]) -> Callable[[StagingDirectory], None]:
    def write(staging: StagingDirectory) -> None:
        for index, model in enumerate(models):
            engine = next((one for one in engines if one is model), None)
            if engine is not None:
                engine.save_checkpoint(str(staging.folder), tag=engine_tag(index))

    return write


def _fresh(arguments: PreparedArguments, role: Role) -> Iterator[PreparedArgument]:
    """Iterate over the arguments of one role that weren't prepared before."""
    for argument in arguments.of(role):
        obj = argument.current
        is_prepared = getattr(obj, "__dict__", {}).get("_is_accelerate_prepared", False)
        if not is_prepared and not isinstance(obj, (AcceleratedOptimizer, DeepSpeedSchedulerWrapper)):
            yield argument


def _scheduler_of_deepspeed(arguments: PreparedArguments) -> PreparedArgument | None:
    """Return the argument that is one of DeepSpeed's own schedules, not a torch scheduler."""
    names: Sequence[str] = require("deepspeed.runtime.lr_schedules", "deepspeed").VALID_LR_SCHEDULES
    return next((argument for argument in arguments.of(Role.FOREIGN) if type(argument.current).__name__ in names), None)


def _trainable(params: Any) -> list[Any]:
    """Return the parameters that require gradients; parameter groups are returned unchanged."""
    given = list(params)
    if given and isinstance(given[0], dict):
        return given
    return [parameter for parameter in given if parameter.requires_grad]


def _init_single_process_group(world: World) -> None:
    """Initialise a process group of this process alone, which DeepSpeed requires, without a port."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group(world.kind.backend or "gloo", store=store, rank=0, world_size=1)
