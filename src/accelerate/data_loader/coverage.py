"""Which rows of a batch are real samples, and which were added so that all ranks have equal batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast, final

import torch

from accelerate.nested import recursively_apply


@final
@dataclass(frozen=True)
class BatchCoverage:
    """For every share of the data, in order: how many leading rows of its batch are real, and how many rows it has.

    Every rank holds the account of all shares, so that what was gathered can be cut without asking anybody.
    """

    real: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every row is a real sample."""
        return self.real == self.size

    @property
    def num_samples(self) -> int:
        """Real samples in the batches of all shares together."""
        return sum(self.real)


@lru_cache(maxsize=256)
def full_coverage(size: int, count: int) -> BatchCoverage:
    """The account of ``count`` batches of ``size`` real samples each."""
    sizes = (size,) * count
    return BatchCoverage(sizes, sizes)


def _kept_rows(num_rows: int, coverage: BatchCoverage) -> Iterator[range] | None:
    """The ranges of real rows among ``num_rows`` gathered ones; None where rows can't be told from the account."""
    real, size = coverage.real, coverage.size
    num_shares, num_samples, largest = len(size), sum(size), max(size)
    if num_rows == num_samples or (num_rows != num_shares and num_samples and num_rows % num_samples == 0):
        rows_per_sample = num_rows // num_samples
        starts = [sum(size[:share]) * rows_per_sample for share in range(num_shares)]
    elif num_rows == num_shares:  # one value per rank: a rank with nothing real has nothing to say
        return (range(share, share + 1) for share in range(num_shares) if real[share])
    elif largest and num_rows % (num_shares * largest) == 0:  # padded to the largest batch before the gather
        rows_per_sample = num_rows // (num_shares * largest)
        starts = [share * largest * rows_per_sample for share in range(num_shares)]
    else:
        return None
    return (range(start, start + count * rows_per_sample) for start, count in zip(starts, real, strict=True) if count)


def _keep_tensor(tensor: torch.Tensor, coverage: BatchCoverage) -> torch.Tensor:
    if tensor.ndim == 0:
        return tensor
    kept = _kept_rows(tensor.shape[0], coverage)
    if kept is None:
        return tensor
    pieces = [tensor[rows.start : rows.stop] for rows in kept]
    return torch.cat(pieces) if pieces else tensor[:0]


def _keep_items(items: list[Any], coverage: BatchCoverage) -> list[Any]:
    kept = _kept_rows(len(items), coverage)
    return items if kept is None else [items[row] for rows in kept for row in rows]


def _keep_repeated(tensor: torch.Tensor, coverage: BatchCoverage, nominal: int) -> torch.Tensor:
    """One value per rank, repeated for as many rows as its batches usually have, is kept for each real sample.

    Where ranks split one batch between them, it is repeated for the rows of that whole one.
    """
    shares = len(coverage.size)
    for copies in (1, shares):
        if tensor.ndim == 1 and tensor.shape[0] == shares * nominal * copies:
            by_share = tensor.view(shares, nominal * copies)
            if torch.equal(by_share, by_share[:, :1].expand_as(by_share)):
                return torch.cat([by_share[share, : real * copies] for share, real in enumerate(coverage.real)])
    return _keep_tensor(tensor, coverage)


def keep_real(
    gathered: Any, coverage: BatchCoverage | None, *, as_objects: bool = False, nominal: int | None = None
) -> Any:
    """``gathered`` (tensors in any containers, rank after rank) without the rows that were added.

    A sample may have several rows (all samples equally many), and a tensor may hold one value per rank instead:
    then the values of ranks that had no real sample are left out. Tensors whose rows can't belong to the
    samples of the batch come back whole.

    A flat list of objects, one per sample, is cut in the same way; ``as_objects`` says that a list is one where
    its objects are, or hold, tensors.

    In a batch that is shorter than the ``nominal`` one, a mean that was repeated once per nominal row (so does the
    Trainer of transformers) is kept once per real sample: averages over all rows are then averages over samples.
    """
    if coverage is None:
        return gathered
    if nominal is not None and max(coverage.size) < nominal and not isinstance(gathered, list):
        return recursively_apply(_keep_repeated, gathered, coverage, nominal)
    if coverage.is_complete:
        return gathered
    if isinstance(gathered, list):
        items = cast("list[Any]", gathered)
        if as_objects or not _holds_tensors(items):
            return _keep_items(items, coverage)
    return recursively_apply(_keep_tensor, gathered, coverage)


def _holds_tensors(data: Any) -> bool:
    found: list[bool] = []
    note: Callable[[Any], Any] = lambda tensor: found.append(True)  # noqa: E731
    recursively_apply(note, data)
    return bool(found)
