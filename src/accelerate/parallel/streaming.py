"""Stream the weights of a model, bucket by bucket, to the ranks that receive them; all ranks take part.

Weights are streamed under the names of the state dict, or with PEFT's adapters merged into them. A merged weight is
``W + scaling * B @ A``, as in PEFT's ``merge_and_unload``, computed by the receiver from whole matrices.

An exchange sends a bucket from ranks with regions to ranks that receive whole tensors. Every rank knows the regions of
all others, so ranks send no requests. An exchange only copies; the sender may cast to another dtype.

Before each bucket's exchange there is a barrier in the store. So the senders wait while a receiver processes a bucket,
and the store tells them, outside of any collective, if a receiver stops.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, final, get_args

import torch
from torch import distributed as dist

from ..checkpointing.quantized_state import is_statistic, packed_layers
from ..checkpointing.weights import Selection, adapter_names
from ..distributed.collectives import coordinator_of, gather_object
from ..distributed.messages import checksum
from ..distributed.world import World
from ..errors import CollectiveError, NotBuilt, SettingError
from .rebind import canonical_name
from .state import HeldTensor, Region, buckets, shape_of, size_of

if TYPE_CHECKING:
    from .base import Strategy

_OPERATION: Final = "stream_weights"
_ALIGNMENT_BYTES: Final = 16
_ON_HOST: Final = ("gloo", "mpi")
_PREFIX: Final = "base_model.model."

# --------------------------------------------------------------------------------------------------
# The stream


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
    held = exchange.held
    sizes = [sum(held[number].num_elements * own.itemsize for number, own in of_one.items()) for of_one in dtypes]
    for positions in buckets(sizes, limit):
        of_bucket = {number: own for position in positions for number, own in dtypes[position].items()}
        ready = BucketExchange(exchange, of_bucket)
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
    asked = Selection(dtype=dtype).dtype
    chosen = asked if isinstance(asked, torch.dtype) else None
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


# --------------------------------------------------------------------------------------------------
# The exchange of a bucket

#: A rank's message to all others: a checksum of the tensors, its region of each, the address to watch its process.
Outline: TypeAlias = tuple[int, list[Region | None], "tuple[str, int] | None", str]


@final
@dataclass(frozen=True)
class Piece:
    """A region of one tensor that one rank sends to another, and its offset in the message."""

    number: int
    region: Region
    begin: int
    end: int


@final
@dataclass(eq=False)
class Message:
    """The pieces that one rank sends to another, concatenated as bytes."""

    num_bytes: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def add(self, number: int, region: Region, dtype: torch.dtype) -> None:
        """Append ``region`` of tensor ``number``."""
        end = self.num_bytes + size_of(region) * dtype.itemsize
        self.pieces.append(Piece(number, region, self.num_bytes, end))
        self.num_bytes = end + -end % _ALIGNMENT_BYTES


@final
class BucketExchange:
    """The prepared exchange of one bucket: this rank's messages, and the tensors that it will receive.

    Args:
        dtypes: the numbers of the bucket's tensors, with the dtype in which each is sent.
    """

    def __init__(self, exchange: WeightExchange, dtypes: dict[int, torch.dtype]) -> None:
        self._exchange, self._dtypes = exchange, dtypes
        world, held = exchange.world, exchange.held
        leaving = [Message() for _ in range(world.size)]
        arriving = [Message() for _ in range(world.size)]
        self._has_messages = False
        self.tensors: dict[int, torch.Tensor] = {}
        self._own_regions: dict[int, list[Region]] = {}
        for receiver in exchange.receivers:
            for number, dtype in dtypes.items():
                for region, source in exchange.sources(number, receiver):
                    if source == world.rank == receiver:
                        self._own_regions.setdefault(number, []).append(region)
                    self._has_messages = self._has_messages or source != receiver
                    if source == world.rank != receiver:
                        leaving[receiver].add(number, region, dtype)
                    elif source != world.rank == receiver:
                        arriving[source].add(number, region, dtype)
        self._arriving, self._counts = arriving, [message.num_bytes for message in leaving]
        if world.rank in exchange.receivers:
            self.tensors = {number: held[number].empty(dtype, world.device) for number, dtype in dtypes.items()}
        self._sent = self._bytes(sum(self._counts))
        for message, space in zip(leaving, self._sent.split(self._counts), strict=True):
            for piece in message.pieces:
                self._view(space, piece).copy_(exchange.values(piece.number, piece.region))

    def run(self) -> dict[int, torch.Tensor]:
        """Exchange the messages of all ranks, and return this rank's received tensors by number; a collective."""
        sizes = [message.num_bytes for message in self._arriving]
        received = self._exchanged(sizes)
        for number, regions in self._own_regions.items():
            for region in regions:
                self._part(number, region).copy_(self._exchange.values(number, region))
        for message, space in zip(self._arriving, received.split(sizes), strict=True):
            for piece in message.pieces:
                self._part(piece.number, piece.region).copy_(self._view(space, piece))
        return self.tensors

    def _part(self, number: int, region: Region) -> torch.Tensor:
        return self._exchange.held[number].part_of(self.tensors[number], region)

    def _exchanged(self, sizes: list[int]) -> torch.Tensor:
        received, world = self._bytes(sum(sizes)), self._exchange.world
        if not self._has_messages:  # all receivers hold all of the bucket
            return received
        work = dist.all_to_all_single(received, self._sent, sizes, self._counts, group=world.group, async_op=True)
        if work is not None:
            if world.backend in _ON_HOST and world.coordinator is not None:
                world.coordinator.wait_for_work(work)
            else:
                work.wait()
        self._sent = self._bytes(0)
        return received

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._exchange.device)

    def _view(self, space: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the ``piece`` of the message ``space`` in its shape."""
        return space[piece.begin : piece.end].view(self._dtypes[piece.number]).view(shape_of(piece.region))


@final
class WeightExchange:
    """The regions of one model's tensors on all ranks, and the ranks that receive whole tensors."""

    def __init__(self, world: World, held: Sequence[HeldTensor], receivers: Sequence[int], arguments: str) -> None:
        self.world = world
        self.held = held
        self.receivers = receivers
        #: The device on which messages are allocated.
        self.device: torch.device = torch.device("cpu") if world.backend in _ON_HOST else world.device
        own: Outline = (
            checksum([(one.names, one.shape, one.dtype) for one in held]),
            [one.region for one in held],
            world.coordinator.exits.listen() if world.coordinator is not None and world.rank in receivers else None,
            arguments,
        )
        outlines: list[Outline] = gather_object([own], world=world) if world.size > 1 else [own]
        other_calls = [rank for rank, outline in enumerate(outlines) if outline[3] != arguments]
        if other_calls:
            raise CollectiveError(
                f"stream_weights({arguments}) on rank {world.rank}, but stream_weights({outlines[other_calls[0]][3]}) "
                f"on rank {other_calls[0]}. Every rank sends by them: give the same ones on all ranks."
            )
        different = [rank for rank, outline in enumerate(outlines) if outline[0] != own[0]]
        if different:
            raise CollectiveError(
                f"stream_weights: rank {world.rank} has a model of {len(held)} tensors, whose names, shapes or dtypes "
                f"are others than on rank {different[0]}. Give the same model on all ranks."
            )
        self._regions = [outline[1] for outline in outlines]
        self._watched = self._watch([outline[2] for outline in outlines])

    def _watch(self, addresses: list[tuple[str, int] | None]) -> list[int]:
        """Watch the processes of receivers assigned to this rank, each from a distant rank; return those receivers."""
        rank, size, coordinator = self.world.rank, self.world.size, self.world.coordinator
        watched: list[int] = []
        for receiver in self.receivers:
            address = addresses[receiver]
            if coordinator is not None and address is not None and rank == (receiver + size // 2) % size:
                watched += [receiver] if coordinator.exits.watch(receiver, address) else []
        return watched

    def end_watch(self) -> None:
        """Stop watching the receivers, because the stream is over."""
        if self.world.coordinator is not None:
            self.world.coordinator.exits.unwatch(self._watched)
        self._watched = []

    def values(self, number: int, region: Region) -> torch.Tensor:
        """Return this rank's values of ``region`` of tensor ``number``."""
        local = self.held[number].local
        assert local is not None and self.held[number].region == region, "as this rank told the others"
        return local

    def sources(self, number: int, receiver: int) -> list[tuple[Region, int]]:
        """Return the regions that make up tensor ``number`` on ``receiver``, each with its source rank.

        Raises:
            NotBuilt: the ranks' regions don't cover the tensor.
        """
        tensor = self.held[number]
        holders: dict[Region, list[int]] = {}
        for rank, regions in enumerate(self._regions):
            region = regions[number]
            if region is not None:
                holders.setdefault(region, []).append(rank)
        if tensor.whole in holders:
            holders = {tensor.whole: holders[tensor.whole]}
        found = [
            (region, min(ranks, key=lambda rank: (abs(rank - receiver), rank)))  # the nearest
            for region, ranks in sorted(holders.items())
        ]
        if sum(size_of(region) for region, _ in found) != tensor.num_elements:
            raise NotBuilt(
                f"{tensor.names[0]!r} of shape {list(tensor.shape)} lies over the ranks in regions that don't make the "
                "whole, or overlap: it can't be streamed. Use get_state_dict()."
            )
        return found


# --------------------------------------------------------------------------------------------------
# The weights, with or without adapters

#: How to stream the adapters of a PEFT model: beside the base weights, merged into them, or alone.
Adapters: TypeAlias = Literal["kept", "merged", "only"]


@final
@dataclass(frozen=True)
class StreamedWeight:
    """One weight of the stream.

    Attributes:
        names: its names in the stream; several if it is tied.
        numbers: the numbers of the tensors it is computed from; the first has its shape.
        merge: computes it from them in place of the first; None if there is only one.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None


def streamed_weights(
    model: torch.nn.Module, held: Sequence[HeldTensor], adapters: Adapters = "kept"
) -> list[StreamedWeight]:
    """Return the weights to stream from ``model``, the user's own, whose tensors are ``held``.

    Raises:
        SettingError: ``adapters`` is invalid, or the model has no adapters.
        NotBuilt: these adapters can't be merged.
    """
    if adapters not in get_args(Adapters):
        raise SettingError(f"adapters={adapters!r}: choose one of {', '.join(map(repr, get_args(Adapters)))}.")
    if adapters == "kept":
        return [StreamedWeight(tensor.names, (number,)) for number, tensor in enumerate(held)]
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise SettingError(
            f"adapters={adapters!r}: {type(model).__name__} is no model with adapters of PEFT's. Leave it out."
        )
    if adapters == "merged":
        return list(_merged(model, held, peft))
    short = adapter_names(model, [name for tensor in held for name in tensor.names])
    found = (
        (tuple(short[name] for name in tensor.names if name in short), number) for number, tensor in enumerate(held)
    )
    return [StreamedWeight(names, (number,)) for names, number in found if names]


def _merged(model: Any, held: Sequence[HeldTensor], peft: Any) -> Iterator[StreamedWeight]:
    numbers = {name: number for number, tensor in enumerate(held) for name in tensor.names}
    merges: dict[int, tuple[tuple[int, ...], Callable[[Sequence[torch.Tensor]], torch.Tensor]]] = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            factors = _factors(canonical_name(prefix), layer, peft)
            if factors:
                base = numbers[f"{canonical_name(prefix)}.base_layer.weight"]
                parts = (base, *(numbers[name] for name in factors))
                is_embedding = isinstance(layer, peft.tuners.lora.Embedding)
                swapped = is_embedding or bool(getattr(layer, "fan_in_fan_out", False))
                merges[base] = parts, partial(_merge, tuple(factors.values())[::2], swapped)
    active = model.active_adapter
    saved = {active} if isinstance(active, str) else set(active)
    for number, tensor in enumerate(held):
        names = tuple(found for name in tensor.names if (found := _without_adapters(name, saved)))
        if names:
            parts, merge = merges.get(number, ((number,), None))
            yield StreamedWeight(names, parts, merge)


def _factors(prefix: str, layer: Any, peft: Any) -> Mapping[str, float]:
    """Return the names of A and B of each active adapter of ``layer``, with the adapter's scaling.

    Raises:
        NotBuilt: the adapters aren't LoRA, or are a variant of it.
    """
    lora = peft.tuners.lora
    active = (
        [] if layer.disable_adapters else [one for one in layer.active_adapters if one not in layer.merged_adapters]
    )
    if not isinstance(layer, (lora.Linear, lora.Embedding)) or any(
        one in layer.lora_variant or layer.lora_bias.get(one, False) for one in active
    ):
        raise NotBuilt(
            f'adapters="merged" merges LoRA of linear layers and embeddings, without variants such as DoRA; {prefix!r} '
            f'is {type(layer).__module__}.{type(layer).__name__}. Stream adapters="only", or save the model, and let '
            "PEFT merge them (merge_and_unload)."
        )
    is_embedding = isinstance(layer, lora.Embedding)
    kind, end = ("lora_embedding_", "") if is_embedding else ("lora_", ".weight")
    return {
        f"{prefix}.{kind}{factor}.{one}{end}": float(layer.scaling[one])
        for one in active
        if one in layer.scaling
        for factor in "AB"
    }


def _merge(scalings: Sequence[float], swapped: bool, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    base, *factors = tensors
    for first, second, scaling in zip(factors[::2], factors[1::2], scalings, strict=True):
        product = second.float() @ first.float() if second.dtype.itemsize < 4 else second @ first
        change = (product.T if swapped else product) * scaling
        base += change.to(second.dtype)
    return base


def _without_adapters(name: str, active: set[str]) -> str:
    """Return ``name`` as in the model without adapters; empty if it isn't there.

    Raises:
        NotBuilt: it belongs to individually trained tokens.
    """
    parts = name.removeprefix(_PREFIX).split(".")
    if any(part.startswith("trainable_tokens_") for part in parts):
        raise NotBuilt(f'adapters="merged" doesn\'t merge single trained tokens ({name!r}). Stream adapters="only".')
    if any(part.startswith("lora_") for part in parts) or "original_module" in parts:
        return ""
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        if parts[place + 1] not in active:
            return ""
        del parts[place : place + 2]
    return ".".join(part for part in parts if part != "base_layer")
