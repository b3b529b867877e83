"""Optimizers follow parameters that preparation replaces: by name, tied weights included.

Sharding, and moving a model to some devices, makes new Parameter objects. An optimizer that was made before holds
the old ones, and would go on training tensors that no model uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, final

import torch

from ..checkpointing.sharded import laid_like
from ..errors import PreparationError

#: What wrappers put into the names of a module's parameters.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """``name`` as the user's own model has it, without what compiling, recomputing and sharding add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_by_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter under every name that it has in the user's own model."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside what ``prepare`` returned; any other comes back as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def rebind(
    optimizers: Iterable[torch.optim.Optimizer],
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
) -> None:
    """Where ``optimizers`` held a parameter of ``before``, they hold the one of the same name in ``after``.

    Parameters that no name leads to stay. State that an optimizer already has goes along.

    Raises:
        PreparationError: pieces of one new parameter are in two groups.
    """
    Names(optimizers, before.items()).resolve(after)


@final
class Names:
    """Optimizers that hold names in place of parameters, so that what these hold can be freed; until resolved."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], before: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._optimizers = list({id(inner): inner for inner in map(inner_optimizer, optimizers)}.values())
        names: dict[int, str] = {}
        for name, parameter in before:
            names.setdefault(id(parameter), name)  # any name of a tied parameter leads to it
        self._state: list[list[tuple[str, dict[str, Any]]]] = []
        for optimizer in self._optimizers:
            held = [(tensor, state) for tensor, state in optimizer.state.items() if id(tensor) in names]
            self._state.append([(names[id(tensor)], state) for tensor, state in held])
            for tensor, _ in held:
                del optimizer.state[tensor]
            for group in optimizer.param_groups:
                # In place: some optimizers keep the list itself (LBFGS).
                group["params"][:] = [names.get(id(parameter), parameter) for parameter in group["params"]]

    def resolve(self, after: Mapping[str, torch.Tensor]) -> None:
        """The optimizers hold the parameters that have the names now."""
        for optimizer, states in zip(self._optimizers, self._state, strict=True):
            owners: dict[int, int] = {}
            for number, group in enumerate(optimizer.param_groups):
                group["params"][:] = _unique(_looked_up(group["params"], after))
                _refuse_shared(group["params"], number, owners)
            for name, state in states:
                new = after[name]
                optimizer.state[new] = {key: _following(value, new) for key, value in state.items()}
            _keep_kinds_apart(optimizer)


def _looked_up(held: Sequence[Any], after: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    for entry in held:
        if not isinstance(entry, str):
            yield entry
            continue
        if entry not in after:
            raise PreparationError(f"Parameter {entry!r} of the optimizer is gone from the prepared model.")
        yield after[entry]


def _unique(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Several names may lead to one parameter: ties, and flat parameters."""
    return list({id(parameter): parameter for parameter in parameters}.values())


def _refuse_shared(parameters: Iterable[torch.Tensor], number: int, owners: dict[int, int]) -> None:
    for parameter in parameters:
        if owners.setdefault(id(parameter), number) != number:
            raise PreparationError(
                f"Parameter groups {owners[id(parameter)]} and {number} of the optimizer both hold pieces of one flat "
                "parameter. Set FullyShardedDataParallelPlugin(use_orig_params=True), which keeps parameters apart, "
                "or fsdp_version=2."
            )


def _keep_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Parameters that lie differently are updated one by one: torch's joint updates want them to lie alike.

    Raises:
        PreparationError: a joint update (``foreach=True``, ``fused=True``) was asked for.
    """
    for group in optimizer.param_groups:
        # Parameters of other stages of a pipeline, which have no values, are never updated here.
        meshes = {_mesh_of(parameter) for parameter in group["params"] if not parameter.is_meta}
        if len(meshes) < 2 or "foreach" not in group:
            continue
        asked = next((name for name in ("foreach", "fused") if group.get(name)), None)
        if asked is not None:
            raise PreparationError(
                f"{type(optimizer).__name__}({asked}=True) updates all parameters at once, but some are cut over other "
                f"ranks than others. Leave {asked} out."
            )
        group["foreach"] = False


def _mesh_of(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "device_mesh", None)


def _following(value: Any, parameter: torch.Tensor) -> Any:
    """Optimizer state of an old parameter, lying as ``parameter`` does."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if value.shape != parameter.shape:
        raise PreparationError(
            f"The optimizer has state of shape {list(value.shape)} for a parameter of shape {list(parameter.shape)}. "
            "Load the optimizer's state after prepare(), with accelerator.load_state()."
        )
    return laid_like(value, parameter)


def ensure_weights_retied(
    param_init_fn: Callable[[torch.nn.Module], Any], model: torch.nn.Module, device: torch.device
) -> Callable[[torch.nn.Module], Any]:
    """``param_init_fn``, after which parameters of ``model`` that were tied are one parameter again."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    tied = {place: group for group in places.values() if len(group) > 1 for place in group}
    if not tied:
        return param_init_fn
    made: dict[tuple[torch.nn.Module, str], torch.nn.Parameter] = {}

    @wraps(param_init_fn)
    def initialise(module: torch.nn.Module) -> Any:
        result = param_init_fn(module)
        for name in list(module._parameters):
            group = tied.get((module, name))
            if group is not None:
                module._parameters[name] = made.setdefault(group[0], module._parameters[name])  # pyright: ignore[reportArgumentType]
        return result

    return initialise
