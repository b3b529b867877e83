"""What an evaluation computes, from all ranks, each sample once: gathered, or kept as sums."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from . import collectives
from .collectives import reduce
from .data_loader.coverage import BatchCoverage
from .devices import widest_float
from .errors import PreparationError, UnequalTensors
from .gradients import GradientState
from .joining import Joiner, children_of, is_of_tensors, kept, tensors_of, with_tensors
from .logging import get_logger
from .mesh import DATA_AXES, TOKEN_AXES, Mesh
from .world import World

logger = get_logger(__name__)


class AssumedLoaderWarning(UserWarning):
    """Values were gathered between the batches of several loaders, and could belong to any of them."""


@final
class MetricGather:
    """``gather_for_metrics`` of one Accelerator: what every rank computed from the batch in hand, each sample once."""

    def __init__(self, mesh: Mesh, clock: GradientState) -> None:
        self._mesh, self._clock = mesh, clock
        self._histories: WeakKeyDictionary[Any, _RowHistory] = WeakKeyDictionary()

    def gather(self, data: Any, *, as_objects: bool, to_main: bool) -> Any:
        """What all ranks gave as ``data``, joined leaf by leaf, without the rows that complete a batch.

        Tensors of equal shapes travel as they are; everything else (objects, batches of different sizes) travels
        pickled. With ``to_main`` the other ranks get None.
        """
        readers = self._mesh.within(*DATA_AXES)  # of ranks that share the work on a sample, each hears from its like
        is_told = not to_main or self._mesh.world.is_main
        loader, accounts = loader_of(data, self._clock, is_main=self._mesh.world.is_main)
        coverage: BatchCoverage | None = getattr(loader, "coverage", None)
        is_plain = not as_objects and is_of_tensors(data)
        keep = self._keeper(loader, coverage)
        if readers.size == 1:
            if not is_plain and not isinstance(data, torch.Tensor):
                return data
            tensors = tensors_of(data)
            rows = [[len(tensor)] if tensor.ndim else [1] for tensor in tensors]
            return with_tensors(data, map(keep, tensors, rows, [coverage] * len(tensors)))
        tensors, joined = tensors_of(data) if is_plain else [], None
        is_even = is_plain and not (coverage is not None and coverage.is_uneven)
        if is_even:
            try:
                joined = collectives.gather(tensors, world=readers, to=0 if to_main else None)
            except UnequalTensors:  # raised on every rank: some left rows out, or give all that they have seen
                is_even = False
        if not is_even:
            return self._joined(data, readers, accounts, coverage, keep, as_objects=as_objects, is_told=is_told)
        if joined is None or not is_told:
            return None
        rows = [[len(tensor) if tensor.ndim else 1] * readers.size for tensor in tensors]
        covered = [accounts.get(id(tensor), coverage) for tensor in tensors]
        return with_tensors(data, map(keep, joined, rows, covered))

    def pad(self, tensor: Any, dim: int, pad_index: float, *, pad_first: bool) -> Any:
        """``tensor`` padded along ``dim`` to the largest size of any rank that has a batch in this round."""
        coverage: BatchCoverage | None = getattr(self._clock.active_dataloader, "coverage", None)
        world, num_present = self._mesh.world, None
        if coverage is not None and coverage.num_absent:  # the other ranks' loops are over: they don't come
            world = self._mesh.within(*DATA_AXES)
            num_present = world.size - coverage.num_absent
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, world=world, num_present=num_present)

    def _joined(
        self,
        data: Any,
        readers: World,
        accounts: dict[int, BatchCoverage | None],
        coverage: BatchCoverage | None,
        keep: _Keeper,
        *,
        as_objects: bool,
        is_told: bool,
    ) -> Any:
        tensors = tensors_of(data)
        on_host = with_tensors(data, [tensor.detach().cpu() for tensor in tensors])
        num_absent = 0 if coverage is None else coverage.num_absent
        if num_absent:
            logger.warning_once(
                "gather_for_metrics(): with even_batches=False the last %d rank(s) have no batch in the last round. "
                "What is gathered in it reaches the other ranks, the main process among them. For the same metric on "
                "every rank, gather once after the loop, or leave even_batches on.",
                num_absent,
            )
        parts = (
            collectives.exchange_objects(on_host, readers.size - num_absent, world=readers)
            if num_absent
            else collectives.gather_object([on_host], world=readers)
        )
        if not is_told:
            return None
        parts[readers.rank] = data  # by what it is made of, its loader is known

        def coverage_of(own: Any) -> BatchCoverage | None:
            found = accounts.get(id(own), coverage)
            return None if found is None else found.of_present()

        joined = Joiner(coverage_of, readers.rank, as_objects=as_objects, keep=keep).join(parts)
        if not tensors:
            return joined
        return with_tensors(joined, [tensor.to(tensors[0].device) for tensor in tensors_of(joined)])

    def _keeper(self, loader: Any, coverage: BatchCoverage | None) -> _Keeper:
        nominal = getattr(loader, "total_batch_size", None) if coverage is not None else None
        if nominal is None or coverage is None:
            return _Keeper(None, 0, is_short=False)
        history = self._histories.setdefault(loader, _RowHistory())
        history.next_call(getattr(getattr(loader, "progress", None), "drawn", None))
        nominal //= len(coverage.size)
        return _Keeper(history, nominal, is_short=loader.end_of_dataloader and max(coverage.size) < nominal)


# -- rows that aren't one per sample -----------------------------------------------------------------------


@final
class _RowHistory:
    """How many rows tensors had in the full batches of a loader: by the call in the batch, and their place in it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], int] = {}
        self.call = 0
        self._drawn: Any = None

    def next_call(self, drawn: Any) -> None:
        """Values of the batch ``drawn`` are gathered."""
        self.call = self.call + 1 if drawn is self._drawn else 0
        self._drawn = drawn


