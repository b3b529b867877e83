"""Automatic micro-batching: after an out-of-memory error, split the batch further; the update stays the same.

A batch of a shape that isn't known to fit is computed *carefully*, so that the pass can be aborted and retried in
smaller parts. There are two ways. Replicas compute it without communication and reduce gradients afterwards, with the
strategy's own reduction; the others wait for a rank that ran out of memory as for any slow rank. If the forward itself
communicates (sharded or tensor-parallel layers), all ranks abort and retry the pass together (:class:`CoordinatedPass`)
and agree on the number of parts. Once the shape is known to fit (together with the optimizer's state, so after an
update), both compute as usual, without further exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final, Literal, TypeVar, cast, final

import torch

from ..devices.memory import clear_device_cache, should_reduce_batch_size
from ..distributed.collectives import MaxReducer
from ..distributed.random import capture_rng_states, restore_rng_states
from ..distributed.world import World
from ..errors import CollectiveError, MemoryExhausted, SettingError
from ..logging import MultiProcessAdapter, get_logger
from ..nested import ignorant_find_batch_size, split_batch
from ..torch_private.tracing import TorchDispatchMode

logger: MultiProcessAdapter = get_logger(__name__)

ComputeLoss = Callable[[Any], torch.Tensor]
Reduction = Literal["mean", "sum"]
Shapes = tuple[tuple[int, ...], ...]
REDUCTIONS: Final = ("mean", "sum")


class RetryMode(Enum):
    """Which ranks retry a batch after an out-of-memory error."""

    ALONE = "the rank itself: forwards don't communicate"
    TOGETHER = "all ranks: forwards communicate, and all can abort one"
    NEVER = "nobody: forwards communicate, and a rank can't abort one"


class Retryable:
    """The interface of a strategy to retry a batch in smaller parts.

    This base class is for models without state left by a forward, and with gradients as tensors in ``.grad``.
    """

    def __init__(self, world: World, mode: RetryMode = RetryMode.ALONE) -> None:
        self.world: World = world
        self.mode: RetryMode = mode

    def local_gradients(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Enter a context in which the gradients of passes stay on this rank until :meth:`all_reduce_gradients`."""
        return nullcontext()

    def check_parts(self, model: torch.nn.Module) -> None:
        """Raise if a batch of ``model`` can't be split into micro-batches."""

    def sync_buffers(self, model: torch.nn.Module) -> None:
        """Broadcast the buffers now that the next forward of ``model`` would broadcast."""

    def all_reduce_gradients(self, model: torch.nn.Module) -> None:
        """Reduce the gradients of passes under :meth:`local_gradients`."""

    def reset_forwards(self, model: torch.nn.Module) -> None:
        """Reset the state of forwards whose backward will never run."""

    def snapshot_gradients(self, model: torch.nn.Module) -> Callable[[], None]:
        """Copy the gradients of ``model``, and return a function that restores them."""
        return snapshot_gradients(model.parameters())


