"""The collectives of a fault-tolerant run: the values of the living members, the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from ...callers import call_site
from ...data_loader.gathering import Joiner, tensors_of, with_tensors
from ...data_loader.sampling import BatchCoverage
from ...distributed.collectives import REDUCTIONS, check_reducible, finished, leaves_of, over_ranks
from ...distributed.messages import places_of
from ...distributed.world import World, current_world
from ...errors import CollectiveError, SettingError, UnequalTensors
from ...nested import recursively_apply
from .shared_epoch import SharedLoader

if TYPE_CHECKING:
    from .membership import Membership


def _gather(members: Membership, tensor: Any, *, to: int | None = None, like: object = None, **_: object) -> Any:
    rows = _share_tensors(members, "gather" if to is None else f"gather to={to}", tensor, like=like)
    if to not in (None, members.rank):
        return None
    joined = iter([torch.cat([piece.reshape(1) if piece.ndim == 0 else piece for piece in row]) for row in rows])
    return recursively_apply(lambda leaf: next(joined).to(leaf.device), tensor)


def _reduce(
    members: Membership,
    tensor: Any,
    reduction: str = "mean",
    scale: float = 1.0,
    world: World | None = None,
    **_: object,
) -> Any:
    if reduction not in REDUCTIONS:
        raise SettingError(f"reduction={reduction!r}: choose one of {', '.join(map(repr, REDUCTIONS))}.")
    for leaf in leaves_of(tensor, "reduce"):
        check_reducible(leaf, reduction)
    if reduction == "none":
        return recursively_apply(torch.Tensor.clone, tensor)
    whole = current_world()
    num_left_out = 1 if world is None or whole is None else whole.size // world.size
    rest = iter(_share_tensors(members, f"reduce {reduction}", tensor, num_left_out))

    def reduce_leaf(leaf: torch.Tensor) -> torch.Tensor:
        row = next(rest)
        return finished(over_ranks(torch.stack(row), reduction), leaf, reduction, scale, len(row))

    return recursively_apply(reduce_leaf, tensor)


def _share_tensors(
    members: Membership, operation: str, tensor: Any, num_left_out: int = 1, like: object = None
) -> list[tuple[torch.Tensor, ...]]:
    """Return all members' tensors for each tensor in ``tensor``, in the order of ranks.

    Args:
        num_left_out: how many ranks of a replica have the same values; only one of them counts.
        like: the containers that the members compare (default: those of ``tensor``).

    Raises:
        UnequalTensors: on all members, if the places, shapes or dtypes differ.
    """
    own = [leaf.detach().cpu() for leaf in leaves_of(tensor, operation)]
    given = members.share(operation, (_kinds(tensor if like is None else like, own), own))
    parts = {rank: given[rank] for rank in members.without_copies(given, num_left_out)}
    _check_equal(operation, {rank: kinds for rank, (kinds, _) in parts.items()})
    return [*zip(*(part for _, part in parts.values()), strict=True)]


def _kinds(data: object, leaves: list[torch.Tensor]) -> tuple[list[str], list[tuple[list[int], str]]]:
    """Return the places of tensors in ``data``, and their shapes and dtypes, which are the same on all members."""
    return places_of(data), [(list(leaf.shape), str(leaf.dtype)) for leaf in leaves]


def _check_equal(operation: str, kinds: Mapping[int, object]) -> None:
    if any(kind != kinds[min(kinds)] for kind in kinds.values()):
        lines = "\n".join(f"  - Process {rank}: {kind}" for rank, kind in kinds.items())
        raise UnequalTensors(
            f"`{operation}` at {call_site()}: the ranks' values differ in place, shape, dtype or number. Give the same "
            f"containers and keys, in the same order, with tensors of the same shapes, on all ranks:\n{lines}"
        )


def _broadcast(members: Membership, tensor: Any, from_process: int = 0, **_: object) -> Any:
    leaves = leaves_of(tensor, "broadcast")
    own = [leaf.detach().cpu() for leaf in leaves]
    given = _of_one(members, "broadcast", _kinds(tensor, own), own, from_process)
    if given is not None and members.rank != from_process:
        with torch.no_grad():
            for leaf, value in zip(leaves, given, strict=True):
                leaf.copy_(value)
    return tensor


def _broadcast_object_list(
    members: Membership, object_list: list[Any], from_process: int = 0, **_: object
) -> list[Any]:
    kind = f"{len(object_list)} objects"
    given = _of_one(members, "broadcast_object_list", kind, object_list, from_process)
    if given is not None:
        object_list[:] = given
    return object_list


def _of_one(members: Membership, operation: str, kind: object, own: object, rank: int) -> Any:
    """Return the value of ``rank``; None in a process that hasn't reached the others' position yet.

    Raises:
        UnequalTensors: on all members, if their ``kind`` differs.
        CollectiveError: the rank is lost.
    """
    given = members.share(f"{operation} from_process={rank}", (kind, own if members.rank == rank else None))
    _check_equal(operation, {other: kind for other, (kind, _) in given.items()})
    if rank not in given and not members.is_behind:
        raise CollectiveError(
            f"`{operation}` at {call_site()}: rank {rank} was lost, and its new process hasn't joined yet. Compute the "
            "values on every rank, or use gather_object and take the first one."
        )
    return given[rank][1] if rank in given else None


def _gather_object(members: Membership, object: Any, **_: object) -> list[Any]:
    return [item for part in members.share("gather_object", [*object]).values() for item in part]


#: The implementations of the functions of `accelerate.utils`, by name.
COLLECTIVES: Final[Mapping[str, Callable[..., Any]]] = {
    "gather": _gather,
    "gather_object": _gather_object,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "broadcast_object_list": _broadcast_object_list,
}


def gather_for_metrics(
    members: Membership, data: object, loader: object, as_objects: bool, is_receiver: bool
) -> object:
    """Return the joined values that the living members computed from the current batch of ``loader``.

    In an evaluation, the samples of a rank that was lost before it gave its values are read again by the others.
    """
    tensors, shared = tensors_of(data), loader if isinstance(loader, SharedLoader) else None
    on_host = with_tensors(data, [tensor.detach().cpu() for tensor in tensors])
    given = members.share("gather_for_metrics", (on_host, None if shared is None else shared.own_rows))
    parts = {rank: part for rank, part in given.items() if rank == members.reader_of(rank)}
    if shared is not None:
        shared.note_gathered(parts)
    if not is_receiver:
        return None
    rows = [rows for _, rows in parts.values() if rows is not None]
    is_known = len(rows) == len(parts)
    coverage = BatchCoverage(tuple(valid for valid, _ in rows), tuple(size for _, size in rows)) if is_known else None
    joined = Joiner(lambda _: coverage, 0, as_objects=as_objects).join([value for value, _ in parts.values()])
    return with_tensors(joined, [tensor.to(tensors[0].device) for tensor in tensors_of(joined)]) if tensors else joined
