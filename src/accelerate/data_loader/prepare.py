"""One function that gives a loader to this world: which part of the data is mine, and who reads it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate.errors import PreparationError
from accelerate.gradients import GradientState
from accelerate.mesh import AXES, DATA_AXES, DataShare
from accelerate.torch_private.data import asked_samples
from accelerate.world import current_world

from .aware import AlreadyShardedWarning, account_of, rank_aware_part, say_what_is_divided
from .dispatch import DataLoaderDispatcher
from .index_free import IndexFreeSampler
from .order import SeedableRandomSampler
from .own_reading import reads_by_itself, refuse_unless_kept
from .prefetch import BatchFeeder, DataLoaderShard
from .sample_streams import SampleSeed
from .shard import BatchSamplerShard, IterableDatasetShard
from .skip import arguments_of

# Mesh axes along which ranks work on the same samples.
_SAME_DATA_AXES = frozenset(AXES) - frozenset(DATA_AXES)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    gradient_state: GradientState | None = None,
    share: DataShare | None = None,
    index_free_shuffle: bool = False,
    prefetch_to_device: int = 0,
    augment_by_sample: bool = False,
    already_sharded: bool | None = None,
) -> BatchFeeder:
    """A loader over the same data of which every process gets its part, on its device.

    Args:
        device: where batches go with ``put_on_device``.
        num_processes: how many processes divide the data; as many as there are, if left out.
        process_index: which of them this one is.
        split_batches: the loader's batches are cut into equal parts, instead of one going to each process.
        rng_types: streams that all processes take over from rank 0 when a pass begins; ``"generator"`` stands for
            the order of the samples.
        dispatch_batches: rank 0 reads and deals. Default: for streams whose batches are put on a device.
        even_batches: complete the last round from the beginning of the epoch, so that all have equal batches.
        slice_fn_for_dispatch: cuts what rank 0 read: ``f(data, slice, process_index, num_processes)``.
        use_seedable_sampler: the order is a function of ``data_seed`` (or torch's seed) and the epoch.
        non_blocking: copy to the device without waiting.
        use_stateful_dataloader: read through torchdata's StatefulDataLoader.
        torch_device_mesh: ranks that differ only in its model-parallel axes get the same data.
        gradient_state: the accumulation clock that the loader reports to; the newest one, if left out.
        share: which part of the data this process gets; takes the place of the two counts and the mesh.
        index_free_shuffle: a shuffled order is computed instead of kept in memory; seeded like the seedable one.
        prefetch_to_device: how many batches are on their way to the device while one is in use.
        augment_by_sample: what a dataset that is read by index draws from Python's, NumPy's and torch's streams
            while it reads a sample is decided by the seed, the epoch and the sample's place in it. Seeded like the
            seedable sampler.
        already_sharded: whether what each rank's loader reads is that rank's own part already, so that nothing is
            divided here. Default: samplers and datasets that name a rank and a number of ranks are taken to be
            divided, other samplers and datasets not; of a stream, where that is a guess, one warning says so.

    Raises:
        PreparationError: the settings contradict each other or the loader.
        MissingDependency: ``use_stateful_dataloader`` without torchdata.
    """
    if share is None:
        share = _share(num_processes, process_index, torch_device_mesh)
    if dispatch_batches is None:
        is_stream = isinstance(dataloader.dataset, IterableDataset)
        dispatch_batches = put_on_device and is_stream and not already_sharded
    _check_reader(dispatch_batches, put_on_device, bool(already_sharded) and share.count > 1)
    _check_split(dataloader, split_batches, share.count)
    common: dict[str, Any] = {
        "rng_types": rng_types,
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": _drops_last(dataloader),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "gradient_state": gradient_state if gradient_state is not None else GradientState(),
        "device": device if put_on_device else None,
        "prefetch_to_device": prefetch_to_device if put_on_device else 0,
        **arguments_of(dataloader),
    }
    if augment_by_sample:
        common["sample_seed"] = SampleSeed(data_seed if data_seed is not None else torch.initial_seed())
    is_reseeded = use_seedable_sampler or index_free_shuffle
    sampler = _seedable(dataloader, data_seed, index_free_shuffle) if is_reseeded else None
    is_own = reads_by_itself(dataloader)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    aware = None if already_sharded is False else rank_aware_part(dataloader, share.count)
    is_as_it_is = share.count > 1 and (aware is not None or bool(already_sharded))
    if is_own:
        refuse_unless_kept(
            dataloader,
            is_sharded_stream=is_stream and share.count > 1 and not dispatch_batches and not is_as_it_is,
            use_stateful_dataloader=use_stateful_dataloader,
        )
    if is_as_it_is:
        feeder = _as_it_is(dataloader, aware, share, common, say=not already_sharded)
    elif dispatch_batches:
        if already_sharded is None:
            say_what_is_divided(dataloader, share.count)
        sampling = _sampling(dataloader, sampler or _index_sampler(dataloader))
        feeder = DataLoaderDispatcher(
            dataloader.dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            share=share,
            **sampling,
            **common,
        )
        _shown(feeder, dataloader, sampler, dataloader.batch_size)
    elif is_stream:
        if already_sharded is None:
            say_what_is_divided(dataloader, share.count)
        feeder = _sharded_stream(dataloader, share, split_batches, common)
    else:
        root = sampler or _index_sampler(dataloader)
        feeder = _sharded_map(dataloader, root, sampler, share, split_batches, even_batches, common)
    feeder.own_loader = dataloader if is_own else None
    return feeder


# -- which part is mine ------------------------------------------------------------------------------------


def _share(num_processes: int | None, process_index: int | None, mesh: Any) -> DataShare:
    world = current_world()
    count = num_processes if num_processes is not None else world.size if world is not None else 1
    index = process_index if process_index is not None else world.rank if world is not None else 0
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        share, count, rest = 0, 1, index
        for name, size in reversed([*zip(names, mesh.mesh.shape, strict=False)]):
            rest, place = divmod(rest, size)
            if name not in _SAME_DATA_AXES:
                share += place * count
                count *= size
        index = share
    return DataShare(index, count)


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


def _check_split(dataloader: DataLoader[Any], split_batches: bool, count: int) -> None:
    if not split_batches:
        return
    size = dataloader.batch_size
    if size is None:
        size = getattr(_index_sampler(dataloader), "batch_size", None)
    if size is None:
        raise PreparationError(
            "split_batches=True cuts each batch into equal parts, but neither the loader nor its batch sampler has a "
            "batch_size. Give the batch sampler one, or use split_batches=False."
        )
    if size > 1 and size % count != 0:
        raise PreparationError(
            f"split_batches=True cuts each batch into {count} equal parts (one per process), but the batch size is "
            f"{size}. Use a multiple of {count}, or split_batches=False, where each process gets whole batches."
        )


# -- what the loader is made of ----------------------------------------------------------------------------


def _index_sampler(dataloader: DataLoader[Any]) -> Any:
    return dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    batch_sampler = dataloader.batch_sampler
    return bool(dataloader.drop_last or getattr(batch_sampler, "drop_last", False))


def _sampling(dataloader: DataLoader[Any], root: Any) -> dict[str, Any]:
    """The arguments by which a loader over the same dataset reads the batches of ``root``."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"sampler": root, "batch_size": None}
    return {"batch_sampler": root}


def _seedable(dataloader: DataLoader[Any], data_seed: int | None, is_index_free: bool) -> Any:
    """The loader's batch sampler over a seeded sampler; None where its sampler isn't torch's random one."""
    batch_sampler: Any = dataloader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None) if batch_sampler is not None else dataloader.sampler
    if type(sampler) is not RandomSampler:
        return None
    is_whole = not sampler.replacement and asked_samples(sampler) is None
    if is_index_free and is_whole:
        seeded: Any = IndexFreeSampler(sampler.data_source, data_seed)
    else:
        seeded = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=asked_samples(sampler),
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


