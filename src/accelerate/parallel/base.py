"""The interface of a parallelism strategy: how parameters, gradients and state are distributed over the ranks.

A strategy is one file. Adding one is that file plus one line in ``parallel/__init__.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast, final
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..distributed.mesh import Mesh
from ..distributed.world import World, current_world
from ..errors import ArgumentError, PreparationError
from ..lazy import function_in_use
from ..logging import MultiProcessAdapter, get_logger
from ..modules import is_sharded, moved
from ..plugins import Placeholder, Plugins
from ..plugins.handlers import DataLoaderConfiguration
from ..precision import Precision
from ..settings.labels import DistributedType
from ..training.accumulation import GradientState
from ..training.oom_retry import Retryable
from ..training.optimizer import AcceleratedOptimizer, Closure
from ..training.recompute import chosen_modules, recompute_activations
from ..training.scheduler import AcceleratedScheduler
from ..training.window_weights import Reduction
from .compile import compile_model
from .rebind import unwrap
from .state import ModelState, ReplicatedState, has_offloaded_weights

if TYPE_CHECKING:
    from ..data_loader.loader import PreparedLoader
    from ..plugins.ddp import DistributedDataParallelKwargs


logger: MultiProcessAdapter = get_logger(__name__)

#: (output of the model, targets) -> loss.
LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]


@final
@dataclass
class StrategyOptions:
    """The option objects that a strategy reads at each use, because callers may replace them."""

    plugins: Plugins = field(default_factory=Plugins)
    ddp_handler: DistributedDataParallelKwargs | None = None
    mesh: Mesh | None = None  # None: all ranks are replicas
    gradient_state: GradientState | None = None
    loaders: DataLoaderConfiguration | None = None


@final
class Clipping(NamedTuple):
    """The arguments of ``clip_grad_norm_``, as torch's function takes them after the parameters."""

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False


