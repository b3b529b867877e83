"""What is drawn while a sample is read depends on the seed, the epoch and the sample's place in the epoch alone.

So augmentation doesn't depend on how many ranks and workers read, nor on where a run was continued. The streams begin
anew before each sample: the key travels with the indices and acts where they are gone through, so that neither the
dataset nor ``worker_init_fn`` is touched. The place tells apart a sample that comes twice in an epoch, as samplers with
replacement want it; the index couldn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from torch.utils.data import Dataset

from accelerate.seeding import capture_host_streams, seed_host_streams, set_host_stream

from .worker_streams import derived_seed

if TYPE_CHECKING:
    from .order import Drawn
    from .position import Progress

_END: Final = object()


@final
@dataclass
class SampleSeed:
    """The seed of all that reading draws: one for all ranks, and kept with the order of the samples."""

    value: int

    def keyed(self, groups: Iterable[Any], epoch: int) -> Iterator[Any]:
        """The batches, or the samples, that ``epoch`` began with; the streams begin anew before each sample is read."""
        place = 0
        for group in groups:
            try:
                size = len(group)
            except TypeError:
                yield begun(group, derived_seed(self.value, epoch, place))
                size = 1
            else:
                yield KeyedSamples(group, self.value, epoch, place)
            place += size


@final
@dataclass(frozen=True)
class KeyedSamples:
    """The indices of one batch; the streams begin anew whenever one of them is taken."""

    indices: Any
    seed: int
    epoch: int
    first: int  # the place of the first one in the epoch
    stride: int = 1  # how far the places lie apart

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        for number, index in enumerate(self.indices):
            seed_host_streams(derived_seed(self.seed, self.epoch, self.first + number * self.stride))
            yield index


@final
@dataclass(frozen=True)
class KeyedSample:
    """One index of a loader that doesn't batch; who receives it gets it bare, and has the streams begun for it."""

    index: Any
    seed: int

    def __reduce__(self) -> tuple[Any, ...]:
        return begun, (self.index, self.seed)


def begun(index: Any, seed: int) -> Any:
    """``index``, for a sample that is read next: the streams start from ``seed``."""
    seed_host_streams(seed)
    return index


@final
class SampleKeys:
    """From what is drawn, in order, to indices that begin the streams for each sample.

    Args:
        index, count: this rank's part: one of ``count`` consecutive batches, or with ``is_dealt=False`` (a sampler that
            knows the ranks) every ``count``-th sample.
        in_process: the samples are read in this process, whose own streams are put aside meanwhile.
    """

    def __init__(
        self,
        seed: SampleSeed,
        progress: Progress,
        index: int,
        count: int,
        *,
        is_dealt: bool,
        is_batched: bool,
        in_process: bool,
    ) -> None:
        self._seed, self._progress, self._epoch = seed, progress, progress.epoch
        self._index, self._count = index, count
        self._is_dealt, self._is_batched, self._in_process = is_dealt, is_batched, in_process
        self._samples = -1  # drawn by all ranks before
        self._aside: dict[str, Any] = {}

    def __call__(self, drawn: Drawn) -> Any:
        samples = self._progress.place.samples if self._samples < 0 else self._samples
        self._samples = drawn.samples
        first, stride = samples + self._index, self._count
        if self._is_dealt:
            size = drawn.coverage.size[: self._index] if drawn.coverage is not None else ()
            first, stride = samples + sum(size), 1
        if self._in_process:  # the sampler has drawn, the dataset hasn't
            self._aside = capture_host_streams()
        if self._is_batched:
            return KeyedSamples(drawn.indices, self._seed.value, self._epoch, first, stride)
        seed = derived_seed(self._seed.value, self._epoch, first)
        return begun(drawn.indices, seed) if self._in_process else KeyedSample(drawn.indices, seed)

    def undisturbed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, read without moving the streams of this process."""
        batch = None
        while batch is not _END:
            try:
                batch = next(batches, _END)
            finally:
                for name, state in self._aside.items():
                    set_host_stream(name, state)
                self._aside = {}
            if batch is not _END:
                yield batch


@final
class OneByOne(Dataset[Any]):
    """``dataset``, which reads whole batches at once, asked for one sample at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset.__getitems__([index])[0]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__getitems__"):  # not there yet while it is unpickled; not there at all
            raise AttributeError(name)
        return getattr(self.dataset, name)