def _keep_order(common: dict[str, Any]) -> None:
    if common.get("in_order", True):
        return
    common["in_order"] = True
    warnings.warn(
        "in_order=False is not used for a loader whose batches are dealt to several ranks: a batch that overtakes "
        "others would take over their account of which samples are real. Silence: make the loader with in_order=True.",
        stacklevel=4,
    )


def _shown(feeder: BatchFeeder, dataloader: DataLoader[Any], sampler: Any, batch_size: int | None) -> BatchFeeder:
    """``feeder`` with the attributes that its user knows from the loader: sampler, batch size, drop_last."""
    if isinstance(dataloader.dataset, IterableDataset):
        return feeder
    feeder.show(drop_last=dataloader.drop_last)
    if dataloader.batch_sampler is not None:
        inner = getattr(sampler, "sampler", None) if sampler is not None else dataloader.sampler
        feeder.show(sampler=inner, batch_size=batch_size)
    return feeder


def _sharded_map(
    dataloader: DataLoader[Any],
    root: Any,
    sampler: Any,
    share: DataShare,
    split_batches: bool,
    even_batches: bool,
    common: dict[str, Any],
) -> BatchFeeder:
    if share.count > 1:
        root = BatchSamplerShard(root, share.count, share.index, split_batches, even_batches)
        _keep_order(common)
    feeder = DataLoaderShard(dataloader.dataset, **_sampling(dataloader, root), **common)
    size = getattr(root, "batch_size", dataloader.batch_size) if share.count > 1 else dataloader.batch_size
    if size is not None and dataloader.batch_sampler is not None and dataloader.batch_size is not None:
        size = size // share.count if split_batches else size
    return _shown(feeder, dataloader, sampler, size if dataloader.batch_size is not None else None)


