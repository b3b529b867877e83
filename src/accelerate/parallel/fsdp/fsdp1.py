"""Parameters, gradients and optimizer state sharded as flat parameters: torch's FullyShardedDataParallel (FSDP 1).

``fsdp_version=2`` is newer, simpler and has fewer restrictions. Works on CPU ranks too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar, final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ...checkpointing.sharded import StateAccess
from ...distributed.world import World
from ...errors import CheckpointError, PreparationError
from ...precision import Precision
from ...torch_private.fsdp import (
    all_flat_parameters,
    flat_gradients,
    handle_of,
    hybrid_without_resharding,
    places_in_flat,
    reset_flat_runtime,
    reshard_units,
    set_flat_gradients,
    snapshot_flat_gradients,
    trained_parameters,
)
from ...torch_private.modules import takes_data_of
from ...training.oom_retry import Retryable, RetryMode, snapshot_gradients
from ...training.open_window import GradientHolder
from ..base import Clipping, PreparedArguments, Role, StrategyOptions
from ..compile import compile_model, uncompiled
from ..gradient_norm import Axes, norm_dtype, scale_to, total_norm
from ..gradients import HeldGradients, gradients_of, load_gradients
from ..matrix_optimizer import needs_whole_matrices
from ..rebind import compile_like_given, ensure_weights_retied, inner_optimizer
from ..state import HeldTensor, ModelState
from .setup import (
    FSDPStrategy,
    average_ignored,
    broadcast_from_main,
    move_unit,
    refuse_cast,
    replicate_unsharded,
    set_mixed_precision,
)
from .state import FlatAccess, flat_held_tensors, flat_parameters, names_of
from .wrapping import find_ignored, find_wrap_units

_HYBRID = (ShardingStrategy.HYBRID_SHARD, hybrid_without_resharding())


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@final
class FlatShard(FSDPStrategy):
    """Flat parameters, one per wrap unit, sharded over the ranks and gathered while their unit computes."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self.retry = _FlatRetry(world, RetryMode.TOGETHER)
        self._unreduced: set[int] = set()  # the models inside no_sync
        #: In the order of the model, which is the same on all ranks.
        self._units: weakref.WeakKeyDictionary[FullyShardedDataParallel, None] = weakref.WeakKeyDictionary()
        #: The modules whose own parameters were flattened.
        self.flattened: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    # -- placing -------------------------------------------------------------------------------------------

    def adopts(self, model: torch.nn.Module) -> bool:
        """Return True if ``model`` was wrapped before."""
        return bool(FullyShardedDataParallel.fsdp_modules(model))

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if an optimizer needs whole matrices, because flat parameters don't keep them."""
        super().check(arguments)
        for optimizer in (inner_optimizer(argument.current) for argument in arguments.of(Role.OPTIMIZER)):
            if needs_whole_matrices(optimizer) and self.plugin.sharding_strategy is not ShardingStrategy.NO_SHARD:
                raise PreparationError(
                    f"{type(optimizer).__name__} needs whole matrices, but FSDP version 1 flattens parameters and cuts "
                    "them anywhere. Use version 2 (FullyShardedDataParallelPlugin(fsdp_version=2), or "
                    "--fsdp_version 2), which brings each matrix together for the update."
                )

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Cast ``model``, add activation checkpointing, wrap and compile it, in this order."""
        if isinstance(wrapped := uncompiled(model), FullyShardedDataParallel):
            precision.patch_forward(self.unwrap(model, keep_torch_compile=False))
            self._keep(wrapped)
            return model
        if evaluation_mode:
            return super().place_model(model, precision, device_placement, evaluation_mode=True)
        plugin = self.plugin
        given, model = model, self.unwrap(model, keep_torch_compile=False)
        model = precision.convert(model)
        set_mixed_precision(plugin, model, precision)
        refuse_cast(model, getattr(plugin.mixed_precision_policy, "param_dtype", None))
        precision.patch_forward(model)
        plugin.set_auto_wrap_policy(model)
        ignored = find_ignored(plugin.ignored_modules, model)
        self.recompute(model, find_wrap_units(model, plugin.auto_wrap_policy, ignored))
        key = id(model)
        with warnings.catch_warnings():  # torch warns when it changes the user's options
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = self._wrapped(model, ignored)
        average_ignored(ignored, None, self.world.size, lambda: key not in self._unreduced)
        if callable(getattr(model, "generate", None)):
            wrapped.__dict__["generate"] = _with_full_root(wrapped, model.generate)  # pyright: ignore[reportArgumentType]
        self._keep(wrapped)
        dynamo = self.options.plugins.dynamo
        precision.patch_wrapped(wrapped)
        return compile_model(compile_like_given(given, wrapped), dynamo)

    def _keep(self, wrapped: FullyShardedDataParallel) -> None:
        """Keep the units of ``wrapped``, to clip their gradients together and to reshard them before steps."""
        wrapped.__dict__.update(names_of(wrapped))
        self._units.update(dict.fromkeys(FullyShardedDataParallel.fsdp_modules(wrapped)))
        self.flattened.update(places_in_flat(wrapped))

    def _wrapped(self, model: torch.nn.Module, ignored: list[torch.nn.Module]) -> FullyShardedDataParallel:
        plugin, on_cpu = self.plugin, self.world.device.type == "cpu"
        sync, init = plugin.sync_module_states, plugin.param_init_fn
        # Torch's own broadcast needs an accelerator on which parameters can be allocated.
        if sync and (on_cpu or not takes_data_of(torch.empty(0), self.world.device)):
            broadcast_from_main(model, model, self.world)
            replicate_unsharded(model, self._mesh(), self.world)
            sync, init = False, None
        if init is None:
            move_unit(model, self.world.device)
        options: dict[str, Any] = {} if on_cpu else {"cpu_offload": plugin.cpu_offload}  # already in CPU memory
        return FullyShardedDataParallel(
            model,
            device_mesh=self._mesh(),
            sharding_strategy=plugin.sharding_strategy,
            auto_wrap_policy=plugin.auto_wrap_policy,
            mixed_precision=plugin.mixed_precision_policy,
            sync_module_states=bool(sync),
            backward_prefetch=plugin.backward_prefetch,
            forward_prefetch=bool(plugin.forward_prefetch),
            use_orig_params=bool(plugin.use_orig_params),
            param_init_fn=init and ensure_weights_retied(init, model, self.world.device),
            ignored_modules=ignored or None,
            limit_all_gathers=plugin.limit_all_gathers,
            device_id=self.world.device,
            **options,
        )

    def _mesh(self) -> DeviceMesh:
        """Return a mesh of one axis with all ranks; under hybrid sharding, of two: hosts and ranks of a host."""
        size, local = self.world.size, self.world.local_size
        if self.plugin.sharding_strategy in _HYBRID:
            shape, names = (size // local, local), ("dp_replicate", "dp_shard")
        else:
            shape, names = (size,), ("dp_shard",)
        return init_device_mesh(self.world.device.type, shape, mesh_dim_names=names)

    # -- training ------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes accumulate unsharded gradients on each rank."""
        wrapped = uncompiled(model)
        return self._without_reduction(wrapped) if isinstance(wrapped, FullyShardedDataParallel) else nullcontext()

    @contextmanager
    def _without_reduction(self, wrapped: FullyShardedDataParallel) -> Iterator[None]:
        key = id(wrapped.module)
        if key in self._unreduced:  # nested: the outer context ends it
            yield
            return
        self._unreduced.add(key)
        try:
            with wrapped.no_sync():
                yield
        finally:
            self._unreduced.discard(key)

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Register a hook that reshards parameters before a step, because a forward may have left them unsharded."""
        inner_optimizer(optimizer).register_step_pre_hook(lambda *_: reshard_units(self._units))

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients of a list of parameters to a global norm ; a collective."""
        axes = self._axes()
        found = [(p.grad, axes.get(id(p), ())) for p in parameters if p.grad is not None]
        # A rank without a shard of these parameters still has to take part.
        known = list(dict.fromkeys(axes.values()))
        norm = total_norm(found, clipping.norm_type, self.world.device, known).to(norm_dtype(parameters))
        scale_to([gradient for gradient, _ in found], norm, clipping.max_norm, clipping.error_if_nonfinite)
        return norm

    def _axes(self) -> dict[int, Axes]:
        """Return by parameter the groups over which its flat parameter is sharded."""
        axes: dict[int, Axes] = {}
        for unit in self._units:
            handle = handle_of(unit)
            if handle is not None and handle.uses_sharded_strategy:
                axes.update((id(parameter), (handle.process_group,)) for parameter in trained_parameters(handle))
        return axes

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[FlatShard]:
        """The state of models with flat parameters."""
        return _FlatState(self)


