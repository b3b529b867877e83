"""Replace an optimizer's parameters, by name, by those of the prepared model; unwrap models.

Sharding a model, and moving it to some devices, creates new Parameter objects. An optimizer that was created before
refers to the old ones, and would train tensors that no model uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..checkpointing.run_state import Stateful
from ..checkpointing.sharded import shard_like
from ..errors import PreparationError
from ..modules import parameter_places
from ..precision.base import restore_forward
from ..torch_private.modules import compile_like, original_module
from .compile import is_compiled_module, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

#: The parts that wrappers add to the names of a module's parameters.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return ``name`` as in the user's own model, without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_by_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Iterate over the parameters of ``model`` under all their names in the user's own model."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter


def inner_optimizer(optimizer: Stateful) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a prepared one; any other object is returned unchanged."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    return inner


@final
class OptimizerRebinding:
    """Optimizers that hold names instead of parameters until :meth:`resolve`, to free the parameters' memory.

    Parameters without a name in ``before`` stay. Existing optimizer state moves to the new parameters.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], before: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._optimizers = list({id(inner): inner for inner in map(inner_optimizer, optimizers)}.values())
        names: dict[int, str] = {}
        for name, parameter in before:
            names.setdefault(id(parameter), name)  # any name of a tied parameter leads to it
        self._state: list[list[tuple[str, dict[str, Any]]]] = []
        for optimizer in self._optimizers:
            known = [(tensor, state) for tensor, state in optimizer.state.items() if id(tensor) in names]
            self._state.append([(names[id(tensor)], state) for tensor, state in known])
            for tensor, _ in known:
                del optimizer.state[tensor]
            for group in optimizer.param_groups:
                # In place: some optimizers keep the list itself (LBFGS).
                group["params"][:] = [names.get(id(parameter), parameter) for parameter in group["params"]]

    def resolve(self, after: Mapping[str, torch.Tensor]) -> None:
        """Replace the names in the optimizers by the parameters with these names in ``after``.

        Raises:
            PreparationError: one new parameter would be in two parameter groups.
        """
        for optimizer, states in zip(self._optimizers, self._state, strict=True):
            owners: dict[int, int] = {}
            for number, group in enumerate(optimizer.param_groups):
                group["params"][:] = _unique(_parameters_of_names(group["params"], after))
                _refuse_shared(group["params"], number, owners)
            for name, state in states:
                new = after[name]
                optimizer.state[new] = {key: _placed_like(value, new) for key, value in state.items()}
            disable_foreach_across_meshes(optimizer)


