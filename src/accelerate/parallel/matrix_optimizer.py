"""Optimizers of whole matrices (Muon, Shampoo, ...) under sharding: each matrix is updated once, on its owner.

Before the step of such an optimizer, every sharded parameter and its gradient are gathered on one rank, the owner. On
each rank, the optimizer's own step then updates the matrices of that rank. Afterwards the new parameters are scattered
to their shards. Optimizer state stays on the owner. An update is bit for bit the same as on one process.

Every matrix has one owner among the ranks that hold its shards; all ranks get about the same amount of computation.
An exchange, an all-to-all, only copies, so matrices arrive bit for bit.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable for LLM
Training", 2025.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import NotBuilt
from .state import Region, buckets, part_of, region_of, shape_of, size_of

#: The attribute of an optimizer, and the key of a parameter group, that say whether it needs whole matrices.
DECLARATION: Final = "needs_whole_matrices"
#: The largest size in bytes of a bucket per rank of the group; a single matrix may be larger.
BUCKET_BYTES: Final = 64 * 2**20


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` declares that it needs whole matrices; torch's Muon does by default."""
    muon = getattr(torch.optim, "Muon", None)  # since torch 2.9
    return bool(getattr(optimizer, DECLARATION, muon is not None and isinstance(optimizer, muon)))