def _sharded_stream(
    dataloader: DataLoader[Any], share: DataShare, split_batches: bool, common: dict[str, Any]
) -> BatchFeeder:
    dataset: Any = dataloader.dataset
    size = dataloader.batch_size
    if share.count == 1:
        return DataLoaderShard(dataset, batch_size=size, drop_last=dataloader.drop_last, **common)
    per_rank = size // share.count if split_batches and size is not None else size
    num_files = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    divide = getattr(dataset, "shard", None)
    if callable(divide) and type(num_files) is int and num_files >= share.count and not split_batches:
        # A dataset of several files gives each rank some of them; nobody reads what others read.
        part: Any = divide(num_shards=share.count, index=share.index)
        feeder = DataLoaderShard(part, batch_size=per_rank, drop_last=dataloader.drop_last, **common)
        feeder.rank_shares, feeder.rank_index = share.count, share.index
        return feeder
    part = IterableDatasetShard(
        dataset,
        batch_size=size or 1,
        drop_last=dataloader.drop_last,
        num_processes=share.count,
        process_index=share.index,
        split_batches=split_batches,
    )
    _keep_order(common)
    return DataLoaderShard(part, batch_size=per_rank, drop_last=dataloader.drop_last, **common)


def _as_it_is(
    dataloader: DataLoader[Any], part: Any, share: DataShare, common: dict[str, Any], *, say: bool
) -> BatchFeeder:
    world = current_world()
    if say and (world is None or world.is_main):
        warnings.warn(
            f"This loader is used as it is: its {type(part).__name__} divides the data between {share.count} ranks "
            "already. Leave the division to prepare() (a plain sampler or dataset), or confirm it with "
            "DataLoaderConfiguration(already_sharded=True); already_sharded=False divides it again.",
            AlreadyShardedWarning,
            stacklevel=3,
        )
    root = _index_sampler(dataloader) if not isinstance(dataloader.dataset, IterableDataset) else None
    feeder = DataLoaderShard(dataloader.dataset, **_sampling(dataloader, root), **common)
    feeder.rank_shares, feeder.rank_index = share.count, share.index
    feeder.account = account_of(part, share.count)  # ranks may have batches of different sizes: only some are known
    return _shown(feeder, dataloader, None, dataloader.batch_size)
