"""Prepare a loader: choose this rank's shard of the data, and the rank that reads it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from ..distributed.mesh import AXES, DATA_AXES, DataParallelRank
from ..distributed.world import current_world
from ..errors import PreparationError, SettingError
from ..torch_private.modules import requested_num_samples
from ..training.accumulation import GradientState
from .adapter import SETTABLE, SequenceShardLoader
from .dispatch import DataLoaderDispatcher
from .iterable import (
    AlreadyShardedWarning,
    check_own_iter,
    coverage_function,
    rank_aware_part,
    reads_by_itself,
    warn_if_sharded_here,
)
from .loader import DataLoaderShard, PreparedLoader
from .random_streams import SampleSeed
from .sampling import IndexFreeSampler, SeedableRandomSampler, SkipBatchSampler
from .sharding import BatchSamplerShard, IterableDatasetShard, check_split
from .token_batches import LengthOf, TokenBatchSampler, with_token_budget

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: The arguments of a loader by name.
Arguments = dict[str, Any]

#: The arguments of torch's loader that a prepared loader keeps: all but those that choose its samples.
_KEPT: Final = (*SETTABLE, "collate_fn", "multiprocessing_context", "persistent_workers")

# Mesh axes along which ranks work on the same samples.
_SAME_DATA_AXES = frozenset(AXES) - frozenset(DATA_AXES)


def prepare_data_loader(
    dataloader: DataLoader[object],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[object] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., object] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: DeviceMesh | None = None,
    *,
    gradient_state: GradientState | None = None,
    share: DataParallelRank | None = None,
    index_free_shuffle: bool = False,
    prefetch_to_device: int = 0,
    augment_by_sample: bool = False,
    reseed_workers: bool = True,
    already_sharded: bool | None = None,
    token_budget: int | None = None,
    length_of: LengthOf | None = None,
    packed: bool = False,
) -> PreparedLoader:
    """Make a loader over the same data that yields this process's shard, on its device.

    Args:
        device: the device of the batches, with ``put_on_device``.
        num_processes: over how many processes the data is sharded (default: all).
        process_index: this process's index among them.
        split_batches: split each of the loader's batches into equal parts, instead of giving each process one batch.
        rng_types: random streams that all processes copy from rank 0 when a pass begins; ``"generator"`` means the
            order of the samples.
        dispatch_batches: rank 0 reads for all ranks. Default: for iterable datasets whose batches are put on a device.
        even_batches: pad the last global batch from the beginning of the epoch, so that all processes have equal
            batches.
        slice_fn_for_dispatch: slices rank 0's batches: ``f(data, slice, process_index, num_processes)``.
        use_seedable_sampler: shuffle by ``data_seed`` (or torch's seed) and the epoch only.
        non_blocking: copy to the device without waiting.
        use_stateful_dataloader: read through torchdata's StatefulDataLoader.
        torch_device_mesh: ranks that differ only in its model-parallel axes get the same data.
        gradient_state: the accumulation state that the loader reports to (default: the newest one).
        share: this process's data-parallel rank and size; replaces ``num_processes``, ``process_index`` and the mesh.
        index_free_shuffle: compute a shuffled order instead of storing it; seeded like the seedable sampler.
        prefetch_to_device: how many batches are being copied to the device while one is in use.
        augment_by_sample: make random draws (Python's, NumPy's, torch's) of a map-style dataset while it reads a sample
            depend only on the seed, the epoch and the sample's position in it. Seeded like the seedable sampler.
        reseed_workers: reseed the workers' random streams for every batch of a map-style dataset, so that a resumed run
            makes the same draws as the saved one would have. False: workers draw as torch's do.
        already_sharded: whether each rank's loader already reads its own shard, so the data isn't sharded here.
            Default: samplers and datasets that have a rank and a number of ranks count as already sharded, others
            don't; for iterable datasets, where this is a guess, there is one warning.
        token_budget: the maximum number of tokens per batch, instead of the loader's number of samples.
        length_of: the number of tokens per sample, which ``token_budget`` needs: a function of a sample, the lengths of
            all samples, or the name of the dataset's column with the lengths.
        packed: the cost of a batch is the sum of its lengths; otherwise every sample counts as the longest one, to
            which it is padded.

    Raises:
        PreparationError: the settings contradict each other or the loader.
        MissingDependency: ``use_stateful_dataloader`` without torchdata.
    """
    dp_rank = share if share is not None else _data_parallel_rank(num_processes, process_index, torch_device_mesh)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and is_stream and not already_sharded
    _check_reader(dispatch_batches, put_on_device, bool(already_sharded) and dp_rank.count > 1)
    _check_split(dataloader, split_batches, dp_rank.count)
    common: Arguments = {
        "rng_types": rng_types,
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": _drops_last(dataloader),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "gradient_state": gradient_state if gradient_state is not None else GradientState(),
        "device": device if put_on_device else None,
        "prefetch_to_device": prefetch_to_device if put_on_device else 0,
        "reseed_workers": reseed_workers,
        **arguments_of(dataloader),
    }
    if augment_by_sample:
        common["sample_seed"] = SampleSeed(data_seed if data_seed is not None else torch.initial_seed())
    kept = _shared(dataloader, (dispatch_batches, split_batches, token_budget, already_sharded), data_seed, common)
    if kept is not None:
        return kept
    reseeds = use_seedable_sampler or index_free_shuffle
    sampler = _seedable(dataloader, data_seed, index_free_shuffle) if reseeds else None
    if token_budget is not None:
        sampler = with_token_budget(dataloader, sampler, token_budget, length_of, packed)
    is_own = reads_by_itself(dataloader)
    aware = None if already_sharded is False else rank_aware_part(dataloader, dp_rank.count)
    is_presharded = dp_rank.count > 1 and (aware is not None or bool(already_sharded))
    if is_own:
        check_own_iter(
            dataloader,
            is_sharded_stream=is_stream and dp_rank.count > 1 and not dispatch_batches and not is_presharded,
            use_stateful_dataloader=use_stateful_dataloader,
        )
    root = sampler if sampler is not None else _index_sampler(dataloader)
    _check_planned(root, split_batches, bool(dispatch_batches), is_presharded)
    if is_presharded:
        prepared = _presharded(dataloader, aware, dp_rank, common, warn=not already_sharded)
    elif dispatch_batches:
        if already_sharded is None:
            warn_if_sharded_here(dataloader, dp_rank.count)
        prepared = DataLoaderDispatcher(
            dataloader.dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            share=dp_rank,
            **_sampling(dataloader, root),
            **common,
        )
        _shown(prepared, dataloader, sampler, dataloader.batch_size)
    elif is_stream:
        if already_sharded is None:
            warn_if_sharded_here(dataloader, dp_rank.count)
        prepared = _sharded_stream(dataloader, dp_rank, split_batches, common)
    else:
        prepared = _sharded_map(dataloader, root, sampler, dp_rank, split_batches, even_batches, common)
    prepared.own_loader = dataloader if is_own else None
    return prepared


def _shared(
    dataloader: DataLoader[object], asked: Sequence[object], data_seed: int | None, common: Arguments
) -> PreparedLoader | None:
    """Return the prepared loader of a world with members (without a process group); None in other worlds."""
    world = current_world()
    if world is None or world.members is None:
        return None
    arguments: dict[str, object] = {
        **dict(zip(("dispatch_batches", "split_batches", "token_budget", "already_sharded"), asked, strict=True)),
        "use_stateful_dataloader": common.get("use_stateful_dataloader"),
        "augment_by_sample": common.get("sample_seed"),
    }
    prepared = world.members.prepare_data_loader(dataloader, arguments, data_seed, {**common})
    return _shown(cast("PreparedLoader", prepared), dataloader, None, dataloader.batch_size)


# -- the data-parallel rank --------------------------------------------------------------------------------


def _data_parallel_rank(
    num_processes: int | None, process_index: int | None, mesh: DeviceMesh | None
) -> DataParallelRank:
    world = current_world()
    count = num_processes if num_processes is not None else world.size if world is not None else 1
    index = process_index if process_index is not None else world.rank if world is not None else 0
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        data_index, count, rest = 0, 1, index
        for name, size in reversed([*zip(names, mesh.mesh.shape, strict=False)]):
            rest, coordinate = divmod(rest, size)
            if name not in _SAME_DATA_AXES:
                data_index += coordinate * count
                count *= size
        index = data_index
    return DataParallelRank(index, count)


def _check_reader(dispatch_batches: bool, put_on_device: bool, is_divided: bool) -> None:
    if dispatch_batches and is_divided:
        raise PreparationError(
            "dispatch_batches=True lets rank 0 read for all ranks, and already_sharded=True says that each rank's "
            "loader reads a part of its own: what the others' loaders read would be lost. Use one of them."
        )
    if dispatch_batches and not put_on_device:
        raise PreparationError(
            "dispatch_batches=True sends batches from rank 0 to the other ranks' devices, so it needs device_placement "
            "(put_on_device=True). Allow it for this loader, or use dispatch_batches=False."
        )


def _check_split(dataloader: DataLoader[object], split_batches: bool, count: int) -> None:
    size = dataloader.batch_size
    if size is None:
        size = getattr(_index_sampler(dataloader), "batch_size", None)
    if split_batches and size != 1:
        check_split(size, count)


def _check_planned(root: object, split_batches: bool, dispatch_batches: bool, is_presharded: bool) -> None:
    if not isinstance(root, TokenBatchSampler):
        return
    refused = {
        "split_batches=True, which cuts every batch": split_batches,
        "dispatch_batches=True, which joins batches of one shape": dispatch_batches,
        "a sampler that divides the data between ranks already": is_presharded,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise PreparationError(
                f"Batches of at most {root.plan.token_budget} tokens are divided between the ranks by their lengths. "
                f"This doesn't go with {what}. Leave that out, or token_budget."
            )


# -- construction ------------------------------------------------------------------------------------------


def _index_sampler(dataloader: DataLoader[object]) -> Iterable[object]:
    return dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler


def _drops_last(dataloader: DataLoader[object]) -> bool:
    batch_sampler = dataloader.batch_sampler
    return bool(dataloader.drop_last or getattr(batch_sampler, "drop_last", False))


def _sampling(dataloader: DataLoader[object], root: Iterable[object]) -> Arguments:
    """Return the arguments for a loader over the same dataset that reads the batches of ``root``."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"sampler": root, "batch_size": None}
    return {"batch_sampler": root}


def _seedable(dataloader: DataLoader[object], data_seed: int | None, is_index_free: bool) -> Iterable[object] | None:
    """Return the loader's batch sampler with a seeded sampler; None if its sampler isn't torch's RandomSampler."""
    batch_sampler: Any = dataloader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None) if batch_sampler is not None else dataloader.sampler
    if type(sampler) is not RandomSampler:
        return None
    is_whole = not sampler.replacement and requested_num_samples(sampler) is None
    if is_index_free and is_whole:
        seeded: Any = IndexFreeSampler(sampler.data_source, data_seed)
    else:
        seeded = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=requested_num_samples(sampler),
            generator=sampler.generator,
            data_seed=data_seed,
        )
    if batch_sampler is None:
        return seeded
    if type(batch_sampler) is BatchSampler:
        return BatchSampler(seeded, batch_sampler.batch_size, batch_sampler.drop_last)
    changed = copy.copy(batch_sampler)  # the user's own object keeps its sampler
    changed.sampler = seeded
    return changed


