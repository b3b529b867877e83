"""Options of prepared data loaders."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import OptionGroup, option


@dataclass
class DataLoaderOptions(OptionGroup, title="Data loaders"):
    """How the batches of a data loader are shared among the processes."""

    split_batches: bool = option(
        False, "Split each batch over the processes, instead of giving each process a batch of the full size."
    )
    dispatch_batches: bool | None = option(
        None, "Read every batch on the main process and send the parts; None: only for iterable datasets."
    )
    even_batches: bool = option(
        True, "Complete the last batches from the start of the epoch, so that all processes have equal ones."
    )
    use_seedable_sampler: bool = option(False, "Shuffle with a sampler that is seeded anew for every epoch.")
    data_seed: int | None = option(None, "The seed of the seedable sampler; None: torch's initial seed.")
    non_blocking: bool = option(False, "Copy batches to the device without waiting (with pinned memory).")
    use_stateful_dataloader: bool = option(False, "Use torchdata's StatefulDataLoader.")
    index_free_shuffle: bool = option(
        False, "Compute the shuffled order sample by sample instead of keeping it in memory (for very many samples)."
    )
    prefetch_to_device: int = option(
        0, "How many batches are on their way to the device while one is in use; 0: copied when asked for.", minimum=0
    )
    augment_by_sample: bool = option(
        False,
        "Draw the augmentation of a sample from its seed, epoch and place alone: the same on any number of ranks.",
    )
    already_sharded: bool | None = option(
        None,
        "Each process's loader reads its own part of the data already, so nothing is divided; None: find out.",
    )
