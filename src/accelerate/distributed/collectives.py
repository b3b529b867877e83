"""Collectives: gather, broadcast, reduce and pad tensors in nested containers.

With a single process, every function works without torch.distributed. Results carry no gradient.

Before each operation the ranks compare a checksum of what they are about to do. If they disagree, all of them raise,
and the error shows what each rank gave. On the host, the checksum is in a first message whose length all ranks know;
short tensors are in the same message. With an accelerator's backend, reading such a message would wait for the device,
so the ranks compare the checksums through the store.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from itertools import permutations, zip_longest
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast, final, get_args, overload

import torch
import torch.distributed as dist

from ..callers import call_site
from ..devices.table import KINDS
from ..errors import CollectiveError, NotBuilt, SettingError, UnequalTensors
from ..nested import chained_operation, flat_tensors, get_shape, named_tensors, recursively_apply
from ..torch_private.distributed import all_gather_single
from .messages import Buffers, MessageLengths, checksum, describe, joined_message_for, message_for, places_of
from .store_client import Coordinator
from .world import World, current_world, join_world

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Data = TypeVar("Data")  # a tensor, or containers of tensors

Reduction = Literal["sum", "mean", "max", "none"]
REDUCTIONS: Final[tuple[Reduction, ...]] = get_args(Reduction)

#: The labels of worlds whose ranks communicate through torch.distributed.
TORCH_DISTRIBUTED_OPERATION_TYPES: Final = (
    *(kind.label for kind in KINDS if kind.label.startswith("MULTI_")),
    "DEEPSPEED",
    "FSDP",
    "MEGATRON_LM",
    "TP",
)

# The dtypes that every backend supports; others are sent as bytes, or summed in a wider dtype.
_CARRIED_DTYPES: Final = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_ON_HOST: Final = ("gloo", "mpi")
_SHORT_BYTES: Final = 64 << 10  # up to here, an all-gather costs less than one more message
_OF_OBJECTS: Final = ("gather_object", "broadcast_object_list")  # always sent pickled


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was given to :func:`pad_across_processes` and came back unpadded."""


# -- numbered operations -----------------------------------------------------------------------------------