@final
class _FlatRetry(Retryable):
    """The retry of a batch on models with flat parameters, whose runtime state can be reset."""

    def reset_forwards(self, model: torch.nn.Module) -> None:
        """Reset FSDP's runtime state: every unit is resharded and expects a forward."""
        wrapped = uncompiled(model)
        if isinstance(wrapped, FullyShardedDataParallel):
            reset_flat_runtime(wrapped)

    def snapshot_gradients(self, model: torch.nn.Module) -> Callable[[], None]:
        """Copy the gradients, with those accumulated under ``no_sync``; return a function that restores them."""
        wrapped = uncompiled(model)
        if not isinstance(wrapped, FullyShardedDataParallel):
            return super().snapshot_gradients(model)
        return snapshot_flat_gradients(wrapped, snapshot_gradients)


# --------------------------------------------------------------------------------------------------
# State


@final
class _FlatState(ModelState[FlatShard]):
    """The state of models with flat parameters, read through their wrappers."""

    def saved_model(self, model: torch.nn.Module, prepared: torch.nn.Module) -> torch.nn.Module:
        """Return the wrapper, because only it gives access to full parameters and state."""
        return prepared

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the trained parameters; once ``model`` is wrapped, a flat one has many names."""
        return super().named_parameters(model) if self.is_whole(model) else flat_parameters(uncompiled(model))

    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return True if no parameter of ``model`` is sharded."""
        return model is not None and not FullyShardedDataParallel.fsdp_modules(model)

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict on the main process, in CPU memory, and an empty one elsewhere; a collective."""
        if self.is_whole(model):
            self._require_values(model)
            return super().full_state_dict(model, unwrap)
        return self.access.full_model_state(model, self.strategy.world.is_main)

    def held_tensors(self, model: torch.nn.Module) -> list[HeldTensor]:
        """Return the tensors of ``model``, each with this rank's part of it."""
        if self.is_whole(model):
            self._require_values(model)
            return super().held_tensors(model)
        return flat_held_tensors(uncompiled(model))

    def _require_values(self, model: torch.nn.Module) -> None:
        flattened = next((name for name, one in model.named_modules() if one in self.strategy.flattened), None)
        if flattened is not None:
            name = f"{type(model).__name__}.{flattened}".rstrip(".")
            raise PreparationError(
                f"The parameters of {name} lie in a flat parameter of FSDP 1, and only its unit gathers them. Give the "
                "model from prepare(), and choose names in it; or shard with fsdp_version=2."
            )

    @property
    def access(self) -> StateAccess:
        """The access to state through FSDP's own state-dict functions."""
        return FlatAccess(self.strategy.world)

    @property
    def gradients(self) -> GradientHolder | None:
        """The gradients of flat parameters, and those of ignored parameters."""
        return _FlatGradients(self.layout, self.named_parameters)


