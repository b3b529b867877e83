"""All-to-all between sharded matrices and their owners: each matrix is whole on one rank, and sharded on all.

Every matrix has one owner among the ranks that hold its shards; all ranks get about the same amount of computation.
An exchange only copies, so matrices arrive bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import NotBuilt
from ..torch_private.distributed import shard_offset

#: (begin, end) in each dimension of a matrix; empty where begin is end.
Region: TypeAlias = tuple[tuple[int, int], ...]

#: The largest size in bytes of a bucket per rank of the group; a single matrix may be larger.
BUCKET_BYTES: Final = 64 * 2**20


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

    def shape_at(self, rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s shard."""
        return tuple(end - begin for begin, end in self.regions[rank])

    def size_at(self, rank: int) -> int:
        """Return the number of elements of ``rank``'s shard."""
        return math.prod(self.shape_at(rank))

    def part_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a view of the region of ``rank`` in ``whole``."""
        return whole[tuple(slice(begin, end) for begin, end in self.regions[rank])]


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
                shard.matrix.part_of(shard.whole, rank).copy_(values.view(shard.matrix.shape_at(rank)))

    def scatter(self, bucket: Sequence[Shard]) -> None:
        """Copy the owners' ``whole`` into shards of one dtype and device, with one all-to-all."""
        leaving = [
            [shard.matrix.part_of(shard.whole, rank) for shard in bucket if shard.whole is not None]
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
        limit, held, bucket = BUCKET_BYTES * exchange.size, 0, list[Shard]()
        for shard in sorted(same, key=lambda shard: (shard.matrix.turn, shard.matrix.owner)):
            size = shard.matrix.shape.numel() * dtype.itemsize
            if bucket and held + size > limit:
                yield exchange, bucket
                held, bucket = 0, []
            bucket.append(shard)
            held += size
        yield exchange, bucket


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
    shape, offset = shard_offset(parameter)
    held = tuple(parameter.to_local().shape)
    if held != shape:
        raise NotBuilt(
            f"A parameter of shape {list(parameter.shape)} is sharded as {parameter.placements}, of which this rank "
            f"holds {list(held)}, and torch says {list(shape)}: an optimizer of whole matrices can't bring it "
            "together. Set needs_whole_matrices=False on the optimizer, or shard the parameter in another way."
        )
    return tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def _sources(regions: Sequence[Region], owner: int) -> frozenset[int]:
    """Return one rank for each region; if there are replicas, the ranks of the owner's replica."""
    holders: dict[Region, list[int]] = {}
    for rank, region in enumerate(regions):
        if all(begin < end for begin, end in region):
            holders.setdefault(region, []).append(rank)
    replica = next((ranks.index(owner) for ranks in holders.values() if owner in ranks), 0)
    return frozenset(ranks[min(replica, len(ranks) - 1)] for ranks in holders.values())
