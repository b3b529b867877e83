"""Subclasses of DataLoader that read in a way of their own keep it, or are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate.data_loader import prepare_data_loader
from accelerate.errors import PreparationError

CPU = torch.device("cpu")
SIZE = 11


class Doubling(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 2


class ReadingAhead(DataLoader):
    """Holds one batch more than it has given."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held


class ReadingItself(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for indices in self.batch_sampler:
            yield self.collate_fn([self.dataset[index] for index in indices])


class WithItsIterator(DataLoader):
    def _get_iterator(self) -> Any:
        return map(torch.neg, super()._get_iterator())


class LeavingOut(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number != 1:
                yield batch


class Inventing(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(3)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def prepared(loader: DataLoader, share: int = 0, count: int = 1, **options: Any) -> Any:
    return prepare_data_loader(loader, CPU, count, share, put_on_device=True, **options)


def flat(loader: Any) -> list[int]:
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Doubling, ReadingAhead, WithItsIterator, ReadingItself])
def test_a_loader_with_an_iteration_of_its_own_keeps_it(kind: type[DataLoader], num_workers: int) -> None:
    def loader() -> DataLoader:
        return kind(range(SIZE), 2, shuffle=True, num_workers=num_workers)

    torch.manual_seed(3)
    bare = loader()
    expected = [flat(bare) for _ in range(2)]
    torch.manual_seed(3)
    mine = prepared(loader())
    ends = []
    for rows in expected:
        found = []
        for batch in mine:
            found += batch.tolist()
            ends.append(mine.end_of_dataloader)
        assert found == rows
    assert ends == ([False] * 5 + [True]) * 2
    both = []
    for share in range(2):
        torch.manual_seed(3)
        loaded = prepared(loader(), share, 2)
        both.append([batch[: loaded.own_rows[0]].tolist() for batch in loaded])
    rows = [row for pair in zip(*both, strict=True) for batch in pair for row in batch]
    assert rows == expected[0]


def test_a_position_in_a_loader_with_an_iteration_of_its_own_is_continued() -> None:
    loader = prepared(Doubling(range(SIZE), 2, shuffle=True))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    other = prepared(Doubling(range(SIZE), 2, shuffle=True))
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest


@pytest.mark.parametrize("kind", [LeavingOut, Inventing])
def test_a_loader_whose_batches_arent_those_of_its_sampler_is_refused_by_name(kind: type[DataLoader]) -> None:
    with pytest.raises(PreparationError, match=kind.__name__):
        list(prepared(kind(range(SIZE), 2)))


def test_an_iteration_over_a_stream_is_kept_where_one_rank_reads_and_else_refused_by_name() -> None:
    assert flat(prepared(Doubling(Stream(), 2))) == [2 * index for index in range(SIZE)]
    with pytest.raises(PreparationError, match="Doubling"):
        prepared(Doubling(Stream(), 2), 0, 2, dispatch_batches=False)


def test_torchdata_doesnt_read_for_a_loader_that_reads_by_itself() -> None:
    with pytest.raises(PreparationError, match="Doubling"):
        prepared(Doubling(range(SIZE), 2), use_stateful_dataloader=True)


# -- warnings ----------------------------------------------------------------------------------------------


class Warning_(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        warnings.warn("this sample is odd", UserWarning, stacklevel=1)
        return index


class WarningStream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        for index in range(4):
            warnings.warn("this sample is odd", UserWarning, stacklevel=1)
            yield index


@pytest.mark.parametrize("dataset", [Warning_(), WarningStream()], ids=["by index", "stream"])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}], ids=str)
def test_a_warning_that_python_shows_once_is_shown_once_over_all_epochs(dataset: Any, options: dict[str, Any]) -> None:
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        loader = prepared(DataLoader(dataset, 2), **options)
        for _ in range(3):
            list(loader)
    assert [str(one.message) for one in shown if "odd" in str(one.message)] == ["this sample is odd"]


def test_what_torch_said_when_the_loader_was_made_isnt_said_again() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        base = DataLoader(range(4), num_workers=100)
        said = len(shown)
        prepared(base)
    assert (said, len(shown)) == (1, 1)