@final
class _FlatGradients(HeldGradients[Any]):
    """The gradients of flat parameters, sharded or unsharded, and those of ignored parameters."""

    def read(self, model: torch.nn.Module) -> dict[str, object]:
        """Return both kinds of gradients of ``model``."""
        wrapped = uncompiled(model)
        if not isinstance(wrapped, FullyShardedDataParallel):
            return {"units": [], "others": gradients_of(self.named_parameters(model))}
        return {"units": flat_gradients(wrapped), "others": gradients_of(_ignored_parameters(wrapped))}

    def load(self, model: torch.nn.Module, gradients: Mapping[str, Any] | None) -> None:
        """Set both kinds of gradients of ``model``."""
        wrapped, others = uncompiled(model), {} if gradients is None else gradients["others"]
        if not isinstance(wrapped, FullyShardedDataParallel):
            load_gradients(self.named_parameters(model), others)
            return
        load_gradients(_ignored_parameters(wrapped), others)
        if not set_flat_gradients(wrapped, None if gradients is None else gradients["units"]):
            raise CheckpointError("its gradients were saved in other FSDP units")


def _ignored_parameters(wrapped: FullyShardedDataParallel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Iterate over the parameters of ignored modules, which belong to no wrap unit."""
    flat = all_flat_parameters(wrapped)
    return ((name, parameter) for name, parameter in wrapped.named_parameters() if parameter not in flat)


def _with_full_root(
    wrapped: FullyShardedDataParallel, method: Callable[Arguments, Result]
) -> Callable[Arguments, Result]:
    """Wrap ``method``, which bypasses the wrapper's forward, to gather the root's parameters around it."""

    @wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with FullyShardedDataParallel.summon_full_params(wrapped, recurse=False, writeback=False):
            return method(*args, **kwargs)

    return call