@final
class _Keeper:
    """Takes the rows that complete a batch from one tensor of a call after the other.

    A mean that is repeated once for each usual row of a batch (so does the Trainer of transformers) is kept once per
    real sample of a last batch that is shorter: averages over all rows are then averages over samples. That it is one
    is seen from the number of its rows, which was the same in the full batches, never from its values.
    """

    def __init__(self, history: _RowHistory | None, nominal: int, *, is_short: bool) -> None:
        self._history, self._nominal, self._is_short = history, nominal, is_short
        self._place = -1

    def __call__(self, joined: torch.Tensor, rows: Sequence[int], coverage: BatchCoverage | None) -> torch.Tensor:
        self._place += 1
        if joined.ndim == 0:
            return joined
        if self._history is not None and coverage is not None and joined.ndim == 1 and joined.is_floating_point():
            copies = self._copies(rows, coverage, self._history)
            if copies:
                parts = zip(joined.split(rows[0]), coverage.real, strict=True)
                return torch.cat([part[: real * copies] for part, real in parts])
        return kept(joined, rows, coverage)

    def _copies(self, rows: Sequence[int], coverage: BatchCoverage, history: _RowHistory) -> int:
        """How often a mean stands there for each sample of a shorter batch; 0 where the rows are no repeated mean."""
        shares, nominal, number = len(coverage.size), self._nominal, rows[0]
        # Where ranks split one batch between them, it is repeated for the rows of that whole one.
        if len(rows) != shares or rows.count(number) != shares or number not in (nominal, nominal * shares):
            return 0
        key = (history.call, self._place)
        if not self._is_short:
            history.rows[key] = number
            return 0
        before = history.rows.get(key)
        is_repeated = any(number % size for size in coverage.size if size) if before is None else before == number
        return number // nominal if is_repeated else 0


# -- whose values they are ---------------------------------------------------------------------------------


def loader_of(data: Any, clock: GradientState, *, is_main: bool) -> tuple[Any, dict[int, BatchCoverage | None]]:
    """The running loader that ``data`` was computed from; and the accounts of what belongs to a batch, by identity.

    Between the batches of several loaders, what a batch is made of belongs to its loader; other values are taken for
    those of the loader whose batch is among them, or else of the one that delivered last.
    """
    if len(clock.dataloader_references) <= 2:  # None, and one loader
        return clock.active_dataloader, {}
    running = clock.running_dataloaders
    parts = [*_parts(data)]
    owners = [_owner_of(part, running) for part in parts]
    owning = [loader for loader in running if any(owner is loader for owner in owners)]
    assumed = running[-1] if not owning or owning[-1] is running[-1] else owning[-1]
    accounts = {
        id(part): getattr(owner, "coverage", None)
        for part, owner in zip(parts, owners, strict=True)
        if owner is not None
    }
    has_derived = any(isinstance(part, torch.Tensor) and id(part) not in accounts for part in parts)
    if has_derived or not accounts:
        _say_what_is_assumed(assumed, running, clock, is_main=is_main)
    return assumed, accounts


def _parts(data: Any) -> Iterator[Any]:
    """What ``data`` is made of: its containers and leaves, itself included."""
    yield data
    for child in children_of(data) or ():
        yield from _parts(child)


