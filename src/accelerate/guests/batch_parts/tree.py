"""The order in which the gradients of an update's parts are summed: one binary tree, whatever ranks hold the parts.

The parts 0 to P - 1 are the leaves. A node covers 2^k parts and starts at a multiple of 2^k; it is the sum of its two
halves. Nodes that are left over at the end, if P isn't a power of two, are summed from the last to the first. So the
tree depends on P only, and floating-point sums come out the same for any division of the parts among ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

#: A gradient of each parameter; None if the part didn't use the parameter.
Gradients: TypeAlias = list[torch.Tensor | None]


@final
@dataclass
class Node:
    """The sum over the parts ``start`` to ``start + size - 1``."""

    start: int
    size: int
    sums: Gradients

    def is_left_of(self, other: Node) -> bool:
        """Return whether this node and ``other`` are the halves of one node."""
        return self.size == other.size and self.start + self.size == other.start and not self.start % (2 * self.size)

    def joined(self, other: Node, *, in_place: bool) -> Node:
        """Return the sum of this node and the one to its right, in the tensors of this one or in new ones."""
        sums: Gradients = []
        for own, added in zip(self.sums, other.sums, strict=True):
            if own is None or added is None:
                sums.append(added if own is None else own)
            else:
                sums.append(own.add_(added) if in_place else own + added)
        return Node(self.start, self.size + other.size, sums)


@final
class PartialSums:
    """The sums of some parts, joined as far as the tree allows: log2(P) nodes and one for P consecutive parts."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = [*nodes]

    def add(self, node: Node, *, in_place: bool = True) -> None:
        """Add the next node to the right; with ``in_place``, to the tensors of those before."""
        self.nodes.append(node)
        while len(self.nodes) > 1 and self.nodes[-2].is_left_of(self.nodes[-1]):
            self._join_last(in_place)

    def total(self, *, in_place: bool = True) -> Gradients:
        """Return the sum of all parts; this object must have got all of them."""
        while len(self.nodes) > 1:
            self._join_last(in_place)
        return self.nodes[0].sums

    def _join_last(self, in_place: bool) -> None:
        last = self.nodes.pop()
        self.nodes.append(self.nodes.pop().joined(last, in_place=in_place))


def nodes_of(parts: Iterable[int]) -> list[tuple[int, int]]:
    """Return (start, size) of the nodes to which ``parts``, in rising order, are joined."""
    sums = PartialSums()
    for part in parts:
        sums.add(Node(part, 1, []))
    return [(node.start, node.size) for node in sums.nodes]
