"""Exchange a model's tensors in buckets: from ranks with regions to ranks that receive whole tensors.

Every rank knows the regions of all others, so ranks send no requests. An exchange only copies; the sender may cast to
another dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

import torch
from torch import distributed as dist

from ...distributed.collectives import gather_object
from ...distributed.messages import checksum
from ...distributed.world import World
from ...errors import CollectiveError, NotBuilt
from ..held_tensors import HeldTensor, Region, size_of

_ALIGNMENT_BYTES: Final = 16
_ON_HOST: Final = ("gloo", "mpi")

#: A rank's message to all others: a checksum of the tensors, its region of each, the address to watch its process.
Outline: TypeAlias = tuple[int, list[Region | None], "tuple[str, int] | None", str]


@final
@dataclass(frozen=True)
class Piece:
    """A region of one tensor that one rank sends to another, and its offset in the message."""

    number: int
    region: Region
    begin: int
    end: int


@final
@dataclass(eq=False)
class Message:
    """The pieces that one rank sends to another, concatenated as bytes."""

    num_bytes: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def add(self, number: int, region: Region, dtype: torch.dtype) -> None:
        """Append ``region`` of tensor ``number``."""
        end = self.num_bytes + size_of(region) * dtype.itemsize
        self.pieces.append(Piece(number, region, self.num_bytes, end))
        self.num_bytes = end + -end % _ALIGNMENT_BYTES


@final
class BucketExchange:
    """The prepared exchange of one bucket: this rank's messages, and the tensors that it will receive."""

    def __init__(self, exchange: WeightExchange, dtypes: dict[int, torch.dtype]) -> None:
        self._exchange, self._dtypes = exchange, dtypes
        world, held = exchange.world, exchange.held
        leaving = [Message() for _ in range(world.size)]
        arriving = [Message() for _ in range(world.size)]
        self._has_messages = False
        self.tensors: dict[int, torch.Tensor] = {}
        self._own_regions: dict[int, list[Region]] = {}
        for receiver in exchange.receivers:
            for number, dtype in dtypes.items():
                for region, source in exchange.sources(number, receiver):
                    if source == world.rank == receiver:
                        self._own_regions.setdefault(number, []).append(region)
                    self._has_messages = self._has_messages or source != receiver
                    if source == world.rank != receiver:
                        leaving[receiver].add(number, region, dtype)
                    elif source != world.rank == receiver:
                        arriving[source].add(number, region, dtype)
        self._arriving, self._counts = arriving, [message.num_bytes for message in leaving]
        if world.rank in exchange.receivers:
            self.tensors = {number: held[number].empty(dtype, world.device) for number, dtype in dtypes.items()}
        self._sent = self._bytes(sum(self._counts))
        for message, space in zip(leaving, self._sent.split(self._counts), strict=True):
            for piece in message.pieces:
                self._view(space, piece).copy_(exchange.values(piece.number, piece.region))

    def run(self) -> dict[int, torch.Tensor]:
        """Exchange the messages of all ranks, and return this rank's received tensors by number; a collective."""
        sizes = [message.num_bytes for message in self._arriving]
        received = self._exchanged(sizes)
        for number, regions in self._own_regions.items():
            for region in regions:
                self._part(number, region).copy_(self._exchange.values(number, region))
        for message, space in zip(self._arriving, received.split(sizes), strict=True):
            for piece in message.pieces:
                self._part(piece.number, piece.region).copy_(self._view(space, piece))
        return self.tensors

    def _part(self, number: int, region: Region) -> torch.Tensor:
        return self._exchange.held[number].part_of(self.tensors[number], region)

    def _exchanged(self, sizes: list[int]) -> torch.Tensor:
        received, world = self._bytes(sum(sizes)), self._exchange.world
        if not self._has_messages:  # all receivers hold all of the bucket
            return received
        work = dist.all_to_all_single(received, self._sent, sizes, self._counts, group=world.group, async_op=True)
        if work is not None:
            if world.backend in _ON_HOST and world.coordinator is not None:
                world.coordinator.wait_for_work(work)
            else:
                work.wait()
        self._sent = self._bytes(0)
        return received

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._exchange.device)

    def _view(self, space: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the ``piece`` of the message ``space`` in its shape."""
        shape = tuple(end - begin for begin, end in piece.region)
        return space[piece.begin : piece.end].view(self._dtypes[piece.number]).view(shape)


@final
class WeightExchange:
    """The regions of one model's tensors on all ranks, and the ranks that receive whole tensors."""

    def __init__(self, world: World, held: Sequence[HeldTensor], receivers: Sequence[int], arguments: str) -> None:
        self.world = world
        self.held = held
        self.receivers = receivers
        #: The device on which messages are allocated.
        self.device: torch.device = torch.device("cpu") if world.backend in _ON_HOST else world.device
        own: Outline = (
            checksum([(one.names, one.shape, one.dtype) for one in held]),
            [one.region for one in held],
            world.coordinator.exits.listen() if world.coordinator is not None and world.rank in receivers else None,
            arguments,
        )
        outlines: list[Outline] = gather_object([own], world=world) if world.size > 1 else [own]
        other_calls = [rank for rank, outline in enumerate(outlines) if outline[3] != arguments]
        if other_calls:
            raise CollectiveError(
                f"stream_weights({arguments}) on rank {world.rank}, but stream_weights({outlines[other_calls[0]][3]}) "
                f"on rank {other_calls[0]}. Every rank sends by them: give the same ones on all ranks."
            )
        different = [rank for rank, outline in enumerate(outlines) if outline[0] != own[0]]
        if different:
            raise CollectiveError(
                f"stream_weights: rank {world.rank} has a model of {len(held)} tensors, whose names, shapes or dtypes "
                f"are others than on rank {different[0]}. Give the same model on all ranks."
            )
        self._regions = [outline[1] for outline in outlines]
        self._watched = self._watch([outline[2] for outline in outlines])

    def _watch(self, addresses: list[tuple[str, int] | None]) -> list[int]:
        """Watch the processes of receivers assigned to this rank, each from a distant rank; return those receivers."""
        rank, size, coordinator = self.world.rank, self.world.size, self.world.coordinator
        watched: list[int] = []
        for receiver in self.receivers:
            address = addresses[receiver]
            if coordinator is not None and address is not None and rank == (receiver + size // 2) % size:
                watched += [receiver] if coordinator.exits.watch(receiver, address) else []
        return watched

    def end_watch(self) -> None:
        """Stop watching the receivers, because the stream is over."""
        if self.world.coordinator is not None:
            self.world.coordinator.exits.unwatch(self._watched)
        self._watched = []

    def prepare(self, dtypes: dict[int, torch.dtype]) -> BucketExchange:
        """Pack this rank's part of a bucket: the tensors with these numbers, each in the dtype to send."""
        return BucketExchange(self, dtypes)

    def values(self, number: int, region: Region) -> torch.Tensor:
        """Return this rank's values of ``region`` of tensor ``number``."""
        local = self.held[number].local
        assert local is not None and self.held[number].region == region, "as this rank told the others"
        return local

    def sources(self, number: int, receiver: int) -> list[tuple[Region, int]]:
        """Return the regions that make up tensor ``number`` on ``receiver``, each with its source rank.

        Raises:
            NotBuilt: the ranks' regions don't cover the tensor.
        """
        tensor = self.held[number]
        holders: dict[Region, list[int]] = {}
        for rank, regions in enumerate(self._regions):
            region = regions[number]
            if region is not None:
                holders.setdefault(region, []).append(rank)
        if tensor.whole in holders:
            holders = {tensor.whole: holders[tensor.whole]}
        found = [(region, _nearest(ranks, receiver)) for region, ranks in sorted(holders.items())]
        if sum(size_of(region) for region, _ in found) != tensor.num_elements:
            raise NotBuilt(
                f"{tensor.names[0]!r} of shape {list(tensor.shape)} lies over the ranks in regions that don't make the "
                "whole, or overlap: it can't be streamed. Use get_state_dict()."
            )
        return found


def _nearest(ranks: Iterable[int], receiver: int) -> int:
    return min(ranks, key=lambda rank: (abs(rank - receiver), rank))


def buckets(sizes: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Iterate over the indices of ``sizes`` in runs whose sum is at most ``limit``; a larger size is a run alone."""
    held, run = 0, list[int]()
    for position, size in enumerate(sizes):
        if run and held + size > limit:
            yield run
            held, run = 0, []
        run.append(position)
        held += size
    if run:
        yield run


def num_bytes(tensor: HeldTensor, dtype: torch.dtype) -> int:
    """Return the size in bytes of the whole ``tensor`` in ``dtype``."""
    return math.prod(tensor.shape) * dtype.itemsize