def _owner_of(part: Any, running: Sequence[Any]) -> Any:
    """The only loader whose batch in hand holds ``part``, or a tensor of the same memory; else None."""
    if not isinstance(part, (torch.Tensor, list, Mapping)):  # an equal number or string may be the same object
        return None
    held = [(loader, [*_parts(getattr(loader, "batch_in_hand", None))]) for loader in running]
    found = [loader for loader, parts in held if any(part is one for one in parts)]
    if not found and isinstance(part, torch.Tensor):
        memory = _memory_of(part)
        found = [
            loader
            for loader, parts in held
            if memory and any(isinstance(one, torch.Tensor) and _memory_of(one) == memory for one in parts)
        ]
    return found[0] if len(found) == 1 else None


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _say_what_is_assumed(assumed: Any, running: Sequence[Any], clock: GradientState, *, is_main: bool) -> None:
    account = getattr(assumed, "coverage", None)
    others = [loader for loader in running if loader is not assumed]
    is_in_doubt = getattr(assumed, "is_interleaved", False) and any(
        getattr(other, "is_interleaved", False) and getattr(other, "coverage", None) != account for other in others
    )
    if not is_in_doubt or account is None or clock.has_assumed_loader:
        return
    clock.has_assumed_loader = True
    if is_main:
        warnings.warn(
            f"Several loaders deliver batches in turn, and values that are no part of a batch could belong to any of "
            f"them. They are taken for values of {_described(assumed)}, not of "
            f"{' or '.join(map(_described, others))}. Gather them together with a tensor of their batch "
            "(gather_for_metrics((outputs, batch['labels']))), or silence this with "
            "warnings.simplefilter('ignore', accelerate.metrics.AssumedLoaderWarning).",
            AssumedLoaderWarning,
            stacklevel=5,
        )


def _described(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    try:
        length = f" of {loader.total_dataset_length} samples"
    except (AttributeError, TypeError):  # a stream, or a loader of others
        length = ""
    return f"the loader over {type(dataset).__name__}{length} (global batches of {loader.total_batch_size})"


# -- sums --------------------------------------------------------------------------------------------------


@final
class StreamingMean:
    """The sum, the count and the mean of what all ranks saw, each sample once.

    Rows that complete the last batch of a loader are left out, by the account that the running loader gives of the
    batch in hand. Sums are kept in float64 on the device (float32 where it has none), and ranks talk only when asked.

        loss = accelerator.streaming_mean()
        for batch in evaluation_loader:
            loss.update(per_sample_losses)
        print(loss.mean())
    """

    def __init__(self, mesh: Mesh, clock: GradientState) -> None:
        self._mesh, self._clock = mesh, clock
        self.reset()

    def reset(self) -> None:
        """Nothing has been seen."""
        device = self._mesh.world.device
        self._kept = torch.zeros(2, dtype=widest_float(device), device=device)

    def update(self, values: Any, weight: Any = None) -> None:
        """The samples of the batch in hand are in.

        Args:
            values: one number per sample, or several (all samples equally many): shape ``[samples, ...]``; or, with
                ``weight``, a sum over the batch: a number, or a tensor of one element.
            weight: how many items such a sum is over (tokens, for example). Only what is real may be in it: rows that
                complete a batch can't be taken out of a sum (``real_rows`` of the loader says how many are real).
        """
        values = torch.as_tensor(values, device=self._kept.device).detach()
        if weight is not None:
            total, count = values.sum(dtype=self._kept.dtype), weight
        else:
            values = self._real(values)
            # Ranks that share the work on a sample all speak for it.
            speakers = self._mesh.size("cp", "sp")
            total, count = values.sum(dtype=self._kept.dtype) / speakers, values.numel() / speakers
        self._kept[0] += total
        self._kept[1] += count

    def _real(self, values: torch.Tensor) -> torch.Tensor:
        if values.ndim == 0:
            raise PreparationError(
                "StreamingMean.update() was given a single number. Give one value per sample, so that rows that "
                "complete a batch can be left out; or the sum over the batch, with weight=."
            )
        loader, _ = loader_of(values, self._clock, is_main=self._mesh.world.is_main)
        own = getattr(loader, "own_rows", None)
        if own is None or own[0] == own[1] or values.shape[0] % own[1]:
            return values
        real, size = own
        return values[: real * (values.shape[0] // size)]

    def sum_and_count(self) -> tuple[float, float]:
        """The sum and the count over all ranks, on every rank; a collective."""
        total, count = reduce(self._kept, "sum", world=self._mesh.within(*TOKEN_AXES)).tolist()
        return total, count

    def sum(self) -> float:
        """The sum over all ranks, on every rank; a collective."""
        return self.sum_and_count()[0]

    def mean(self) -> float:
        """The mean over all ranks, on every rank, NaN before any sample; a collective."""
        total, count = self.sum_and_count()
        return total / count if count else float("nan")
