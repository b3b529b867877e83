"""A rank's gradients between two updates: encoded for a checkpoint, and loaded bit for bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypedDict, TypeVar, final

import torch

from ..errors import CheckpointError
from ..torch_private.fsdp import set_unsharded_gradients, unshard_once, unsharded_gradients
from ..torch_private.modules import sparse_components

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
NamedParametersOf = Callable[[torch.nn.Module], NamedParameters]


@final
class GradientShard(TypedDict):
    """This rank's shard of a gradient, and the names of its placements."""

    piece: torch.Tensor
    cut: list[str]


@final
class SparseGradient(TypedDict):
    """The components of a sparse gradient."""

    indices: torch.Tensor
    values: torch.Tensor
    is_coalesced: bool


#: A gradient in the form that a checkpoint holds.
EncodedGradient: TypeAlias = torch.Tensor | GradientShard | SparseGradient
Value = TypeVar("Value")


class HeldGradients(ABC, Generic[Value]):
    """A strategy's gradients between two updates, as named values that a checkpoint can hold.

    Args:
        layout: the placement of gradients over the ranks; gradients of another layout can't be loaded.
        named_parameters: returns a model's parameters under all names of the user's own model.
    """

    def __init__(self, layout: str, named_parameters: NamedParametersOf) -> None:
        self.layout: str = layout
        self.named_parameters: NamedParametersOf = named_parameters

    @abstractmethod
    def read(self, model: torch.nn.Module) -> dict[str, Value]:
        """Return this rank's gradients of ``model``."""

    @abstractmethod
    def load(self, model: torch.nn.Module, gradients: Mapping[str, Value] | None) -> None:
        """Set the gradients of ``model`` to those that :meth:`read` returned on this rank; None clears them.

        Raises:
            CheckpointError: they belong to another model, or to one that is sharded differently.
        """


@final
class PlainGradients(HeldGradients[EncodedGradient]):
    """The gradients in ``.grad`` of a model's parameters, by name."""

    def read(self, model: torch.nn.Module) -> dict[str, EncodedGradient]:
        """Return this rank's gradients of ``model``."""
        return gradients_of(self.named_parameters(model))

    def load(self, model: torch.nn.Module, gradients: Mapping[str, EncodedGradient] | None) -> None:
        """Set the gradients of ``model``; None clears them."""
        load_gradients(self.named_parameters(model), gradients or {})


@final
class ShardedGradients(HeldGradients[dict[str, EncodedGradient]]):
    """The gradients of models under ``fully_shard``: sharded ones, and unsharded ones of passes under ``no_sync``.

    Args:
        modules_of: returns the sharded modules of a model.
    """

    def __init__(
        self,
        layout: str,
        named_parameters: NamedParametersOf,
        modules_of: Callable[[torch.nn.Module], Sequence[torch.nn.Module]],
    ) -> None:
        super().__init__(layout, named_parameters)
        self._modules_of = modules_of

    def read(self, model: torch.nn.Module) -> dict[str, dict[str, EncodedGradient]]:
        """Return both kinds of gradients of ``model``."""
        whole = unsharded_gradients(self._modules_of(model))  # this reshards every unit
        found = list(self.named_parameters(model))
        names = {id(parameter): name for name, parameter in reversed(found)}
        unsharded = {names[id(parameter)]: encode_gradient(gradient) for parameter, gradient in whole}
        return {"held": gradients_of(found), "whole": unsharded}

    def load(self, model: torch.nn.Module, gradients: Mapping[str, dict[str, EncodedGradient]] | None) -> None:
        """Set both kinds of gradients of ``model``; None clears them. A collective.

        Raises:
            CheckpointError: a gradient doesn't fit the parameter of its name.
        """
        modules, given = self._modules_of(model), gradients or {"held": {}, "whole": {}}
        if gradients is not None:
            unshard_once(modules)
        found = list(self.named_parameters(model))
        load_gradients(found, given["held"])
        names = {id(parameter): name for name, parameter in reversed(found)}
        unknown = sorted(set(given["whole"]) - set(names.values()))
        if unknown:
            raise CheckpointError(f"the model has no parameter {unknown[0]!r}, of which a gradient was saved")

        def gradient_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
            name = names.get(id(parameter), "")
            value = given["whole"].get(name)
            return None if value is None else decode_gradient(value, whole, name)

        set_unsharded_gradients(modules, gradient_of)


def gradients_of(named: NamedParameters) -> dict[str, EncodedGradient]:
    """Return the existing gradients by parameter name; for a sharded one, the local shard and its placements."""
    first: dict[int, str] = {}
    found: dict[str, EncodedGradient] = {}
    for name, parameter in named:
        if parameter.grad is not None and first.setdefault(id(parameter), name) == name:
            found[name] = encode_gradient(parameter.grad)
    return found


def load_gradients(named: NamedParameters, gradients: Mapping[str, EncodedGradient]) -> None:
    """Set the gradients of the parameters in ``gradients``, and clear all others.

    Raises:
        CheckpointError: a gradient doesn't fit the parameter of its name.
    """
    parameters = dict(named)
    for parameter in parameters.values():
        parameter.grad = None
    for name, value in gradients.items():
        parameter = parameters.get(name)
        if parameter is None:
            raise CheckpointError(f"the model has no parameter {name!r}, of which a gradient was saved")
        parameter.grad = decode_gradient(value, parameter, name)


def encode_gradient(gradient: torch.Tensor) -> EncodedGradient:
    """Return ``gradient`` in a form that a checkpoint can hold: the local tensor and its placements."""
    shard: Any = gradient.detach()
    if getattr(shard, "to_local", None) is not None:
        return {"piece": shard.to_local(), "cut": list(map(_placement_name, shard.placements))}
    if shard.is_sparse:
        indices, values = sparse_components(shard)
        return {"indices": indices, "values": values, "is_coalesced": shard.is_coalesced()}
    return shard


def decode_gradient(value: EncodedGradient, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return the gradient that :func:`encode_gradient` encoded, placed like ``parameter``.

    Raises:
        CheckpointError: the gradient belongs to another parameter.
    """
    gradient = _laid_out(value, parameter)
    if gradient is None or gradient.shape != parameter.shape:
        raise CheckpointError(f"the saved gradient of {name!r} doesn't fit the model")
    return gradient


def _laid_out(value: EncodedGradient, parameter: torch.Tensor) -> torch.Tensor | None:
    target: Any = parameter  # a DTensor if it is sharded
    is_piece = getattr(parameter, "to_local", None) is not None
    if isinstance(value, torch.Tensor):
        if is_piece or value.shape != parameter.shape:
            return None
        # In the parameter's strides, like autograd: norms are summed in memory order.
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    if "indices" in value:
        indices, values = (value[key].to(parameter.device) for key in ("indices", "values"))
        is_coalesced = value["is_coalesced"]
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, check_invariants=True, is_coalesced=is_coalesced
        )
    if not is_piece:
        return None
    from torch.distributed.tensor import DTensor

    local = value["piece"].to(target.to_local().device)
    placements: Sequence[Placement] = target.placements  # preferred: names don't describe strided shards
    if value["cut"] != list(map(_placement_name, placements)):
        placements = list(map(_placement, value["cut"]))
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, target.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _placement_name(placement: Any) -> str:
    if placement.is_shard():
        return f"shard {placement.dim}"
    return f"partial {placement.reduce_op}" if placement.is_partial() else "replicate"


def _placement(word: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kind, _, value = word.partition(" ")
    if kind == "shard":
        return Shard(int(value))
    return Partial(value) if kind == "partial" else Replicate()
