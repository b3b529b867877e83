"""The epoch of a loader and the position in it, which a checkpoint saves and another run resumes from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, final

from ..errors import CheckpointError
from .sampling import BEGINNING, BatchInfo, OrderState, ResumePosition, SeededSampler, order_fingerprint, samplers_of
from .sharding import IterableDatasetShard


class PositionState(TypedDict):
    """The format of a saved position in a checkpoint: JSON values and tensors."""

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
    """A saved position from which the next pass resumes."""

    epoch: int
    position: ResumePosition
    dp_size: int
    order: OrderState
    fingerprint: list[int] = field(default_factory=list)
    dataset: Any = None  # an iterable dataset's own state, if it has one and all ranks read the same data
    own: Mapping[str, Any] = field(default_factory=dict)  # state that only the rank that saved it can use
    is_finished: bool = False  # the last batch of the epoch had been yielded

    def position_for(self, dp_size: int, global_batch_size: int) -> ResumePosition:
        """Return the position after the same samples for ``dp_size`` ranks and another global batch size."""
        if dp_size == self.dp_size:
            return self.position
        steps = self.position.samples // max(global_batch_size, 1)
        return ResumePosition(steps, self.position.batches, self.position.samples)

    def state(self) -> PositionState:
        """Return the position as JSON values and tensors."""
        return {
            "epoch": self.epoch,
            "rounds": self.position.steps,
            "groups": self.position.batches,
            "samples": self.position.samples,
            "shares": self.dp_size,
            "order": self.order.copy(),
            "witnesses": self.fingerprint,
            "dataset": self.dataset,
            "own": dict(self.own),
            "_iterator_finished": self.is_finished,
        }


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
    order_state: OrderState | None = None  # determines the order of the running epoch
    position: ResumePosition = BEGINNING  # where the running pass began
    batch_info: BatchInfo | None = None  # of the last batch yielded in the running epoch
    saved: SavedPosition | None = None  # loaded from a checkpoint, not resumed yet
    own: Mapping[str, Any] = field(default_factory=dict)  # this rank's own state for a whole pass
    loaded_own: Mapping[str, Any] = field(default_factory=dict)  # the same, of the saved run
    is_loaded: bool = False  # and no pass has begun since

    def start(self) -> SavedPosition | None:
        """Begin a pass; return the position to resume from, and clear it."""
        last = self.batch_info
        if last is not None and last.is_last:  # a loop that ended by a break at its last batch has seen all batches
            self.epoch += 1
        self.is_loaded = False
        saved, self.saved = self.saved, None
        self.order_state, self.batch_info, self.position = None, None, BEGINNING
        if saved is not None:
            self.position = saved.position
        return saved

    def finish(self, epoch: int) -> None:
        """Record that the pass of ``epoch`` is complete, so the next pass is the following epoch.

        Another pass that began at this one's last batch has counted that already.
        """
        self.epoch = max(self.epoch, epoch + 1)
        self.leave()

    def pass_start(self) -> PassStart:
        """Return the epoch, order state and position at the start of the running pass."""
        return PassStart(self.epoch, self.order_state, self.position)

    def return_to(self, pass_start: PassStart) -> None:
        """Return to a pass after another pass over the same loader has run in between."""
        self.epoch, self.order_state, self.position = pass_start

    def leave(self) -> None:
        """Clear the position in the epoch."""
        self.order_state, self.batch_info, self.position, self.saved = None, None, BEGINNING, None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; clear a position in another epoch or at the end of this one."""
        saved = self.saved
        if saved is not None and saved.is_finished:
            if epoch == self.epoch + 1:
                return  # it is the next epoch already, in the order that follows the finished one
            self.leave()
        elif epoch != self.epoch or (self.batch_info is not None and self.batch_info.is_last):
            self.leave()
        self.epoch = epoch

    @property
    def is_inside(self) -> bool:
        """Whether at least one batch of the epoch has been yielded."""
        return self.batch_info is not None or self.saved is not None or self.position != BEGINNING

    def state(self, dp_size: int, ready: OrderState) -> PositionState:
        """Return the position as JSON values and tensors; between epochs, ``ready`` is the sampler's state."""
        batch_info, saved, order = self.batch_info, self.saved, (self.order_state or {}).copy()
        if "newest" in order:
            order["newest"] = order_fingerprint(order["newest"])
        if saved is None and batch_info is not None:
            own = dict(batch_info.own or self.own)
            saved = SavedPosition(
                self.epoch,
                ResumePosition(batch_info.steps, batch_info.batches, batch_info.samples),
                dp_size,
                order,
                order_fingerprint(batch_info.last_batch),
                own.pop("dataset", None),
                own,
                batch_info.is_last,
            )
        elif saved is None:
            inside = self.position != BEGINNING
            order = order if inside else ready
            saved = SavedPosition(self.epoch, self.position, dp_size, order, own=self.own, is_finished=not inside)
        return saved.state()

    def load(self, state: Mapping[str, Any]) -> OrderState | None:
        """Resume from ``state`` in the next pass; return the sampler's state if ``state`` is between two epochs."""
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
            if needs := state.get("needs"):
                raise CheckpointError(f"The checkpoint is of a run under `{needs}`. Resume it like that.") from error
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


# --------------------------------------------------------------------------------------------------
# The epochs of samplers and datasets with ``set_epoch``, set by loaders or by the script

# By id, because a dataset may be a dataclass without a hash: the object, and its last known epoch.
_known: dict[int, tuple[weakref.ref[Any], object]] = {}


def epoch_listeners(root: object, dataset: object) -> list[Any]:
    """Return the samplers in ``root`` that have ``set_epoch``; without any, ``dataset`` if it has it."""
    listeners = [sampler for sampler in samplers_of(root) if getattr(sampler, "set_epoch", None) is not None]
    return listeners or [one for one in (dataset,) if getattr(one, "set_epoch", None) is not None]


def note_epochs(listeners: Iterable[object], *, only_new: bool = False) -> None:
    """Remember the current epochs of ``listeners``; with ``only_new``, of listeners not yet known."""
    for listener in map(_own, listeners):
        key = id(listener)
        if listener is None or (only_new and key in _known):
            continue
        try:
            _known[key] = (
                weakref.ref(listener, lambda _, key=key: _known.pop(key, None)),
                getattr(listener, "epoch", None),
            )
        except TypeError:  # a class with slots
            continue


def epoch_of_script(listeners: Iterable[object]) -> int | None:
    """Return the epoch that the script has set on one of ``listeners`` since :func:`note_epochs`, or None."""
    for listener in map(_own, listeners):
        known = _known.get(id(listener))
        epoch = getattr(listener, "epoch", None)
        if known is not None and isinstance(epoch, int) and epoch != known[1]:
            return epoch
    return None


def _own(listener: object) -> object | None:
    """Return the script's object; None for this package's samplers, which count epochs themselves."""
    if isinstance(listener, SeededSampler):
        return None
    return listener.dataset if isinstance(listener, IterableDatasetShard) else listener