def snapshot_gradients(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Copy the gradients of ``parameters``, and return a function that restores them."""
    kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]

    def restore() -> None:
        for parameter, gradient, values in kept:
            if gradient is not None and values is not None:
                gradient.copy_(values)  # in place: it may be a view of a DDP bucket
            parameter.grad = gradient

    return restore


_NUM_QUIET: Final = 16  # after so many batches in a row that were new to no rank, the ranks stop comparing


@final
@dataclass(frozen=True)
class Work:
    """One micro-batch of the training loop: its computation, its models, and the loss's reduction."""

    compute_loss: ComputeLoss
    batch: Any
    models: Sequence[torch.nn.Module]  # prepared
    backward: Callable[[torch.Tensor], None]
    reduction: Reduction
    synchronises: bool  # it completes an update
    size: int = 0
    largest: int = 0  # the largest size of the ranks in this pass, as far as known

    def run(self, parts: Iterable[tuple[object, int]]) -> torch.Tensor:
        """Compute ``parts`` and accumulate their gradients; return the sum of their losses (means weighted by size)."""
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
    """The number of parts for this rank's batches, and the shapes that are known to fit with it."""

    def __init__(self, retry: Retryable) -> None:
        self._retry = retry
        self._communicates = retry.mode is not RetryMode.ALONE  # in the forward
        self._aborts_together = retry.mode is RetryMode.TOGETHER
        self.num_parts: int = 1
        self._num_updates = 0
        self._known: list[Shapes] = []  # the largest shapes that are known to fit
        self._watch = _ShapeComparison(retry.world)

    def backward(self, work: Work, *, num_parts: int = 1, always_careful: bool = False) -> torch.Tensor:
        """Accumulate the gradients of the batch's loss; return the detached loss.

        Args:
            num_parts: the minimum number of parts.
            always_careful: compute carefully even if the shape is known to fit.

        Raises:
            MemoryExhausted: a single sample doesn't fit, or the pass can't be aborted.
        """
        if work.reduction not in REDUCTIONS:
            raise SettingError(f"reduction={work.reduction!r}: choose one of {', '.join(map(repr, REDUCTIONS))}.")
        work = replace(work, size=_size_of(work.batch))
        self.num_parts = max(self.num_parts, num_parts)
        shapes = _shapes_of(work.batch)
        is_new = always_careful or not any(_covers(known, shapes) for known in self._known)
        largest = max(work.size, self.num_parts) if self._communicates else work.size
        if self._aborts_together and (self._watch.is_on or always_careful):
            is_surprise = is_new and not always_careful and bool(self._known)
            is_new, self.num_parts, largest = self._watch.compare(is_new, is_surprise, self.num_parts, work.size)
        elif self._communicates:
            is_new = False
        work = replace(work, largest=largest)
        if not is_new:
            loss = self._run_known(work)
        else:
            loss = self._run_new(work)
            if self._num_updates:  # before the first update, there is no optimizer state yet
                self._known = [known for known in self._known if not _covers(shapes, known)] + [shapes]
        self._num_updates += work.synchronises
        return loss

    def _parts(self, work: Work) -> list[tuple[object, int]]:
        parts = list(split_batch(work.batch, work.size, min(self.num_parts, work.size)))
        # A rank with fewer samples than parts joins the others' passes with a weight of zero.
        return parts + [(parts[-1][0], 0)] * (min(self.num_parts, work.largest) - len(parts))

    def _run_known(self, work: Work) -> torch.Tensor:
        """Compute like an accumulating loop: replicas synchronise in the last part, if the micro-batch does."""
        try:
            parts = self._parts(work)
            if not work.synchronises or len(parts) == 1:
                return work.run(parts)
            with self._local_gradients(work.models):
                loss = work.run(parts[:-1])
            return loss + work.run(parts[-1:])
        except Exception as error:  # raised again unless memory ran out
            if not should_reduce_batch_size(error):
                raise
            can_be_careful = self._aborts_together or not self._communicates
            way_out = ", or give up the overlap of communication with always_careful=True" if can_be_careful else ""
            raise MemoryExhausted(
                f"A batch of {work.size} in {self.num_parts} part(s) ran out of memory while the ranks exchange "
                "weights or gradients, so that it can't be computed again: the others are waiting. Begin with smaller "
                f"parts: backward_in_parts(..., num_parts={self.num_parts * 2}){way_out}."
            ) from error

    def _run_new(self, work: Work) -> torch.Tensor:
        for model in work.models:
            self._retry.check_parts(model)
            self._retry.sync_buffers(model)
        with self._local_gradients(work.models):
            while (loss := self._attempt(work)) is None:
                self._split_further(work.largest)
        if work.synchronises:
            for model in work.models:
                self._retry.all_reduce_gradients(model)
        return loss

    @contextmanager
    def _local_gradients(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Enter a context without gradient reduction.

        Sharded gradients are still reduced in each part, because full gradients wouldn't fit.
        """
        with ExitStack() as held:
            for model in models:
                held.enter_context(self._retry.local_gradients(model))
            yield

    def _attempt(self, work: Work) -> torch.Tensor | None:
        """Accumulate the gradients and return the loss; if memory ran out, restore the state and return None.

        If forwards communicate, memory counts as exhausted on all ranks once it is on one.
        """
        before = _Snapshot(self._retry, work.models)

        def compute() -> torch.Tensor:
            before.copy()
            return work.run(self._parts(work))

        run = CoordinatedPass(self._retry.world).run if self._aborts_together else _run_alone
        try:
            loss = run(compute)
        except Exception:  # raised again, after the pass has been undone
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


def _run_alone(compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return the result of ``compute``, or None if memory ran out; then no traceback refers to its tensors any more."""
    try:
        return compute()
    except Exception as error:  # raised again unless memory ran out
        if not should_reduce_batch_size(error):
            raise
    return None


@final
class _Snapshot:
    """A copy of the state that an attempt changes: gradients, buffers, random streams, and a strategy's pass state."""

    def __init__(self, retry: Retryable, models: Sequence[torch.nn.Module]) -> None:
        self._retry = retry
        self._models = models
        self._streams = capture_rng_states()
        self._put_back: list[Callable[[], Any]] = []

    def copy(self) -> None:
        """Copy gradients and buffers; this allocates memory."""
        for model in self._models:
            self._put_back.append(self._retry.snapshot_gradients(model))
            for buffer in model.buffers():
                self._put_back.append(partial(buffer.copy_, buffer.clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the attempt."""
        for model in self._models:
            self._retry.reset_forwards(model)
        for restore_gradients in self._put_back:
            restore_gradients()
        restore_rng_states(self._streams)
        clear_device_cache(garbage_collection=True)


# -- shapes ------------------------------------------------------------------------------------------------


@final
class _ShapeComparison:
    """The check, before each batch, whether its shape is new to any rank.

    If all batches have one shape, the checks end soon. If shapes vary, a batch may be new to one rank only, and the
    others have to know.
    """

    def __init__(self, world: World) -> None:
        self._reducer = MaxReducer(world, 4)
        self._num_quiet = 0
        self._varies = False

    @property
    def is_on(self) -> bool:
        """Whether the ranks compare; the same on all ranks."""
        return self._varies or self._num_quiet < _NUM_QUIET

    def compare(self, is_new: bool, is_surprise: bool, num_parts: int, size: int) -> tuple[bool, int, int]:
        """Return whether the batch is new to any rank, the most parts, and the largest batch; a collective.

        Args:
            is_surprise: its shape is new, although other shapes are known to fit.
        """
        new, surprise, num_parts, size = self._reducer.largest(is_new, is_surprise, num_parts, size)
        self._varies |= bool(surprise)
        self._num_quiet = 0 if new else self._num_quiet + 1
        return bool(new), num_parts, size


def _size_of(batch: object) -> int:
    size = ignorant_find_batch_size(batch)
    if not size:
        raise SettingError(
            f"backward_in_parts() can't split this batch ({type(batch).__name__}): its first tensor has no samples. "
            "Give a tensor, or tuples, lists and dicts whose first tensor has a dimension of samples in front."
        )
    return size


def _shapes_of(data: object) -> Shapes:
    if isinstance(data, torch.Tensor):
        return (tuple(data.shape),)
    if isinstance(data, Mapping):
        data = list(cast("Mapping[Any, Any]", data).values())
    if isinstance(data, (list, tuple)):
        return tuple(shape for item in cast("Sequence[Any]", data) for shape in _shapes_of(item))
    return ()


def _covers(known: Shapes, shapes: Shapes) -> bool:
    """Return whether ``known`` is at least as large as ``shapes`` in every dimension."""
    return len(known) == len(shapes) and all(
        len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True))
        for large, small in zip(known, shapes, strict=True)
    )


# --------------------------------------------------------------------------------------------------
# Coordinated retry: all ranks finish a pass or all abort it, so that no rank is left waiting
#
# Before each collective of the pass, and at its end, the ranks exchange two numbers: which rank ran out of memory, and
# which failed otherwise. A rank that fails joins the next exchange of the others, so they never enter a collective that
# it won't enter. So the order of a strategy's collectives needn't be known, and a failed rank has to make none of them.
#
# Two assumptions: between two exchanges no rank waits for another, and all ranks issue the same number of collectives,
# as sharded, tensor and context parallelism do.

Result = TypeVar("Result")

#: The namespaces of torch's collectives; those of the second one have a separate operation for waiting.
_COLLECTIVES: Final = ("c10d", "_c10d_functional")
_WAITING: Final = "_c10d_functional::wait_tensor"


class _PassAborted(Exception):
    """Another rank has aborted the pass."""


@final
class CoordinatedPass(TorchDispatchMode):
    """A dispatch mode in which the computation of :meth:`run` finishes on all ranks, or is aborted on all."""

    #: Higher-order operators pass through; the collectives inside them are dispatched one by one.
    supports_higher_order_operators = True

    def __init__(self, world: World) -> None:
        from torch.distributed.tensor import DTensor  # takes half a second, so only where forwards communicate

        super().__init__()
        self._dtensor = DTensor
        self._rank = world.rank
        self._reducer = MaxReducer(world, 2)
        self._failed_rank: int | None = None
        self.oom_rank: int | None = None
        self._can_communicate = True

    def run(self, compute: Callable[[], Result]) -> Result | None:
        """Return the result of ``compute``, or None on every rank if memory ran out on ``oom_rank``; a collective.

        Raises:
            CollectiveError: another rank has failed for another reason.
        """
        self.oom_rank = self._failed_rank = None
        try:
            with self:
                result = compute()
            self._check_ranks()
            return result
        except Exception as error:  # raised again unless a rank ran out of memory
            if not self._can_communicate:
                raise
            if self.oom_rank is None and self._failed_rank is None:
                self._report_failure(out_of_memory=should_reduce_batch_size(error))
            if self._failed_rank is not None:
                if self._failed_rank == self._rank or not isinstance(error, _PassAborted):
                    raise
                raise CollectiveError(
                    f"Rank {self._failed_rank} failed while the ranks computed a batch together; its own output says "
                    "why. This rank doesn't wait for it."
                ) from None
        return None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Exchange failures before each collective; run every operation unchanged."""
        if any(issubclass(kind, self._dtensor) for kind in types):
            return NotImplemented  # replaced by plain operations and collectives, dispatched here again
        if getattr(func, "namespace", "") in _COLLECTIVES and not func.name().startswith(_WAITING):
            self._check_ranks()
        return func(*args, **(kwargs or {}))

    def _check_ranks(self) -> None:
        self._exchange_failures(0, 0)
        if self.oom_rank is not None or self._failed_rank is not None:
            raise _PassAborted

    def _report_failure(self, out_of_memory: bool) -> None:
        rank = self._rank + 1
        self._exchange_failures(rank if out_of_memory else 0, 0 if out_of_memory else rank)

    def _exchange_failures(self, oom: int, failed: int) -> None:
        self._can_communicate = False
        oom, failed = self._reducer.largest(oom, failed)
        self._can_communicate = True
        self.oom_rank = oom - 1 if oom else None
        self._failed_rank = failed - 1 if failed else None
