"""The points of a training loop at which ranks measure, agree on sizes and weight their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import BatchSampler, IterableDataset

from ...data_loader.dispatch import DataLoaderDispatcher
from ...data_loader.loader import PreparedLoader
from ...data_loader.sampling import unskipped
from ...data_loader.sharding import BatchSamplerShard
from ...distributed.collectives import gather
from ...errors import PreparationError
from ...logging import MultiProcessAdapter, get_logger
from ...seams import LoopHook
from .clock import Clock
from .sizes import choose_sizes

if TYPE_CHECKING:
    from ...accelerator import Accelerator

logger: MultiProcessAdapter = get_logger(__name__)

#: These compute statistics over a rank's own rows.
_BATCH_NORMS: Final = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


@final
class Balance(LoopHook):
    """The balance of one training loop.

    A loader is balanced once a backward pass has used one of its batches. So loaders of evaluations keep equal parts.
    """

    def __init__(self, run: Accelerator) -> None:
        self._run = ref(run)  # it owns the hooks
        self._state, self._device = run.gradient_state, run.device
        self._clocks: WeakKeyDictionary[BatchSamplerShard, Clock] = WeakKeyDictionary()
        self._running: Clock | None = None  # between a batch and its backward pass
        self._is_checked = False
        self._handles: list[Any] = []

    # -- measuring -----------------------------------------------------------------------------------------

    def begin_pass(self, loader: object) -> None:
        """Forget earlier measurements, and sizes for another global batch."""
        shard = shard_of(loader)
        if shard is not None:
            set_sizes(shard, shard.sizes)
            self._clock_of(shard).reset()

    def begin_batch(self, loader: object) -> None:
        """Begin to measure."""
        shard = shard_of(loader)
        self._running = None if shard is None else self._clock_of(shard)
        if self._running is not None:
            self._running.begin_batch()

    def before_backward(self, loss: object, weight: object) -> None:
        """End the measurement, and set the weight of the loss, which is a mean over this rank's rows.

        Raises:
            PreparationError: this loop can't be balanced.
        """
        state, self._running = self._state, None
        state.mean_weight = 1
        loader: Any = state.loaders.active
        if not isinstance(loader, PreparedLoader):
            return
        shard, rows = shard_of(loader), loader.own_rows
        clock = None if shard is None else self._clocks.get(shard)
        if not self._is_checked or shard is None or loss is None:
            self._check(loader, loss)
        if shard is None or rows is None or clock is None:
            return
        if not loader.is_interleaved:
            clock.end_batch(rows[1])
        if shard.sizes and loader.coverage is not None:
            if loader.is_interleaved:
                raise PreparationError(
                    "balance=True in a loop that reads several loaders in turn: their batches have different sizes on "
                    "a rank, and one loss can't be weighted by both. Leave balance out, or use one loader."
                )
            sizes = loader.coverage.size
            state.mean_weight = rows[1] * len(sizes) / sum(sizes)

    def _clock_of(self, shard: BatchSamplerShard) -> Clock:
        found = self._clocks.get(shard)
        if found is None:
            found = self._clocks[shard] = Clock(self._device)
        return found

    def _check(self, loader: PreparedLoader, loss: object) -> None:
        """Refuse what can't be balanced; at the first backward pass, leave the collectives of FSDP out of the time."""
        run, reason = self._run(), _why_not(loader)
        if loss is None:
            reason = "forward and backward in one call, before which a rank can't measure"
        elif run is not None and run.has_lomo_optimizer:
            reason = "a LOMO optimizer, because it doesn't weight its gradients"
        if reason:
            raise PreparationError(f"balance=True with {reason}. Change that, or leave balance out.")
        self._is_checked = True
        if run is not None and run.settings.fsdp is not None and not self._handles:
            from torch.distributed.fsdp import FSDPModule

            units = [one for model in run._wrapped_models for one in model.modules() if isinstance(one, FSDPModule)]
            for unit in units:  # FSDP gathers the parameters in a hook between these two
                self._handles.append(unit.register_forward_pre_hook(self._pause, prepend=True))
                self._handles.append(unit.register_forward_pre_hook(self._resume))

    def _pause(self, *_: object) -> None:
        if self._running is not None:
            self._running.pause()

    def _resume(self, *_: object) -> None:
        if self._running is not None:
            self._running.resume()

    def free_memory(self) -> None:
        """Remove the hooks from models."""
        while self._handles:
            self._handles.pop().remove()
        self._is_checked = False

    # -- agreeing ------------------------------------------------------------------------------------------

    def end_pass(self, loader: object) -> None:
        """Agree on the sizes of the next pass, if all ranks have come to the end of this one; a collective."""
        shard = shard_of(loader)
        clock = None if shard is None else self._clocks.get(shard)
        if not isinstance(loader, PreparedLoader) or shard is None or clock is None or not clock.has_measured:
            return
        if loader.progress.batch_info is not None:  # the loop has ended by `break` or an exception, maybe on one rank
            return
        seconds = self._seconds_of_all(shard, clock.seconds_per_row())
        clock.reset()
        if min(seconds) > 0:
            before = shard.rows_of_processes
            set_sizes(shard, choose_sizes(before, seconds))
            if shard.rows_of_processes != before:
                self._tell(shard.rows_of_processes)

    def _seconds_of_all(self, shard: BatchSamplerShard, own: float) -> list[float]:
        """Return the seconds per row by data-parallel rank, each of its slowest process; 0 if one is unknown."""
        run, found = self._run(), [0.0] * shard.num_processes
        assert run is not None, "its loop has just ended"
        given = gather(torch.tensor([[shard.process_index, own]], device=self._device), world=run.world)
        for index, seconds in given.tolist():
            found[int(index)] = max(found[int(index)], seconds)
        return found

    def _tell(self, sizes: Sequence[int]) -> None:
        logger.info("From the next epoch on, the ranks read %s rows of each global batch.", list(sizes))
        run = self._run()
        if run is not None and any(isinstance(one, _BATCH_NORMS) for model in run._models for one in model.modules()):
            logger.warning_once(
                "balance=True with BatchNorm: each rank computes statistics over its own rows, so they, and the "
                "gradients, depend on the sizes. torch.nn.SyncBatchNorm's are those of the global batch."
            )

    # -- checkpoints ---------------------------------------------------------------------------------------

    def details_of_save(self, alone: bool) -> Mapping[str, object]:
        """Return the sizes by loader, if there are any."""
        run = self._run()
        shards = [] if run is None else map(shard_of, run._dataloaders)
        found = [[] if shard is None else list(shard.sizes) for shard in shards]
        return {"balance": found} if any(found) else {}

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Take the sizes of the saved run; equal ones on another number of ranks or for another global batch."""
        run, saved = self._run(), details.get("balance")
        shards = [] if run is None else list(map(shard_of, run._dataloaders))
        known: list[Any] = list(saved) if isinstance(saved, list) else []
        for number, shard in enumerate(shards):
            if shard is not None:
                set_sizes(shard, known[number] if number < len(known) else ())


def shard_of(loader: object) -> BatchSamplerShard | None:
    """Return what divides the batches of ``loader``, if its parts can have any sizes; else None."""
    if not isinstance(loader, PreparedLoader) or _why_not(loader):
        return None
    root, _ = unskipped(loader.index_sampler)
    return root if isinstance(root, BatchSamplerShard) else None


def _why_not(loader: PreparedLoader) -> str:
    """Return why the parts of ``loader`` can't have different sizes; empty if they can."""
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable dataset, whose ranks read equal parts"
    if isinstance(loader, DataLoaderDispatcher):
        return "dispatch_batches=True, with which rank 0 reads equal batches for all ranks"
    if loader.batch_sampler is None:
        return "batch_size=None, so a rank's batch has no size"
    root, _ = unskipped(loader.index_sampler)
    if not isinstance(root, BatchSamplerShard):
        return "a sampler that divides the data between ranks already"
    if type(root.batch_sampler) is not BatchSampler:
        return f"the batch sampler {type(root.batch_sampler).__name__}, whose batches may differ in size"
    return ""


def set_sizes(shard: BatchSamplerShard, sizes: Sequence[int]) -> None:
    """Let the ranks read these numbers of rows from the next pass on; equal ones if they don't fit the global batch."""
    shard.sizes = ()
    is_equal = len(set(sizes)) == 1
    fits = len(sizes) == shard.num_processes and sum(sizes) == sum(shard.rows_of_processes) and min(sizes) > 0
    if fits and not is_equal and shard.batch_size == shard.batch_sampler.batch_size:
        shard.sizes = tuple(sizes)
