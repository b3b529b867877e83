"""Automatic micro-batching: when memory runs out, a batch is split further, and the update stays the same.

A batch of a shape that hasn't proved to fit is computed *carefully*, so that it can be given up and computed again in
smaller parts. There are two ways. Replicas compute it without communication, and gradients are reduced afterwards, by
the strategy's own reduction: a rank that ran out of memory tells nobody, the others wait for it as for any slow rank.
Where the forward itself communicates (shards, pieces of layers), all ranks give the pass up together
(:mod:`.joint_pass`) and agree on the number of parts. Once the shape has proved to fit (also beside the optimizer's
state, that is after an update), both compute as always and exchange nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast, final

import torch

from .errors import MemoryExhausted, SettingError
from .joint_pass import Exchange, JointPass
from .logging import get_logger
from .memory import clear_device_cache, should_reduce_batch_size
from .nested import ignorant_find_batch_size, split_batch
from .seeding import capture_rng_states, restore_rng_states
from .world import World

if TYPE_CHECKING:
    from .strategies import Strategy

logger = get_logger(__name__)

ComputeLoss = Callable[[Any], torch.Tensor]
Reduction = Literal["mean", "sum"]
Shapes = tuple[tuple[int, ...], ...]
REDUCTIONS: Final = ("mean", "sum")
_NUM_QUIET: Final = 16  # batches in a row that were new to no rank, until the ranks stop asking


@final
@dataclass(frozen=True)
class Work:
    """One micro-batch of the loop: what to compute, through which models, and how its parts add up."""

    compute_loss: ComputeLoss
    batch: Any
    models: Sequence[torch.nn.Module]  # prepared
    backward: Callable[[torch.Tensor], None]
    reduction: Reduction
    synchronises: bool  # it completes an update
    size: int = 0
    largest: int = 0  # size of any rank that shares this pass, as far as is known

    def run(self, parts: Iterable[tuple[Any, int]]) -> torch.Tensor:
        """The sum of the losses of ``parts``, each in proportion to its size if they are means; gradients are added."""
        total: torch.Tensor | None = None
        for part, part_size in parts:
            loss = self.compute_loss(part)
            weight = part_size / self.size if self.reduction == "mean" else float(part_size > 0)
            if weight != 1.0:
                loss = loss * weight
            self.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a batch has at least one part"
        return total


@final
class MicroBatches:
    """Into how many parts this rank's batches are split, and which shapes are known to fit so."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.num_parts = 1
        self._num_updates = 0
        self._known = _KnownShapes()
        self._watch = _Watch(strategy.world)

    def backward(self, work: Work, *, num_parts: int = 1, always_careful: bool = False) -> torch.Tensor:
        """The gradients of the loss of the batch have been added to the parameters'; returns that loss, detached.

        Args:
            num_parts: at least so many.
            always_careful: also where the shape is known to fit.

        Raises:
            MemoryExhausted: a single sample doesn't fit, or the batch can't be given up.
        """
        if work.reduction not in REDUCTIONS:
            raise SettingError(f"reduction={work.reduction!r}: choose one of {', '.join(map(repr, REDUCTIONS))}.")
        work = replace(work, size=_size_of(work.batch))
        self.num_parts = max(self.num_parts, num_parts)
        shapes = _shapes_of(work.batch)
        is_new = always_careful or not self._known.cover(shapes)
        largest = max(work.size, self.num_parts) if self._strategy.communicates_in_forward else work.size
        if self._strategy.gives_up_together and (self._watch.is_on or always_careful):
            is_surprise = is_new and not always_careful and bool(self._known)
            is_new, self.num_parts, largest = self._watch.compare(is_new, is_surprise, self.num_parts, work.size)
        elif self._strategy.communicates_in_forward:
            is_new = False
        work = replace(work, largest=largest)
        if not is_new:
            loss = self._as_known(work)
        else:
            loss = self._carefully(work)
            if self._num_updates:  # before the first update, the optimizer's state isn't there yet
                self._known.add(shapes)
        self._num_updates += work.synchronises
        return loss

    def _parts(self, work: Work) -> list[tuple[Any, int]]:
        parts = list(split_batch(work.batch, work.size, min(self.num_parts, work.size)))
        # A rank with fewer samples than parts takes part in the others' passes, with a weight of nothing.
        return parts + [(parts[-1][0], 0)] * (min(self.num_parts, work.largest) - len(parts))

    def _as_known(self, work: Work) -> torch.Tensor:
        """As in a loop that accumulates by hand: of replicas the last part synchronises, if the micro-batch does."""
        try:
            parts = self._parts(work)
            if not work.synchronises or len(parts) == 1:
                return work.run(parts)
            with self._apart(work.models):
                loss = work.run(parts[:-1])
            return loss + work.run(parts[-1:])
        except Exception as error:  # looked at, and raised again unless memory ran out
            if not should_reduce_batch_size(error):
                raise
            can_be_careful = self._strategy.gives_up_together or not self._strategy.communicates_in_forward
            way_out = ", or give up the overlap of communication with always_careful=True" if can_be_careful else ""
            raise MemoryExhausted(
                f"A batch of {work.size} in {self.num_parts} part(s) ran out of memory while the ranks exchange "
                "weights or gradients, so that it can't be computed again: the others are waiting. Begin with smaller "
                f"parts: backward_in_parts(..., num_parts={self.num_parts * 2}){way_out}."
            ) from error

    def _carefully(self, work: Work) -> torch.Tensor:
        attempt = self._attempt_together if self._strategy.gives_up_together else self._attempt_alone
        for model in work.models:
            self._strategy.check_parts(model)
            self._strategy.send_buffers(model)
        with self._apart(work.models):
            while (loss := attempt(work)) is None:
                self._split_further(work.largest)
        if work.synchronises:
            for model in work.models:
                self._strategy.reduce_now(model)
        return loss

    @contextmanager
    def _apart(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Shards are reduced part by part all the same: whole gradients are what there is no memory for."""
        with ExitStack() as held:
            for model in models:
                held.enter_context(self._strategy.keep_apart(model))
            yield

    def _attempt_alone(self, work: Work) -> torch.Tensor | None:
        """The loss, with its gradients added; or None, with everything as it was, if memory ran out here."""
        before = _Before(self._strategy, work.models)
        try:
            before.copy()
            return work.run(self._parts(work))
        except Exception as error:  # looked at, and raised again unless memory ran out
            if not should_reduce_batch_size(error):
                before.restore()
                raise
        # Outside the handler: inside it, the traceback still holds the tensors of the failed attempt.
        before.restore()
        return None

    def _attempt_together(self, work: Work) -> torch.Tensor | None:
        """The loss, with its gradients added; or None, with everything as it was, if memory ran out on a rank."""
        before = _Before(self._strategy, work.models)

        def compute() -> torch.Tensor:
            before.copy()
            return work.run(self._parts(work))

        try:
            loss = JointPass(self._strategy.world).run(compute)
        except Exception:  # raised again, once nothing is left of the pass
            before.restore()
            raise
        if loss is None:
            before.restore()
        return loss

    def _split_further(self, largest: int) -> None:
        if self.num_parts >= largest:
            raise MemoryExhausted(
                f"One sample at a time (a batch of {largest} in {self.num_parts} parts) ran out of memory. Recompute "
                "activations, shard or offload the model, or use smaller samples."
            )
        before, self.num_parts = self.num_parts, min(self.num_parts * 2, largest)
        self._known.clear()
        logger.warning(
            "Memory ran out in a batch of %d in %d part(s); it is computed in %d from now on, and updates stay the "
            "same. backward_in_parts(..., num_parts=%d) begins there.",
            largest,
            before,
            self.num_parts,
            self.num_parts,
            main_process_only=False,
        )


@final
class _Before:
    """What an attempt changes: gradients, buffers, random number streams, and what a strategy keeps of a pass."""

    def __init__(self, strategy: Strategy, models: Sequence[torch.nn.Module]) -> None:
        self._strategy = strategy
        self._models = models
        self._streams = capture_rng_states()
        self._put_back: list[Callable[[], Any]] = []

    def copy(self) -> None:
        """There are copies of what is there; this takes memory."""
        for model in self._models:
            self._put_back.append(self._strategy.remember_gradients(model))
            for buffer in model.buffers():
                self._put_back.append(partial(buffer.copy_, buffer.clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """As if there had been no attempt."""
        for model in self._models:
            self._strategy.abandon_forwards(model)
        for put_back in self._put_back:
            put_back()
        restore_rng_states(self._streams)
        clear_device_cache(garbage_collection=True)


# ------------------------------------------------------------------------------------------------- shapes


@final
class _Watch:
    """Whether the ranks still compare, before each batch, if its shape is new to one of them.

    Where all batches have one shape, that ends soon. Where they vary, a batch may be new to one rank alone, and the
    others have to know.
    """

    def __init__(self, world: World) -> None:
        self._exchange = Exchange(world, 4)
        self._num_quiet = 0
        self._varies = False

    @property
    def is_on(self) -> bool:
        """On all ranks, or on none."""
        return self._varies or self._num_quiet < _NUM_QUIET

    def compare(self, is_new: bool, is_surprise: bool, num_parts: int, size: int) -> tuple[bool, int, int]:
        """Whether the batch is new to any rank, the most parts, the largest batch. A collective.

        Args:
            is_surprise: it is new although others had proved to fit before.
        """
        new, surprise, num_parts, size = self._exchange.largest(is_new, is_surprise, num_parts, size)
        self._varies |= bool(surprise)
        self._num_quiet = 0 if new else self._num_quiet + 1
        return bool(new), num_parts, size


@final
class _KnownShapes:
    """The largest shapes that have proved to fit."""

    def __init__(self) -> None:
        self._largest: list[Shapes] = []

    def __bool__(self) -> bool:
        return bool(self._largest)

    def cover(self, shapes: Shapes) -> bool:
        """Whether a batch as large was computed before."""
        return any(_covers(known, shapes) for known in self._largest)

    def add(self, shapes: Shapes) -> None:
        """A batch of ``shapes`` has proved to fit."""
        self._largest = [known for known in self._largest if not _covers(shapes, known)] + [shapes]

    def clear(self) -> None:
        """Nothing is known."""
        self._largest = []


def _size_of(batch: Any) -> int:
    size = ignorant_find_batch_size(batch)
    if not size:
        raise SettingError(
            f"backward_in_parts() can't split this batch ({type(batch).__name__}): its first tensor has no samples. "
            "Give a tensor, or tuples, lists and dicts whose first tensor has a dimension of samples in front."
        )
    return size


def _shapes_of(data: Any) -> Shapes:
    if isinstance(data, torch.Tensor):
        return (tuple(data.shape),)
    if isinstance(data, Mapping):
        data = list(cast("Mapping[Any, Any]", data).values())
    if isinstance(data, (list, tuple)):
        return tuple(shape for item in cast("Sequence[Any]", data) for shape in _shapes_of(item))
    return ()


def _covers(known: Shapes, shapes: Shapes) -> bool:
    """Whether a batch of ``shapes`` is in no dimension larger than one of ``known``."""
    return len(known) == len(shapes) and all(
        len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True))
        for large, small in zip(known, shapes, strict=True)
    )
