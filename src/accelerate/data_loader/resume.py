"""The position of a loader in its epoch, as a value that a checkpoint saves and another run resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, final

from ..errors import CheckpointError
from .sampling import BEGINNING, BatchInfo, OrderState, ResumePosition, order_fingerprint


class PositionState(TypedDict):
    """A saved position as a checkpoint keeps it: JSON values and tensors."""

    epoch: int
    rounds: int
    groups: int
    samples: int
    shares: int
    order: OrderState
    witnesses: list[int]
    dataset: object
    own: Mapping[str, object]
    _iterator_finished: bool


@final
@dataclass(frozen=True)
class SavedPosition:
    """A saved position that the next pass continues from."""

    epoch: int
    position: ResumePosition
    dp_size: int
    order: OrderState
    fingerprint: list[int] = field(default_factory=list)
    dataset: Any = None  # the stream's own state, where it keeps one and all ranks read the same stream
    own: Mapping[str, Any] = field(default_factory=dict)  # what only the rank that saved it can use
    is_finished: bool = False  # the last batch of the epoch had been yielded

    def position_for(self, dp_size: int, global_batch_size: int) -> ResumePosition:
        """Return the position among ``dp_size`` ranks, after the same samples, in global batches of another size."""
        if dp_size == self.dp_size:
            return self.position
        steps = self.position.samples // max(global_batch_size, 1)
        return ResumePosition(steps, self.position.batches, self.position.samples)


@final
class PassStart(NamedTuple):
    """The epoch, order state and position with which one pass over a loader began."""

    epoch: int
    order_state: OrderState | None
    position: ResumePosition


@final
@dataclass
class Progress:
    """The epoch of a loader and the position in it; a loader and its skipped copies share one."""

    epoch: int = 0
    order_state: OrderState | None = None  # how the order of the running epoch began
    position: ResumePosition = BEGINNING  # where the running pass began
    batch_info: BatchInfo | None = None  # of the batch that was yielded last in the running epoch
    saved: SavedPosition | None = None  # read from a checkpoint, not continued yet
    own: Mapping[str, Any] = field(default_factory=dict)  # this rank's own state for a whole pass
    loaded_own: Mapping[str, Any] = field(default_factory=dict)  # the same of the run that the checkpoint is of
    is_loaded: bool = False  # and no pass has begun since

    def start(self) -> SavedPosition | None:
        """Begin a pass; return the position to continue from, and forget it."""
        last = self.batch_info
        if last is not None and last.is_last:  # a loop that was left at its last batch has seen all of them
            self.epoch += 1
        self.is_loaded = False
        saved, self.saved = self.saved, None
        self.order_state, self.batch_info, self.position = None, None, BEGINNING
        if saved is not None:
            self.position = saved.position
        return saved

    def finish(self, epoch: int) -> None:
        """Note that the pass of ``epoch`` reached its end: the next pass is the following epoch.

        Another pass, begun while this one was at its last batch, has counted that already.
        """
        self.epoch = max(self.epoch, epoch + 1)
        self.leave()

    def pass_start(self) -> PassStart:
        """Return how the running pass began."""
        return PassStart(self.epoch, self.order_state, self.position)

    def return_to(self, pass_start: PassStart) -> None:
        """Continue a pass after another pass over the same loader has read in between."""
        self.epoch, self.order_state, self.position = pass_start

    def leave(self) -> None:
        """Forget the position in the epoch."""
        self.order_state, self.batch_info, self.position, self.saved = None, None, BEGINNING, None

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``; forget a position in another epoch, or at the end of this one."""
        saved = self.saved
        if saved is not None and saved.is_finished:
            if epoch == self.epoch + 1:
                return  # the next epoch anyway, in the order that follows from the finished one
            self.leave()
        elif epoch != self.epoch or (self.batch_info is not None and self.batch_info.is_last):
            self.leave()
        self.epoch = epoch

    @property
    def is_inside(self) -> bool:
        """Whether some, but maybe not all, batches of the epoch have been yielded."""
        return self.batch_info is not None or self.saved is not None or self.position != BEGINNING

    def state(self, dp_size: int, ready: OrderState) -> PositionState:
        """Return the position as JSON values and tensors; ``ready`` is the state of the sampler between epochs."""
        batch_info, saved = self.batch_info, self.saved
        if saved is not None:
            return _state_of(saved)
        if batch_info is not None:
            own = dict(batch_info.own or self.own)
            return _state_of(
                SavedPosition(
                    self.epoch,
                    ResumePosition(batch_info.steps, batch_info.batches, batch_info.samples),
                    dp_size,
                    self.order_state or {},
                    order_fingerprint(batch_info.last_batch),
                    own.pop("dataset", None),
                    own,
                    batch_info.is_last,
                )
            )
        inside = self.position != BEGINNING
        order = (self.order_state or {}) if inside else ready
        return _state_of(SavedPosition(self.epoch, self.position, dp_size, order, own=self.own, is_finished=not inside))

    def load(self, state: Mapping[str, Any]) -> OrderState | None:
        """Continue from ``state`` in the next pass; return the sampler's state if it lies between two epochs."""
        try:
            saved = SavedPosition(
                int(state["epoch"]),
                ResumePosition(int(state["rounds"]), int(state["groups"]), int(state["samples"])),
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
        self.epoch, self.own, self.loaded_own, self.is_loaded = saved.epoch, saved.own, saved.own, True
        if saved.position == BEGINNING:
            return saved.order
        self.saved = saved
        return None


def _state_of(saved: SavedPosition) -> PositionState:
    position = saved.position
    return {
        "epoch": saved.epoch,
        "rounds": position.steps,
        "groups": position.batches,
        "samples": position.samples,
        "shares": saved.dp_size,
        "order": saved.order.copy(),
        "witnesses": saved.fingerprint,
        "dataset": saved.dataset,
        "own": dict(saved.own),
        "_iterator_finished": saved.is_finished,
    }
