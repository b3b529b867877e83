"""Sum the nodes that ranks hold in the order of the tree: an all-to-all of shards, a local sum, an all-gather.

Each rank sums one shard of every tensor. If each rank holds one node, they send as many bytes as in a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import distributed as dist

from ...torch_private.distributed import all_gather_single
from .tree import Gradients, Node, PartialSums, nodes_of

#: The bytes of one exchange; smaller ones are sent together, and the next one is sent while this one is summed.
_BUCKET_BYTES: Final = 25 * 2**20


@final
@dataclass(frozen=True)
class Division:
    """The division of parts among ranks: of each ``count``, a rank computes ``count / num_ranks`` consecutive ones.

    An update has a number of such rounds: ``gradient_accumulation_steps``, fewer at the end of an epoch.
    """

    count: int
    num_ranks: int
    rank: int

    @property
    def per_rank(self) -> int:
        """The number of parts that one rank computes."""
        return self.count // self.num_ranks

    def part(self, rank: int, number: int) -> int:
        """Return the part of the update that is the one with ``number`` of ``rank``."""
        round_, place = divmod(number, self.per_rank)
        return round_ * self.count + rank * self.per_rank + place

    def nodes(self, rank: int, num_rounds: int) -> list[tuple[int, int]]:
        """Return (start, size) of the nodes that ``rank`` holds at the end of an update."""
        return nodes_of(self.part(rank, number) for number in range(num_rounds * self.per_rank))


@final
@dataclass
class _Bucket:
    """Parameters of one dtype and device, and an exchange of their gradients that may be running."""

    numbers: list[int]
    parameters: list[torch.nn.Parameter]
    is_used: list[bool] | None = None  # whether this rank has a gradient of each parameter
    received: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def num_values(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters) + len(self.parameters)  # and a flag for each


def sum_over_ranks(
    parameters: Sequence[torch.nn.Parameter],
    nodes: Sequence[Node],
    division: Division,
    num_rounds: int,
    group: dist.ProcessGroup | None,
) -> Gradients:
    """Return the sums over all parts on every rank; a collective.

    Args:
        nodes: those that this rank holds.
        num_rounds: how many times ``division.count`` parts the update has.
        group: the process group of the ranks that divide the parts.
    """
    held = [division.nodes(rank, num_rounds) for rank in range(division.num_ranks)]
    totals: Gradients = [None] * len(parameters)
    waiting: _Bucket | None = None
    for bucket in _buckets(parameters):
        _send(bucket, nodes, list(map(len, held)), group)
        if waiting is not None:
            _receive(waiting, totals, held, group)
        waiting = bucket
    if waiting is not None:
        _receive(waiting, totals, held, group)
    return totals


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[_Bucket]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, parameter in enumerate(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(number)
    for numbers in by_kind.values():
        held: list[int] = []
        num_bytes = 0
        for number in numbers:
            held.append(number)
            num_bytes += parameters[number].numel() * parameters[number].element_size()
            if num_bytes >= _BUCKET_BYTES:
                yield _Bucket(held, [parameters[one] for one in held])
                held, num_bytes = [], 0
        if held:
            yield _Bucket(held, [parameters[one] for one in held])


def _send(bucket: _Bucket, nodes: Sequence[Node], num_nodes: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Start to send each rank its shard of every node of ``bucket``; ``num_nodes`` are those of each rank."""
    ranks, first = len(num_nodes), bucket.parameters[0]
    shard = -(-bucket.num_values // ranks)
    sent = first.new_zeros(len(nodes), ranks * shard, requires_grad=False)
    for row, node in zip(sent, nodes, strict=True):
        gradients = [node.sums[number] for number in bucket.numbers]
        flat = [
            first.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True)
        ]
        has = [gradient is not None for gradient in gradients]
        bucket.is_used = [used or one for used, one in zip(bucket.is_used or has, has, strict=True)]
        torch.cat([*flat, first.new_tensor(has)], out=row[: bucket.num_values])
    by_rank = sent.view(len(nodes), ranks, shard).transpose(0, 1).reshape(-1)
    counts = [count * shard for count in num_nodes]
    bucket.received = first.new_empty(sum(counts), requires_grad=False)
    bucket.work = dist.all_to_all_single(
        bucket.received, by_rank, counts, [len(nodes) * shard] * ranks, group=group, async_op=True
    )


def _receive(
    bucket: _Bucket, totals: Gradients, held: Sequence[Sequence[tuple[int, int]]], group: dist.ProcessGroup | None
) -> None:
    """Sum this rank's shard of ``bucket``, gather the shards, and write the gradients to ``totals``.

    Args:
        held: (start, size) of the nodes of each rank.
    """
    assert bucket.work is not None and bucket.received is not None and bucket.is_used is not None, "sent before"
    bucket.work.wait()
    places = [place for of_rank in held for place in of_rank]
    rows = bucket.received.view(len(places), -1)
    sums = PartialSums()
    for number in sorted(range(len(places)), key=places.__getitem__):
        sums.add(Node(*places[number], [rows[number]]))
    (own,) = sums.total()
    assert own is not None, "each row is a tensor"
    gathered = own.new_empty(own.numel() * len(held))
    all_gather_single(gathered, own.contiguous(), group, async_op=False)
    *flat, flags = gathered[: bucket.num_values].split(
        [*(parameter.numel() for parameter in bucket.parameters), len(bucket.parameters)]
    )
    used = bucket.is_used if all(bucket.is_used) else flags.tolist()  # reading them waits for the device
    for number, parameter, values, count in zip(bucket.numbers, bucket.parameters, flat, used, strict=True):
        totals[number] = values.view_as(parameter) if count else None