def _keep_order(common: Arguments) -> None:
    if common.get("in_order", True):
        return
    common["in_order"] = True
    warnings.warn(
        "in_order=False is not used for a loader whose batches are sharded over several ranks: a batch that overtakes "
        "others would be taken for them, valid rows and all. Silence: make the loader with in_order=True.",
        stacklevel=4,
    )


def _shown(
    prepared: PreparedLoader, dataloader: DataLoader[object], sampler: object, batch_size: int | None
) -> PreparedLoader:
    """Set the public attributes of the user's loader on ``prepared``: sampler, batch size, drop_last."""
    if isinstance(dataloader.dataset, IterableDataset):
        return prepared
    prepared.show(drop_last=dataloader.drop_last)
    if dataloader.batch_sampler is not None:
        inner = getattr(sampler, "sampler", None) if sampler is not None else dataloader.sampler
        prepared.show(sampler=inner, batch_size=batch_size)
    return prepared


def _sharded_map(
    dataloader: DataLoader[object],
    root: Iterable[object],
    sampler: object,
    dp_rank: DataParallelRank,
    split_batches: bool,
    even_batches: bool,
    common: Arguments,
) -> PreparedLoader:
    is_planned = isinstance(root, TokenBatchSampler)
    if isinstance(root, TokenBatchSampler):
        root = root.for_ranks(dp_rank.count)
    if dp_rank.count > 1 or is_planned:
        root = BatchSamplerShard(root, dp_rank.count, dp_rank.index, split_batches, even_batches)
        _keep_order(common)
    prepared = DataLoaderShard(dataloader.dataset, **_sampling(dataloader, root), **common)
    size = getattr(root, "batch_size", dataloader.batch_size) if dp_rank.count > 1 else dataloader.batch_size
    if size is not None and dataloader.batch_sampler is not None and dataloader.batch_size is not None:
        size = size // dp_rank.count if split_batches else size
    is_fixed = dataloader.batch_size is not None and not is_planned
    return _shown(prepared, dataloader, sampler, size if is_fixed else None)