def _parameters_of_names(
    entries: Sequence[str | torch.Tensor], after: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    for entry in entries:
        if not isinstance(entry, str):
            yield entry
            continue
        if entry not in after:
            raise PreparationError(f"Parameter {entry!r} of the optimizer is gone from the prepared model.")
        yield after[entry]


def _unique(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each parameter once, because a tied or flat parameter has several names."""
    return list({id(parameter): parameter for parameter in parameters}.values())


def _refuse_shared(parameters: Iterable[torch.Tensor], number: int, owners: dict[int, int]) -> None:
    for parameter in parameters:
        if owners.setdefault(id(parameter), number) != number:
            raise PreparationError(
                f"Parameter groups {owners[id(parameter)]} and {number} of the optimizer both hold shards of one flat "
                "parameter. Set FullyShardedDataParallelPlugin(use_orig_params=True), which keeps parameters apart, "
                "or fsdp_version=2."
            )


def disable_foreach_across_meshes(optimizer: torch.optim.Optimizer) -> None:
    """Set ``foreach=False`` in groups with parameters on different meshes: torch can't update them jointly.

    Raises:
        PreparationError: the optimizer was created with a joint update (``foreach=True``, ``fused=True``).
    """
    for group in optimizer.param_groups:
        # Parameters of other pipeline stages are on the meta device, and never updated here.
        meshes = {_mesh_of(parameter) for parameter in group["params"] if not parameter.is_meta}
        if len(meshes) < 2 or "foreach" not in group:
            continue
        asked = next((name for name in ("foreach", "fused") if group.get(name)), None)
        if asked is not None:
            raise PreparationError(
                f"{type(optimizer).__name__}({asked}=True) updates all parameters at once, but some are sharded over "
                f"other ranks than others. Leave {asked} out."
            )
        group["foreach"] = False


def _mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    return getattr(parameter, "device_mesh", None)


def _placed_like(value: object, parameter: torch.Tensor) -> object:
    """Return ``value``, the optimizer state of an old parameter, in the placement of ``parameter``."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if value.shape != parameter.shape:
        raise PreparationError(
            f"The optimizer has state of shape {list(value.shape)} for a parameter of shape {list(parameter.shape)}. "
            "Load the optimizer's state after prepare(), with accelerator.load_state()."
        )
    return shard_like(value, parameter)


def ensure_weights_retied(
    param_init_fn: Callable[[torch.nn.Module], Result], model: torch.nn.Module, device: torch.device
) -> Callable[[torch.nn.Module], Result]:
    """Wrap ``param_init_fn`` so that the tied parameters of ``model`` stay tied."""
    tied = {place: group for group in parameter_places(model).values() if len(group) > 1 for place in group}
    if not tied:
        return param_init_fn
    made: dict[tuple[torch.nn.Module, str], torch.nn.Parameter] = {}

    @wraps(param_init_fn)
    def initialise(module: torch.nn.Module) -> Result:
        result = param_init_fn(module)
        for name in list(module._parameters):
            group = tied.get((module, name))
            if group is not None:
                module._parameters[name] = made.setdefault(group[0], module._parameters[name])  # pyright: ignore[reportArgumentType]
        return result

    return initialise


# --------------------------------------------------------------------------------------------------
# Unwrapping


def _wrapper_classes() -> tuple[type, ...]:
    classes: list[type] = [DistributedDataParallel, DataParallel]
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        classes.append(FullyShardedDataParallel)
    import sys

    # Only a package that was imported can have made an engine, so it isn't imported to check.
    deepspeed: Any = sys.modules.get("deepspeed")
    engine = getattr(deepspeed, "DeepSpeedEngine", None)
    return (*classes, engine) if engine is not None else tuple(classes)


def unwrap(model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> torch.nn.Module:
    """Return the model without its data-parallel, sharding and engine wrappers, in whatever order they were added.

    A compiled model stays compiled unless ``keep_torch_compile`` is False; the mixed-precision forward stays
    unless ``keep_fp32_wrapper`` is False. An object without wrappers is returned unchanged.
    """
    compiled, classes = None, _wrapper_classes()
    while is_compiled_module(model) or isinstance(model, classes):
        if is_compiled_module(model):
            compiled, model = model, original_module(model)
        else:
            model = model.get_submodule("module")
    if not keep_fp32_wrapper and isinstance(model, torch.nn.Module):
        restore_forward(model)
    if not keep_torch_compile:
        return uncompiled(model) if isinstance(model, torch.nn.Module) else model
    if compiled is None or original_module(compiled) is model:
        return model if compiled is None else compiled
    # The user keeps training the wrapped compiled object, so the inner model gets a compiled object of its own.
    return compile_like(compiled, model)


def compile_like_given(given: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """Return ``model``, the wrapped inner model of ``given``, compiled if ``given`` is."""
    inner = unwrap(given)
    return compile_like(inner, model) if is_compiled_module(inner) else model


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return :func:`unwrap` of ``model``; ``recursive`` unwraps submodules too."""
    model = unwrap(model, keep_fp32_wrapper, keep_torch_compile)
    if recursive and isinstance(model, torch.nn.Module):
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    return model


def is_peft_model(model: object) -> bool:
    """Return True if ``model``, unwrapped, is a PeftModel; False if peft isn't imported."""
    import sys

    peft: Any = sys.modules.get("peft")
    if peft is None:
        return False
    inner = unwrap(model, keep_torch_compile=False) if isinstance(model, torch.nn.Module) else model
    return isinstance(inner, peft.PeftModel)
