"""Sum the nodes that ranks hold in the order of the tree: an all-to-all of shards, a local sum, an all-gather.

Each rank sums one shard of every tensor. If each rank holds one node, they send as many bytes as in a ring all-reduce.
Gradients are sent in buckets while the backward pass computes others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from threading import Lock
from typing import Final, final
from weakref import ref

import torch
from torch import distributed as dist

from ...errors import PreparationError
from ...torch_private.distributed import all_gather_single
from ...torch_private.modules import current_backward
from .fixed_order import Gradients, Node, PartialSums, nodes_of

#: The bytes of the first bucket, which is sent early, and of the others; those of DDP.
_FIRST_BYTES: Final = 2**20
_BUCKET_BYTES: Final = 25 * 2**20
#: The bytes at whose multiples a gradient begins, as if it had memory of its own: kernels choose their sums by that.
_ALIGNMENT: Final = 64


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


@cache
def _nodes(division: Division, num_rounds: int) -> list[list[tuple[int, int]]]:
    """Return for each rank (start, size) of the nodes that it holds at the end of an update."""
    numbers = range(num_rounds * division.per_rank)
    return [nodes_of(division.part(rank, number) for number in numbers) for rank in range(division.num_ranks)]


@final
class Exchange:
    """The exchange of the gradients of ``parameters`` between the ranks that divide the parts.

    The order of its messages is that of the buckets on every rank, whenever a rank's gradients are computed. A bucket
    that lacks one waits for the end of the backward pass, and so do the buckets after it.

    Args:
        group: the process group of the ranks.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], division: Division, group: dist.ProcessGroup | None
    ) -> None:
        self.parameters = parameters
        self._division, self._group = division, group
        self._buckets = _buckets(parameters) if division.num_ranks > 1 else []
        self._lock = Lock()  # a backward pass has a thread for each device
        self._pass: int | None = None  # the running backward pass that completes the gradients
        self._earlier: Sequence[Node] = ()
        self._held: Sequence[Sequence[tuple[int, int]]] = ()
        self._part, self._num_sent = 0, 0
        exchange = ref(self)  # a tensor keeps its hooks alive

        def note(number: int) -> None:
            alive = exchange()
            if alive is not None and alive._pass is not None:
                alive._note(number)

        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: note(number))
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def during_backward(
        self, loss: torch.Tensor, earlier: Sequence[Node], part: int, num_rounds: int
    ) -> Iterator[None]:
        """Enter a context in which the backward pass of ``loss`` sends the sums of this rank as it completes them.

        Args:
            earlier: the nodes of the parts before.
            part: the number of the one whose gradients the parameters get.
            num_rounds: how many times ``division.count`` parts the update has.
        """
        self._earlier, self._held = earlier, _nodes(self._division, num_rounds)
        self._part, self._num_sent = part, 0
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)

        def begin(_: object) -> None:
            self._pass = current_backward()

        handle = loss.register_hook(begin) if loss.requires_grad else None
        try:
            yield
        finally:
            self._pass = None
            if handle is not None:
                handle.remove()

    def _note(self, number: int) -> None:
        """Count a gradient of the bucket with ``number``, and send what is complete.

        A pass inside of the backward pass, of a reentrant checkpoint, may compute only a part of a gradient.

        Raises:
            PreparationError: the bucket is sent already.
        """
        with self._lock:
            if number < self._num_sent:
                raise PreparationError(
                    "A gradient has changed after it was sent, with batch_parts: a reentrant activation checkpoint "
                    "uses a parameter that is also used outside of it. Give checkpoint(use_reentrant=False)."
                )
            if self._pass != current_backward():
                return
            self._buckets[number].num_missing -= 1
            while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_missing:
                self._send_next()

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Send what the backward pass hasn't sent; return the sums over all parts on every rank."""
        totals: Gradients = [None] * len(self.parameters)
        if self._division.num_ranks == 1:
            own = self._own_sums(range(len(self.parameters))).total(in_place=False)
            totals = [None if total is None else total + 0.0 for total in own]  # as in _Bucket.sum
        else:
            while self._num_sent < len(self._buckets):
                self._send_next()
            for bucket in self._buckets[-1:]:
                bucket.sum(self._held, self._group)
            for bucket in self._buckets:
                for number, total in zip(bucket.numbers, bucket.gathered(), strict=True):
                    totals[number] = total
        self._earlier = ()
        return totals

    def _own_sums(self, numbers: Sequence[int]) -> PartialSums:
        """Return the sums of this rank for the parameters with ``numbers``.

        Raises:
            PreparationError: a gradient is sparse.
        """
        sums = PartialSums(Node(node.start, node.size, [node.sums[one] for one in numbers]) for node in self._earlier)
        sums.add(Node(self._part, 1, [self.parameters[one].grad for one in numbers]), in_place=False)
        if any(gradient is not None and gradient.is_sparse for node in sums.nodes for gradient in node.sums):
            raise PreparationError("A gradient is sparse, which batch_parts can't sum. Give Embedding(sparse=False).")
        return sums

    @torch.no_grad()
    def _send_next(self) -> None:
        """Send the next bucket, and sum the one before, which has arrived in the meantime."""
        place, self._num_sent = self._num_sent, self._num_sent + 1
        bucket = self._buckets[place]
        bucket.send(self._own_sums(bucket.numbers).nodes, list(map(len, self._held)), self._group)
        if place:
            self._buckets[place - 1].sum(self._held, self._group)