def _sharded_stream(
    dataloader: DataLoader[object], dp_rank: DataParallelRank, split_batches: bool, common: Arguments
) -> PreparedLoader:
    part: Any = dataloader.dataset
    size, count, is_presharded = dataloader.batch_size, dp_rank.count, False
    num_files = getattr(part, "num_shards", None) or getattr(part, "n_shards", None)
    divide = getattr(part, "shard", None)
    if count > 1 and callable(divide) and type(num_files) is int and num_files >= count and not split_batches:
        # If a dataset has several files, each rank gets some of them, and no rank reads another's files.
        part, is_presharded = divide(num_shards=count, index=dp_rank.index), True
    elif count > 1:
        part = IterableDatasetShard(
            part,
            batch_size=size or 1,
            drop_last=dataloader.drop_last,
            num_processes=count,
            process_index=dp_rank.index,
            split_batches=split_batches,
        )
        _keep_order(common)
    per_rank = size // count if split_batches and size is not None else size
    prepared = DataLoaderShard(part, batch_size=per_rank, drop_last=dataloader.drop_last, **common)
    if is_presharded:
        prepared.presharded_size, prepared.presharded_rank = count, dp_rank.index
    return prepared


def _presharded(
    dataloader: DataLoader[object], part: object, dp_rank: DataParallelRank, common: Arguments, *, warn: bool
) -> PreparedLoader:
    world = current_world()
    if warn and (world is None or world.is_main):
        warnings.warn(
            f"This loader is used as it is: its {type(part).__name__} divides the data between {dp_rank.count} ranks "
            "already. Leave the division to prepare() (a plain sampler or dataset), or confirm it with "
            "DataLoaderConfiguration(already_sharded=True); already_sharded=False divides it again.",
            AlreadyShardedWarning,
            stacklevel=3,
        )
    prepared = DataLoaderShard(dataloader.dataset, **_sampling(dataloader, _index_sampler(dataloader)), **common)
    prepared.presharded_size, prepared.presharded_rank = dp_rank.count, dp_rank.index
    # Ranks may have batches of different sizes: the coverage of only some is known.
    prepared.coverage_of = coverage_function(part, dp_rank.count)
    return _shown(prepared, dataloader, None, dataloader.batch_size)


