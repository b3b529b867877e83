"""The gradients that a rank holds between two updates, given away and taken back bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError
from ..torch_private.fsdp import gather_once, take_whole_gradients, whole_gradients_of
from ..torch_private.optim import parts_of_sparse

NamedParameters = Iterable[tuple[str, torch.Tensor]]


def gradients_of(named: NamedParameters) -> dict[str, Any]:
    """By name the gradient of each parameter that has one; of a piece, what lies on this rank and how it is cut."""
    first: dict[int, str] = {}
    found: dict[str, Any] = {}
    for name, parameter in named:
        if parameter.grad is not None and first.setdefault(id(parameter), name) == name:
            found[name] = written(parameter.grad)
    return found


def take_gradients(named: NamedParameters, gradients: Mapping[str, Any]) -> None:
    """The parameters have these gradients, and the others none.

    Raises:
        CheckpointError: a gradient is of another parameter than the one of its name.
    """
    parameters = dict(named)
    for parameter in parameters.values():
        parameter.grad = None
    for name, value in gradients.items():
        parameter = parameters.get(name)
        if parameter is None:
            raise CheckpointError(f"the model has no parameter {name!r}, of which a gradient was saved")
        parameter.grad = read_as(value, parameter, name)


def sharded_gradients(modules: Sequence[torch.nn.Module], named: Callable[[], NamedParameters]) -> dict[str, Any]:
    """The gradients in pieces, and those that passes without reduction have left whole, under ``fully_shard``.

    Args:
        modules: the sharded ones.
        named: the parameters, as they are while every unit is sharded.
    """
    whole = whole_gradients_of(modules)  # every unit is sharded now
    found = list(named())
    names = {id(parameter): name for name, parameter in reversed(found)}
    return {"held": gradients_of(found), "whole": {names[id(p)]: written(gradient) for p, gradient in whole}}


def take_sharded_gradients(
    modules: Sequence[torch.nn.Module], named: Callable[[], NamedParameters], gradients: Mapping[str, Any] | None
) -> None:
    """Give the parameters what :func:`sharded_gradients` gave, a collective; None: nothing at all.

    Raises:
        CheckpointError: a gradient is of another parameter than the one of its name.
    """
    given = gradients or {"held": {}, "whole": {}}
    if gradients is not None:
        gather_once(modules)
    found = list(named())
    take_gradients(found, given["held"])
    names = {id(parameter): name for name, parameter in reversed(found)}
    unknown = sorted(set(given["whole"]) - set(names.values()))
    if unknown:
        raise CheckpointError(f"the model has no parameter {unknown[0]!r}, of which a gradient was saved")

    def gradient_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
        name = names.get(id(parameter))
        value = given["whole"].get(name)
        return None if name is None or value is None else read_as(value, whole, name)

    take_whole_gradients(modules, gradient_of)


def written(gradient: torch.Tensor) -> Any:
    """``gradient`` as values that a checkpoint holds: what lies on this rank, and how it is laid out."""
    piece: Any = gradient.detach()
    if getattr(piece, "to_local", None) is not None:
        return {"piece": piece.to_local(), "cut": list(map(_word, piece.placements))}
    if piece.is_sparse:
        indices, values = parts_of_sparse(piece)
        return {"indices": indices, "values": values, "is_coalesced": piece.is_coalesced()}
    return piece


def read_as(value: Any, parameter: Any, name: str) -> torch.Tensor:
    """The gradient that :func:`written` gave, laid out for ``parameter``.

    Raises:
        CheckpointError: it is the gradient of another parameter.
    """
    gradient = _laid_out(value, parameter)
    if gradient is None or gradient.shape != parameter.shape:
        raise CheckpointError(f"the saved gradient of {name!r} doesn't fit the model")
    return gradient


def _laid_out(value: Any, parameter: Any) -> torch.Tensor | None:
    is_piece = getattr(parameter, "to_local", None) is not None
    if isinstance(value, torch.Tensor):
        if is_piece or value.shape != parameter.shape:
            return None
        # In the strides of the parameter, as autograd lays it: norms add up in the order of memory.
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    if "indices" in value:
        indices, values = (value[key].to(parameter.device) for key in ("indices", "values"))
        options = {"check_invariants": True, "is_coalesced": value["is_coalesced"]}
        return torch.sparse_coo_tensor(indices, values, parameter.shape, **options)
    if not is_piece:
        return None
    from torch.distributed.tensor import DTensor

    local = value["piece"].to(parameter.to_local().device)
    placements: Any = parameter.placements  # first: words can't tell how pieces of pieces are cut
    if value["cut"] != list(map(_word, placements)):
        placements = list(map(_placement, value["cut"]))
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _word(placement: Any) -> str:
    if placement.is_shard():
        return f"shard {placement.dim}"
    return f"partial {placement.reduce_op}" if placement.is_partial() else "replicate"


def _placement(word: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kind, _, value = word.partition(" ")
    if kind == "shard":
        return Shard(int(value))
    return Partial(value) if kind == "partial" else Replicate()
