"""Automatic micro-batching: when memory runs out, a batch is split further, and the update stays the same.

A rank that runs out of memory tells nobody in the middle of a backward, because the others may be waiting for it in
a collective. So a batch of a shape that hasn't proved to fit is computed *carefully*: without communication, with
gradients kept apart from earlier ones, so that it can be given up and computed again in smaller parts; only then are
gradients reduced, by the strategy's own reduction. The other ranks wait for that reduction as they wait for any slow
rank, and nothing extra is exchanged. Once the shape has proved to fit (also beside the optimizer's state, that is
after an update), reduction overlaps with backward as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, final

import torch

from .errors import MemoryExhausted, SettingError
from .logging import get_logger
from .memory import clear_device_cache, should_reduce_batch_size
from .nested import ignorant_find_batch_size, split_batch
from .seeding import capture_rng_states, restore_rng_states
from .strategies import Strategy

logger = get_logger(__name__)

ComputeLoss = Callable[[Any], torch.Tensor]
Reduction = Literal["mean", "sum"]
Shapes = tuple[tuple[int, ...], ...]
REDUCTIONS = ("mean", "sum")


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

    def run(self, parts: Iterable[tuple[Any, int]]) -> torch.Tensor:
        """The sum of the losses of ``parts``, each in proportion to its size if they are means; gradients are added."""
        total: torch.Tensor | None = None
        for part, part_size in parts:
            loss = self.compute_loss(part)
            if self.reduction == "mean" and part_size != self.size:
                loss = loss * (part_size / self.size)
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
        self._proved: list[Shapes] = []

    def backward(self, work: Work, *, num_parts: int = 1, always_careful: bool = False) -> torch.Tensor:
        """The gradients of the loss of the batch have been added to the parameters'; returns that loss, detached.

        Args:
            num_parts: at least so many.
            always_careful: also where the shape is known to fit.

        Raises:
            MemoryExhausted: a single sample doesn't fit, or ranks wait for each other in the middle of the forward.
        """
        if work.reduction not in REDUCTIONS:
            raise SettingError(f"reduction={work.reduction!r}: choose one of {', '.join(map(repr, REDUCTIONS))}.")
        work = replace(work, size=_size_of(work.batch))
        self.num_parts = min(max(self.num_parts, num_parts), work.size)
        shapes = _shapes_of(work.batch)
        if self._strategy.communicates_in_forward or (self._is_proved(shapes) and not always_careful):
            loss = self._as_known(work)
        else:
            loss = self._carefully(work)
            if self._num_updates:  # before the first update, the optimizer's state isn't there yet
                self._proved = [known for known in self._proved if not _covers(shapes, known)] + [shapes]
        self._num_updates += work.synchronises
        return loss

    def _is_proved(self, shapes: Shapes) -> bool:
        return any(_covers(known, shapes) for known in self._proved)

    def _as_known(self, work: Work) -> torch.Tensor:
        """As in a loop that accumulates by hand: the last part synchronises, if the micro-batch does."""
        try:
            if not work.synchronises or self.num_parts == 1:
                return work.run(split_batch(work.batch, work.size, self.num_parts))
            parts = list(split_batch(work.batch, work.size, self.num_parts))
            with self._apart(work.models):
                loss = work.run(parts[:-1])
            return loss + work.run(parts[-1:])
        except Exception as error:  # looked at, and raised again unless memory ran out
            if not should_reduce_batch_size(error):
                raise
            raise MemoryExhausted(
                f"A batch of {work.size} in {self.num_parts} part(s) ran out of memory while the ranks exchange "
                "weights or gradients, so that it can't be computed again: the others are waiting. Begin with smaller "
                f"parts: backward_in_parts(..., num_parts={self.num_parts * 2}), or give up the overlap of "
                "communication with always_careful=True (where the ranks exchange gradients only)."
            ) from error

    def _carefully(self, work: Work) -> torch.Tensor:
        for model in work.models:
            self._strategy.check_parts(model)
            self._strategy.send_buffers(model)
        with self._apart(work.models):
            while (loss := self._attempt(work)) is None:
                self._split_further(work.size)
        if work.synchronises:
            for model in work.models:
                self._strategy.reduce_now(model)
        return loss

    @contextmanager
    def _apart(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        with ExitStack() as held:
            for model in models:
                held.enter_context(self._strategy.no_sync(model))
            yield

    def _attempt(self, work: Work) -> torch.Tensor | None:
        """The loss, with its gradients added; or None, with everything as it was, if memory ran out."""
        before = _Before(work.models)
        try:
            loss = work.run(split_batch(work.batch, work.size, self.num_parts))
        except Exception as error:  # looked at, and raised again unless memory ran out
            before.restore()
            if not should_reduce_batch_size(error):
                raise
        else:
            before.add_gradients()
            return loss
        # Outside the handler: inside it, the traceback still holds the tensors of the failed attempt.
        for model in work.models:
            self._strategy.abandon_forwards(model)
        clear_device_cache(garbage_collection=True)
        return None

    def _split_further(self, size: int) -> None:
        if self.num_parts >= size:
            raise MemoryExhausted(
                f"One sample at a time (a batch of {size} in {self.num_parts} parts) ran out of memory. Recompute "
                "activations, shard or offload the model, or use smaller samples."
            )
        before, self.num_parts = self.num_parts, min(self.num_parts * 2, size)
        self._proved.clear()
        logger.warning(
            "Memory ran out in a batch of %d in %d part(s); it is computed in %d from now on, and updates stay the "
            "same. backward_in_parts(..., num_parts=%d) begins there.",
            size,
            before,
            self.num_parts,
            self.num_parts,
            main_process_only=False,
        )


@final
class _Before:
    """What an attempt changes: gradients (put aside until it has succeeded), buffers, random number streams."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        parameters = dict.fromkeys(parameter for model in models for parameter in model.parameters())
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
        self._streams = capture_rng_states()
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        """As if there had been no attempt."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for buffer, value in self._buffers:
            buffer.copy_(value)
        restore_rng_states(self._streams)

    def add_gradients(self) -> None:
        """The gradients of the attempt are added to those from before."""
        for parameter, earlier in self._gradients:
            if earlier is None:
                continue
            if parameter.grad is not None:
                earlier.add_(parameter.grad)
            parameter.grad = earlier


# ------------------------------------------------------------------------------------------------ batches


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