def verify_operation(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate `function` to run as one numbered operation of the world.

    In debug mode ranks publish the call with its line. In a world of one, `function` is simply called.
    """

    @functools.wraps(function)
    def operation(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        world = world_or_joined(cast("World | None", kwargs.get("world")))
        if world.size == 1:
            return function(*args, **kwargs)
        name = function.__name__
        if world.members is not None:
            return world.members.collective(name, args, kwargs)
        coordinator = coordinator_of(world, name)
        # On the host the wait checks the other ranks, so the operation is published only once the wait gets long.
        is_published = world.debug or name in _OF_OBJECTS or world.backend not in _ON_HOST
        before, num_collectives = (coordinator.operation, coordinator.site), coordinator.num_collectives
        coordinator.begin(name, with_site=world.debug, publish=is_published)
        try:
            return function(*args, **kwargs)
        except Exception as error:  # whatever it is, a refused call is no operation
            require_group(name)
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise CollectiveError(coordinator.explain(error)) from error
            if name not in _OF_OBJECTS and coordinator.num_collectives == num_collectives:
                coordinator.withdraw(*before)  # the others' next operation is this rank's next one, too
            raise

    return operation


def require_group(name: str) -> None:
    """Raise CollectiveError if the program has destroyed the process group that `name` needs."""
    if not dist.is_initialized():
        raise CollectiveError(
            f"`{name}` needs the process group, which this program has destroyed (destroy_process_group). Call it "
            "before, or leave the destruction out: the group is destroyed when the process ends."
        )


def world_or_joined(world: World | None) -> World:
    """Return `world`, or the world that this process is in, joining it first if needed."""
    return world or current_world() or join_world()


def coordinator_of(world: World, name: str) -> Coordinator:
    """Return the coordinator of `world` for operation `name`. Raises CollectiveError for a pretended world."""
    if world.coordinator is not None:
        return world.coordinator
    if world.members is not None:
        raise CollectiveError(world.members.why_not(name))
    if world.kind.runtime:
        raise NotBuilt(f"`{name}` between {world.kind.name} processes isn't built in this version.")
    raise CollectiveError(f"`{name}`: this is a simulated world of {world.size}; it can't communicate.")


def _describe(data: object) -> list[Any]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors(data)]
    kinds = recursively_apply(
        lambda item: type(item).__name__, data, test_type=lambda x: not isinstance(x, torch.Tensor)
    )
    return [str(get_shape(kinds)), dtypes, places_of(data)]


def _mismatch(descriptions: list[str], sites: list[str]) -> str | None:
    """Return the documented message about the difference between the ranks; None without one."""
    if len(set(descriptions)) == 1:
        return None
    calls = [json.loads(text) for text in descriptions]
    name = calls[0][0]
    if len({(call[0], *call[2:]) for call in calls}) > 1:
        lines = "\n".join(f"  - Process {rank}: {_named(call)} at {sites[rank]}" for rank, call in enumerate(calls))
        if len({call[0] for call in calls}) == 1:
            return f"The processes call `{name}` with arguments that have to be the same on all of them:\n{lines}"
        return f"The processes are in different operations and would wait for each other forever:\n{lines}"
    what, column = ("shape", 0) if len({call[1][0] for call in calls}) > 1 else ("dtype", 1)
    lines = "\n".join(f"  - Process {rank}: {call[1][column]} at {sites[rank]}" for rank, call in enumerate(calls))
    why = _other_places([call[1][2] for call in calls]) or (
        f"Cannot apply desired operation due to {what} mismatches. All {what}s across devices must be valid."
    )
    return f"{why}\n\nOperation: `accelerate.utils.operations.{name}`\nInput {what}s:\n{lines}"


def _other_places(places: list[list[str]]) -> str:
    """Return a sentence about the first difference between the ranks' places of tensors; "" without one."""
    for rank, own in enumerate(places):
        for first, other in zip_longest(places[0], own, fillvalue="no tensor"):
            if first != other:
                return (
                    "The ranks' tensors are combined in order, but process 0 has "
                    f"{first or 'a tensor'} where process {rank} has {other or 'a tensor'}. "
                    "Give the same containers and keys, in the same order, on all ranks."
                )
    return ""


def _exchange_first_message(
    operation: str,
    data: Any,
    leaves: list[torch.Tensor],
    world: World,
    *,
    how: str = "",
    limit_bytes: int | None = None,
    same_shapes: bool = False,
) -> Buffers | None:
    """Check that all ranks are in `operation` with such tensors; return all ranks' tensors, if the message held them.

    The message holds them if it has room, and if they are no longer than `limit_bytes`; never on a device.

    Args:
        how: arguments of the operation that have to be the same on all ranks.
        same_shapes: the ranks' tensors are known to match, so on a device the check is skipped (except in debug mode).

    Raises:
        CollectiveError: on every rank, when the ranks disagree.
    """
    coordinator, places = coordinator_of(world, operation), ",".join(places_of(data))
    if world.backend not in _ON_HOST:
        if not same_shapes or world.debug:
            ranks = range(world.size) if world.group is None else dist.get_process_group_ranks(world.group)
            described = describe(leaves, plain=all(map(_is_plain, leaves)))
            shapes = [(tuple(shape), dtype) for shape, dtype, _ in described]
            if not coordinator.agree(checksum(operation, how, places, shapes), ranks):
                raise _disagreement(operation, data, world, how)
        return None
    lengths = coordinator.lengths.setdefault(world.group, MessageLengths())
    is_plain = all(_is_plain(leaf) and leaf.is_cpu for leaf in leaves)
    message = message_for(describe(leaves, plain=is_plain), world.size, f"{operation} {how} {places}", lengths.next)
    buffers = message.buffers()
    buffers.pack(leaves)
    _finish(world, _all_gather(buffers.joined, buffers.own, world))
    if not buffers.agree():
        raise _disagreement(operation, data, world, how)
    fits = limit_bytes is None or message.needed_bytes <= limit_bytes
    lengths.note(message.kind, message.needed_bytes if fits else 0)
    return buffers if message.is_whole and fits else None


def _disagreement(operation: str, data: object, world: World, how: str) -> CollectiveError:
    """Gather each rank's operation and return the error for ranks that disagree."""
    calls: list[Any] = [None] * world.size
    mine = json.dumps([operation, None if data is None else _describe(data), how])
    dist.all_gather_object(calls, (mine, call_site()), group=world.group)
    descriptions, sites = ([call[number] for call in calls] for number in (0, 1))
    text = _mismatch(descriptions, sites) or f"`{operation}`: the ranks gave different tensors."
    is_same_call = len({(call[0], call[2]) for call in map(json.loads, descriptions)}) == 1
    return UnequalTensors(text) if is_same_call else CollectiveError(text)


def _named(call: list[object]) -> str:
    return f"`{call[0]}`" + "".join(f" ({how})" for how in call[2:] if how)


def _finish(world: World, work: Any) -> None:
    """Wait for a started operation; on the host, check the other ranks during the wait."""
    if work is None:
        return
    if world.coordinator is not None and world.backend in _ON_HOST:
        world.coordinator.wait_for_work(work)
    else:
        work.wait()


# -- gather -----------------------------------------------------------------------------------------------


@overload
def gather(tensor: Data, *, world: World | None = None) -> Data: ...
@overload
def gather(tensor: Any, *, world: World | None = None, to: int | None, like: object = None) -> Any: ...
@verify_operation
def gather(tensor: Any, *, world: World | None = None, to: int | None = None, like: object = None) -> Any:
    """Concatenate every tensor in `tensor` over all ranks along dimension 0; a scalar counts as a vector of length 1.

    Args:
        to: only this rank gets the result, the others get None (default: every rank).
        like: the containers that the ranks compare (default: those of `tensor`).

    Raises:
        TypeError: there is something other than tensors in the containers.
        CollectiveError: the ranks' containers or shapes differ, or a rank is missing.
    """
    here = world_or_joined(world)
    if here.size == 1:
        return tensor
    leaves = flat_tensors(tensor)
    is_flat = leaves is not None
    if leaves is None:
        leaves = leaves_of(tensor, "gather")
    buffers = _exchange_first_message(
        "gather",
        tensor if like is None else like,
        leaves,
        here,
        how="" if to is None else f"to={to}",
        limit_bytes=None if to is None else _SHORT_BYTES,
    )
    parts = _gather_together(leaves, here, to) if buffers is None else buffers.unpack()
    if parts is None:
        parts = [_gather_one(leaf, here, to) for leaf in leaves]
    if to is not None and to != here.rank:
        return None
    if is_flat:
        return dict(zip(tensor, parts, strict=True)) if type(tensor) is dict else type(tensor)(parts)
    rest = iter(parts)
    return recursively_apply(lambda _: next(rest), tensor)


def leaves_of(data: Any, operation: str) -> list[torch.Tensor]:
    """Return the tensors of `data`, in order; raise TypeError (naming `operation`) if it holds anything else."""
    leaves: list[torch.Tensor] = []

    def keep(leaf: torch.Tensor) -> None:
        leaves.append(leaf)

    keep.__name__ = operation
    recursively_apply(keep, data, error_on_other_type=True)
    return leaves


def _gather_together(leaves: list[torch.Tensor], world: World, to: int | None) -> list[Any] | None:
    """Gather all leaves in one message per rank; return None if one message per leaf is better."""
    message = joined_message_for(leaves, world.size) if all(map(_is_plain, leaves)) else None
    if message is None or not (world.backend in _ON_HOST or f"{leaves[0].device.type}:" in str(world.backend)):
        return None
    buffers = message.buffers()
    buffers.pack(leaves)
    _gather_into(buffers.joined, buffers.own, world, to)
    return buffers.unpack() if to in (None, world.rank) else []


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _gather_one(tensor: torch.Tensor, world: World, to: int | None) -> torch.Tensor | None:
    if tensor.ndim == 0:
        tensor = tensor.reshape(1)
    carried = _for_backend(tensor, world)
    if to not in (None, world.rank):
        _gather_into(carried, carried, world, to)
        return None
    joined = torch.empty(
        (world.size * carried.shape[0], *carried.shape[1:]), dtype=carried.dtype, device=carried.device
    )
    _gather_into(joined, carried, world, to)
    return _from_backend(joined, tensor)


def _gather_into(joined: torch.Tensor, part: torch.Tensor, world: World, to: int | None) -> None:
    """Gather the parts of all ranks in `joined`, on every rank or on rank `to`; the other ranks don't use it."""
    if part.numel() == 0:  # on every rank: nothing to gather
        return
    if to is None:
        _finish(world, _all_gather(joined, part, world))
        return
    parts = list(joined.chunk(world.size)) if to == world.rank else None
    _finish(world, dist.gather(part, parts, dst=_global_rank(to, world), group=world.group, async_op=True))


def _global_rank(rank: int, world: World) -> int:
    """Return the global rank of ``rank`` in ``world``."""
    return rank if world.group is None else dist.get_global_rank(world.group, rank)


def _all_gather(joined: torch.Tensor, part: torch.Tensor, world: World) -> Any:
    if world.backend in _ON_HOST:  # call the group directly: torch's function adds overhead on the host
        start = getattr(world.group or dist.group.WORLD, "all_gather_single", None)
        if start is not None:
            return start(joined, part)
    return all_gather_single(joined, part, world.group, async_op=True)


def _for_backend(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Return the tensor in a form that the backend supports: contiguous, on its device, of a supported dtype."""
    tensor = _where_carried(tensor.detach(), world).resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dtype in _CARRIED_DTYPES else tensor.view(torch.uint8)


def _where_carried(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Return `tensor` on a device that the backend supports."""
    is_known = world.backend in _ON_HOST or f"{tensor.device.type}:" in str(world.backend)
    return tensor if is_known else tensor.to(world.device)


def _from_backend(carried: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `carried` with the dtype and on the device of `like`."""
    if carried.dtype != like.dtype:
        carried = carried.view(like.dtype)
    return carried.to(like.device)


@verify_operation
def gather_object(object: Any, *, world: World | None = None) -> Any:
    """Gather the objects of all ranks, flattened by one level: lists become one list. A world of one returns `object`.

    Raises:
        TypeError: `object` isn't iterable.
    """
    here = world_or_joined(world)
    if here.size == 1:
        return object
    _exchange_first_message("gather_object", None, [], here)
    objects: list[Any] = [None] * here.size
    dist.all_gather_object(objects, object, group=here.group)
    return [item for part in objects for item in part]


def send_object(object: object, to: int, *, world: World) -> None:
    """Send `object` to rank `to`, which receives it with :func:`receive_object`; no other rank takes part."""
    device = None if world.backend in _ON_HOST else world.device
    dist.send_object_list([object], dst=_global_rank(to, world), group=world.group, device=device)


def exchange_objects(own: object, num_present: int, *, world: World) -> list[Any]:
    """Return the objects of the first `num_present` ranks in order; only these ranks make the call."""
    parts: list[Any] = [None] * num_present
    parts[world.rank] = own
    for sender, receiver in permutations(range(num_present), 2):
        if world.rank == sender:
            send_object(own, receiver, world=world)
        elif world.rank == receiver:
            parts[sender] = receive_object(sender, world=world)
    return parts


def receive_object(sender: int, *, world: World) -> Any:
    """Receive the object that rank `sender` gave to :func:`send_object`."""
    device = None if world.backend in _ON_HOST else world.device
    received: list[Any] = [None]
    dist.recv_object_list(received, src=_global_rank(sender, world), group=world.group, device=device)
    return received[0]


# -- broadcast --------------------------------------------------------------------------------------------


@verify_operation
def broadcast(tensor: Data, from_process: int = 0, *, world: World | None = None, same_shapes: bool = False) -> Data:
    """Overwrite every tensor in `tensor`, in place, with that of rank `from_process`, as torch's broadcast does.

    Args:
        same_shapes: the ranks' tensors are known to match, so on a device the check is skipped.
    """
    here = world_or_joined(world)
    _check_source(from_process, here)
    if here.size == 1:
        return tensor
    leaves = leaves_of(tensor, "broadcast")
    buffers = _exchange_first_message(
        "broadcast",
        tensor,
        leaves,
        here,
        how=f"from_process={from_process}",
        limit_bytes=_SHORT_BYTES,
        same_shapes=same_shapes,
    )
    if buffers is None:
        return recursively_apply(_broadcast_one, tensor, from_process, here)
    with torch.no_grad():
        for leaf, rank_rows in zip(leaves, buffers.rank_rows, strict=True):
            if here.rank != from_process:
                leaf.copy_(rank_rows[from_process])
    return tensor


def _check_source(from_process: int, world: World) -> None:
    if not 0 <= from_process < world.size:
        raise SettingError(
            f"from_process={from_process}: no rank has that index among {world.size} process(es). "
            f"Give a number from 0 to {world.size - 1}."
        )


def _broadcast_one(tensor: torch.Tensor, from_process: int, world: World) -> torch.Tensor:
    flat = tensor.reshape(1) if tensor.ndim == 0 else tensor
    carried = _for_backend(flat, world)
    _finish(world, dist.broadcast(carried, src=_global_rank(from_process, world), group=world.group, async_op=True))
    if carried.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(_from_backend(carried, flat).reshape(tensor.shape))
    return tensor


@verify_operation
def broadcast_object_list(object_list: list[Any], from_process: int = 0, *, world: World | None = None) -> list[Any]:
    """Overwrite `object_list`, in place, with the objects of rank `from_process`, and return it.

    Raises:
        CollectiveError: the ranks' lists aren't of the same length, as torch requires it.
    """
    here = world_or_joined(world)
    _check_source(from_process, here)
    if here.size > 1:
        how = f"{len(object_list)} objects, from_process={from_process}"
        _exchange_first_message("broadcast_object_list", None, [], here, how=how)
        device = None if here.backend in _ON_HOST else here.device
        dist.broadcast_object_list(object_list, src=_global_rank(from_process, here), group=here.group, device=device)
    return object_list


def gather_tensor_shape(tensor: torch.Tensor | None, *, world: World | None = None) -> torch.Tensor:
    """Return on every rank, as an integer tensor, the shape of a tensor that one rank passes (the others pass None)."""
    here = world_or_joined(world)
    _, shape, _ = _given_by_one(tensor, "gather_tensor_shape", here)
    return torch.tensor(shape, dtype=torch.int, device=here.device)


def _given_by_one(tensor: torch.Tensor | None, name: str, world: World) -> tuple[int, list[int], torch.dtype]:
    """Return on every rank the rank that passes a tensor, its shape and its dtype."""
    mine = None if tensor is None else (world.rank, list(tensor.shape), tensor.dtype)
    found = [mine] if world.size == 1 else gather_object([mine], world=world)
    given = next((one for one in found if one is not None), None)
    if given is None:
        raise CollectiveError(f"`{name}`: no rank has a tensor. One of them has to give one.")
    return given


def copy_tensor_to_devices(tensor: torch.Tensor | None = None, *, world: World | None = None) -> torch.Tensor:
    """Copy a tensor that one rank passes (the others pass None) to the device of every rank."""
    here = world_or_joined(world)
    owner, shape, dtype = _given_by_one(tensor, "copy_tensor_to_devices", here)
    if tensor is None or here.rank != owner:
        tensor = torch.empty(shape, dtype=dtype, device=here.device)
    return broadcast(tensor.detach().clone().to(here.device), owner, world=here)


# -- reduce -----------------------------------------------------------------------------------------------


@verify_operation
def reduce(
    tensor: Data,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    *,
    world: World | None = None,
    same_shapes: bool = False,
) -> Data:
    """Return the elementwise sum, mean or max over ranks of every tensor in `tensor`, times `scale`, as new tensors.

    The results are new tensors, also with a single process. The sum of booleans is int64. `"none"` only copies.

    Args:
        same_shapes: the ranks' tensors are known to match, so on a device the check is skipped.

    Raises:
        TypeError: there is something other than tensors in the containers.
        SettingError: `reduction` isn't one of sum, mean, max, none.
        CollectiveError: the mean of integers or the max of complex numbers, or the ranks disagree.
    """
    if reduction not in REDUCTIONS:
        raise SettingError(f"reduction={reduction!r}: choose one of {', '.join(map(repr, REDUCTIONS))}.")
    here = world_or_joined(world)
    leaves = leaves_of(tensor, "reduce")  # raises for other types before any rank waits
    if reduction == "none" or (here.size == 1 and scale == 1.0):
        return recursively_apply(torch.Tensor.clone, tensor)
    if here.size == 1:
        return recursively_apply(lambda item: item * scale, tensor)
    for leaf in leaves:
        check_reducible(leaf, reduction)
    buffers = _exchange_first_message(
        "reduce", tensor, leaves, here, how=reduction, limit_bytes=_SHORT_BYTES, same_shapes=same_shapes
    )
    if buffers is None:
        return recursively_apply(_reduce_one, tensor, reduction, scale, here)
    rank_rows = iter(buffers.rank_rows)
    return recursively_apply(
        lambda item: finished(over_ranks(next(rank_rows), reduction), item, reduction, scale, here.size), tensor
    )


def check_reducible(tensor: torch.Tensor, reduction: str) -> None:
    if reduction == "mean" and _is_exact(tensor):
        raise CollectiveError(
            f"reduce(..., 'mean') of {str(tensor.dtype).removeprefix('torch.')} has no exact answer. Give "
            "`tensor.float()`, or reduce with 'sum' and divide."
        )
    if reduction == "max" and tensor.is_complex():
        raise CollectiveError("reduce(..., 'max') of complex numbers: they have no order. Reduce their real parts.")


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _widened(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in a dtype wide enough to sum values of `like`'s dtype."""
    if like.dtype in _CARRIED_DTYPES or like.is_complex():
        return tensor
    return tensor.to(torch.int64 if _is_exact(like) else torch.float32)


def over_ranks(rank_rows: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the sum or the maximum of the ranks' tensors, in the order of the ranks."""
    rank_rows = _widened(rank_rows, rank_rows)
    result = rank_rows[0].clone()
    for other in rank_rows[1:]:
        result = torch.maximum(result, other) if reduction == "max" else result.add_(other)
    return result


def _reduce_one(tensor: torch.Tensor, reduction: str, scale: float, world: World) -> torch.Tensor:
    widened = _widened(tensor.detach(), tensor)
    is_complex = tensor.is_complex()
    result = _where_carried(widened, world).contiguous().clone() if is_complex else _for_backend(widened, world)
    if result.data_ptr() == tensor.data_ptr():
        result = result.clone()
    operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    _finish(world, dist.all_reduce(result, operation, group=world.group, async_op=True))
    return finished(result, tensor, reduction, scale, world.size)


def finished(result: torch.Tensor, tensor: torch.Tensor, reduction: str, scale: float, num_ranks: int) -> torch.Tensor:
    """Return the result of `reduce` for `tensor`, given its sum or maximum over ranks as `result`."""
    if reduction == "mean":
        result = result / num_ranks
    if scale != 1.0:
        result = result * scale
    is_count = tensor.dtype == torch.bool and reduction == "sum"
    return result.to(tensor.device) if is_count or scale != 1.0 else result.to(tensor.device, tensor.dtype)


@final
class MaxReducer:
    """An all-reduce of the maximum of a few integers, which allocates no memory."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        on_host = world.backend is None or world.backend == "mpi" or "gloo" in world.backend
        self._numbers = torch.zeros(count, dtype=torch.int64, device="cpu" if on_host else world.device)

    def largest(self, *numbers: int) -> list[int]:
        """Return the maximum over ranks of each number; a collective."""
        world = self._world
        if world.size == 1:
            return list(numbers)
        self._numbers.copy_(torch.tensor(numbers))
        work: Any = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=world.group, async_op=True)
        if self._numbers.is_cpu and world.coordinator is not None:
            world.coordinator.wait_for_work(work)
        else:
            work.wait()
        return self._numbers.tolist()


def max_over_ranks(world: World, *numbers: int) -> list[int]:
    """Return the maximum over ranks of each number; a collective."""
    return MaxReducer(world, len(numbers)).largest(*numbers)


# -- pad --------------------------------------------------------------------------------------------------


@chained_operation
def pad_across_processes(
    tensor: Data,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    world: World | None = None,
    num_present: int | None = None,
) -> Data:
    """Pad every tensor in `tensor` along `dim` with `pad_index` to the longest size of any rank.

    A tensor without that dimension is returned unchanged, and so is a nested one (with a warning). With `num_present`,
    only the first `num_present` ranks make the call.

    Raises:
        TypeError: there is something other than tensors in the containers.
    """
    here = world_or_joined(world)
    leaves = leaves_of(tensor, "pad_across_processes")
    sizes = [_size_along(leaf, dim) for leaf in leaves]
    if here.size == 1 or num_present == 1:
        return tensor
    ranks = [-1 if getattr(leaf, "is_nested", False) else leaf.ndim for leaf in leaves]
    if num_present is None:
        everyone = gather(torch.tensor([[sizes, ranks]], device=here.device), world=here, to=None, like=tensor)
    else:
        given = exchange_objects((places_of(tensor), [sizes, ranks]), num_present, world=here)
        if difference := _other_places([places for places, _ in given]):
            raise CollectiveError(f"{difference} Called at {call_site()}")
        everyone = torch.tensor([numbers for _, numbers in given])
    rank_rows = everyone[:, 1].tolist()
    if any(other != rank_rows[0] for other in rank_rows):
        lines = "\n".join(f"  - Process {rank}: {numbers}" for rank, numbers in enumerate(rank_rows))
        raise CollectiveError(
            "the ranks gave tensors of different numbers of dimensions, which can't be filled up to one shape.\n"
            f"Dimensions of each tensor:\n{lines}\nCalled at {call_site()}"
        )
    longest = iter(everyone[:, 0].amax(dim=0).tolist())
    return recursively_apply(lambda item: _pad_one(item, dim, next(longest), pad_index, pad_first), tensor)


def _size_along(tensor: torch.Tensor, dim: int) -> int:
    if getattr(tensor, "is_nested", False):
        warnings.warn(
            "A nested tensor can't be padded across processes and is left as it is. Give padded tensors "
            "(`torch.nested.to_padded_tensor`), or silence this category: CannotPadNestedTensorWarning.",
            CannotPadNestedTensorWarning,
        )
        return -1
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else -1


def _pad_one(tensor: torch.Tensor, dim: int, longest: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    size = (
        longest if getattr(tensor, "is_nested", False) or not -tensor.ndim <= dim < tensor.ndim else tensor.shape[dim]
    )
    if size == longest:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = longest
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, longest - size if pad_first else 0, size).copy_(tensor)
    return padded
