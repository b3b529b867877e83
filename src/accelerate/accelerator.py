"""The Accelerator: run a PyTorch training loop on any device and any number of processes.

It owns the run's objects (``settings``, ``world``, ``precision``, ``strategy``, ``gradient_state``) and passes them
to other packages, in which its methods are implemented.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any, Generic, Literal, SupportsFloat, TypeAlias, TypeVar, final, overload

import torch

from . import checkpointing, construction, parallel, seams, tracking
from .data_loader.gathering import MetricGather, StreamingMean
from .devices.memory import release_memory
from .distributed import collectives, process_control, watchdog
from .distributed.world import World, join_world
from .errors import PreparationError
from .lazy import function_in_use, names_from
from .logging import MultiProcessAdapter, get_logger
from .parallel.base import (
    Clipping,
    PreparedArgument,
    PreparedArguments,
    ReplaceableSteps,
    Role,
    StrategyOptions,
    clipped_parameters,
    remark_on_stray,
    require_role,
)
from .parallel.compile import uncompiled
from .plugins.handlers import GradientAccumulationPlugin
from .precision import scaler_of_shards
from .settings.labels import DistributedType, FP8BackendType, LoggerType
from .settings.option import options_of
from .state import AcceleratorState, Flag
from .training.accumulation import GradientState, NamedWindows, WindowContext
from .training.oom_retry import ComputeLoss, MicroBatches, Work
from .training.open_window import OpenWindow, global_batch_info, restore_accumulation
from .training.optimizer import AcceleratedOptimizer
from .training.scheduler import AcceleratedScheduler, check_mode
from .training.window_weights import WindowWeights

if TYPE_CHECKING:
    from numpy import ndarray
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import TypeVarTuple, Unpack

    from .data_loader.loader import PreparedLoader
    from .distributed.mesh import Mesh
    from .parallel.streaming import Adapters, WeightStream
    from .plugins import Engine
    from .plugins.ddp import DistributedDataParallelKwargs
    from .plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from .plugins.fsdp import FullyShardedDataParallelPlugin
    from .plugins.handlers import (
        AutocastKwargs,
        DataLoaderConfiguration,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        KwargsHandler,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from .plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from .precision.base import ConversionReport, Precision
    from .settings.labels import DynamoBackend, PrecisionType, RNGType
    from .settings.preemption import PreemptionOptions
    from .settings.run import Settings
    from .training.averaging import WeightAverage
    from .watching import Flops, LossRules, RunCallback, RunWatch

    Placed: TypeAlias = Sequence[bool] | None
    Tracker: TypeAlias = str | LoggerType | tracking.GeneralTracker
    One = TypeVar("One")
    Two = TypeVar("Two")
    Batch = TypeVar("Batch")
    Rest = TypeVarTuple("Rest")
    #: What is gathered leaf by leaf.
    Nested = TypeVar(
        "Nested", bound=torch.Tensor | ndarray[Any, Any] | dict[Any, Any] | list[Any] | tuple[Any, ...] | None
    )

    @final
    class TypedLoader(PreparedLoader, Generic[Batch]):
        """A prepared loader whose batches have a known type."""

        def __iter__(self) -> Generator[Batch, None, None]: ...


logger: MultiProcessAdapter = get_logger(__name__)

_NOT_GIVEN: Any = object()
#: The context inside that of ``accumulate`` if all gradients are reduced; it has no state, so one is enough.
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()

Model = TypeVar("Model", bound=torch.nn.Module)


class Accelerator(ReplaceableSteps, process_control.ProcessGuards):
    """The entry point: set up devices, processes and precision, and prepare training objects.

    The constructor joins the world: one process, or all processes that the launcher started. ``accelerate launch`` can
    also set every argument through environment variables; an argument of the constructor takes precedence.

    Args:
        device_placement: whether to move prepared objects to ``device``.
        split_batches: old spelling of ``dataloader_config``.
        mixed_precision: no, fp16, bf16 or fp8.
        gradient_accumulation_steps: micro-batches per optimizer update.
        cpu: force the CPU.
        dataloader_config: how loaders are divided over the ranks: batch size, order, prefetch, resume.
        deepspeed_plugin: train with DeepSpeed and these options; a mapping of names to plugins allows several engines.
        fsdp_plugin: shard models with FSDP and these options.
        torch_tp_plugin: old spelling of ``parallelism_config``, for tensor parallelism alone.
        megatron_lm_plugin: train with Megatron-LM and these options.
        rng_types: the random generators that ranks synchronise at the start of each pass over a loader:
            ``"generator"`` (the sampler's, the default), ``"python"``, ``"numpy"``, ``"torch"``, or a kind of device.
        log_with: the trackers of the run: names such as ``"wandb"``, ``"all"``, or tracker objects.
        project_dir: the folder for checkpoints and logs.
        project_config: the layout of that folder: names of checkpoints, how many are kept, where logs go.
        gradient_accumulation_plugin: options of gradient accumulation, instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: whether schedulers step only if the optimizer has stepped; set it to False for a
            schedule that steps at another time, such as once per epoch.
        kwargs_handlers: options of DDP, of the gradient scaler, of the process group, of autocast, of fp8, of the
            profiler and of activation checkpointing, at most one object of each kind.
        dynamo_backend: compile prepared models with this backend of ``torch.compile``.
        dynamo_plugin: options of ``torch.compile``, instead of ``dynamo_backend``.
        deepspeed_plugins: another name of ``deepspeed_plugin``.
        parallelism_config: the sizes of the mesh axes: replicas, shards, tensor, context, sequence, expert and
            pipeline parallelism.
        scheduler_mode: ``"samples"`` (the default of the interface: N processes advance a schedule N times per step)
            or ``"updates"`` (once per optimizer update; the same curve on any number of processes).
        parameter_dtype: the dtype of parameters, gradients, optimizer states and computation of prepared models (true
            half or double precision), instead of ``mixed_precision``.
        preemption: when a rank gets a signal or a notice of preemption, save on all ranks at one step, and end.
        old: keywords of optional parts of this library, which the reference page of Accelerator lists, and old
            spellings of other arguments, such as ``even_batches`` and ``fp16``. A warning names today's.

    Raises:
        ArgumentError: an argument is unknown; the message names the one that was probably meant.
        SettingError: values are contradictory or impossible; the message says where they were set.
        NotBuilt: the kinds of parallelism can't be combined.
    """

    settings: Settings
    world: World
    mesh: Mesh
    state: AcceleratorState
    precision: Precision
    strategy: parallel.Strategy
    gradient_state: GradientState
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    rng_types: list[str]
    log_with: Sequence[Tracker]

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _NOT_GIVEN,
        mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | PrecisionType | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Engine | Mapping[str, Engine] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Engine | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Tracker | Sequence[Tracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | DynamoBackend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Engine | Mapping[str, Engine] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_mode: Literal["samples", "updates"] = "samples",
        parameter_dtype: torch.dtype | None = None,
        preemption: PreemptionOptions | None = None,
        **old: object,
    ) -> None:
        construction.install_exception_hooks()
        if split_batches is not _NOT_GIVEN:
            old["split_batches"] = split_batches
        loading, project, asked = construction.deprecated_arguments(Accelerator.__init__, old, mixed_precision)
        self.dataloader_config = construction.loader_configuration(dataloader_config, loading)
        self.project_configuration = construction.project_configuration(project_config, project_dir, project)
        self._handlers = construction.sort_handlers(kwargs_handlers)
        known = AcceleratorState._shared_state
        arguments = old | {
            "mixed_precision": known.get("_mixed_precision") if asked is None else asked,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "cpu": cpu,
            "dynamo_backend": dynamo_backend,
            "dynamo_plugin": dynamo_plugin,
            "kwargs_handlers": kwargs_handlers,
            "deepspeed_plugin": deepspeed_plugin,
            "deepspeed_plugins": deepspeed_plugins,
            "fsdp_plugin": fsdp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": construction.parallelism(parallelism_config, torch_tp_plugin),
        }
        self.settings, plugins = construction.settings_and_plugins(self, arguments, parameter_dtype, known)
        plugins.torch_tp, plugins.recompute = torch_tp_plugin, self._handlers.recompute
        run, init = self.settings.run, self._handlers.init
        # With a device runtime, FSDP means that one program drives all devices.
        group: dict[str, Any] = {} if init is None else init.to_kwargs()
        self.world = join_world(cpu=run.use_cpu, debug=run.debug, spmd=self.settings.fsdp is not None, **group)
        self.state = AcceleratorState._fill(self.settings, self.world, plugins)
        self.mesh = construction.mesh(self.world, plugins)
        self.state.device_mesh = self.mesh.device_mesh if plugins.parallelism is not None else None
        label = self.state.mixed_precision
        self.precision = construction.precision(
            label, self.settings, self.world, plugins, self._handlers, parameter_dtype
        )
        self.dataloader_config.balance |= self.settings.data.balance  # the launcher's
        self.settings.data, self.settings.project = self.dataloader_config, self.project_configuration
        accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin(run.gradient_accumulation_steps)
        self.settings.accumulation, self.gradient_state = accumulation, GradientState.create(accumulation)
        options = StrategyOptions(plugins, self._handlers.ddp, self.mesh, self.gradient_state, self.dataloader_config)
        self.strategy = parallel.choose(self.settings, self.world, options)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        check_mode(scheduler_mode)
        self.scheduler_mode = scheduler_mode
        self.rng_types = construction.stream_names(rng_types)
        self.log_with = [] if log_with is None else tracking.filter_trackers(log_with, self.logging_dir)
        self.flag_tensor: torch.Tensor | None = None
        watchdog.watch_for_hangs(self.world, self.gradient_state, self.project_dir)
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._may_pickle: list[object] = []
        self._start_in_process()
        construction.add_loop_hooks(self, preemption)

    def _start_in_process(self) -> None:
        """Create the objects that belong to this process; copies for other processes omit them."""
        self.trackers: list[Any] = []
        self._run_log: list[Any] = []
        self._windows = NamedWindows()
        self._weights = WindowWeights(self.mesh, self.gradient_state, self._windows)
        self._metric_gather = MetricGather(self.mesh, self.gradient_state)
        self._micro_batches: MicroBatches | None = None
        self._prepared_models: dict[int, Any] = {}
        # Programs run and change the hooks under these names.
        self._save_model_state_pre_hook, self._load_model_state_pre_hook = checkpointing.Hooks(), checkpointing.Hooks()
        self._background = checkpointing.Background()

    # == this process ======================================================================================

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of parallelism of this run."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host."""
        return self.world.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1

    @property
    def multi_device(self) -> bool:
        """Whether several processes compute on accelerators of one kind (not CPUs)."""
        return self.use_distributed and self.distributed_type in process_control.MULTI_DEVICE_LABELS

    @property
    def is_main_process(self) -> Flag:
        """Whether this is rank 0; also callable, for old scripts."""
        return Flag(self.world.is_main)

    @property
    def is_local_main_process(self) -> Flag:
        """Whether this is the first process of its host; also callable."""
        return Flag(self.world.is_local_main)

    @property
    def is_last_process(self) -> Flag:
        """Whether this is the last rank; also callable."""
        return Flag(self.world.is_last)

    # == settings ==========================================================================================

    @property
    def mixed_precision(self) -> str:
        """The precision: no, fp16, bf16 or fp8."""
        return self.state.mixed_precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16 training; None otherwise."""
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.precision.scaler = scaler
        for optimizer in self._optimizers:
            optimizer.scaler = scaler

    @property
    def native_amp(self) -> bool:
        """Whether forward passes run under autocast; scripts may assign False to disable it."""
        return self.precision.is_autocast

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        self.precision.is_autocast = value

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin | None:
        """The TorchDynamoPlugin, which says how prepared models are compiled."""
        return self.strategy.options.plugins.dynamo

    @dynamo_plugin.setter
    def dynamo_plugin(self, plugin: TorchDynamoPlugin | None) -> None:
        self.strategy.options.plugins.dynamo = plugin

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The AutocastKwargs of the constructor, or the last one assigned."""
        return self._handlers.autocast

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._handlers.autocast = self.precision.handler = handler

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The DistributedDataParallelKwargs; libraries may assign it before ``prepare``."""
        return self.strategy.options.ddp_handler

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self.strategy.options.ddp_handler = handler

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The GradScalerKwargs of the constructor."""
        return self._handlers.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The InitProcessGroupKwargs of the constructor."""
        return self._handlers.init

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The ProfileKwargs of the constructor, or the last one assigned."""
        return self._handlers.profile

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._handlers.profile = handler

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The FP8RecipeKwargs of the constructor (deprecated)."""
        return self._handlers.fp8

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The AORecipeKwargs of the constructor."""
        return self._handlers.ao

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The TERecipeKwargs of the constructor."""
        return self._handlers.te

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The MSAMPRecipeKwargs of the constructor."""
        return self._handlers.msamp

    @property
    def fp8_enabled(self) -> bool:
        """Whether the model computes in fp8."""
        return self.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8 (AO: torchao, TE: Transformer Engine); NO without fp8."""
        return FP8BackendType(self.precision.backend or "NO")

    @property
    def conversions(self) -> Sequence[ConversionReport]:
        """The reports of fp8 conversion, one per prepared model; printing one shows a table."""
        return self.precision.reports

    @property
    def delayed_fp8_autocast(self) -> bool:
        """Whether fp8 autocast is applied around the wrapped model (DDP, FSDP) instead of inside it."""
        return self.fp8_backend == FP8BackendType.TE and self.use_distributed

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer steps during backward."""
        return any(optimizer.is_fused_into_backward for optimizer in self._optimizers)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads the data for all processes."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get the same number of batches of the same size."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether ``prepare`` replaces random samplers by seedable ones."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are torchdata's StatefulDataLoader."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder that trackers write to."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeedPlugin; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The wrapper whose ``backward`` runs DeepSpeed's engine (its ``.engine``); None without DeepSpeed."""
        return getattr(self.strategy, "engine", None)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The ParallelismConfig; None if there is none."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The DeviceMesh of the ParallelismConfig; None if there is none."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is sharded by ``fully_shard``."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """An alias of :attr:`is_fsdp2`."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes weights."""
        return self.parallelism_config is not None or self.world.is_local_main

    @property
    def tensor_parallel_rank(self) -> int:
        """The rank of this process along the tensor-parallel axis."""
        return self._axis_rank("tp")

    @property
    def data_parallel_rank(self) -> int:
        """The rank of this process along the replicating data-parallel axis."""
        return self._axis_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The rank of this process along the sharding data-parallel axis."""
        return self._axis_rank("dp_shard")

    @property
    def context_parallel_rank(self) -> int:
        """The rank of this process along the context-parallel axis."""
        return self._axis_rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The rank of this process along the pipeline axis."""
        return self._axis_rank("pp")

    def _axis_rank(self, axis: str) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(f"The rank along {axis!r} needs Accelerator(parallelism_config=ParallelismConfig(...)).")
        return self.mesh.place(axis)

    # == one process, or all in turn =======================================================================

    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Enter a context whose value is this process's part of ``inputs``.

        Example:
            ```python
            with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
                accelerator.print(len(prompts))  # 3 on one process; 2 and 1 on two
            ```
        """
        return process_control.split_between_processes(inputs, apply_padding, world=self.world)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Enter a context whose block runs on rank 0 first, then on the others, even if it raises on rank 0.

        Example:
            ```python
            with accelerator.main_process_first():
                Path("cache").mkdir(exist_ok=True)  # rank 0 creates it, the others find it
            ```
        """
        return process_control.main_process_first(world=self.world)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Enter a context whose block runs first on the first process of each host, then on the others.

        Example:
            ```python
            with accelerator.local_main_process_first():
                Path("cache").mkdir(exist_ok=True)
            ```
        """
        return process_control.local_main_process_first(world=self.world)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once per host.

        Example:
            ```python
            accelerator.print(f"{accelerator.num_processes} processes")
            ```
        """
        if self.world.is_local_main:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait until every process calls this.

        Example:
            ```python
            if accelerator.is_main_process:
                Path("vocabulary.txt").write_text("a b c")
            accelerator.wait_for_everyone()
            words = Path("vocabulary.txt").read_text().split()
            ```
        """
        process_control.wait_for_everyone(world=self.world)

    def set_trigger(self) -> None:
        """Make the next :meth:`check_trigger` return True on every process.

        Example:
            ```python
            if loss.item() < 0.01:
                accelerator.set_trigger()
            if accelerator.check_trigger():  # true on all ranks if it was set on any
                accelerator.print("stopping early")
            ```
        """
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return True if any process called :meth:`set_trigger` since the last check.

        Example:
            ```python
            accelerator.set_trigger()
            assert accelerator.check_trigger()
            assert not accelerator.check_trigger()
            ```
        """
        flag_tensor = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = None
        return bool(collectives.reduce(flag_tensor, "sum", world=self.world, same_shapes=True).item() >= 1)

    # == prepare ===========================================================================================

    # For type checkers. No type says "each of these, prepared". So the usual order of model, optimizer and loaders is
    # listed; what comes elsewhere keeps its type, whose attributes the prepared object has too.
    @overload
    def prepare(self, one: Optimizer, /, *, device_placement: Placed = None) -> AcceleratedOptimizer: ...
    @overload
    def prepare(self, one: LRScheduler, /, *, device_placement: Placed = None) -> AcceleratedScheduler: ...
    @overload
    def prepare(self, one: DataLoader[Batch], /, *, device_placement: Placed = None) -> TypedLoader[Batch]: ...
    @overload
    def prepare(self, one: One, /, *, device_placement: Placed = None) -> One: ...
    @overload
    def prepare(
        self, one: One, two: Optimizer, data: DataLoader[Batch], /, *rest: Unpack[Rest], device_placement: Placed = None
    ) -> tuple[One, AcceleratedOptimizer, TypedLoader[Batch], Unpack[Rest]]: ...
    @overload
    def prepare(
        self, one: One, two: Optimizer, /, *rest: Unpack[Rest], device_placement: Placed = None
    ) -> tuple[One, AcceleratedOptimizer, Unpack[Rest]]: ...
    @overload
    def prepare(
        self, one: One, two: DataLoader[Batch], /, *rest: Unpack[Rest], device_placement: Placed = None
    ) -> tuple[One, TypedLoader[Batch], Unpack[Rest]]: ...
    @overload
    def prepare(
        self, one: One, two: Two, /, *rest: Unpack[Rest], device_placement: Placed = None
    ) -> tuple[One, Two, Unpack[Rest]]: ...
    @overload
    def prepare(self, *args: object, device_placement: Placed = None) -> Any: ...
    def prepare(self, *args: object, device_placement: Placed = None) -> Any:  # pyright: ignore[reportInconsistentOverload]
        """Prepare objects for distributed training; return them in the given order, a single object without a tuple.

        Models, optimizers, loaders and schedulers are prepared. Other objects, and those prepared before, are returned
        unchanged.

        Args:
            device_placement: for each object, whether to move it to ``device``; by default, the Accelerator's setting.

        Raises:
            PreparationError: the objects can't be prepared together, or ``device_placement`` doesn't match them.

        Example:
            ```python
            model = nn.Linear(4, 3)
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            ```
        """
        _ = self.distributed_type  # raises after AcceleratorState._reset_state(): the Accelerator has to be made anew
        return self._prepare_in_steps(args, device_placement)

    def _prepare_all(self, args: Sequence[object], device_placement: Sequence[bool] | None) -> object:
        arguments = PreparedArguments.classify(args, device_placement, self.device_placement)
        for argument in arguments.of(Role.MODEL):
            self._adopt(argument.current)
        self.strategy.check(arguments)
        fresh = self._new_objects(arguments)
        self.precision.check(*([argument.current for argument in new] for new in fresh))
        self._place_together(arguments)
        with self._rebinding_optimizers(arguments):
            for argument in arguments.of(Role.MODEL):
                argument.current = self.prepare_model(argument.current, device_placement=argument.device_placement)
        for argument in arguments.of(Role.LOADER):
            argument.current = self.prepare_data_loader(argument.current, device_placement=argument.device_placement)
            if fresh[0]:
                argument.current = self.strategy.shard_sequences(argument.current)
        for argument in arguments.of(Role.OPTIMIZER):
            argument.current = self.prepare_optimizer(argument.current, device_placement=argument.device_placement)
        for argument in arguments.of(Role.SCHEDULER):  # last: a scheduler looks for its prepared optimizer
            argument.current = self.prepare_scheduler(argument.current)
        models, optimizers = ([argument.current for argument in new] for new in fresh)
        self.precision.follow(models, [getattr(one, "optimizer", one) for one in optimizers])
        return arguments.results()

    def _new_objects(self, arguments: PreparedArguments) -> tuple[list[PreparedArgument], list[PreparedArgument]]:
        """Return the models and the optimizers that weren't prepared before."""
        models = [one for one in arguments.of(Role.MODEL) if id(one.current) not in self._prepared_models]
        made = [one for one in arguments.of(Role.OPTIMIZER) if not isinstance(one.current, AcceleratedOptimizer)]
        return models, made

    def _place_together(self, arguments: PreparedArguments) -> None:
        """Let an engine prepare the arguments that it replaces together; the others are prepared one by one."""
        self.strategy.place(arguments, self.precision)
        for argument in arguments.of(Role.MODEL):
            if argument.current is not argument.original:
                argument.current.__dict__["_is_accelerate_prepared"] = True
                self._register_model(argument.original, argument.current)

    @contextmanager
    def _rebinding_optimizers(self, arguments: PreparedArguments) -> Iterator[None]:
        """Enter a context at whose end the optimizers get the models' current parameters."""
        models = [one for one in arguments.of(Role.MODEL) if id(one.current) not in self._prepared_models]
        optimizers = [argument.current for argument in arguments.of(Role.OPTIMIZER)]
        if not models or not optimizers:
            yield
            return
        from .parallel.rebind import OptimizerRebinding

        rebinding = OptimizerRebinding(optimizers, self._named_parameters(models))
        try:
            yield
        except BaseException:  # raised to the caller, whatever is left of the models
            with suppress(PreparationError):
                rebinding.resolve(dict(self._named_parameters(models)))
            raise
        rebinding.resolve(dict(self._named_parameters(models)))

    def _named_parameters(self, models: Sequence[PreparedArgument]) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, argument in enumerate(models):
            for name, parameter in self.strategy.state.named_parameters(argument.current):
                yield f"{number}.{name}", parameter

    def prepare_model(self, model: Model, device_placement: bool | None = None, evaluation_mode: bool = False) -> Model:
        """Prepare ``model``: cast it, move it to its device and wrap it for training.

        Args:
            device_placement: whether to move it to ``device``; by default, the Accelerator's setting.
            evaluation_mode: skip the steps that only training needs.

        Raises:
            PreparationError: the model can't be prepared under this strategy, or isn't a model.

        Example:
            ```python
            teacher = accelerator.prepare_model(nn.Linear(4, 3), evaluation_mode=True)
            ```
        """
        require_role(model, Role.MODEL)
        self._windows.known.clear()
        if id(model) in self._prepared_models:
            return self._prepared_models[id(model)]
        inner = uncompiled(model)
        if inner is not model and self._prepared_models.get(id(inner)) is inner:  # compiled after `prepare`
            self._prepared_models[id(model)] = model
            return model
        self._adopt(model)
        if model.__dict__.get("_is_accelerate_prepared", False):  # by another Accelerator, or before free_memory()
            inner = self.strategy.unwrap(model, keep_torch_compile=False)
            self.precision.patch_forward(inner)
            self.precision.patch_wrapped(model)
            return self._register_model(inner, model)
        placed = self.device_placement if device_placement is None else device_placement
        prepared: Any = self._place_model(model, placed, evaluation_mode)
        if evaluation_mode:  # not marked: the same model may be prepared for training later
            _register(self._models, self.strategy.state.saved_model(model, model))
            return prepared
        prepared.__dict__["_is_accelerate_prepared"] = True
        return self._register_model(model, prepared)

    def _adopt(self, model: torch.nn.Module) -> None:
        """Adopt the mesh of ``model`` if it was sharded before ``prepare``."""
        is_marked = model.__dict__.get("_is_accelerate_prepared", False)  # maybe another Accelerator adopted it
        if id(model) not in self._prepared_models and (self.strategy.hands_over_shards or not is_marked):
            is_in_use = bool(self._dataloaders or self._schedulers)
            self._follow(self.strategy.mesh, parallel.adopt(self.strategy, model, is_in_use=is_in_use))

    def _follow(self, known: Mesh, strategy: parallel.Strategy) -> None:
        if strategy.mesh != known:
            self.mesh = strategy.mesh
            self._weights = WindowWeights(self.mesh, self.gradient_state, self._windows)
            self._metric_gather = MetricGather(self.mesh, self.gradient_state)
        if strategy is not self.strategy and not strategy.hands_over_shards:
            self.scaler = scaler_of_shards(self.scaler, self.world)  # the strategy before registered no hooks
            for optimizer in self._optimizers:
                strategy.register_step_hooks(optimizer.optimizer)
        self.strategy = strategy

    def _register_model(self, model: torch.nn.Module, prepared: Model) -> Model:
        saved = _register(self._models, self.strategy.state.saved_model(model, prepared))
        self._prepared_models |= dict.fromkeys(map(id, (model, saved, prepared)), prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap ``optimizer`` to step only when gradients are synchronised.

        Example:
            ```python
            optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            ```
        """
        require_role(optimizer, Role.OPTIMIZER)
        if isinstance(optimizer, AcceleratedOptimizer):
            return _register(self._optimizers, optimizer)
        for known in self._optimizers:
            if known.optimizer is optimizer:
                return known
        placed = self.device_placement if device_placement is None else device_placement
        prepared = AcceleratedOptimizer(
            optimizer, placed, self.scaler, device=self.device, gradient_state=self.gradient_state
        )
        self.strategy.register_step_hooks(optimizer)
        _register(self._optimizers, prepared)
        checkpointing.watch_first_step(optimizer, self.project_dir if self.world.is_main else None)
        prepared.before_first_step(partial(remark_on_stray, optimizer, self._models, self._prepared_models))
        return prepared

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Wrap ``scheduler`` to follow the updates of its prepared optimizer.

        Example:
            ```python
            scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
            ```
        """
        require_role(scheduler, Role.SCHEDULER)
        if isinstance(scheduler, AcceleratedScheduler):
            return _register(self._schedulers, scheduler)
        for known in self._schedulers:
            if known.scheduler is scheduler:
                return known
        target = getattr(scheduler, "optimizer", None)
        own = [optimizer for optimizer in self._optimizers if target is optimizer or optimizer.optimizer is target]
        prepared = AcceleratedScheduler(
            scheduler,
            own[:1] or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            num_processes=self.strategy.data_parallel_size,
            mode=self.scheduler_mode,
            gradient_state=self.gradient_state,
        )
        return _register(self._schedulers, prepared)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Batch],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., object] | None = None,
    ) -> DataLoader[Batch]:
        """Wrap ``data_loader`` to yield this process's shard of every batch, on its device.

        Example:
            ```python
            loader = accelerator.prepare_data_loader(DataLoader(dataset, batch_size=4, shuffle=True))
            for inputs, targets in loader:
                loss = loss_function(model(inputs), targets)
            ```
        """
        require_role(data_loader, Role.LOADER)
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return _register(self._dataloaders, data_loader)
        options = [option.name for option in options_of(type(self.dataloader_config)) if not option.guest]
        prepared = function_in_use("prepare_data_loader")(
            data_loader,
            self.device,
            num_processes=self.world.size,
            process_index=self.world.rank,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            torch_device_mesh=self.torch_device_mesh,
            gradient_state=self.gradient_state,
            share=self.mesh.data_share(),
            **{name: getattr(self.dataloader_config, name) for name in options},
        )
        self.strategy.configure_loader(prepared)
        return _register(self._dataloaders, prepared)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that starts at batch ``num_batches`` of the epoch.

        Example:
            ```python
            rest = accelerator.skip_first_batches(loader, num_batches=2)
            assert len(rest) == len(loader) - 2
            ```
        """
        return function_in_use("skip_first_batches")(dataloader, num_batches=num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: object, model: object) -> Any:
        """Wrap ``dl`` to yield parts of sequences for DeepSpeed's sequence parallelism; else return ``dl``.

        Loaders prepared together with their model need no wrapper.

        Example:
            ```python
            loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)  # the same loader without DeepSpeed
            ```
        """
        return self.strategy.shard_sequences(dl)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return True if a device map spreads ``model``, or a part of it, over several devices.

        Example:
            ```python
            if accelerator.verify_device_map(model):
                raise SystemExit("this model is spread over devices for inference")
            ```
        """
        return any(parallel.is_placed_by_map(module) for module in model.modules())

    # == a step ============================================================================================

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes an update."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state._set_sync_gradients(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches per optimizer update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.num_steps = value

    @property
    def step(self) -> int:
        """The number of micro-batches started since the last loader ended."""
        return self.gradient_state.step

    @step.setter
    def step(self, value: int) -> None:
        self.gradient_state.step = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because of an fp16 overflow."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context around one micro-batch; gradients are reduced only if it completes the accumulation window.

        Prepared optimizers skip their steps until then. Windows are counted per set of ``models``, so that two models
        of one loop may take turns. Contexts may be nested: ``backward`` and ``step`` follow the innermost one.

        Example:
            ```python
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        state, windows = self.gradient_state, self._windows
        outer = (windows.current, state.current) if windows.depth else None
        ids = tuple(map(id, models))
        windows.current = window = windows.known.get(ids) or windows.find(models, self._wrapped_models)
        is_reduced = state.advance(window.key) or self.world.size == 1 or state.sync_each_batch
        context = _NO_CONTEXT if is_reduced else _entered(map(self.strategy.no_sync, window.unreduced))
        return WindowContext(state, windows, outer, context)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes through ``model`` don't reduce gradients.

        Example:
            ```python
            with accelerator.no_sync(model):
                accelerator.backward(loss_function(model(inputs), targets))  # stays on this rank
            accelerator.backward(loss_function(model(inputs), targets))  # both are reduced
            ```
        """
        return _entered(map(self.strategy.no_sync, self._windows.unreduced_by(model, self._wrapped_models)))

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """Enter a context in which backward also reduces gradients from forwards under ``no_sync``.

        Example:
            ```python
            with accelerator.no_sync(model):
                first = loss_function(model(inputs), targets)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(first)
            ```
        """
        from .parallel.ddp import trigger_sync_in_backward

        return trigger_sync_in_backward(model)

    def backward(self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Accumulate the gradients of ``loss``.

        Without ``weight``, ``loss`` is a mean over the micro-batch and is divided by the accumulation steps. With
        ``weight``, it is a sum over ``weight`` tokens or samples; the accumulated gradient is then that of the mean
        over all ranks and micro-batches, even if their sizes differ.

        Args:
            loss: a scalar (``[]``).
            weight: the number of items in the sum ``loss``: an int, or a tensor on the device.
            kwargs: for ``torch.Tensor.backward``; ``learning_rate`` for LOMO optimizers.

        Example:
            ```python
            losses = F.cross_entropy(model(inputs), targets, reduction="sum")
            accelerator.backward(losses, weight=len(targets))  # the mean over all ranks' samples
            optimizer.step()
            ```
        """
        if self._background.failure is not None:
            self._background.raise_failure()
        steps = self.gradient_state.note_backward(loss, weight)
        if kwargs and "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs.pop("learning_rate"))
        elif weight is not None:
            run = partial(self.strategy.backward, scaler=self.precision.scaler, **kwargs)
            self._weights.backward(
                loss, weight, models=lambda: self._wrapped_models, backward=run, reduction=self.strategy.reduction
            )
        else:
            if self._weights.pending:
                self._weights.refuse_unweighted()
            self.strategy.backward(loss, self.precision.scaler, steps, **kwargs)
        for hook in self.gradient_state.hooks.after_backward:
            hook(loss, weight)

    def backward_in_parts(
        self,
        compute_loss: ComputeLoss,
        batch: object,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        num_parts: int = 1,
        always_careful: bool = False,
    ) -> torch.Tensor:
        """Accumulate the gradients of ``compute_loss(batch)`` in parts that fit into memory; return the loss.

        Use it instead of ``loss = ...; accelerator.backward(loss)``::

            loss = accelerator.backward_in_parts(lambda part: model(**part).loss, batch)

        If a rank runs out of memory, it recomputes its batch in twice as many parts; all ranks do so if the forward
        itself communicates, as in FSDP. The global batch, the gradients and later random numbers don't change. For
        new shapes (and in the first two updates), replicas reduce gradients after the backward instead of during it,
        and ranks that communicate in the forward agree before each collective to continue.

        Args:
            compute_loss: returns the loss of a part of ``batch``, which is split along the first dimension.
            batch: tensors, or tuples, lists and dicts of them; the first dimension of the first one is the number of
                samples.
            reduction: ``"mean"`` averages the losses of parts over their samples; ``"sum"`` adds them (if the caller
                divides the loss by the tokens of the whole batch).
            num_parts: the minimum number of parts; the same on all ranks.
            always_careful: allow to recompute every batch, also of a shape that has fit before; the same on all ranks.

        Raises:
            MemoryExhausted: a single sample doesn't fit, or memory ran out in a batch that can't be retried.
            CollectiveError: another rank has failed in a forward that communicates.

        Example:
            ```python
            loss = accelerator.backward_in_parts(
                lambda part: loss_function(model(part[0]), part[1]), (inputs, targets), num_parts=2
            )
            optimizer.step()
            ```
        """
        if self._micro_batches is None:
            if self.strategy.retry is None:
                obstacle = self.strategy.reduction.one_backward or "batch_parts sets its parts"
                raise PreparationError(
                    f"backward_in_parts() needs several backward passes for a batch, but {obstacle}. Use FSDP or DDP "
                    "without it."
                )
            self._micro_batches = MicroBatches(self.strategy.retry)
        models = self._wrapped_models
        named = [models[number] for number in self._windows.current.models or range(len(models))]
        steps = self.gradient_state.note_backward()
        if self._weights.pending:
            self._weights.refuse_unweighted()

        def backward(loss: torch.Tensor) -> None:
            self.strategy.backward(loss, self.precision.scaler, steps)

        work = Work(compute_loss, batch, named, backward, reduction, self.gradient_state.sync_gradients)
        loss = self._micro_batches.backward(work, num_parts=num_parts, always_careful=always_careful)
        return self._noting(loss)

    def pipeline_step(
        self, model: torch.nn.Module, batch: tuple[object, object], loss_function: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch through all pipeline stages; return its loss on every rank.

        ::

            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = accelerator.pipeline_step(model, (inputs, targets), loss_function)
                    optimizer.step()
                    ...

        Without pipeline parallelism it runs a plain forward and backward, so that the same loop runs on one process.

        Args:
            batch: the model's inputs (a tensor or a tuple of tensors) and the targets, the same on all stages.
            loss_function: takes the model's output and the targets, and returns a mean over samples.

        Example:
            ```python
            with accelerator.accumulate(model):
                loss = accelerator.pipeline_step(model, (inputs, targets), loss_function)
                optimizer.step()
                optimizer.zero_grad()
            ```
        """
        inputs, targets = batch
        loss = self.strategy.pipeline_step(
            model,
            inputs if isinstance(inputs, tuple) else (inputs,),
            targets,
            loss_function,
            scaler=self.precision.scaler,
            num_steps=self.gradient_state.note_backward(),
            synchronises=self.gradient_state.sync_gradients,
        )
        return self._noting(loss)

    def _noting(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` after passing it to the hooks."""
        for hook in self.gradient_state.hooks.after_backward:
            hook(loss, None)
        return loss

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Update the parameters of the LOMO optimizers with the gradients of ``loss``.

        Raises:
            PreparationError: no LOMO optimizer was prepared.

        Example:
            <!-- not run: needs an optimizer of the package lomo-optim -->
            ```python
            model, optimizer = accelerator.prepare(model, Lomo(model, lr=1e-3))
            accelerator.lomo_backward(loss_function(model(inputs), targets), learning_rate=1e-3)
            ```
        """
        fused = [optimizer for optimizer in self._optimizers if optimizer.is_fused_into_backward]
        if not fused:
            raise PreparationError("lomo_backward() needs a LOMO optimizer; none was given to prepare().")
        for optimizer in fused:
            lomo: Any = optimizer.optimizer  # of lomo-optim, whose classes have this method of their own
            lomo.fused_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...] | None = None) -> None:
        """Unscale the fp16 gradients of ``optimizer``: one, several, or None for all prepared ones.

        Example:
            ```python
            accelerator.backward(loss)
            accelerator.unscale_gradients(optimizer)
            largest = max(parameter.grad.abs().max() for parameter in model.parameters())
            optimizer.step()
            ```
        """
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self.precision.unscale(getattr(one, "optimizer", one))

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the global norm of the unscaled gradients to at most ``max_norm``; return the norm before clipping.

        Example:
            ```python
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            ```
        """
        parameters = clipped_parameters("clip_grad_norm_", parameters)
        self._unscale_owners_of(parameters)
        norm = self.strategy.clip_grad_norm(parameters, Clipping(max_norm, float(norm_type), error_if_nonfinite))
        for hook in self.gradient_state.hooks.after_clip:
            hook(norm)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of the unscaled gradients to [-``clip_value``, ``clip_value``].

        Example:
            ```python
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), clip_value=0.5)
            optimizer.step()
            ```
        """
        parameters = clipped_parameters("clip_grad_value_", parameters)
        self._unscale_owners_of(parameters)
        self.strategy.clip_grad_value(parameters, clip_value)

    def _unscale_owners_of(self, parameters: list[torch.Tensor]) -> None:
        """Unscale only the optimizers of these parameters; others still expect scaled backward passes."""
        if self.precision.scaler is None:
            return
        ours = set(map(id, parameters))
        for optimizer in self._optimizers:
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                self.unscale_gradients(optimizer)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Enter a context in which operations run in the Accelerator's precision.

        Example:
            ```python
            with accelerator.autocast():
                loss = loss_function(model(inputs), targets)
            ```
        """
        return self.precision.autocast(autocast_handler)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Enter a context with torch's profiler; write a trace per process if ``output_trace_dir`` is set.

        Example:
            ```python
            with accelerator.profile() as profiler:
                model(inputs)
            print(profiler.key_averages().table(row_limit=5))
            ```
        """
        handler = profile_handler or self.profile_handler or function_in_use("ProfileKwargs")()
        with handler.record(self.process_index) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()

    def join_uneven_inputs(
        self, joinables: Sequence[object], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Enter a context in which ranks may run out of batches at different times.

        Example:
            ```python
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
            ```
        """
        from .parallel.ddp import join_uneven_inputs

        return join_uneven_inputs(
            self.world, [*joinables], self._dataloaders, configured=self.even_batches, override=even_batches
        )

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Enter a context in which ``buffers`` are sharded along the sequence, under context parallelism.

        Attention inside the block still sees full sequences. Run both forward and backward inside it.

        Args:
            buffers: tensors with a sequence dimension (inputs, labels, positions), changed in place.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: the set of buffers that need not be restored after the block.

        Example:
            ```python
            tokens = torch.arange(16).reshape(2, 8)
            with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
                print(tokens.shape)  # [2, 8] divided by cp_size along the sequence
            ```
        """
        return self._split_sequences(
            buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
        )

    # == collectives =======================================================================================

    def gather(self, tensor: One) -> One:
        """Gather tensors from all ranks, concatenated along the first dimension, on every rank.

        Example:
            ```python
            lengths = accelerator.gather(torch.tensor([len(inputs)], device=accelerator.device))
            assert len(lengths) == accelerator.num_processes
            ```
        """
        return collectives.gather(tensor, world=self.world)

    @overload
    def gather_for_metrics(
        self, input_data: Nested, use_gather_object: bool = False, *, to: Literal["all"] = "all"
    ) -> Nested: ...
    @overload
    def gather_for_metrics(
        self, input_data: object, use_gather_object: bool = False, *, to: Literal["all", "main"] = "all"
    ) -> Any: ...
    def gather_for_metrics(
        self, input_data: object, use_gather_object: bool = False, *, to: Literal["all", "main"] = "all"
    ) -> Any:
        """Gather values that every rank computed from the current batch, with each sample exactly once.

        Padding rows, which give all ranks equal batches, are dropped. Containers and dataclasses are joined leaf by
        leaf: tensors and arrays along the first dimension, lists with one object per sample end to end. Any other
        object becomes a list with one entry per rank; None stays None.

        Args:
            use_gather_object: treat every list as one object per sample, even if these are tensors (of any shapes).
            to: ``"main"`` gathers on rank 0 only; the other ranks get None.

        Example:
            ```python
            correct = []
            for inputs, targets in loader:
                hits = model(inputs).argmax(1) == targets
                correct.append(accelerator.gather_for_metrics(hits))
            assert len(torch.cat(correct)) == len(dataset)
            ```
        """
        return self._metric_gather.gather(input_data, as_objects=use_gather_object, to_main=to == "main")

    def streaming_mean(self) -> StreamingMean:
        """Return a running mean over the samples of all ranks, each counted once; every rank keeps only two numbers.

        Example:
            ```python
            accuracy = accelerator.streaming_mean()
            for inputs, targets in loader:
                accuracy.update(model(inputs).argmax(1) == targets)
            accelerator.print(accuracy.mean())
            ```
        """
        return StreamingMean(self.mesh, self.gradient_state)

    def reduce(self, tensor: One, reduction: collectives.Reduction = "sum", scale: float = 1.0) -> One:
        """Return the elementwise sum, mean or max over ranks on every rank; ``tensor`` is unchanged.

        Example:
            ```python
            average = accelerator.reduce(loss.detach(), reduction="mean")
            ```
        """
        return collectives.reduce(tensor, reduction, scale, world=self.world)

    def pad_across_processes(self, tensor: One, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> One:
        """Pad ``tensor`` along ``dim`` to the largest size on any rank.

        Example:
            ```python
            tokens = torch.ones(2, 3 + accelerator.process_index, device=accelerator.device)
            tokens = accelerator.pad_across_processes(tokens, dim=1)
            assert len(accelerator.gather(tokens)) == 2 * accelerator.num_processes
            ```
        """
        return self._metric_gather.pad(tensor, dim, pad_index, pad_first=pad_first)

    # == models and state ==================================================================================

    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model:
        """Return the user's own model.

        Example:
            ```python
            own = accelerator.unwrap_model(model)
            assert isinstance(own, nn.Sequential)
            ```
        """
        own: Any = self.strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)
        return own

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of ``model``; a collective if the model is sharded over the ranks.

        Example:
            ```python
            weights = accelerator.get_state_dict(model)  # on all ranks: a sharded model is gathered
            accelerator.save(weights, "weights.safetensors", safe_serialization=True)
            ```
        """
        return self.strategy.state.collective_full_state_dict(model, "get_state_dict", unwrap)

    def save(self, obj: object, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False) -> None:
        """Write ``obj`` to the file ``f`` on the main process (of each host with ``save_on_each_node``).

        Example:
            ```python
            accelerator.save({"epoch": 3}, "progress.pt")
            ```
        """
        on_each_node = self.project_configuration.save_on_each_node
        checkpointing.save(obj, f, save_on_each_node=on_each_node, safe_serialization=safe_serialization)

    @property
    def _moment(self) -> str:
        """The number of backward passes, equal on all ranks; it distinguishes calls from the same line."""
        return str(self.gradient_state.num_backwards if self.even_batches else 0)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        select: checkpointing.Selection | None = None,
    ) -> None:
        """Write the weights of ``model`` to ``save_directory``, in files of at most ``max_shard_size``.

        ``select`` omits or converts some of them. All ranks must call this, or only the main process if the model isn't
        sharded.

        Example:
            ```python
            accelerator.save_model(model, "weights", max_shard_size="2GB")
            assert Path("weights/model.safetensors").is_file()
            ```
        """
        state = self.strategy.state.collective_full_state_dict(model, "save_model")
        state = state if select is None else select.of(state)
        options: dict[str, Any] = {"world": self.world, "moment": self._moment}
        checkpointing.save_model(state, save_directory, max_shard_size, safe_serialization, **options)

    def export_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        select: checkpointing.Selection | None = None,
    ) -> None:
        """Write weights and configuration of ``model`` to ``save_directory``, for ``from_pretrained``.

        With ``Selection(adapters_only=True)`` it writes the adapters of a PEFT model in PEFT's own format.

        Raises:
            CheckpointError: on every rank, if the model has no configuration, or the main process can't write.

        Example:
            <!-- not run: needs a model of Transformers, with a configuration -->
            ```python
            model = accelerator.prepare(AutoModelForCausalLM.from_pretrained("gpt2"))
            accelerator.export_model(model, "exported")
            AutoModelForCausalLM.from_pretrained("exported")
            ```
        """
        checkpointing.export_model(
            self.strategy.unwrap(model, keep_torch_compile=False),
            self.strategy.state.collective_full_state_dict(model, "export_model"),
            save_directory,
            max_shard_size=max_shard_size,
            select=select,
            world=self.world,
            moment=self._moment,
        )

    def stream_weights(
        self,
        model: torch.nn.Module,
        *,
        ranks: Sequence[int] = (0,),
        bucket_bytes: int = 256 << 20,
        dtype: torch.dtype | str | None = None,
        adapters: Adapters = "kept",
    ) -> WeightStream:
        """Return an iterator over names and whole weights of ``model``; all ranks iterate, ``ranks`` receive weights.

        Names and values are those of :meth:`get_state_dict`, but it needs the memory of only a few buckets. A receiver
        owns its tensors. The others wait while it processes a bucket. If it leaves the loop early, fails or dies, all
        ranks raise.

        Args:
            ranks: the ranks that receive the weights; on other ranks the iterator yields nothing.
            bucket_bytes: the bytes of weights to gather at a time; a larger weight is gathered alone.
            dtype: the dtype to send floating-point weights in.
            adapters: how to send adapters of a PEFT model: ``"kept"`` beside the base, ``"merged"`` into it, or
                ``"only"`` the adapters.

        Raises:
            CollectiveError: on every rank, if one doesn't call this, or doesn't exhaust the iterator.

        Example:
            ```python
            for name, weight in accelerator.stream_weights(model):
                print(name, tuple(weight.shape))  # on rank 0
            ```
        """
        return parallel.stream_weights(self.strategy, model, ranks, bucket_bytes, dtype, adapters)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: bool | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        details: Mapping[str, object] | None = None,
        select: checkpointing.Selection | None = None,
        pin: bool = False,
        **save_model_func_kwargs: object,
    ) -> str:
        """Save all prepared and registered objects as one committed checkpoint, and return its folder.

        All ranks must call this, or only the main process if every process has the full state (not under FSDP, tensor
        or pipeline parallelism, DeepSpeed). In the latter case the checkpoint lacks the other ranks' random states
        and loader positions.

        With automatic naming, the folder is the next ``checkpoints/checkpoint_{n}`` of the project, and
        ``output_dir`` is not used. The checkpoint is atomic: a crash never damages earlier checkpoints.

        Args:
            asynchronous: return as soon as the state is copied to host memory, and write while training continues;
                :meth:`wait_for_checkpoint` and the next save wait for it. They, or the next ``backward``, raise a
                failure. Default: ``ProjectConfiguration.save_asynchronously``.
            metrics: numbers to record; the project can keep the best checkpoints by one of them.
            details: JSON values to record; ``epoch`` and ``step`` are shown in listings.
            select: parts to omit or to convert.
            pin: never delete this checkpoint, whatever the project's limits are.
            save_model_func_kwargs: options of engines with their own way to save models.

        Raises:
            CheckpointError: on every rank, if writing failed on any rank, now or in the previous save.
            CollectiveError: on every rank, if all are needed and one doesn't call this.
            ReplicaError: with ``ProjectConfiguration(compare_replicas="raise")``, if :meth:`compare_replicas` raises
                it.

        Example:
            ```python
            folder = accelerator.save_state("checkpoint", metrics={"loss": 0.25})
            accelerator.load_state(folder)
            ```
        """
        project, hooks = self.project_configuration, self.gradient_state.hooks
        if self.world.is_main:
            self._open_window.warn_if_lost()
        self._background.wait()
        participants = checkpointing.participants_of_save(
            output_dir,
            world=self.world,
            project=project,
            needs_all=not self.strategy.state.is_whole(),
            moment=self._moment,
        )
        if participants.has_all:
            for hook in hooks.before_save:
                hook()
        recorded: dict[str, object] = {}
        for details_of in hooks.details_of_save:
            recorded |= details_of(not participants.has_all)
        began = perf_counter()
        folder = checkpointing.save_run(
            self._run_state,
            output_dir,
            participants=participants,
            safe_serialization=safe_serialization,
            details={
                "pace": global_batch_info(self.world, self._dataloaders, self.gradient_state),
                "reduction_orders": parallel.reduction_orders(self._wrapped_models),
                **recorded,
                **(details or {}),
            },
            metrics=metrics,
            select=select,
            pin=pin,
            asynchronous=project.save_asynchronously if asynchronous is None else asynchronous,
        )
        for note in hooks.after_save:
            note(folder, perf_counter() - began, details or {})
        return folder

    @property
    def preempted(self) -> bool:
        """Whether the run should end because a rank got a notice of preemption; the same on all ranks.

        With ``PreemptionPolicy(save_on_signal=False)``, the script reads it equally often on all ranks, saves and ends.
        Otherwise it becomes true when the run saves automatically.
        """
        return True in [asks() for asks in self.gradient_state.hooks.asks_to_end]  # call all: each counts its calls

    def compare_replicas(self, action: Literal["warn", "raise", "no"] = "raise") -> None:
        """Warn or raise if parameters or optimizer states differ between ranks that replicate them; a collective.

        Raises:
            ReplicaError: on every rank; the message names the first tensor that differs, and the ranks.

        Example:
            ```python
            accelerator.compare_replicas()  # raises if a rank's parameters have drifted
            ```
        """
        seams.function_of("checks", "compare", asked="compare_replicas()")(self, action)

    def fingerprint(self) -> str:
        """Return the SHA-256 of weights, optimizer states, random streams and positions of data; a collective.

        Two runs with equal fingerprints go on equally. With ``batch_parts`` it is the same on any number of ranks.

        Example:
            ```python
            accelerator.print(accelerator.fingerprint())
            ```
        """
        return seams.function_of("batch_parts", "fingerprint", asked="fingerprint()")(self)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint saved in the background, if there is one, is committed.

        Raises:
            CheckpointError: saving failed.

        Example:
            ```python
            accelerator.save_state("checkpoint", asynchronous=True)
            accelerator.backward(loss)  # training goes on
            accelerator.wait_for_checkpoint()
            ```
        """
        self._background.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, object] | None = None,
        *,
        keep_global_batch: bool = False,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load all prepared and registered objects from a checkpoint; by default, the project's newest valid one.

        Loaders continue at the next unseen batch, in the order of the interrupted epoch, also on another number of
        ranks; the changes that this causes are logged once.

        Args:
            keep_global_batch: set ``gradient_accumulation_steps`` to keep the global batch size of the checkpoint.

        Raises:
            CheckpointNotFound: there is no checkpoint.
            CheckpointError: on every rank, if reading failed on any rank.

        Example:
            ```python
            accelerator.save_state("checkpoint")
            accelerator.load_state("checkpoint")
            ```
        """
        self._background.wait()
        options = checkpointing.LoadOptions.of(load_kwargs=load_kwargs, **load_model_func_kwargs)
        loaded = checkpointing.load_run(self._run_state, input_dir, options)
        self._go_on(loaded, keep_global_batch)

    def resume(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        keep_global_batch: bool = False,
        load_kwargs: Mapping[str, object] | None = None,
        **load_model_func_kwargs: Any,
    ) -> str | None:
        """Load the newest valid checkpoint in ``root`` and return its folder; return None in a new run.

        ``root`` is a folder of checkpoints, by default the project's. Call this unconditionally at the start of a
        script.

        Raises:
            CheckpointError: there are checkpoints, but none is complete.

        Example:
            ```python
            folder = accelerator.resume("checkpoints")
            accelerator.print("a new run" if folder is None else f"resumed from {folder}")
            ```
        """
        self._background.wait()
        options = checkpointing.LoadOptions.of(load_kwargs=load_kwargs, **load_model_func_kwargs)
        loaded = checkpointing.resume_run(self._run_state, root, options)
        if loaded is None:
            logger.info("Starting a new run: there is no checkpoint in %s", root or self.project_dir)
            return None
        logger.info("Resuming from %s", loaded.folder)
        self._go_on(loaded, keep_global_batch)
        return str(loaded.folder)

    def _go_on(self, loaded: checkpointing.LoadedCheckpoint, keep_batch: bool) -> None:
        restore_accumulation(
            loaded, self.world, self._dataloaders, self.gradient_state, self._open_window, keep_global_batch=keep_batch
        )
        recorded = {} if loaded.manifest is None else loaded.manifest.details
        if loaded.manifest is not None and loaded.manifest.world_size == self.num_processes:
            parallel.restore_reduction_orders(self._wrapped_models, recorded.get("reduction_orders", ()))
        for hook in self.gradient_state.hooks.after_load:
            hook(str(loaded.folder), recorded)

    @property
    def _wrapped_models(self) -> list[torch.nn.Module]:
        """The models as ``prepare`` returned them."""
        return [self._wrapped(model) for model in self._models]

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model`` as ``prepare`` returned it."""
        return self._prepared_models.get(id(model), model)

    @property
    def _run_state(self) -> checkpointing.RunState:
        """The live objects of the run that a checkpoint saves and loads."""
        self.gradient_state.finish_window()
        return checkpointing.RunState(
            self.strategy.state,
            self.world,
            self.project_configuration,
            label=DistributedType(self.distributed_type).value,
            step=self.step,
            models=self._models,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            dataloaders=self._dataloaders,
            scaler=self.scaler,
            custom_objects=self._custom_objects,
            may_pickle=self._may_pickle,
            open_window=self._open_window,
            save_hooks=[*self._save_model_state_pre_hook.values()],
            load_hooks=[*self._load_model_state_pre_hook.values()],
            background=self._background,
        )

    def register_for_checkpointing(self, *objects: object, allow_pickle: bool = False) -> None:
        """Add ``objects`` to ``save_state`` and ``load_state``, in this order.

        With ``allow_pickle``, their states are saved as pickles. A pickle can hold any object, and runs code when a run
        that also registers them with ``allow_pickle`` loads it.

        Raises:
            SettingError: an object has no ``state_dict`` or ``load_state_dict``.
            EncodingError: a state can't be written without pickle; the message names the object and the entry.

        Example:
            ```python
            class Progress:
                best = 0.0
                def state_dict(self):
                    return {"best": self.best}
                def load_state_dict(self, state):
                    self.best = state["best"]

            accelerator.register_for_checkpointing(Progress())
            ```
        """
        may_pickle = allow_pickle or self.project_configuration.checkpoint_format == "classic"
        checkpointing.check_registrable(objects, first=len(self._custom_objects), may_pickle=may_pickle)
        self._custom_objects.extend(objects)
        if allow_pickle:
            self._may_pickle.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register ``hook(models, weights, output_dir)`` to run before ``save_state`` writes; return its handle.

        ``output_dir`` is the checkpoint's folder; files that the hook writes there are committed with it.

        Example:
            ```python
            handle = accelerator.register_save_state_pre_hook(
                lambda models, weights, output_dir: print(f"saving {len(models)} models to {output_dir}")
            )
            accelerator.save_state("checkpoint")
            handle.remove()
            ```
        """
        return self._save_model_state_pre_hook.add(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register ``hook(models, input_dir)`` to run before ``load_state`` reads; return its handle.

        Example:
            ```python
            accelerator.register_load_state_pre_hook(lambda models, input_dir: print(f"loading {input_dir}"))
            accelerator.save_state("checkpoint")
            accelerator.load_state("checkpoint")
            ```
        """
        return self._load_model_state_pre_hook.add(hook)

    def free_memory(self, *objects: object) -> list[None]:
        """Drop all references to prepared objects, empty device caches, and return one None per object.

        Example:
            ```python
            model, optimizer = accelerator.free_memory(model, optimizer)
            assert model is None
            ```
        """
        for model in self._models:
            # A wrapper that the caller still uses keeps working; a model without a wrapper is restored.
            if self._wrapped(model) is model:
                self._restore(model)
        lists = self._models, self._optimizers, self._schedulers, self._dataloaders, self._custom_objects
        for registry in (*lists, self._may_pickle, self._prepared_models):
            registry.clear()
        self._background.release_memory()
        self._micro_batches, self.step = None, 0
        self._windows.forget()
        for release in (*self.gradient_state.hooks.free_memory, self.strategy.release):
            release()
        self._follow(self.strategy.mesh, parallel.unadopted(self.strategy))
        return release_memory(*objects)

    def _restore(self, model: torch.nn.Module) -> None:
        """Undo ``prepare`` on a ``model`` without a wrapper."""
        self.precision.restore_forward(model)
        model.__dict__.pop("_is_accelerate_prepared", None)

    def clear(self, *objects: object) -> list[None]:
        """Drop references and empty caches; an alias of :meth:`free_memory`.

        Example:
            ```python
            model, optimizer, loader = accelerator.clear(model, optimizer, loader)
            ```
        """
        return self.free_memory(*objects)

    # == tracking ==========================================================================================

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with`` and the JSONL log of the run, and store ``config`` in them.

        Example:
            ```python
            accelerator.init_trackers("first_project", config={"lr": 1e-2})
            accelerator.log({"loss": 0.25}, step=1)
            accelerator.end_training()
            ```
        """
        self.trackers = tracking.init_trackers(self.log_with, project_name, config, init_kwargs, self.logging_dir)
        self._run_log = tracking.init_run_log(project_name, config, init_kwargs, self.logging_dir)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker ``name``, or with ``unwrap`` the service's object; off the main process, a blank one.

        Example:
            ```python
            accelerator.init_trackers("first_project")
            log = accelerator.get_tracker("jsonl")
            ```
        """
        return tracking.find_tracker(self.trackers, name, unwrap, run_log=self._run_log)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Log the current ``values`` to every tracker, without waiting for it.

        Each tracker has its own thread, which keeps the order. A tracker that fails or hangs loses only its own
        records, and logs that once. The JSONL log of the run is a separate tracker.

        Example:
            ```python
            accelerator.init_trackers("first_project")
            accelerator.log({"loss": loss.item()}, step=1)
            ```
        """
        tracking.log([*self.trackers, *self._run_log], values, step, log_kwargs or {}, asked=self.log_with)

    def end_training(self) -> None:
        """Commit the last checkpoint and finish the trackers.

        The process group stays alive until the processes end, so saving, loading and gathering still work.

        Raises:
            CheckpointError: saving a checkpoint in the background failed.

        Example:
            ```python
            accelerator.save_state("checkpoint", asynchronous=True)
            accelerator.end_training()  # the checkpoint is committed
            ```
        """
        try:
            self._background.wait()
        finally:
            for hook in self.gradient_state.hooks.end_run:
                hook()
            tracking.finish([*self.trackers, *self._run_log])

    # == watching ==========================================================================================

    def watch_run(
        self,
        every: int = 10,
        *,
        callbacks: Sequence[RunCallback] = (),
        total_steps: int | None = None,
        rules: LossRules | None = _NOT_GIVEN,
        flops: Flops | None = None,
        print_line: bool = False,
        log: bool = True,
        compare_replicas: bool | int = True,
        sdc_check: int = 0,
        on_sdc: Literal["raise", "warn"] = "raise",
    ) -> RunWatch:
        """Report training metrics every ``every`` updates; call ``step(loss)`` of the result after each micro-batch.

        Reports are written to the project's folder (one small file per rank, for ``accelerate monitor``), and with
        ``log`` to the trackers.

        Args:
            callbacks: callbacks for the events of the run.
            total_steps: the number of updates in the run, to estimate the remaining time.
            rules: when a loss ends the run, on all ranks at once; by default, at the first report with a NaN or
                infinite loss; None never ends it.
            flops: the floating-point operations of the model, for MFU.
            print_line: whether the main process prints a line for each report.
            compare_replicas: also end the run if ranks that replicate parameters have different ones; checked in the
                first report, and every ``n`` updates if a number is given.
            sdc_check: recompute every ``n``-th update and compare (silent data corruption); 0 never does.
            on_sdc: whether a rank with a wrong computation or memory raises ``HardwareError`` or warns.

        Example:
            ```python
            watch = accelerator.watch_run(every=2, print_line=True)
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = loss_function(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                watch.step(loss)
            ```
        """
        from .watching import LossRules

        return seams.function_of("monitor", "watch_run", "Accelerator.watch_run()")(
            self, every=every, callbacks=callbacks, total_steps=total_steps,
            rules=LossRules() if rules is _NOT_GIVEN else rules, flops=flops, print_line=print_line, log=log,
            compare_replicas=compare_replicas, sdc_check=sdc_check, on_sdc=on_sdc,
        )  # fmt: skip

    def average_weights(
        self, model: torch.nn.Module, decay: float = 0.999, *, every: int = 1, warmup: bool = False
    ) -> WeightAverage:
        """Return an exponential moving average of the weights of a prepared ``model``.

        Call its ``update()`` after ``optimizer.step()``. Its ``applied()`` is a context in which the model has the
        averaged weights. All later checkpoints include it.

        Example:
            ```python
            average = accelerator.average_weights(model, decay=0.99)
            accelerator.backward(loss)
            optimizer.step()
            average.update()
            with average.applied():
                evaluation = model(inputs)
            ```
        """
        inner = self.strategy.unwrap(model, keep_torch_compile=False)
        from .training.averaging import WeightAverage

        average = WeightAverage(
            self.strategy.state.saved_model(inner, model),
            self.strategy.state.access,
            self.gradient_state,
            decay=decay,
            every=every,
            warmup=warmup,
            was_skipped=None if self.scaler is None else lambda: self.optimizer_step_was_skipped,
            is_writer=self.world.is_local_main,
        )
        self.register_for_checkpointing(average)
        self.register_save_state_pre_hook(average.collect)
        return average

    @property
    def _open_window(self) -> OpenWindow:
        gradients, kind = self.strategy.state.gradients, self.strategy.label
        return OpenWindow(self.gradient_state, gradients, self._weights, self._models, kind)

    # == copies ============================================================================================

    def __deepcopy__(self, memo: dict[int, object]) -> Accelerator:
        """Return the same object, because there is one Accelerator per training loop."""
        return self

    def __getstate__(self) -> dict[str, object]:
        # Leave out the objects of this process: its world, its hooks, its trackers' connections.
        left = ("world", "mesh", "trackers", "_run_log", "_weights", "_micro_batches", "_windows")
        left += ("_save_model_state_pre_hook", "_load_model_state_pre_hook", "_background", "_metric_gather")
        state = {name: value for name, value in self.__dict__.items() if name not in left}
        state["strategy"], state["size"] = replace(self.strategy.options, mesh=None), self.world.size
        state["_prepared_models"] = [self._prepared_models.get(id(model)) for model in self._models]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, prepared_models, size = state.pop("strategy"), state.pop("_prepared_models"), state.pop("size", None)
        vars(self).update(state)
        self.world = join_world(cpu=self.settings.run.use_cpu)
        self.mesh = options.mesh = construction.mesh(self.world, options.plugins)
        self.strategy = parallel.choose(self.settings, self.world, options)
        self._start_in_process()
        construction.add_loop_hooks_to_copy(self)
        for model, prepared in zip(self._models, prepared_models, strict=True):
            if prepared is model and size != self.world.size:  # not wrapped for this world: prepare() does it anew
                self._restore(model)
            elif prepared is not None:
                self._register_model(model, prepared)


def _entered(contexts: Iterable[AbstractContextManager[object]]) -> ExitStack:
    """Enter ``contexts``, and return what leaves them."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def _register(registry: list[Any], obj: One) -> One:
    """Append ``obj`` to ``registry`` once, and return it; compare by identity, because tensors compare elementwise."""
    if not any(known is obj for known in registry):
        registry.append(obj)
    return obj


__getattr__: Callable[[str], Any] = names_from(__name__, "accelerate", construction.NAMES_OF_ACCELERATOR)
