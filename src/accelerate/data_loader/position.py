"""Where a loader stands in its epoch, as a value that a checkpoint keeps and another run continues from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from accelerate.errors import CheckpointError

from .order import BEGINNING, Drawn, Place, witnesses_of


@final
@dataclass(frozen=True)
class Restored:
    """A saved position that the next pass continues from."""

    epoch: int
    place: Place
    shares: int
    order: Mapping[str, Any]
    witnesses: list[int] = field(default_factory=list)
    dataset: Any = None  # the stream's own state, where it keeps one and all ranks read the same stream
    own: Mapping[str, Any] = field(default_factory=dict)  # what only the rank that saved it can use
    is_finished: bool = False  # the last batch of the epoch had been delivered

    def place_for(self, shares: int, samples_per_round: int) -> Place:
        """The place among ``shares`` ranks: the same samples have been dealt, in rounds of another size."""
        if shares == self.shares:
            return self.place
        rounds = self.place.samples // max(samples_per_round, 1)
        return Place(rounds, self.place.groups, self.place.samples)


@final
class Beginning(NamedTuple):
    """How one pass over a loader began."""

    epoch: int
    begun: Mapping[str, Any] | None
    place: Place


@final
@dataclass
class Progress:
    """The epoch of a loader and the place in it; a loader and its skipped copies have one between them."""

    epoch: int = 0
    begun: Mapping[str, Any] | None = None  # how the order of the running epoch began
    place: Place = BEGINNING  # where the running epoch was entered
    drawn: Drawn | None = None  # the batch that was delivered last in the running epoch
    restored: Restored | None = None  # read from a checkpoint, not continued yet
    own: Mapping[str, Any] = field(default_factory=dict)  # what only this rank knows, and holds for a whole pass

    def start(self) -> Restored | None:
        """A pass begins; returns the position that it continues from, which is then used up."""
        if self.drawn is not None and self.drawn.is_last:  # a loop that was left at its last batch has seen it all
            self.epoch += 1
        restored, self.restored = self.restored, None
        self.begun, self.drawn, self.place = None, None, BEGINNING
        if restored is not None:
            self.place = restored.place
        return restored

    def finish(self, epoch: int) -> None:
        """Note that the pass of ``epoch`` reached its end: the next pass is that of the following epoch.

        Another pass, begun while this one stood at its last batch, has counted that already.
        """
        self.epoch = max(self.epoch, epoch + 1)
        self.leave()

    def beginning(self) -> Beginning:
        """Return how the running pass began."""
        return Beginning(self.epoch, self.begun, self.place)

    def return_to(self, beginning: Beginning) -> None:
        """Continue a pass after another pass over the same loader has read in between."""
        self.epoch, self.begun, self.place = beginning

    def leave(self) -> None:
        """No place in an epoch is held any more."""
        self.begun, self.drawn, self.place, self.restored = None, None, BEGINNING, None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``; a place in another epoch is given up, and so is the end of this one."""
        restored = self.restored
        if restored is not None and restored.is_finished:
            if epoch == self.epoch + 1:
                return  # where the end leads anyway, and in the order that it leaves behind
            self.leave()
        elif epoch != self.epoch or (self.drawn is not None and self.drawn.is_last):
            self.leave()
        self.epoch = epoch

    @property
    def is_inside(self) -> bool:
        """Whether some, but maybe not all, batches of the epoch have been delivered."""
        return self.drawn is not None or self.restored is not None or self.place != BEGINNING

    def state(self, shares: int, ready: Mapping[str, Any]) -> dict[str, Any]:
        """The position as JSON values and tensors; ``ready`` is the state of the sampler between epochs."""
        drawn, restored = self.drawn, self.restored
        if restored is not None:
            return _state_of(restored)
        if drawn is not None:
            own = dict(drawn.own or self.own)
            return _state_of(
                Restored(
                    self.epoch,
                    Place(drawn.rounds, drawn.groups, drawn.samples),
                    shares,
                    self.begun or {},
                    witnesses_of(drawn.last_group),
                    own.pop("dataset", None),
                    own,
                    drawn.is_last,
                )
            )
        inside = self.place != BEGINNING
        order = (self.begun or {}) if inside else ready
        return _state_of(Restored(self.epoch, self.place, shares, order, own=self.own, is_finished=not inside))

    def load(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The next pass continues from ``state``; returns the sampler's state where that lies between two epochs."""
        try:
            restored = Restored(
                int(state["epoch"]),
                Place(int(state["rounds"]), int(state["groups"]), int(state["samples"])),
                int(state["shares"]),
                state["order"] or {},
                list(state["witnesses"]),
                state.get("dataset"),
                state.get("own") or {},
                bool(state["_iterator_finished"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"load_state_dict: this isn't the state of a prepared loader ({error!r}); it has the keys "
                f"{sorted(map(str, state))}. Pass what state_dict() of a prepared loader returned."
            ) from error
        self.leave()
        self.epoch, self.own = restored.epoch, restored.own
        if restored.place == BEGINNING:
            return restored.order
        self.restored = restored
        return None


def _state_of(position: Restored) -> dict[str, Any]:
    place = position.place
    return {
        "epoch": position.epoch,
        "rounds": place.rounds,
        "groups": place.groups,
        "samples": place.samples,
        "shares": position.shares,
        "order": dict(position.order),
        "witnesses": position.witnesses,
        "dataset": position.dataset,
        "own": dict(position.own),
        "_iterator_finished": position.is_finished,
    }
