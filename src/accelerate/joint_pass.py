"""A pass that all ranks finish, or that all of them give up: nobody is left waiting in a collective.

Before each collective of the pass, and at its end, the ranks exchange two numbers: has anyone run out of memory, has
anyone failed otherwise? A rank that fails says so at the place where the others arrive next, which is the next
collective, or the end: they never enter what that rank won't. So nothing has to be known of how a strategy orders its
communication, and no rank plays through what the others still do.

Two things are taken for granted: between two of these questions no rank waits for another, and all ranks issue the
same number of collectives, as sharded, tensor and context parallel do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist

from .errors import CollectiveError
from .memory import should_reduce_batch_size
from .torch_private.tracing import TorchDispatchMode
from .world import World

Result = TypeVar("Result")

#: Where torch keeps its collectives; those under the second name leave the waiting to an operation of its own.
_COLLECTIVES: Final = ("c10d", "_c10d_functional")
_WAITING: Final = "_c10d_functional::wait_tensor"


class _GivenUp(Exception):
    """Another rank has given the pass up."""


@final
class Exchange:
    """The largest of what the ranks say, for a few whole numbers; it needs no new memory."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        on_host = world.backend is None or world.backend == "mpi" or "gloo" in world.backend
        self._numbers = torch.zeros(count, dtype=torch.int64, device="cpu" if on_host else world.device)

    def largest(self, *numbers: int) -> list[int]:
        """By position the largest number of any rank. A collective."""
        world = self._world
        if world.size == 1:
            return list(numbers)
        self._numbers.copy_(torch.tensor(numbers))
        work: Any = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=world.group, async_op=True)
        if self._numbers.is_cpu and world.meeting is not None:
            world.meeting.complete(work)
        else:
            work.wait()
        return self._numbers.tolist()


@final
class JointPass(TorchDispatchMode):
    """What is computed in :meth:`run` is finished on all ranks, or on none."""

    #: Operations of higher order pass through; the collectives inside are seen one by one.
    supports_higher_order_operators = True

    def __init__(self, world: World) -> None:
        from torch.distributed.tensor import DTensor  # half a second of imports, for those who share forwards

        super().__init__()
        self._piece = DTensor
        self._rank = world.rank
        self._exchange = Exchange(world, 2)
        self._failed_rank: int | None = None
        self.full_rank: int | None = None
        self._can_talk = True

    def run(self, compute: Callable[[], Result]) -> Result | None:
        """The result of ``compute``; None on every rank if memory ran out on ``full_rank``. A collective.

        Raises:
            CollectiveError: another rank has failed for another reason.
        """
        self.full_rank = self._failed_rank = None
        try:
            with self:
                result = compute()
            self._ask()
            return result
        except Exception as error:  # looked at, and raised again unless a rank ran out of memory
            if not self._can_talk:
                raise
            if self.full_rank is None and self._failed_rank is None:
                self._say(full=should_reduce_batch_size(error))
            if self._failed_rank is not None:
                if self._failed_rank == self._rank or not isinstance(error, _GivenUp):
                    raise
                raise CollectiveError(
                    f"Rank {self._failed_rank} failed while the ranks computed a batch together; its own output says "
                    "why. This rank doesn't wait for it."
                ) from None
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A collective is preceded by the question; everything else is as always."""
        if any(issubclass(kind, self._piece) for kind in types):
            return NotImplemented  # it becomes operations on plain tensors, and collectives, which come here again
        if getattr(func, "namespace", "") in _COLLECTIVES and not func.name().startswith(_WAITING):
            self._ask()
        return func(*args, **(kwargs or {}))

    def _ask(self) -> None:
        self._hear(0, 0)
        if self.full_rank is not None or self._failed_rank is not None:
            raise _GivenUp

    def _say(self, full: bool) -> None:
        me = self._rank + 1
        self._hear(me if full else 0, 0 if full else me)

    def _hear(self, full: int, failed: int) -> None:
        self._can_talk = False
        full, failed = self._exchange.largest(full, failed)
        self._can_talk = True
        self.full_rank = full - 1 if full else None
        self._failed_rank = failed - 1 if failed else None