def step_on_whole_matrices(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Register the hooks with which ``optimizer`` steps on whole matrices, if it needs them and trains shards.

    If ``optimizer`` only steps other optimizers, which it keeps as attributes, this applies to those instead.

    Args:
        device: the device on which this process communicates.
    """
    is_declared = needs_whole_matrices(optimizer)
    for one in stepping(optimizer):
        trained = [parameter for group in one.param_groups for parameter in group["params"]]
        if one not in _STEPS and (is_declared or needs_whole_matrices(one)) and any(map(_is_split, trained)):
            steps = _STEPS[one] = WholeMatrixSteps(device)
            one.register_step_pre_hook(steps.begin)
            one.register_step_post_hook(steps.end)


def shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the optimizer state that owners hold whole, in the layout of its parameters; a collective."""
    for one in stepping(optimizer):
        steps = _STEPS.get(one)
        if steps is not None:
            steps.shard_state(one)


def exchange_among(optimizer: torch.optim.Optimizer, ranks: Collection[int] | None) -> None:
    """Let only ``ranks`` own matrices of ``optimizer``; None for all ranks with shards of them.

    Whole state that :func:`shard_state` hasn't sharded before is lost.
    """
    for one in stepping(optimizer):
        if one in _STEPS:
            _STEPS[one].restart(ranks)


def stepping(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``optimizer`` keeps as attributes, also in lists and dicts; if none, itself."""

    def values() -> Iterator[object]:
        for value in vars(optimizer).values():
            inside: Iterable[object] = value.values() if isinstance(value, dict) else [value]
            yield from value if isinstance(value, (list, tuple)) else inside

    return [value for value in values() if isinstance(value, torch.optim.Optimizer)] or [optimizer]


@final
class WholeMatrixSteps:
    """The hooks around the ``step`` of one optimizer of whole matrices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart(None)
        # During a step: the sharded parameters of each group, and their replacements by parameter.
        self._groups: list[list[torch.Tensor]] = []
        self._wholes: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._shards: list[tuple[DTensor, Shard]] = []

    def restart(self, ranks: Collection[int] | None) -> None:
        """Assign owners anew in the next step, among ``ranks`` only; None for all ranks that hold shards."""
        self._ranks = ranks
        self._exchanges: dict[DeviceMesh, MatrixExchange] = {}
        self._matrices: dict[torch.Tensor, Matrix] = {}
        # The same objects in every step: some optimizers keep values by parameter outside of their state.
        self._owned: dict[torch.Tensor, torch.nn.Parameter] = {}

    # -- around a step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the sharded parameters by the whole ones of this rank, with their gradients and state."""
        self._restore(optimizer)  # after a step that raised
        args, kwargs = _with_known_loss(args, kwargs)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        chosen = [p for group in optimizer.param_groups if group.get(DECLARATION, True) for p in group["params"]]
        sharded = [parameter for parameter in chosen if isinstance(parameter, DTensor)]
        trained = [parameter for parameter in sharded if parameter.grad is not None]
        self._gather([parameter for parameter in trained if _is_split(parameter)], optimizer)
        for parameter in trained:
            if not _is_split(parameter):  # every rank has the whole
                self._put(parameter, _local(parameter), _local(parameter.grad, parameter), optimizer)
        left_out = set(sharded)
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            # In place: some optimizers keep the list itself.
            group["params"][:] = [
                self._wholes.get(parameter, parameter)
                for parameter in parameters
                if parameter in self._wholes or parameter not in left_out
            ]
        return args, kwargs

    @torch.no_grad()
    def end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Copy the updated matrices from their owners into all shards, and restore the optimizer's parameters."""
        for parameter, shard in self._shards:
            whole = self._wholes.get(parameter)
            shard.whole = None if whole is None else whole.detach()
        shards = [shard for _, shard in self._shards]
        self._restore(optimizer)
        scatter(shards)

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the sharded parameters back into the optimizer, with the state of the whole ones."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"][:] = parameters
        for parameter, whole in self._wholes.items():
            if whole in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(whole)
            whole.data, whole.grad = whole.data.new_empty(0), None
        self._groups, self._wholes, self._shards = [], {}, []

    def _gather(self, parameters: list[DTensor], optimizer: torch.optim.Optimizer) -> None:
        """Gather ``parameters``, their gradients, and state that was loaded in shards, on the owners."""
        matrices = self._matrices_of(parameters)
        values = [Shard(matrix, _local(p)) for p, matrix in zip(parameters, matrices, strict=True)]
        gradients = [Shard(matrix, _local(p.grad, p)) for p, matrix in zip(parameters, matrices, strict=True)]
        loaded: list[tuple[dict[str, Any], str, Shard]] = []
        for parameter, matrix in zip(parameters, matrices, strict=True):
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, DTensor):
                    loaded.append((state, name, Shard(matrix, _local(value, parameter))))
        gather([shard for pair in zip(values, gradients, strict=True) for shard in pair])
        gather(shard for _, _, shard in loaded)
        for state, name, shard in loaded:
            state[name] = shard.whole
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            if value.whole is not None and gradient.whole is not None:
                self._put(parameter, value.whole, gradient.whole, optimizer)
            else:
                optimizer.state.pop(parameter, None)
        self._shards = list(zip(parameters, values, strict=True))

    def _put(
        self, parameter: DTensor, value: torch.Tensor, gradient: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """Replace ``parameter`` by a whole parameter with its state."""
        whole = self._owned.setdefault(parameter, torch.nn.Parameter(value, parameter.requires_grad))
        whole.data, whole.grad = value, gradient
        self._wholes[parameter] = whole
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[whole] = {
                name: _local(value) if isinstance(value, DTensor) else value for name, value in state.items()
            }

    def _matrices_of(self, parameters: list[DTensor]) -> list[Matrix]:
        """Return the matrices of ``parameters``; only new ones get an owner."""
        new: dict[DeviceMesh, list[DTensor]] = {}
        for parameter in parameters:
            if parameter not in self._matrices:
                new.setdefault(parameter.device_mesh, []).append(parameter)
        for mesh, same in new.items():
            if mesh not in self._exchanges:
                self._exchanges[mesh] = MatrixExchange(mesh, self._device, self._ranks)
            self._matrices.update(zip(same, self._exchanges[mesh].assign_owners(same), strict=True))
        return [self._matrices[parameter] for parameter in parameters]

    # -- state ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the owners' whole state by shards, and copy values of another shape to all ranks."""
        outlines = self._gather_outlines(optimizer)
        shards: list[Shard] = []
        for (parameter, matrix), outline in zip(self._matrices.items(), outlines, strict=True):
            assert isinstance(parameter, DTensor), "only sharded parameters have owners"
            for name, value in outline.items():
                state = optimizer.state[parameter]
                if isinstance(value, _Shaped):
                    shard = Shard(matrix, torch.empty_like(_local(parameter), dtype=value.dtype), state.get(name))
                    shards.append(shard)
                    state[name] = sharded_as(parameter, shard.local)
                elif not matrix.is_owned:
                    state[name] = value
        scatter(shards)
        for group in optimizer.param_groups:  # the order in which every rank gathers them
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def _gather_outlines(self, optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
        """Return by parameter a description of the whole state on its owner."""
        own: dict[int, dict[str, object]] = {}
        for number, (parameter, matrix) in enumerate(self._matrices.items()):
            if matrix.is_owned and parameter in optimizer.state:
                state = optimizer.state[parameter].items()
                own[number] = {
                    name: _Shaped(value.dtype)
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    else value
                    for name, value in state
                    if not isinstance(value, DTensor)
                }
        found: dict[MatrixExchange, list[dict[int, dict[str, object]]]] = {}
        for exchange in self._exchanges.values():
            found[exchange] = [{} for _ in range(exchange.size)]
            dist.all_gather_object(found[exchange], own, group=exchange.group)
        return [
            found[matrix.exchange][matrix.owner].get(number, {})
            for number, matrix in enumerate(self._matrices.values())
        ]


_STEPS: Final[WeakKeyDictionary[torch.optim.Optimizer, WholeMatrixSteps]] = WeakKeyDictionary()


@final
@dataclass(frozen=True)
class _Shaped:
    """The description of a tensor with its parameter's shape."""

    dtype: torch.dtype


def _is_split(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds only a part of ``parameter``."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in parameter.placements)


def _local(tensor: torch.Tensor | None, like: DTensor | None = None) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, sharing its memory if it is sharded like ``like``."""
    assert isinstance(tensor, DTensor), "what belongs to a sharded parameter is sharded"
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local().detach()


def sharded_as(parameter: DTensor, shard: torch.Tensor) -> DTensor:
    """Return ``shard`` as a DTensor that is sharded like ``parameter``."""
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _with_known_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure in the arguments of ``step``, if any, and replace it by one that returns its loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
    if closure is None:
        return args, kwargs
    with torch.enable_grad():  # before gradients are gathered, because the closure computes them
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}


# --------------------------------------------------------------------------------------------------
# The exchange between shards and their owners


@final
@dataclass(frozen=True, eq=False)
class Matrix:
    """A sharded parameter, described identically on all ranks that hold a shard.

    Attributes:
        owner: the rank in the exchange's group that assembles the whole matrix.
        turn: the number of that owner's matrices before this one.
        regions: the region of each rank of the group.
        sources: ranks whose regions cover the matrix, each element once.
    """

    exchange: MatrixExchange
    shape: torch.Size
    owner: int
    turn: int
    regions: tuple[Region, ...]
    sources: frozenset[int]

    @property
    def is_owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.exchange.rank

    def size_at(self, rank: int) -> int:
        """Return the number of elements of ``rank``'s shard."""
        return size_of(self.regions[rank])


@final
@dataclass(eq=False)
class Shard:
    """This rank's shard of a tensor laid out as ``matrix``, and on the owner also the whole tensor."""

    matrix: Matrix
    local: torch.Tensor
    whole: torch.Tensor | None = None


def gather(shards: Iterable[Shard]) -> None:
    """Set ``whole`` of each of ``shards`` on its owner, with one all-to-all per bucket."""
    for exchange, bucket in _buckets(shards):
        exchange.gather(bucket)


def scatter(shards: Iterable[Shard]) -> None:
    """Copy the owner's values into ``local`` of each of ``shards``, with one all-to-all per bucket."""
    for exchange, bucket in _buckets(shards):
        exchange.scatter(bucket)


@final
class MatrixExchange:
    """The ranks that hold shards of the same matrices.

    Args:
        mesh: the mesh of these ranks.
        device: the device on which this process communicates.
        ranks: those of them that take part; default: all.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, ranks: Collection[int] | None = None) -> None:
        self.group: dist.ProcessGroup | None = _group_of(mesh, ranks)
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group)
        self._device = device
        self._costs = [0] * self.size
        self._counts = [0] * self.size

    def assign_owners(self, parameters: Sequence[DTensor]) -> list[Matrix]:
        """Assign each of ``parameters``, the most expensive first, to the rank with the least work; a collective."""
        gathered: list[list[Region]] = [[] for _ in range(self.size)]
        dist.all_gather_object(gathered, [_region_of(parameter) for parameter in parameters], group=self.group)
        matrices: dict[int, Matrix] = {}
        for number in sorted(range(len(parameters)), key=lambda number: (-_cost(parameters[number].shape), number)):
            shape = parameters[number].shape
            owner = min(range(self.size), key=lambda rank: (self._costs[rank], rank))
            regions = tuple(of_rank[number] for of_rank in gathered)
            turn, sources = self._counts[owner], _sources(regions, owner)
            matrices[number] = Matrix(self, shape, owner, turn, regions, sources)
            self._costs[owner] += _cost(shape)
            self._counts[owner] += 1
        return [matrices[number] for number in range(len(parameters))]

    def gather(self, bucket: Sequence[Shard]) -> None:
        """Set ``whole`` on the owners, with one all-to-all for shards of one dtype and device."""
        leaving = [
            [shard for shard in bucket if shard.matrix.owner == rank and self.rank in shard.matrix.sources]
            for rank in range(self.size)
        ]
        owned = [shard for shard in bucket if shard.matrix.is_owned]
        arriving = [[shard for shard in owned if rank in shard.matrix.sources] for rank in range(self.size)]
        for shard in owned:
            shard.whole = shard.local.new_empty(shard.matrix.shape)
        sizes = [sum(shard.matrix.size_at(rank) for shard in shards) for rank, shards in enumerate(arriving)]
        parts = self._all_to_all([[shard.local for shard in to_rank] for to_rank in leaving], sizes, bucket[0].local)
        for rank, shards in enumerate(arriving):
            received = parts[rank].split([shard.matrix.size_at(rank) for shard in shards])
            for shard, values in zip(shards, received, strict=True):
                assert shard.whole is not None, "made above"
                region = shard.matrix.regions[rank]
                part_of(shard.whole, region).copy_(values.view(shape_of(region)))

    def scatter(self, bucket: Sequence[Shard]) -> None:
        """Copy the owners' ``whole`` into shards of one dtype and device, with one all-to-all."""
        leaving = [
            [part_of(shard.whole, shard.matrix.regions[rank]) for shard in bucket if shard.whole is not None]
            for rank in range(self.size)
        ]
        arriving = [[shard for shard in bucket if shard.matrix.owner == rank] for rank in range(self.size)]
        sizes = [sum(shard.local.numel() for shard in shards) for shards in arriving]
        parts = self._all_to_all(leaving, sizes, bucket[0].local)
        for part, shards in zip(parts, arriving, strict=True):
            received = part.split([shard.local.numel() for shard in shards])
            for shard, values in zip(shards, received, strict=True):
                shard.local.copy_(values.view(shard.local.shape))

    def _all_to_all(
        self, leaving: Sequence[Sequence[torch.Tensor]], sizes: list[int], like: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Send ``leaving`` by rank; return the received elements by rank, flat, ``sizes`` of each."""
        counts = [sum(tensor.numel() for tensor in to_rank) for to_rank in leaving]
        flat = [tensor.reshape(-1) for to_rank in leaving for tensor in to_rank]
        sent = torch.cat([like.new_empty(0), *flat]).to(self._device)
        arrived = like.new_empty(sum(sizes), device=self._device)
        dist.all_to_all_single(arrived, sent, sizes, counts, group=self.group)
        return arrived.split(sizes)


def _buckets(shards: Iterable[Shard]) -> Iterator[tuple[MatrixExchange, list[Shard]]]:
    """Iterate over ``shards`` in buckets of one exchange, dtype and device, with about equal amounts for all owners."""
    kinds: dict[tuple[MatrixExchange, torch.dtype, torch.device], list[Shard]] = {}
    for shard in shards:
        kinds.setdefault((shard.matrix.exchange, shard.local.dtype, shard.local.device), []).append(shard)
    for (exchange, dtype, _), same in kinds.items():
        same.sort(key=lambda shard: (shard.matrix.turn, shard.matrix.owner))
        sizes = [shard.matrix.shape.numel() * dtype.itemsize for shard in same]
        for positions in buckets(sizes, BUCKET_BYTES * exchange.size):
            yield exchange, [same[position] for position in positions]


def _group_of(mesh: DeviceMesh, among: Collection[int] | None) -> dist.ProcessGroup | None:
    """Return the group of the ranks of ``mesh``, or of those ``among`` them; create one if there is none."""
    ranks = sorted(rank for rank in mesh.mesh.flatten().tolist() if among is None or rank in among)
    if mesh.ndim == 1 and len(ranks) == mesh.size():
        return mesh.get_group()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)  # pyright: ignore[reportAssignmentType]
    return group


def _cost(shape: torch.Size) -> int:
    """Return a number proportional to the time to multiply the matrix with its own transpose."""
    return shape.numel() * (min(shape[-2:]) if len(shape) > 1 else 1)


def _region_of(parameter: DTensor) -> Region:
    """Return the region of this rank's shard of ``parameter``.

    Raises:
        NotBuilt: the shard isn't a single region.
    """
    region = region_of(parameter)
    if region is None:
        raise NotBuilt(
            f"A parameter of shape {list(parameter.shape)} is sharded as {parameter.placements}, and this rank's "
            f"shard of shape {list(parameter.to_local().shape)} is no single region: an optimizer of whole matrices "
            "can't bring it together. Set needs_whole_matrices=False on the optimizer, or shard the parameter in "
            "another way."
        )
    return region


def _sources(regions: Sequence[Region], owner: int) -> frozenset[int]:
    """Return one rank for each region; if there are replicas, the ranks of the owner's replica."""
    holders: dict[Region, list[int]] = {}
    for rank, region in enumerate(regions):
        if size_of(region):
            holders.setdefault(region, []).append(rank)
    replica = next((ranks.index(owner) for ranks in holders.values() if owner in ranks), 0)
    return frozenset(ranks[min(replica, len(ranks) - 1)] for ranks in holders.values())