class Strategy(ABC):  # noqa: B024  (every member has a default)
    """The interface of one way to distribute parameters, gradients and state over the processes."""

    #: Whether another strategy takes over when ``prepare`` gets a model that is already sharded.
    hands_over_shards: ClassVar[bool] = False
    #: The function of `accelerate.accelerator` that shards a model and that libraries replace; empty if there is none.
    sharding_function: ClassVar[str] = ""
    #: Whether ``prepare`` adapts attention to sharded sequences; False if a library shards them itself.
    shards_attention: bool = True
    #: Whether gradients are averaged over all replicas; otherwise these train apart.
    averages_replicas: bool = True
    #: How `backward` reduces gradients over the ranks.
    reduction: ClassVar[Reduction] = Reduction()
    #: Whether a pass through a model can be recomputed by the model alone.
    can_repeat_passes: ClassVar[bool] = False

    def __init__(self, world: World, options: StrategyOptions) -> None:
        self.world = world
        self.options = options
        self.mesh: Mesh = options.mesh or Mesh.of(world)
        #: Where the mesh was configured; empty if nowhere.
        self.mesh_source: str = "" if options.plugins.parallelism is None else "ParallelismConfig"
        #: Strategy, mesh and source of the mesh before a sharded model was adopted; None if there was none.
        self.before_adoption: tuple[Strategy, Mesh, str] | None = None
        #: Recomputes a batch after out-of-memory; None if an update consists of one backward pass.
        self.retry: Retryable | None = None if self.reduction.one_backward else Retryable(world)
        #: The models whose buffers DDP broadcasts from the main process, each with its DDP module.
        self.broadcasting: WeakKeyDictionary[torch.nn.Module, ref[DistributedDataParallel]] = WeakKeyDictionary()

    # -- choosing ------------------------------------------------------------------------------------------

    @property
    def label(self) -> DistributedType:
        """The value of ``accelerator.distributed_type``: that of the kind of device, and NO for a single process."""
        return DistributedType(self.world.kind.label if self.world.size > 1 else "NO")

    def adopts(self, model: torch.nn.Module) -> bool:
        """Return True if this strategy trains an already sharded ``model`` in its layout, on its mesh."""
        return False

    def has_sharded(self, model: torch.nn.Module) -> bool:
        """Return True if this strategy has sharded ``model``."""
        return False

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise, before anything is changed, if the arguments can't be prepared together."""
        refuse_placeholders(arguments)
        for argument in arguments.of(Role.MODEL):
            if self.world.size > 1 and not self.adopts(argument.current):
                _refuse_flat_parameters(argument.current)

    def place(self, arguments: PreparedArguments, precision: Precision) -> None:
        """Replace the arguments that an engine prepares together; ``prepare`` then prepares the others one by one."""

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` cast, on its device, wrapped (unless ``evaluation_mode``) and compiled."""
        model = precision.convert(model)
        if not evaluation_mode:
            self.recompute(model)
        precision.patch_forward(model)
        if device_placement and not _must_not_move(model, self.world.device):
            model = moved(model, self.world.device)
        if not evaluation_mode:
            model = self._wrap(model)
        precision.patch_wrapped(model)
        plugin = self.options.plugins.dynamo
        return model if plugin is None else compile_model(model, plugin)

    def recompute(self, model: torch.nn.Module, units: Sequence[torch.nn.Module] = ()) -> None:
        """Add the requested activation checkpointing to the named modules, or else to ``units``."""
        options, plugin = self.options.plugins.recompute, self.options.plugins.fsdp
        if options is not None:
            chosen = chosen_modules(model, options, units)
            recompute_activations(chosen, offload=options.offload, save_ops=options.save_ops)
        elif plugin is not None and plugin.activation_checkpointing:
            recompute_activations(units, offload=plugin.activation_checkpointing_offload)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap ``model`` for training over the processes, and return the wrapper."""
        return model

    def unwrap(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the model that the user gave."""
        return unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks that run around every step of ``optimizer``."""

    def configure_loader(self, loader: PreparedLoader) -> None:
        """Configure a prepared ``loader`` so that its batches suit this strategy."""

    def shard_sequences(self, loader: object) -> object:
        """Wrap a prepared ``loader`` to yield each rank's part of a sequence, if an engine shards sequences."""
        return loader

    @property
    def data_parallel_size(self) -> int:
        """The number of different micro-batches that the ranks compute at the same time."""
        return self.mesh.data_share().count

    def release(self) -> None:
        """Drop all references to prepared models."""

    # -- training ------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes don't reduce gradients."""
        return nullcontext()

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float = 1, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss / num_steps``, scaled if there is a gradient scaler."""
        if num_steps != 1:
            loss = loss / num_steps
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward(**kwargs)

    def pipeline_step(
        self,
        model: torch.nn.Module,
        inputs: tuple[object, ...],
        targets: object,
        loss_function: LossFunction,
        *,
        scaler: torch.amp.GradScaler | None,
        num_steps: float,
        synchronises: bool,
    ) -> torch.Tensor:
        """Accumulate the gradients of one micro-batch's loss, and return the loss."""
        loss = loss_function(model(*inputs), targets)
        self.backward(loss, scaler, num_steps)
        return loss.detach()

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``clipping.max_norm``; return the norm before scaling."""
        if any(map(is_sharded, parameters)):  # of a model that wasn't prepared
            from .gradient_norm import clip_sharded_grad_norm

            return clip_sharded_grad_norm(parameters, *clipping, self.world.device)
        return torch.nn.utils.clip_grad_norm_(parameters, *clipping)

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of the gradients to [-``clip_value``, ``clip_value``]."""
        if any(map(is_sharded, parameters)):
            from .gradient_norm import clip_sharded_grad_value

            return clip_sharded_grad_value(parameters, clip_value)
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[Strategy]:
        """The state of prepared models and their optimizers; strategies that shard them override it."""
        return ReplicatedState(self)


def _must_not_move(model: torch.nn.Module, device: torch.device) -> bool:
    """Return True if ``model`` was placed when it was loaded and has to stay there.

    Raises:
        PreparationError: quantized weights are on another device than ``device``.
    """
    if is_placed_by_map(model) or has_offloaded_weights(model):
        return True
    places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if places and (getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)):
        there = {parameter.device for parameter in model.parameters()}
        if any(place.type != device.type or (place.index or 0) != (device.index or 0) for place in there):
            raise PreparationError(
                f"{type(model).__name__} was loaded in 8 or 4 bits on {sorted(places)}, and can't be moved to "
                f"{device}, where this process computes. Load it with `device_map={{'': accelerator.device}}`."
            )
        return True
    return any(is_sharded(parameter) for parameter in model.parameters())


def refuse_placeholders(arguments: PreparedArguments, engine: str = "") -> None:
    """Raise if an argument is a placeholder for another engine than ``engine``.

    Raises:
        PreparationError: there is a placeholder, but the run doesn't use its engine.
    """
    for argument in arguments.arguments:
        given = argument.current
        if isinstance(given, Placeholder) and given.engine != engine:
            raise PreparationError(
                f"{type(given).__name__} is a placeholder for a {given.role} that {given.engine} makes itself, but "
                f"this run doesn't use {given.engine}. Give prepare() a torch object, or ask for the engine: "
                f"Accelerator({given.asked_by}_plugin=...), or launch with --use_{given.asked_by}."
            )


def _refuse_flat_parameters(model: torch.nn.Module) -> None:
    """Raise if ``model`` came with shards of FSDP version 1, in which no other strategy can train.

    Raises:
        PreparationError: a module in it is a trained ``FullyShardedDataParallel``.
    """
    for name, module in model.named_modules():
        # By name, because importing the class is slow.
        if type(module).__name__ == "FullyShardedDataParallel" and any(p.requires_grad for p in module.parameters()):
            raise PreparationError(
                f"{f'The module {name!r}' if name else 'The model'} is in FullyShardedDataParallel, but this run "
                "doesn't use FSDP version 1. Give Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin("
                "fsdp_version=1)), or leave the wrapping to prepare()."
            )


def is_placed_by_map(model: torch.nn.Module) -> bool:
    """Return True if a device map has spread the model over several devices."""
    return len(getattr(model, "hf_device_map", None) or {}) > 1


def refuse_device_map(model: torch.nn.Module) -> None:
    """Raise if a device map spreads ``model`` over devices, because such a model can't be replicated.

    Raises:
        PreparationError: a submodule has an ``hf_device_map`` with several devices.
    """
    for module in model.modules():
        if is_placed_by_map(module):
            raise PreparationError(
                f"{type(model).__name__} is spread over {sorted(set(map(str, module.hf_device_map.values())))} by a "  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue, reportCallIssue]
                "device map, and can't be replicated over processes. Load it without `device_map`, or run one process; "
                "ACCELERATE_BYPASS_DEVICE_MAP=true skips this check."
            )


# --------------------------------------------------------------------------------------------------
# The steps of ``prepare`` that libraries replace or wrap on the Accelerator, by their names


class ReplaceableSteps:
    """The methods of the Accelerator that libraries replace for FSDP2 and for context parallelism."""

    mesh: Mesh
    strategy: Strategy
    precision: Precision
    #: A library's context for `maybe_context_parallel`, instead of ours.
    _cp_context: Callable[..., AbstractContextManager[None]] | None = None

    def _prepare_in_steps(self, args: tuple[object, ...], device_placement: Sequence[bool] | None) -> object:
        if self.mesh.active("cp"):
            self.strategy.shards_attention = False  # unless `_prepare_cp` is ours
            args = self._prepare_cp(*args)
        if not self.strategy.sharding_function:
            return self._prepare_all(args, device_placement)
        placements = {} if device_placement is None else {"device_placement": device_placement}
        prepared = self._prepare_fsdp2(*args, **placements)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_cp(self, *args: object) -> tuple[object, ...]:
        """Prepare for context parallelism, and return ``args``; a replacement may set ``_cp_context``."""
        self.strategy.shards_attention = True
        return args

    def _split_sequences(self, **buffers: Any) -> AbstractContextManager[None]:
        """Enter the context of :meth:`maybe_context_parallel`."""
        if self._cp_context is not None:
            return self._cp_context(**buffers)
        if self.mesh.active("cp", "sp"):
            from .context_parallel import split_sequences

            config = self.strategy.options.plugins.parallelism
            assert config is not None, "the mesh has these axes by it"
            return split_sequences(self.strategy.mesh, config, **buffers)
        logger.warning_once(
            "maybe_context_parallel() has no effect: no ParallelismConfig asks for context parallelism."
        )
        return nullcontext()

    def _prepare_fsdp2(self, *args: object, device_placement: Sequence[bool] | None = None) -> tuple[object, ...]:
        """Prepare ``args`` under FSDP2, and return as many objects."""
        prepared = self._prepare_all(args, device_placement)
        return prepared if isinstance(prepared, tuple) and len(args) > 1 else (prepared,)

    @abstractmethod
    def _prepare_all(self, args: Sequence[object], device_placement: Sequence[bool] | None) -> object:
        """Prepare ``args``; a single object is returned without a tuple."""

    @abstractmethod
    def _adopt(self, model: torch.nn.Module) -> None:
        """Adopt the mesh of ``model`` if it is sharded."""

    def _place_model(self, model: torch.nn.Module, placed: bool, evaluation_mode: bool) -> torch.nn.Module:
        """Distribute ``model`` over the processes; one that a library's function shards keeps its layout."""
        shard = self.strategy.sharding_function
        if shard and not evaluation_mode and not self.strategy.adopts(model):
            model = function_in_use(shard)(self, model)
            if self.strategy.has_sharded(model):
                return model
            self._adopt(model)
        return self.strategy.place_model(model, self.precision, placed, evaluation_mode)


# --------------------------------------------------------------------------------------------------
# The arguments of ``prepare``, classified by role


class Role(Enum):
    """The kinds of objects that ``prepare`` distinguishes."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "data loader"
    FOREIGN = "foreign"  # returned untouched


def role_of(obj: object) -> Role:
    """Return the role of ``obj``; the only place where ``prepare`` checks types."""
    if isinstance(obj, Placeholder):
        return Role(obj.role)
    if isinstance(obj, DataLoader):
        return Role.LOADER
    if isinstance(obj, torch.nn.Module):
        return Role.MODEL
    if isinstance(obj, torch.optim.Optimizer):
        return Role.OPTIMIZER
    if isinstance(obj, (LRScheduler, AcceleratedScheduler)):
        return Role.SCHEDULER
    return Role.FOREIGN


def clipped_parameters(asked: str, given: object) -> list[torch.Tensor]:
    """Return the parameters ``given`` to the method ``asked``, a tensor or several, as a list.

    Raises:
        ArgumentError: it is a model, an optimizer, names with tensors, or the like.
    """
    is_several = isinstance(given, Iterable) and not isinstance(given, (torch.Tensor, torch.nn.Module))
    found: list[Any] = list(cast("Iterable[object]", given)) if is_several else [given]
    for wrong in {type(one).__name__ for one in found if not isinstance(one, torch.Tensor)}:
        raise ArgumentError(f"{asked}() takes tensors, not {wrong}. Did you mean {asked}(model.parameters(), ...)?")
    return found


def require_role(obj: object, role: Role) -> None:
    """Refuse an object that a method for one role can't prepare: another role's, a class, a plain value.

    Objects of unknown classes are let through: they may do what torch's do.
    """
    wanted, asked = _named(role), f"prepare_{role.value.replace(' ', '_')}()"
    if isinstance(obj, type):
        raise PreparationError(f"{asked} got the class {obj.__name__}, not an object of it. Create {wanted} first.")
    if obj is None or isinstance(obj, (str, bytes, int, float)):
        raise PreparationError(
            f"{asked} got {obj!r}, not {wanted}. Pass {wanted}, or leave the call out where there is none."
        )
    found = role_of(obj)
    if found not in (role, Role.FOREIGN):
        raise PreparationError(
            f"{asked} got {type(obj).__name__}, which is {_named(found)}. Use "
            f"prepare_{found.value.replace(' ', '_')}(), or prepare(), for objects of any kind."
        )


def _named(role: Role) -> str:
    return f"{'an' if role is Role.OPTIMIZER else 'a'} {role.value}"


def remark_on_stray(
    optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], prepared: Mapping[int, torch.nn.Module]
) -> None:
    """Warn if ``optimizer`` has no parameter of ``models`` or of their prepared versions.

    With several processes, also warn if some of its parameters belong to no prepared model: they would differ between
    the processes after the first step.
    """
    owned = {id(parameter) for model in [*models, *prepared.values()] for parameter in model.parameters()}
    parameters = [one for group in optimizer.param_groups for one in group["params"] if not one.is_meta]  # other stages
    if parameters and owned.isdisjoint(map(id, parameters)):
        logger.warning(
            "%s trains no parameter of a prepared model (the first has shape %s): prepare() has neither moved nor "
            "cast them, their gradients are not averaged over processes, and save_state() leaves them out. Prepare "
            "the model too, before the first step, unless the script does all this itself.",
            type(optimizer).__name__, tuple(parameters[0].shape),
        )  # fmt: skip
        return
    strange = [parameter for parameter in parameters if parameter.grad is not None and id(parameter) not in owned]
    world = current_world()
    if strange and world is not None and world.size > 1:
        logger.warning_once(
            "%s also trains %d parameters of no prepared model (the first has shape %s): their gradients are not "
            "averaged over processes, so each process trains its own, and save_state() leaves them out. Prepare the "
            "model that holds them, before the first step, unless the script averages them itself.",
            type(optimizer).__name__, len(strange), tuple(strange[0].shape),
        )  # fmt: skip


def _overlooked_in(obj: object) -> str:
    """Return the warning about an object that ``prepare`` ignores, such as a container; empty if there is none."""
    if isinstance(obj, torch.nn.DataParallel):
        return (
            f"prepare() got {type(obj.module).__name__} in a torch.nn.DataParallel, which computes on all devices of "
            "this process. Prepare the model itself (`.module`), and start one process for each device with "
            "`accelerate launch`."
        )
    inner = obj.values() if isinstance(obj, Mapping) else obj if isinstance(obj, (list, tuple, set)) else ()
    for one in inner:
        if role_of(one) is not Role.FOREIGN and not getattr(one, "_is_accelerate_prepared", False):
            return (
                f"prepare() got a {type(obj).__name__} with a {type(one).__name__} in it, and returns it as it is: "
                "objects inside of containers are not prepared. Give each as an argument of its own: prepare(*objects)."
            )
    return ""


@final
@dataclass
class PreparedArgument:
    """One argument of ``prepare``: its role, the given object, its device placement and the prepared object."""

    role: Role
    original: Any
    device_placement: bool
    current: Any


@final
class PreparedArguments:
    """The arguments of one ``prepare`` call in order; strategies replace each one's ``current``."""

    def __init__(self, arguments: list[PreparedArgument], *, has_placements: bool = False) -> None:
        self.arguments = arguments
        #: Whether the caller gave a device placement for each object.
        self.has_placements = has_placements

    @classmethod
    def classify(
        cls, objects: Sequence[object], device_placement: Sequence[bool] | None, default_placement: bool
    ) -> PreparedArguments:
        """Return the objects given to ``prepare``, each with its role.

        Raises:
            PreparationError: nothing was given, or the placements don't match the objects.
        """
        if not objects:
            raise PreparationError("prepare() was called with nothing to prepare. Give it the model, optimizer, ....")
        has_placements = device_placement is not None
        if device_placement is None:
            device_placement = [default_placement] * len(objects)
        elif len(device_placement) != len(objects):
            raise PreparationError(
                f"`device_placement` should be a list with {len(objects)} elements (the number of objects passed), but "
                f"prepare() got {list(device_placement)}. Give one per object, in the same order."
            )
        for obj in objects:
            if overlooked := _overlooked_in(obj):
                logger.warning_once(overlooked)
        pairs = zip(objects, device_placement, strict=True)
        arguments = [PreparedArgument(role_of(obj), obj, bool(placed), obj) for obj, placed in pairs]
        return cls(arguments, has_placements=has_placements)

    def of(self, role: Role) -> Iterator[PreparedArgument]:
        """Iterate over the arguments of one role, in the order given."""
        return (argument for argument in self.arguments if argument.role is role)

    def results(self) -> Any:
        """Return the prepared objects in the given order; a single object is returned without a tuple."""
        objects = tuple(argument.current for argument in self.arguments)
        return objects[0] if len(objects) == 1 else objects


# --------------------------------------------------------------------------------------------------
# Optimizer and scheduler of an engine that steps by itself


class SteppedOptimizer(AcceleratedOptimizer, ABC):
    """The optimizer of an engine whose own step includes ``step`` and ``zero_grad``."""

    #: The attribute of the engine's optimizer that is true if its last step was skipped.
    _skipped: ClassVar[str]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients when it steps."""

    def step(self, closure: Closure | None = None) -> None:
        """Do nothing: the engine has updated the parameters."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine's last step was skipped because of an fp16 overflow."""
        return bool(getattr(self.optimizer, self._skipped, False))


class SteppedScheduler(AcceleratedScheduler, ABC):
    """The scheduler of an engine whose own step includes the scheduler's."""

    def __init__(self, scheduler: LRScheduler, optimizers: AcceleratedOptimizer) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the engine steps the scheduler in its own step."""
