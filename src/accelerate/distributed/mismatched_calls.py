"""Why an operation of all ranks can't complete: one rank publishes the reason, each waiting rank formats it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal, final

_SEPARATOR: Final = "|"
#: The operation of a rank whose loss reaches no shard, while other ranks may wait for its gradients.
UNREACHED: Final = "backward of a loss that reaches no shard"


@final
@dataclass(frozen=True)
class RankState:
    """The last operation published by a rank: its number, name and line.

    Attributes:
        has_left: the rank makes no more calls.
    """

    number: int
    operation: str = ""
    site: str = ""
    has_left: bool = False

    def text(self) -> str:
        """Encode it for the store."""
        return _SEPARATOR.join((str(self.number), "left" if self.has_left else "", self.operation, self.site))

    @classmethod
    def of(cls, text: str) -> RankState:
        """Decode what `text` returned."""
        number, left, operation, site = text.split(_SEPARATOR, 3)
        return cls(int(number), operation, site, bool(left))

    @property
    def named(self) -> str:
        """The operation, with its line if known."""
        return f"`{self.operation}`{f' at {self.site}' if self.site else ''}"


@final
@dataclass(frozen=True)
class Verdict:
    """The reason why an operation can't complete: a rank is elsewhere, has left, is stuck, is late, or was stopped."""

    kind: Literal["different", "inside", "left", "stuck", "late", "stopped"]
    rank: int = 0
    operation: str = ""
    site: str = ""
    text: str = ""

    def encoded(self) -> str:
        """Encode it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Verdict:
        """Decode what `encoded` returned."""
        return cls(**json.loads(text))

    def explain(self, rank: int, me: RankState) -> str:
        """Return the error message for `rank`, whose state is `me`."""
        here = is_in(rank, me)
        where = RankState(me.number, self.operation, self.site).named
        if self.kind == "different":
            return (
                f"{here}, but rank {self.rank} is in {where} instead: they wait for each other and would never meet "
                f"(operation {me.number} of this world). Every rank has to make the same calls in the same order; look "
                "for a call that only one branch of `if accelerator.is_main_process:` makes. To let the "
                "main process go first, use `with accelerator.main_process_first():`."
            )
        if self.kind == "inside":
            return (
                f"{here}, waiting for rank {self.rank} to finish its block, but inside it rank {self.rank} is in "
                f"{where}, which needs all ranks. Move that call out of the block."
            )
        if self.kind == "stuck" and me.operation == UNREACHED:
            return (
                f"{here} that is trained, but {self.text}, for the gradients of this rank's loss. Let the losses of "
                "all ranks reach the model, by `loss + 0.0 * output.sum()` where there is nothing to learn, or "
                "leave the batch out on all ranks."
            )
        if self.kind == "stuck":
            return (
                f"{here}, which every rank has to call, but {self.text}, and "
                f"won't come. Call `{me.operation}` on every rank, outside of `if accelerator.is_main_process:`."
            )
        if self.kind == "stopped":
            return f"{here}, but rank {self.rank} {self.text}."
        if self.kind == "late":
            return f"{here}, but rank {self.rank}, which waited there too, has given up: its timeout is over."
        return (
            f"{here}, but rank {self.rank} has ended (or left the world) without making that call, so it would wait "
            "forever. Every rank has to make the same calls in the same order; look for a call that only one branch of "
            "`if accelerator.is_main_process:` makes, or for an error on that rank."
        )


def is_in(rank: int, state: RankState) -> str:
    """Return ``Rank 3 is in `gather` at train.py:7``."""
    return f"Rank {rank} is in {state.named}"


def find_conflict(
    rank: int, me: RankState, others: dict[int, RankState], setter: int | None, needs_all: tuple[str, ...]
) -> Verdict | None:
    """Return why `me`, the operation of `rank`, can't complete, given the states of `others`; None if nothing is wrong.

    Args:
        setter: the rank that has to set the key, if it is a single rank.
        needs_all: operations that no rank leaves before all have entered.
    """
    for other, state in sorted(others.items()):
        if other == rank:
            continue
        if state.number == me.number and state.operation != me.operation:
            return Verdict("different", other, state.operation, state.site)
        if state.has_left:
            if state.number < me.number:
                return Verdict("left", other)
        elif other == setter and state.number > me.number and state.operation in needs_all:
            return Verdict("inside", other, state.operation, state.site)
    return None
