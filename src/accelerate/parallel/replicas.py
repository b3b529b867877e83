"""Replicated parameters or shards beside the parameters of ``fully_shard``: equal, with averaged gradients.

``fully_shard`` reduces the gradients of its own parameters. This module averages the others at the end of each
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, final
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ..distributed.mesh import TOKEN_AXES, Mesh
from ..distributed.random import synchronize_rng_state
from ..distributed.world import World
from ..errors import PreparationError
from ..nested import recursively_apply
from ..torch_private.fsdp import reshard, sharded_parameters
from ..torch_private.modules import call_after_backward, current_backward
from ..wording import some_ranks
from .gradient_norm import by_device_and_dtype, local_tensor, reduce_partial_gradient
from .layout import sharded_axes

#: The maximum number of elements in one message.
BUCKET: Final = 25 * 2**18
#: The relative tolerance between the norms of one gradient on ranks that share samples.
TOLERANCE: Final = 1e-2

#: parameter -> the handle of its hook, which a later preparation of the model replaces.
_handles: Final = WeakTensorKeyDictionary()
#: unit under ``fully_shard`` -> the handles of its hooks.
_unit_handles: Final[WeakKeyDictionary[torch.nn.Module, list[RemovableHandle]]] = WeakKeyDictionary()


def train_in_place(model: torch.nn.Module, mesh: Mesh, reduces: Callable[[], bool]) -> list[ReplicaGradients]:
    """Make the replicas of ``model`` equal, and average the gradients that ``fully_shard`` doesn't reduce.

    A collective. Return the objects that average them, for :func:`backward_on_all`; an empty list if none is needed.

    Args:
        reduces: returns whether the running backward pass completes the gradients.
    """
    reshard([model])  # otherwise it has unsharded parameters after a forward
    make_replicas_equal(model, mesh)
    reduced = sharded_parameters(model)
    managed, own = set(map(id, reduced)), set(mesh.ranks(*TOKEN_AXES))
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        # Parameters sharded over ranks with other samples (experts that tokens are sent to) have no replicas.
        if parameter.is_floating_point()  # frozen ones too, which may be trained later
        and id(parameter) not in managed
        and not any(own.issuperset(axis) for axis in sharded_axes(parameter))
    }
    for parameter in [*reduced, *named.values()]:
        _remove_hook(parameter)  # of an earlier preparation, with its mesh and its no_sync
    if named and mesh.active(*TOKEN_AXES, "tp"):
        return [ReplicaGradients(model, named, reduced, mesh, reduces)]
    return []


def backward_on_all(replicas: Sequence[ReplicaGradients], backward: Callable[[], None], *, reaches_any: bool) -> None:
    """Call ``backward``, and enter the collectives of replicas that this rank's loss doesn't reach.

    Such a rank contributes zero gradients. If shards are trained, fully_shard's collectives already bring all ranks
    there. If none are, no hook runs on a rank whose loss reaches no parameter, and the others would wait for it.

    Args:
        reaches_any: the loss has a graph; if it has one on no rank, torch raises on all ranks.
    """
    alone = [one for one in replicas if one.is_alone()]
    for one in replicas:
        one.is_reached, one.is_deferred = False, one in alone
    try:
        if not alone or not alone[0].is_reached_elsewhere_only(reaches_any):
            backward()
    finally:
        for one in alone:
            one.is_deferred = False
    for one in alone:  # in the same order on all ranks, because passes reach them in different orders
        one.finish()


def is_averaged(parameter: torch.Tensor) -> bool:
    """Return whether a hook averages the gradients of ``parameter``, or waits for them."""
    return parameter in _handles


def _remove_hook(parameter: torch.Tensor) -> None:
    """Remove the hook that an earlier :func:`train_in_place` added to ``parameter``."""
    handle: RemovableHandle | None = _handles.pop(parameter, None)
    if handle is not None:
        handle.remove()


def _add_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` after gradients of ``parameter`` are accumulated, also if it is frozen now and trained later."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch doesn't allow a hook on a frozen parameter
    _handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trained)


def _add_unit_hooks(
    unit: torch.nn.Module,
    before: Sequence[torch.nn.Parameter],
    held: Sequence[torch.nn.Parameter],
    note: Callable[[torch.Tensor], None],
) -> None:
    """Call ``note`` in backward passes through ``unit``, and give every forward such a backward pass.

    Args:
        before: the replicas before the unit; on ranks that use none of them, the unit's inputs get a graph.
        held: the replicas in the unit, which ``fully_shard`` ignores; on ranks that use none, its outputs get a graph.
    """

    def add_graph(
        _: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in before):
            return None
        inputs = {**dict(enumerate(args)), **kwargs}
        floating = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        if not floating or any(tensor.requires_grad for tensor in floating.values()):
            return None
        key, tensor = next(iter(floating.items()))
        inputs[key] = _with_graph(tensor)
        return tuple(inputs[n] for n in range(len(args))), {name: inputs[name] for name in kwargs}

    def enter(_: torch.nn.Module, args: object, output: object) -> object:
        if not torch.is_grad_enabled():
            return output
        if any(p.requires_grad for p in held) and not any(tensor.requires_grad for tensor in _tensors_in(output)):
            output = recursively_apply(_with_graph, output)
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(note)
        return output

    for handle in _unit_handles.pop(unit, ()):  # of an earlier preparation
        handle.remove()
    _unit_handles[unit] = [
        unit.register_forward_pre_hook(add_graph, prepend=True, with_kwargs=True),  # fully_shard's sees the graph
        unit.register_forward_hook(enter, prepend=True),
    ]


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a leaf that requires gradients, if its dtype has any."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)


def make_replicas_equal(model: torch.nn.Module, mesh: Mesh) -> None:
    """Broadcast replicated tensors and shards, and give ranks that share samples the same random state.

    A collective.
    """
    world, neighbours = mesh.world, set(mesh.ranks("tp"))
    named = {id(tensor): (name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    _refuse_different_shapes([(n, t) for n, t in named.values() if not t.is_meta and not isinstance(t, DTensor)], mesh)
    for _, tensor in named.values():
        if tensor.is_meta:
            continue
        if not isinstance(tensor, DTensor):
            broadcast(tensor.detach(), world.group, world.device)
            continue
        has_replicas = not any(neighbours.issuperset(axis) for axis in sharded_axes(tensor))
        for axis in mesh.active("dp_replicate", *(("tp",) if has_replicas else ())):
            broadcast(local_tensor(tensor.detach()), mesh.group(axis), world.device)
    if mesh.active("tp"):
        synchronize_streams_of_torch(mesh.within("tp"))


def _refuse_different_shapes(named: Sequence[tuple[str, torch.Tensor]], mesh: Mesh) -> None:
    """Raise if plain tensors differ in shape or dtype between ranks: a broadcast would hang or corrupt them.

    A collective.

    Raises:
        PreparationError: names the first of these tensors.
    """
    world = mesh.world

    def differ(own: list[int]) -> list[bool]:
        there = torch.tensor(own, dtype=torch.int64, device=world.device)
        ends = torch.stack([there, -there])
        dist.all_reduce(ends, dist.ReduceOp.MAX, world.group)
        return (ends[0] + ends[1] > 0).tolist()

    prints = [crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()) for name, tensor in named]
    has_other_count, has_others = differ([len(prints), crc32(repr(prints).encode())])
    if has_other_count:  # else messages would differ in size below
        raise PreparationError(
            f"Ranks hold different numbers of tensors that aren't DTensors, rank {world.rank} {len(named)}. The model "
            "has to be the same on all ranks."
        )
    if has_others:
        name, tensor = next(one for one, is_other in zip(named, differ(prints), strict=True) if is_other)
        raise PreparationError(
            f"{name!r}, which is no DTensor, differs in name, shape or dtype between ranks: on rank {world.rank} it is "
            f"{tuple(tensor.shape)} of {tensor.dtype}. A part of a tensor has to be a DTensor, and a whole one the "
            "same on all ranks."
        )


def synchronize_streams_of_torch(world: World) -> None:
    """Give the ranks of ``world`` the same states of torch's random number streams; a collective."""
    for name in dict.fromkeys(("torch", world.kind.name)):
        if name != "cpu":
            synchronize_rng_state(name, world=world)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Broadcast ``tensor`` from the first rank of ``group`` (None: all processes), by way of ``device``."""
    if tensor.numel():
        there = tensor.to(device).contiguous()
        dist.broadcast(there, 0 if group is None else dist.get_global_rank(group, 0), group)
        if there is not tensor:
            tensor.copy_(there)


@final
class ReplicaGradients:
    """The gradients of replicated parameters, averaged over the ranks that read different samples.

    Args:
        model: the model; its units under ``fully_shard`` are resharded.
        named: the parameters that only this object reduces; frozen ones are skipped until they are trained.
        reduced: the parameters that ``fully_shard`` reduces, on all ranks in each backward pass.
        reduces: returns whether the backward pass that ends completes the gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        named: Mapping[str, torch.nn.Parameter],
        reduced: Iterable[torch.Tensor],
        mesh: Mesh,
        reduces: Callable[[], bool],
    ) -> None:
        self._named, self._reduces, self._mesh = named, reduces, mesh
        self._group, self._size = mesh.group(*TOKEN_AXES), mesh.size(*TOKEN_AXES)
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._is_checked = not mesh.active("tp")
        self._backward = -1
        self.is_reached: bool = False  # whether a backward pass has reached it since it was set to False
        self.is_deferred: bool = False  # the caller of the pass enters the collectives after it
        for parameter in named.values():
            _add_hook(parameter, self._note)
        self._handle = _handles[next(iter(named.values()))]
        # A rank whose pass uses none of the replicas must enter their collectives too. fully_shard itself calls these
        # hooks once a gradient is reduced, for some units only after the backward pass.
        self._reduced = [parameter for parameter in reduced if parameter.is_floating_point()]
        for parameter in self._reduced:
            _add_hook(parameter, self._queue)
        if self._reduced and not any(parameter.requires_grad for parameter in self._reduced):
            self._enter_with_units(list(model.parameters()))

    def _enter_with_units(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Enter the collectives after passes through frozen units too, on all ranks.

        A backward pass gathers a frozen unit if a replica comes before it: one registered before a weight of the unit.
        A rank whose batch uses no such replica gathers the unit with the others, for a gradient that is discarded.
        """
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        reduced = set(map(id, self._reduced))
        for unit in self._units:
            inside = [places[id(p)] for p in unit.parameters() if id(p) in reduced]
            if inside:
                before = [p for p in self._named.values() if places[id(p)] < max(inside)]
                own = set(map(id, unit.parameters()))
                held = [p for p in self._named.values() if id(p) in own]
                _add_unit_hooks(unit, before, held, self._queue)

    def is_alone(self) -> bool:
        """Return whether replicas are trained beside frozen shards, and the next pass completes gradients."""
        return (
            self._group is not None
            and bool(self._reduced)
            and not any(parameter.requires_grad for parameter in self._reduced)
            and _handles.get(next(iter(self._named.values()))) is self._handle  # else prepared anew
            and self._reduces()
        )

    def is_reached_elsewhere_only(self, reaches_any: bool) -> bool:
        """Return whether the loss has a graph on another rank but not on this one; a collective.

        It waits for the device only on ranks without a graph.
        """
        found = torch.tensor([reaches_any], dtype=torch.int32, device=self._mesh.world.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return not reaches_any and bool(found)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise PreparationError(
                "A gradient is sparse, which isn't averaged beside sharded parameters. Give Embedding(sparse=False)."
            )
        reduce_partial_gradient(parameter)  # of one that was used on parts of the sequence
        self._queue(parameter)

    def _queue(self, _: torch.Tensor) -> None:
        """Schedule the collectives, once, for the end of the running backward pass."""
        self.is_reached = True
        if not self.is_deferred and self._backward != current_backward() and self._reduces():
            self._backward = current_backward()
            # In two steps, so that on all ranks they run after fully_shard's own at the end of the pass, whichever
            # parameter was first.
            call_after_backward(lambda: call_after_backward(self.finish))

    def finish(self) -> None:
        """Average the gradients over the ranks; a collective."""
        if not self._is_checked:
            self._check_equal()
        if self._group is not None:
            for bucket in _buckets(p for p in self._named.values() if p.requires_grad):
                self._average(bucket)

    def _average(self, bucket: list[torch.nn.Parameter]) -> None:
        """Average the gradients of ``bucket`` with one all-reduce; a rank without a gradient counts as zero."""
        shards = [
            local_tensor(parameter.detach() if parameter.grad is None else parameter.grad) for parameter in bucket
        ]
        has = [parameter.grad is not None for parameter in bucket]
        flags = shards[0].new_ones(len(has)) if all(has) else shards[0].new_tensor(has)
        parts = [(s if there else torch.zeros_like(s)).reshape(-1) for s, there in zip(shards, has, strict=True)]
        flat = torch.cat([*parts, flags])
        dist.all_reduce(flat, group=self._group)
        flat.div_(self._size)
        *means, counts = flat.split([*(part.numel() for part in parts), len(parts)])
        used = has if all(has) else (counts > 0).tolist()
        for parameter, shard, mean, there, anywhere in zip(bucket, shards, means, has, used, strict=True):
            if there:
                shard.copy_(mean.view_as(shard))
            elif anywhere:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                local_tensor(parameter.grad).copy_(mean.view_as(shard))

    def _check_equal(self) -> None:
        """Raise unless ranks that share samples have equal gradients of whole tensors; a collective, once.

        Raises:
            PreparationError: a gradient covers only a part of the samples, or of the sequence.
        """
        whole = {name: p for name, p in self._named.items() if p.requires_grad and not isinstance(p, DTensor)}
        if not whole:
            return
        self._is_checked = True
        device = self._mesh.world.device
        norms = [0.0 if p.grad is None else p.grad.detach().float().norm().to(device) for p in whole.values()]
        own = torch.stack([torch.as_tensor(norm, device=device) for norm in norms])
        ends = torch.stack([own, -own])
        dist.all_reduce(ends, dist.ReduceOp.MAX, self._mesh.group("tp"))
        apart = (ends[0] + ends[1]) > TOLERANCE * ends[0].clamp(min=1e-12)
        wrong = [name for name, differs in zip(whole, apart.tolist(), strict=True) if differs]
        if wrong:
            raise PreparationError(
                f"The gradient of {wrong[0]!r} ({len(wrong)} of {len(whole)} parameters) differs between "
                f"{some_ranks(self._mesh.ranks('tp'))}, which share their samples: their copies would drift apart. "
                "Where each sees a part of the sequence, shard the module by SequenceParallel; where they "
                "were given different samples, let prepare() have the loader."
            )


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Iterate over ``parameters`` in buckets of one device and dtype, each small enough for one message."""
    for same in by_device_and_dtype(parameters).values():
        bucket: list[torch.nn.Parameter] = []
        held = 0
        for parameter in same:
            bucket.append(parameter)
            held += local_tensor(parameter.detach()).numel()
            if held >= BUCKET:
                yield bucket
                bucket, held = [], 0
        if bucket:
            yield bucket
