"""An iterator over the weights of a model, bucket by bucket, on the receiving ranks; all ranks take part.

Before each bucket's exchange there is a barrier in the store. So the senders wait while a receiver processes a bucket,
and the store tells them, outside of any collective, if a receiver stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, final

import torch

from ...checkpointing.packed_weights import is_statistic, packed_layers
from ...checkpointing.weights import Selection
from ...distributed.collectives import coordinator_of
from ...errors import CollectiveError, SettingError
from ..held_tensors import HeldTensor
from .exchange import WeightExchange, buckets, num_bytes
from .weights import Adapters, StreamedWeight, streamed_weights

if TYPE_CHECKING:
    from ..base import Strategy

_OPERATION: Final = "stream_weights"


@final
class Meeting:
    """The barrier of all ranks before each bucket; it reports a rank that stops."""

    def __init__(self, exchange: WeightExchange) -> None:
        world = exchange.world
        self._coordinator = coordinator_of(world, _OPERATION) if world.size > 1 else None
        self._exchange, self._is_over = exchange, False
        self.last_name: str = ""  # the name of the last weight that this rank yielded

    def wait(self) -> None:
        """Wait until all ranks reach the barrier.

        Raises:
            CollectiveError: a rank has stopped.
        """
        if self._coordinator is not None:
            try:
                self._coordinator.wait_for_everyone(_OPERATION)
            except CollectiveError:
                self.end()  # for all ranks alike
                raise

    def end(self) -> None:
        """Mark the stream as over: no rank will reach this barrier again."""
        self._is_over = True
        self._exchange.end_watch()

    def stop(self, reason: str) -> None:
        """Tell the other ranks that this one stops, unless the stream is over."""
        if self._is_over:
            return
        self.end()
        if self._coordinator is not None:
            where = f" (after {self.last_name!r})" if self.last_name else ""
            self._coordinator.stop_others(_OPERATION, f"{reason}{where}")


@final
class WeightStream(Iterator[tuple[str, torch.Tensor]]):
    """An iterator over names and whole tensors on receiving ranks; on other ranks it yields nothing.

    The receiver owns the tensors. Leaving the loop early ends it on all ranks, and so does :meth:`close`.
    """

    def __init__(self, meeting: Meeting, items: Generator[tuple[str, torch.Tensor]]) -> None:
        self._meeting = meeting
        self._items = items  # must not refer back to this object, so that it is freed when the loop ends

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:  # any of them ends the iteration on all ranks
            self._stop(error)
            raise

    def close(self) -> None:
        """End the iteration; if weights are left, the other ranks raise CollectiveError."""
        self._stop(None)

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(error)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the store may be gone
            self._stop(None)

    def _stop(self, error: BaseException | None) -> None:
        self._items.close()
        failure = "" if error is None else f": {type(error).__name__}: {error}"
        self._meeting.stop(f"goes no further in its iteration{failure}")


def _items(
    exchange: WeightExchange,
    weights: Sequence[StreamedWeight],
    dtype: torch.dtype | None,
    limit: int,
    meeting: Meeting,
    packed: frozenset[str],
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the weights on receiving ranks; a collective, with one exchange per bucket."""
    dtypes = [
        _dtypes_of(weight, exchange.held, None if any(n in packed or is_statistic(n) for n in weight.names) else dtype)
        for weight in weights
    ]
    sizes = [sum(num_bytes(exchange.held[number], own) for number, own in of_one.items()) for of_one in dtypes]
    for positions in buckets(sizes, limit):
        ready = exchange.prepare({number: own for position in positions for number, own in dtypes[position].items()})
        meeting.wait()
        tensors = ready.run()
        del ready
        for weight in [weights[position] for position in positions] if tensors else ():
            tensor = _made(weight, [tensors.pop(number) for number in weight.numbers], dtype)
            for name in weight.names:
                meeting.last_name = name
                yield name, tensor
            del tensor
    meeting.wait()
    meeting.end()


def _dtypes_of(weight: StreamedWeight, held: Sequence[HeldTensor], dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """Return the dtypes in which the tensors of ``weight`` are sent: their own if they are merged afterwards."""
    kept = dtype if weight.merge is None else None
    return {number: _converted(held[number].dtype, kept) for number in weight.numbers}


def _converted(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return own if dtype is None or not own.is_floating_point else dtype


def _made(weight: StreamedWeight, tensors: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    if weight.merge is None:
        return tensors[0]
    with torch.no_grad():
        merged = weight.merge(tensors)
    return merged.to(_converted(merged.dtype, dtype))


def stream_weights(
    strategy: Strategy,
    model: torch.nn.Module,
    ranks: Sequence[int],
    bucket_bytes: int,
    dtype: torch.dtype | str | None,
    adapters: Adapters,
) -> WeightStream:
    """Return an iterator over the weights of ``model``; a collective: all ranks must call and exhaust it.

    Raises:
        SettingError: ``ranks`` or ``bucket_bytes`` is invalid.
        CollectiveError: on every rank, if one doesn't call this, or gives another model.
    """
    world = strategy.world
    receivers = sorted(set(ranks))
    if not receivers or not 0 <= receivers[0] <= receivers[-1] < world.size:
        raise SettingError(
            f"stream_weights(ranks={tuple(ranks)}): give at least one rank from 0 to {world.size - 1}, which are those "
            "of this run."
        )
    if bucket_bytes < 1:
        raise SettingError(f"stream_weights(bucket_bytes={bucket_bytes}): give a number of bytes, at least 1.")
    chosen = _dtype_of(dtype)
    if world.size > 1:
        coordinator_of(world, _OPERATION).require_all(_OPERATION)
    held = strategy.state.held_tensors(model)
    inner = strategy.unwrap(model, keep_torch_compile=False)
    weights = streamed_weights(inner, held, adapters)
    # Never cast packed bits stored in a floating-point tensor, nor the tensors that unpack them.
    packed = frozenset(f"{layer}.weight" for layer, _ in packed_layers(inner))
    given = f"ranks={tuple(receivers)}, bucket_bytes={bucket_bytes}, dtype={chosen}, adapters={adapters!r}"
    exchange = WeightExchange(world, held, receivers, given)
    meeting = Meeting(exchange)
    return WeightStream(meeting, _items(exchange, weights, chosen, bucket_bytes, meeting, packed))


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    chosen = Selection(dtype=dtype).dtype
    return chosen if isinstance(chosen, torch.dtype) else None
