"""What a reader decides when its pass begins: numbers of batches, and which first samples may pad the last one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.data_loader.dispatch import Announcement, GlobalBatches
from accelerate.data_loader.map_style import IndexReader
from accelerate.data_loader.sampling import BatchInfo
from accelerate.errors import WorldError


def numbers_of(loader: Any) -> list[int]:
    """Return the numbers among all ranks' batches from which workers seed their random streams."""
    reader = IndexReader(loader, loader.plan(None))
    key = reader._batch_keys()
    return [key(batch_info).number for batch_info in reader.draw()]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"already_sharded": True}], ids=str)
def test_each_batch_of_all_ranks_has_a_number_of_its_own(options: dict[str, bool], count: int) -> None:
    source = DataLoader(range(24), 6, num_workers=1)
    ranks = [prepare_data_loader(source, num_processes=count, process_index=rank, **options) for rank in range(count)]
    numbers = [numbers_of(loader) for loader in ranks]
    steps = {len(each) for each in numbers}
    assert len(steps) == 1
    for step in range(steps.pop()):
        assert [each[step] for each in numbers] == [step * count + rank for rank in range(count)]
    assert sorted(number for each in numbers for number in each) == list(range(sum(map(len, numbers))))
    later = [numbers_of(skip_first_batches(loader, 1)) for loader in ranks]
    assert later == [each[1:] for each in numbers]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


@pytest.mark.parametrize(
    ("dataset", "num_steps", "reads_again"),
    [(Stream(), 0, False), (Stream(), 1, True), (range(7), 0, True), (range(7), 1, True)],
    ids=["stream", "resumed stream", "samples", "resumed samples"],
)
def test_first_rows_are_kept_of_a_stream_and_else_read_again(dataset: Any, num_steps: int, reads_again: bool) -> None:
    asked: list[int] = []

    def first_batches(num_batches: int, num_rows: int) -> list[object]:
        asked.append(num_rows)
        return [torch.tensor([50, 51])]

    rows = [torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6])]
    read = [(batch, BatchInfo(None, None, batch is rows[-1], n, n, n, None)) for n, batch in enumerate(rows, 1)]
    reader: Any = SimpleNamespace(read=lambda: iter(read), first_batches=first_batches)
    loader: Any = SimpleNamespace(
        dp_rank=lambda: SimpleNamespace(count=2), dataset=dataset, batches_per_step=1, drops_last=False,
        split_batches=True, slice_fn=None,
    )  # fmt: skip
    batches = GlobalBatches(loader, reader, num_steps)
    (first,) = batches.next_batch()[1]
    announcement, (last,) = batches.next_batch()
    assert first.tolist() == [0, 1, 2, 3] and last.tolist() == [4, 5, 6, 50 if reads_again else 0]
    assert bool(asked) == reads_again
    assert announcement is not None and announcement.batch_info.steps == num_steps + 2
    assert batches.next_batch() == (None, [])


class Counted(IterableDataset):
    """A stream with a state, which counts how often its first sample is read."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.next, self.num_begun = num_samples, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.num_samples:
            self.num_begun += self.next == 0
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize(
    ("drop_last", "count", "is_read_again"), [(False, 2, True), (True, 2, False), (False, 1, False), (True, 1, False)]
)
def test_a_resumed_stream_reads_its_first_samples_again_only_to_pad(
    drop_last: bool, count: int, is_read_again: bool
) -> None:
    def loader_of(dataset: Counted) -> Any:
        return prepare_data_loader(DataLoader(dataset, 2, drop_last=drop_last), num_processes=count, process_index=0)

    whole = [batch.tolist() for batch in loader_of(Counted(9))]
    loader = loader_of(Counted(9))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    dataset = Counted(9)
    resumed = loader_of(dataset)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == whole[1:]
    assert bool(dataset.num_begun) == is_read_again


def test_other_ranks_get_the_announcement_without_what_only_rank_0_needs() -> None:
    info = BatchInfo(None, None, False, 1, 2, 8, [6, 7], {"stream": object})
    failure = RuntimeError("the disk is gone")
    received = pickle.loads(pickle.dumps(Announcement([], True, info, failure)))
    assert received.batch_info == info._replace(last_batch=None, own=None) and received.is_whole
    assert type(received.failure) is WorldError
    assert str(received.failure).endswith("failed: RuntimeError: the disk is gone")
