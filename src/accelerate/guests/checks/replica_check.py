"""Compare replicas: their parameters and optimizer states must be equal bit by bit.

Ranks with the same parameters apply the same updates, so their parameters stay equal. If they don't (the model wasn't
prepared, a parameter was changed on one rank, hardware computes wrong), each rank silently trains a different model.
Only SyncBatchNorm's buffers are compared, because all ranks compute them from all samples. Other buffers may differ:
statistics of a rank's own batches (until the next forward pass), or caches.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...distributed.collectives import gather_object, max_over_ranks
from ...distributed.world import World
from ...errors import ReplicaError, ReplicaWarning
from ...parallel.gradient_norm import local_tensor
from ...parallel.state import ModelState
from ...wording import by_number, some_ranks

logger = logging.getLogger(__name__)

_CAUSES: Final = (
    "Each rank trains a model of its own from there on. Usual causes: a model whose optimizer was prepared but not it "
    "itself; parameters changed on some ranks after `prepare`; gradients changed by rank before `optimizer.step()`; "
    "hardware that computes wrong."
)
_ALONE: Final = "gradients aren't averaged now"
_FAILED: Final = "a rank can't (its message says why)"
#: Why ranks don't compare; the first entry is no reason. Ranks exchange the index in this list.
_REASONS: Final = ("", _ALONE, _FAILED)
#: Odd, so that multiplication by it is reversible.
_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64


@final
@dataclass(frozen=True)
class Difference:
    """Tensors that differ between ranks.

    Attributes:
        names: the names of the tensors, parameters first.
        ranks: the ranks whose values differ from the majority; all replicas if there is no majority.
        replicas: all ranks that should have equal values.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]

    def __str__(self) -> str:
        first, *others = self.names
        more = f" and {len(others)} more" if others else ""
        if self.ranks == self.replicas:
            who = f"{some_ranks(self.replicas)} hold different values of"
        else:
            usual = tuple(rank for rank in self.replicas if rank not in self.ranks)
            holds = by_number(self.ranks, "holds", "hold")
            who = f"{some_ranks(self.ranks)} {holds} other values than {some_ranks(usual)} of"
        return f"{who} {first}{more}"


@final
@dataclass(frozen=True)
class Replicas:
    """The prepared models and optimizers of a world, with those ranks that replicate them."""

    state: ModelState[Any]
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    world: World

    def difference(self) -> Difference | None:
        """Return how parameters and optimizer states differ, the same on every rank; None if they don't.

        A collective. For sharded models, it compares shards with replicas (hybrid sharding, parameters that tensor
        parallelism doesn't shard). Replicas may differ between the averages of local SGD.
        """
        world = self.world
        if world.size == 1 or world.kind.runtime:
            return None
        held, reason = self._held()
        (number,) = max_over_ranks(world, _REASONS.index(reason))  # all ranks compare, or none does
        if reason := _REASONS[number]:
            if world.is_main and reason is not _ALONE:
                logger.warning("what replicas hold isn't compared: %s", reason)
            return None
        own: Difference | None = None
        for each in held:
            own = _compare(each, world.device) or own
        return own if self.state.is_whole() else _first(own, world)

    def _held(self) -> tuple[list[_Held], str]:
        """Return this rank's replicated values by group of ranks, or why they can't be compared."""
        if not self.state.strategy.averages_replicas or any(map(_trains_alone, self.models)):
            return [], _ALONE
        try:
            parameters = dict(_named_parameters(self.models, self.optimizers))
            states = dict(_named_states(parameters, self.optimizers))
            if self.state.is_whole():
                states |= _named_buffers(self.models)
                return [_Held.of(parameters, states, self.world.group, range(self.world.size), self.world)], ""
            axes = dict.fromkeys(axis for tensor in parameters.values() for axis in _replicated_axes(tensor))
            return [self._held_along(axis, parameters, states) for axis in axes], ""
        except Exception as error:  # raised by a tensor or optimizer; it must not end the save or block other ranks
            logger.warning("rank %d can't compare what replicas hold: %r", self.world.rank, error)
            return [], _FAILED

    def _held_along(
        self, axis: tuple[DeviceMesh, int], parameters: dict[str, torch.Tensor], states: dict[str, torch.Tensor]
    ) -> _Held:
        group = axis[0].get_group(axis[1])
        chosen, beside = (
            {name: local_tensor(tensor) for name, tensor in tensors.items() if axis in _replicated_axes(tensor)}
            for tensors in (parameters, states)
        )
        return _Held.of(chosen, beside, group, dist.get_process_group_ranks(group), self.world)

    def check(self, action: Literal["warn", "raise", "no"], *, operation: str | None = None) -> None:
        """Warn on the main process, or raise, if the replicas differ; a collective unless ``action`` is "no".

        Args:
            operation: the call that all ranks have to make first; None if they already have.

        Raises:
            ReplicaError: on every rank.
            CollectiveError: a rank doesn't make the call.
        """
        if action == "no" or self.world.size == 1:
            return
        if operation is None and self.world.members is not None:
            return  # the ranks sum the same gradients in the same order, and have no group for a comparison
        if operation is not None and (coordinator := self.world.coordinator) is not None:
            coordinator.require_all(operation)
        found = self.difference()
        if found is None:
            return
        if action == "raise":
            raise ReplicaError(f"Replicas differ: {found}. {_CAUSES}")
        if self.world.is_main:
            text = f"Replicas differ, of which rank 0's is saved: {found}. {_CAUSES}"
            way_out = 'ProjectConfiguration(compare_replicas="raise") refuses to save.'
            warnings.warn(f"{text} {way_out}", ReplicaWarning, stacklevel=3)