@final
class _Bucket:
    """Parameters of one dtype and device, and the state of the exchange of their gradients.

    Args:
        numbers: their places among all parameters.
    """

    def __init__(self, numbers: list[int], parameters: Sequence[torch.nn.Parameter]) -> None:
        self.numbers = numbers
        self.parameters = [parameters[number] for number in numbers]
        self.num_missing = 0  # gradients that the running backward pass hasn't computed
        self._first = self.parameters[0].detach()
        step = _ALIGNMENT // self._first.element_size()
        nothing = self._first.new_zeros(step)
        self._gaps = [nothing[: -parameter.numel() % step] for parameter in self.parameters]
        sizes = [parameter.numel() + len(gap) for parameter, gap in zip(self.parameters, self._gaps, strict=True)]
        self._sizes = [*sizes, len(sizes)]  # at the end a flag for each parameter
        self._is_used: list[bool] = []  # whether this rank has a gradient of each
        self._received = self._first  # kept, because new memory takes time
        self._values: torch.Tensor | None = None  # those that are gathered
        self._works: list[dist.Work | None] = []

    def send(self, nodes: Sequence[Node], num_nodes: Sequence[int], group: dist.ProcessGroup | None) -> None:
        """Start to send each rank its shard of every node; ``num_nodes`` are those of each rank."""
        ranks, num_values = len(num_nodes), sum(self._sizes)
        shard = -(-num_values // ranks)
        sent = self._first.new_empty(len(nodes), ranks * shard)
        sent[:, num_values:] = 0
        self._is_used = [False] * len(self.parameters)
        for row, node in zip(sent, nodes, strict=True):
            flat = [
                self._first.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
                for parameter, gradient in zip(self.parameters, node.sums, strict=True)
            ]
            has = [gradient is not None for gradient in node.sums]
            self._is_used = [used or one for used, one in zip(self._is_used, has, strict=True)]
            pieces = [*chain.from_iterable(zip(flat, self._gaps, strict=True)), self._first.new_tensor(has)]
            torch.cat(pieces, out=row[:num_values])
        by_rank = sent.view(len(nodes), ranks, shard).transpose(0, 1).reshape(-1)
        counts = [count * shard for count in num_nodes]
        if self._received.numel() != sum(counts) or self._received is self._first:
            self._received = self._first.new_empty(sum(counts))
        self._values = by_rank if len(nodes) == 1 else None
        sizes = [len(nodes) * shard] * ranks
        self._works = [dist.all_to_all_single(self._received, by_rank, counts, sizes, group=group, async_op=True)]

    def sum(self, held: Sequence[Sequence[tuple[int, int]]], group: dist.ProcessGroup | None) -> None:
        """Sum this rank's shard, and start to gather the shards of all ranks.

        Args:
            held: (start, size) of the nodes of each rank.
        """
        self._wait()
        places = [place for of_rank in held for place in of_rank]
        rows = self._received.view(len(places), -1)
        sums = PartialSums()
        for number in sorted(range(len(places)), key=places.__getitem__):
            sums.add(Node(*places[number], [rows[number]]))
        (own,) = sums.total()
        assert own is not None, "each row is a tensor"
        own += 0.0  # a part without a gradient is a zero on other ranks, so zeros have to have one sign
        if self._values is None:  # else what was sent makes room
            self._values = own.new_empty(own.numel() * len(held))
        if own.device.type != "cpu":
            self._works = [all_gather_single(self._values, own, group, async_op=True)]
            return
        self._works = []  # gloo's all-gather copies all that it has gathered
        for rank, shard in enumerate(self._values.view(len(held), -1)):
            if rank == dist.get_rank(group):
                shard.copy_(own)
            else:
                peer = rank if group is None else dist.get_global_rank(group, rank)
                tag = self.numbers[0]
                self._works += [dist.irecv(shard, peer, group, tag), dist.isend(own, peer, group, tag)]

    def _wait(self) -> None:
        while self._works:
            work = self._works.pop(0)
            assert work is not None, "this rank is in the group"
            work.wait()

    def gathered(self) -> Gradients:
        """Return the gradients of the parameters; None where no rank has one."""
        self._wait()
        assert self._values is not None, "summed before"
        *flat, flags = self._values[: sum(self._sizes)].split(self._sizes)
        used = self._is_used if all(self._is_used) else flags.tolist()  # reading them waits for the device
        self._values = None
        return [
            values[: parameter.numel()].view_as(parameter) if count else None
            for parameter, values, count in zip(self.parameters, flat, used, strict=True)
        ]


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> list[_Bucket]:
    """Return the buckets of ``parameters``, those first whose gradients a backward pass is likely to compute first."""
    num_bytes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    held: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    sizes = dict.fromkeys(((parameter.device, parameter.dtype) for parameter in parameters), 0)
    found: list[list[int]] = []
    for number in reversed(range(len(parameters))):
        kind = parameters[number].device, parameters[number].dtype
        held.setdefault(kind, []).append(number)
        sizes[kind] += num_bytes[number]
        if sizes[kind] >= (_BUCKET_BYTES if found else _FIRST_BYTES):
            found.append(held.pop(kind))
            sizes[kind] = 0
    found.extend(held.values())
    return [_Bucket(numbers, parameters) for numbers in sorted(found, key=min, reverse=True)]
