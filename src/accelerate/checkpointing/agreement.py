"""The ranks that write or read one checkpoint: an error on one of them is an error on all, with its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, final

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..world import World

T = TypeVar("T")


@final
class Ranks:
    """Who takes part, from a world or from one process by itself."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self.rank = world.rank if world else 0
        self.size = world.size if world else 1
        self.local_rank = world.local_rank if world else 0
        self.local_size = world.local_size if world else 1

    @property
    def is_main(self) -> bool:
        """True on the rank that writes what all have in common."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on the first rank of each node."""
        return self.local_rank == 0

    def everyone(self, value: T) -> list[T]:
        """What every rank said, in rank order; all ranks wait here for each other."""
        if self._world is None or not self._world.is_distributed:
            return [value]
        from ..collectives import gather_object

        return list(gather_object([value], world=self._world))

    def agree(self, error: Exception | None, what: str, *, kind: type[CheckpointError] = CheckpointError) -> None:
        """All ranks reached this line without an error.

        Raises:
            CheckpointError: some rank did not; the text names each that failed, and why.
        """
        told = self.everyone(None if error is None else f"{type(error).__name__}: {error}")
        failed = {rank: text for rank, text in enumerate(told) if text is not None}
        if not failed:
            return
        if error is not None and not isinstance(error, (OSError, CheckpointError)):
            raise error  # a hook's or an object's own error stays what it is where it happened
        if self.size == 1 and isinstance(error, kind):
            raise error
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise kind(f"can't {what}: {reasons}") from error
