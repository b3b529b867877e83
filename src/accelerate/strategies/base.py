"""How one model's parameters, gradients and state lie over the processes: the interface.

A strategy is one file. Adding one is that file plus one line in ``strategies/__init__.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch

from ..checkpointing.sharded import InPlace, StateAccess
from ..errors import PreparationError
from ..gradients import GradientState
from ..hooks.values import get_state_dict_offloaded_model, has_offloaded_params
from ..mesh import Mesh
from ..plugins.data import DataLoaderConfiguration
from ..plugins.deepspeed_data import DummyOptim, DummyScheduler
from ..plugins.megatron_data import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from ..precision import Precision
from ..settings.labels import DistributedType
from ..world import World
from .bundle import Bundle, Role
from .compile import compile_model
from .held_gradients import gradients_of, take_gradients
from .rebind import canonical_name, parameters_by_name
from .unwrap import unwrap


@final
@dataclass
class StrategyOptions:
    """What a strategy needs besides the world: the public option objects, read late (callers change them)."""

    dynamo_plugin: Any = None
    ddp_handler: Any = None
    plugins: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None  # without one, all ranks are replicas
    clock: GradientState | None = None
    loaders: DataLoaderConfiguration | None = None


class Strategy(ABC):
    """How parameters, gradients and state lie over the processes."""

    #: Whether :meth:`place` wants the whole bundle at once, and makes the optimizers too (an engine).
    takes_bundle: bool = False
    #: Whether the engine divides losses by the accumulation steps, and updates parameters, inside ``backward``.
    steps_in_backward: bool = False
    #: Whether ranks wait for each other inside a forward, so that none can give one up alone.
    communicates_in_forward: bool = False
    #: Whether they can, then, give it up together: nothing of a pass is left after :meth:`abandon_forwards`.
    gives_up_together: bool = False
    #: Whether every process has the whole state, so that the main process can save it without the others.
    is_replicated: bool = False
    #: Whether gradients between two updates lie where a checkpoint can find them, not inside an engine.
    holds_gradients: bool = False
    #: What ``accelerator.deepspeed_engine_wrapped`` shows.
    engine: Any = None

    def __init__(self, world: World, options: StrategyOptions) -> None:
        self.world = world
        self.options = options
        self.mesh = options.mesh or Mesh.of(world)

    # -- choosing ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def label(self) -> DistributedType:
        """What old callers see as ``distributed_type``."""

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, bundle: Bundle) -> None:
        """Nothing has changed yet; raises if the objects can't be prepared together."""
        if not self.takes_bundle:
            refuse_stand_ins(bundle)
        for slot in bundle.of(Role.MODEL):
            self.check_model(slot.current)

    def check_model(self, model: torch.nn.Module) -> None:
        """Raises if ``model`` can't be prepared under this strategy."""

    def place(self, bundle: Bundle, precision: Precision) -> None:
        """Every model of the bundle lies where this strategy wants it, and its optimizers follow."""
        for slot in bundle.of(Role.MODEL):
            slot.current = self.place_model(slot.current, precision, slot.device_placement)

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """``model`` in its precision, on its device, wrapped for training (unless ``evaluation_mode``), compiled."""
        model = precision.convert(model)
        precision.patch_forward(model)
        if device_placement and not _stays_in_place(model, self.world.device):
            model = model.to(self.world.device)
        if not evaluation_mode:
            model = self.wrap(model)
        precision.patch_wrapped(model)
        plugin = self.options.dynamo_plugin
        return model if plugin is None else compile_model(model, plugin)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """``model`` in the container that trains it over the processes."""
        return model

    def unwrap(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The model that the user gave."""
        return unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """What has to happen around every step of a prepared ``optimizer`` will."""

    def adopt_loader(self, loader: Any) -> None:
        """A prepared ``loader`` gives batches as this strategy wants them."""

    def cut_sequences(self, loader: Any) -> Any:
        """A prepared ``loader`` for ranks that compute one sequence together by an engine; else ``loader`` itself."""
        return loader

    @property
    def num_shares(self) -> int:
        """How many different micro-batches the ranks compute at the same time."""
        return self.mesh.data_share().count

    def held(self, model: torch.nn.Module, prepared: torch.nn.Module) -> torch.nn.Module:
        """Which of the two the Accelerator saves, hands to hooks and looks for gradients in."""
        return model

    def release(self) -> None:
        """Nothing that was placed is held any more."""

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters that train ``model``, prepared or not, under every name of the user's own model."""
        return parameters_by_name(self.unwrap(model, keep_torch_compile=False))

    # -- training ------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes don't reduce gradients."""
        return nullcontext()

    def keep_apart(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients of whole passes stay on this rank until :meth:`reduce_now`, if they can."""
        return nullcontext()

    def check_parts(self, model: torch.nn.Module) -> None:
        """Raises if a batch of ``model`` can't be computed in parts."""

    def send_buffers(self, model: torch.nn.Module) -> None:
        """What the next forward of ``model`` would exchange has been exchanged."""

    def reduce_now(self, model: torch.nn.Module) -> None:
        """Gradients that passes under :meth:`keep_apart` left on each rank are reduced."""

    def abandon_forwards(self, model: torch.nn.Module) -> None:
        """Nothing is left of forwards whose backward will never come."""

    def remember_gradients(self, model: torch.nn.Module) -> Callable[[], None]:
        """What puts the gradients of ``model`` back as they are now, by copies of them."""
        return remember_gradients(model.parameters())

    def gradients(self, model: torch.nn.Module) -> dict[str, Any] | None:
        """What this rank holds of the gradients of ``model`` between two updates; None: an engine keeps them."""
        return gradients_of(self.named_parameters(model)) if self.holds_gradients else None

    def take_gradients(self, model: torch.nn.Module, gradients: Mapping[str, Any] | None) -> None:
        """Give ``model`` the gradients that :meth:`gradients` gave on this rank of as many; None: none at all.

        Raises:
            CheckpointError: they are those of another model, or of one that is laid out in another way.
        """
        take_gradients(self.named_parameters(model), gradients or {})

    def backward(self, loss: torch.Tensor, scaler: Any, **kwargs: Any) -> None:
        """Gradients of ``loss`` have been added to the parameters' (scaled, under a gradient scaler)."""
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward(**kwargs)

    def pipeline_step(
        self,
        model: torch.nn.Module,
        inputs: tuple[Any, ...],
        targets: Any,
        loss_function: Callable[[Any, Any], torch.Tensor],
        *,
        scaler: Any,
        num_steps: int,
        synchronises: bool,
    ) -> torch.Tensor:
        """The gradients of the loss of one micro-batch have been added; the loss. Without stages: the plain step."""
        loss = loss_function(model(*inputs), targets)
        self.backward(loss / num_steps if num_steps != 1 else loss, scaler)
        return loss.detach()

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """The global gradient norm is at most ``max_norm``; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """No gradient element is larger than ``clip_value`` in size."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    # -- state ---------------------------------------------------------------------------------------------

    def has_whole(self, model: torch.nn.Module) -> bool:
        """Whether this process has all weights of ``model``, so that :meth:`full_state_dict` is no collective."""
        return self.is_replicated

    def whole_state_dict(self, model: torch.nn.Module, operation: str, unwrap: bool = True) -> dict[str, Any]:
        """As :meth:`full_state_dict`, on behalf of the public method ``operation``.

        Raises:
            CollectiveError: on every rank, when all are needed and one doesn't call ``operation``.
        """
        if self.world.meeting is not None and not self.has_whole(model):
            self.world.meeting.require_all(operation)
        return self.full_state_dict(model, unwrap)

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of ``model``, under the names of the user's own module."""
        inner = self.unwrap(model, keep_torch_compile=False) if unwrap else model
        if any(has_offloaded_params(module) for module in inner.modules()):
            return get_state_dict_offloaded_model(inner)
        return inner.state_dict()

    @property
    def access(self) -> StateAccess:
        """How checkpoints give and take the state of prepared models and their optimizers."""
        return InPlace(self.named_parameters, canonical_name)

    def saved(self, models: Sequence[Any], optimizers: Sequence[Any], *, model_only: bool = False) -> dict[str, Any]:
        """What a checkpoint is written from: ``weights``, ``optimizers`` and ``write_parts``. A collective."""
        return {"weights": [self.full_state_dict(model) for model in models], "optimizers": optimizers}

    def restorable(self, optimizers: Sequence[Any]) -> Sequence[Any]:
        """Those of ``optimizers`` whose state a checkpoint gives back by itself."""
        return optimizers


def _stays_in_place(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether ``model`` lies where loading it has put it, for good.

    Raises:
        PreparationError: quantized weights lie on another device than ``device``.
    """
    if is_placed_by_map(model) or any(has_offloaded_params(module) for module in model.modules()):
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


def remember_gradients(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    """What puts the gradients of ``parameters`` back as they are now, by copies of them."""
    kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]

    def put_back() -> None:
        for parameter, gradient, values in kept:
            if gradient is not None and values is not None:
                gradient.copy_(values)  # in place: it may lie in a bucket that is sent as one
            parameter.grad = gradient

    return put_back


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is a DTensor: a piece of a tensor that lies over several devices."""
    return any(kind.__name__ == "DTensor" for kind in (type(parameter), type(parameter.data)))


def refuse_stand_ins(bundle: Bundle) -> None:
    """Raises if something stands for what only an engine makes.

    Raises:
        PreparationError: a stand-in of DeepSpeed or Megatron-LM, in a run without it.
    """
    for slot in bundle.slots:
        if isinstance(slot.current, (DummyOptim, DummyScheduler)):
            raise PreparationError(
                f"{type(slot.current).__name__} stands for what DeepSpeed makes from its config, but this run doesn't "
                "use DeepSpeed. Give prepare() a torch object, or Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)), "
                "or launch with --use_deepspeed."
            )
        if isinstance(slot.current, (MegatronLMDummyDataLoader, MegatronLMDummyScheduler)):
            raise PreparationError(
                f"{type(slot.current).__name__} stands for what Megatron-LM makes from its arguments, but this run "
                "doesn't use Megatron-LM. Give prepare() a torch object, or Accelerator(megatron_lm_plugin="
                "MegatronLMPlugin(...)), or launch with --use_megatron_lm."
            )


def is_placed_by_map(model: torch.nn.Module) -> bool:
    """Whether a device map has already spread the model over several devices."""
    return len(getattr(model, "hf_device_map", None) or {}) > 1


def refuse_device_map(model: torch.nn.Module) -> None:
    """Raises if a device map spreads ``model``: replicas can't be made of it.

    Raises:
        PreparationError: some submodule has an ``hf_device_map`` of several places.
    """
    for module in model.modules():
        if is_placed_by_map(module):
            raise PreparationError(
                f"{type(model).__name__} is spread over {sorted(set(map(str, module.hf_device_map.values())))} by a "  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue, reportCallIssue]
                "device map, and can't be replicated over processes. Load it without `device_map`, or run one process; "
                "ACCELERATE_BYPASS_DEVICE_MAP=true skips this check."
            )