def _trains_alone(model: torch.nn.Module) -> bool:
    """Return whether the gradients of ``model`` currently aren't averaged."""
    return isinstance(model, torch.nn.parallel.DistributedDataParallel) and not model.require_backward_grad_sync


def unwrapped(models: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, str]]:
    """Iterate over ``models``, their modules inside of DDP, and a suffix that names one of several models."""
    for number, model in enumerate(models):
        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        yield model, inner, f" of model {number}" if len(models) > 1 else ""


def _named_parameters(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the parameters of models, and those in an optimizer only, which are never made equal."""
    seen: set[int] = set()
    for model, inner, label in unwrapped(models):
        ignored = getattr(model, "parameters_to_ignore", ())  # DDP's: they may differ between ranks
        for name, parameter in inner.named_parameters():
            seen.add(id(parameter))
            if name not in ignored and has_bits(parameter):
                yield f"`{name}`{label}", parameter
    for number, optimizer in enumerate(optimizers):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(held):
            if id(parameter) not in seen and has_bits(parameter):
                seen.add(id(parameter))
                shape = tuple(parameter.shape)
                yield f"parameter {place} {shape} of optimizer {number}, which is in no prepared model", parameter


def _named_buffers(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the buffers that all ranks compute identically."""
    for _, inner, label in unwrapped(models):
        for prefix, module in inner.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm) and module.process_group is None:  # else of some ranks
                for name, buffer in module.named_buffers(prefix):
                    yield f"`{name}`{label}", buffer


def has_bits(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has values in memory that can be compared bit by bit."""
    plain = local_tensor(tensor)
    is_plain = type(plain) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and not plain.is_meta and not plain.is_quantized and plain.layout is torch.strided


def _named_states(
    parameters: dict[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            entries = optimizer.state.get(parameter) or {}
            for key in sorted(map(str, entries)):
                value = entries.get(key)
                if isinstance(value, torch.Tensor) and has_bits(value):
                    yield f"the optimizer's {key!r} of {name}", value


def _replicated_axes(tensor: torch.Tensor) -> list[tuple[DeviceMesh, int]]:
    """Return the dimensions of its mesh along which ``tensor`` is replicated."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [(mesh, axis) for axis, one in enumerate(tensor.placements) if one.is_replicate() and mesh.size(axis) > 1]


# -- comparing ---------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Held:
    """The checksums of the tensors that a rank shares with the other ranks of a group."""

    parameters: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    sums: tuple[torch.Tensor, torch.Tensor]  # of parameters and of states, of shapes [parameters] and [states]
    group: dist.ProcessGroup | None
    replicas: Sequence[int]

    @classmethod
    def of(
        cls,
        parameters: dict[str, torch.Tensor],
        states: dict[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        replicas: Sequence[int],
        world: World,
    ) -> _Held:
        sums = (_checksums(parameters, world.device), _checksums(states, world.device))
        return cls(parameters, states, sums, group, replicas)


def _compare(held: _Held, device: torch.device) -> Difference | None:
    """Compare the bits of all tensors with a collective of four numbers; if they differ, with one of all checksums."""
    counts = torch.tensor([len(each) for each in held.sums], device=device)
    total = torch.cat([counts, *map(_mixed, held.sums)])
    ends = torch.stack([total, -total])
    dist.all_reduce(ends, dist.ReduceOp.MAX, held.group)
    if not (ends[0] + ends[1]).any():
        return None
    own = [
        dict(zip(tensors, each.tolist(), strict=True))
        for tensors, each in zip((held.parameters, held.states), held.sums, strict=True)
    ]
    rows: list[Any] = [None] * len(held.replicas)
    dist.all_gather_object(rows, own, held.group)
    if any(list(row[0]) != list(rows[0][0]) for row in rows):
        return None  # some models exist only on some ranks (an average on the main process), so they can't be matched
    # Optimizers that shard their states (ZeroRedundancyOptimizer) have those of a parameter on one rank.
    names = [*rows[0][0], *(name for name in rows[0][1] if all(name in row[1] for row in rows))]
    values = {name: [row[0].get(name, row[1].get(name)) for row in rows] for name in names}
    different = tuple(name for name in names if len(set(values[name])) > 1)
    if not different:
        return None
    usual, votes = Counter(values[different[0]]).most_common(1)[0]
    is_majority = 2 * votes > len(held.replicas)
    odd = [rank for rank, value in zip(held.replicas, values[different[0]], strict=True) if value != usual]
    return Difference(different, tuple(odd if is_majority else held.replicas), tuple(held.replicas))


def _checksums(tensors: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the checksum of each tensor, of shape [tensors], on ``device``, without waiting for it."""
    found = [checksum(tensor).to(device, non_blocking=True) for tensor in tensors.values()]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of ``tensor`` as an int64 tensor of shape [].

    It adds eight bytes at a time, which is 25 times as fast on a CPU as converting smaller integers.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = len(flat) - len(flat) % 8
    return flat[:end].view(torch.int64).sum() + flat[end:].sum(dtype=torch.int64)


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    """Return one number for all sums, of shape [1]; it also changes if two of them are swapped."""
    places = torch.arange(1, len(sums) + 1, device=sums.device)
    return ((sums + places) * (2 * places + 1) * _FACTOR).sum(dtype=torch.int64)[None]


def _first(own: Difference | None, world: World) -> Difference | None:
    """Return the first rank's difference on every rank; a collective."""
    if not any(max_over_ranks(world, own is not None)):
        return None
    return next(found for found in gather_object([own], world=world) if found is not None)