# --------------------------------------------------------------------------------------------------
# Loaders that skip the first batches of an epoch


class SkipDataLoader(PreparedLoader):
    """A torch DataLoader without the first ``skip_batches`` batches of every pass."""

    def __init__(
        self, dataset: Dataset[object], skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._is_accelerate_prepared = False


def skip_first_batches(dataloader: DataLoader[object] | SequenceShardLoader, num_batches: int = 0) -> Any:
    """Return a loader of the same class that begins at batch ``num_batches`` of the epoch.

    It shares the epoch and the position with ``dataloader``. For a map-style dataset, skipping reads no data. After
    loading a checkpoint, ``num_batches`` counts from the beginning of the epoch in which it was saved, and replaces the
    restored position.
    """
    if not isinstance(num_batches, Integral) or num_batches < 0:
        raise SettingError(f"skip_first_batches(..., {num_batches!r}): give the number of batches to skip, 0 or more.")
    if isinstance(dataloader, SequenceShardLoader):
        whole_batches, rest = divmod(dataloader.skip_parts + num_batches, dataloader.num_parts)
        return dataloader.over(skip_first_batches(dataloader.loader, whole_batches), rest)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if isinstance(dataloader, PreparedLoader):
        if is_stream:
            return dataloader.copy_with(_skip_batches=dataloader.skip_batches + num_batches)
        skip = SkipBatchSampler(dataloader.index_sampler, num_batches)
        return dataloader.copy_with(**{"sampler" if dataloader.batch_sampler is None else "batch_sampler": skip})
    arguments = arguments_of(dataloader)
    if is_stream:
        return SkipDataLoader(
            dataloader.dataset,
            skip_batches=num_batches,
            batch_size=dataloader.batch_size,
            drop_last=dataloader.drop_last,
            **arguments,
        )
    if dataloader.batch_sampler is None:
        skip = SkipBatchSampler(dataloader.sampler, num_batches)
        return DataLoader(dataloader.dataset, sampler=skip, batch_size=None, **arguments)
    return DataLoader(
        dataloader.dataset, batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches), **arguments
    )


def arguments_of(dataloader: DataLoader[object]) -> Arguments:
    """Return the constructor arguments of ``dataloader``, without those that choose its samples."""
    arguments = {name: getattr(dataloader, name) for name in _KEPT if getattr(dataloader, name, None) is not None}
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)  # deprecated: naming it at all makes torch warn
    return arguments
