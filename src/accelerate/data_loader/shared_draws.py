"""What rank 0 draws from random number streams while it reads for all ranks is consumed on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from accelerate.seeding import capture_host_streams, same_stream_state, set_host_stream

#: By name of a stream: its state before and after rank 0 drew.
Moves = Mapping[str, tuple[Any, Any]]


@final
class SharedDraws:
    """The host streams and the loader's generators: compared on rank 0 around each read, followed on the other ranks.

    Args:
        generators: those that the loader and its samplers draw from, in the same order on every rank.
    """

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self._generators = {f"generator {number}": one for number, one in enumerate(generators) if one is not None}

    def capture(self) -> dict[str, Any]:
        """The state of each stream, now."""
        return {**capture_host_streams(), **{name: one.get_state() for name, one in self._generators.items()}}

    def moves_since(self, before: Mapping[str, Any]) -> Moves:
        """The streams that have been drawn from since ``before`` was captured."""
        after = self.capture()
        return {
            name: (state, after[name]) for name, state in before.items() if not same_stream_state(state, after[name])
        }

    def follow(self, moves: Moves) -> None:
        """Streams that stand where rank 0's stood go to where rank 0's stand now; others stay as they are."""
        own = self.capture() if moves else {}
        for name, (before, after) in moves.items():
            if not same_stream_state(own.get(name), before):
                continue
            if name in self._generators:
                self._generators[name].set_state(after)
            else:
                set_host_stream(name, after)
