"""``gather_for_metrics`` on real ranks gives what an evaluation with the bare loader in one process gives."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accelerate import Accelerator
from accelerate.data_loader.gathering import AssumedLoaderWarning
from accelerate.errors import CollectiveError
from accelerate.utils import DataLoaderConfiguration, listify
from tests.ranks import run_on_ranks
from tests.slow import slow

SIZES = (0, 1, 7, 11, 16)
BATCH = 3


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Encoding(UserDict):
    """As a tokenizer's: a mapping that moves itself."""

    def to(self, device: Any) -> Encoding:
        return self


class Inner(NamedTuple):
    ids: Any
    names: Any


class Outer(NamedTuple):
    inner: Any
    pair: Any


@dataclass
class Outputs:
    logits: Any
    names: Any = None
    loss: Any = None


def names_of(ids: torch.Tensor) -> list[str]:
    return [f"sample {i}" for i in ids.tolist()]


def numbers(names: list[str]) -> list[int]:
    return [int(name.split()[1]) for name in names]


#: What a loop computes from the numbers of its samples, and the numbers of samples in what was gathered of it.
OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], list[list[int]]]]] = {
    "tensor": (lambda ids: ids, lambda found: [found.tolist()]),
    "tuple": (
        lambda ids: (ids, ids[:, None].float()),
        lambda found: [found[0].tolist(), found[1][:, 0].int().tolist()],
    ),
    "constant pairs": (lambda ids: torch.zeros(2 * len(ids)), lambda found: [[0] * len(found)]),
    "pairs": (lambda ids: ids.float().repeat_interleave(2), lambda found: [found[::2].int().tolist()]),
    "mapping": (
        lambda ids: {"ids": ids, "names": names_of(ids), "loss": None},
        lambda found: [found["ids"].tolist(), numbers(found["names"])] + [[]] * (found["loss"] is not None),
    ),
    "encoding": (
        lambda ids: Encoding(ids=ids, rows=ids[:, None].expand(-1, 2)),
        lambda found: [found["ids"].tolist(), found["rows"][:, 1].tolist()],
    ),
    "namedtuples": (
        lambda ids: Outer(Inner(ids, names_of(ids)), (ids + 1, None)),
        lambda found: [found.inner.ids.tolist(), numbers(found.inner.names), (found.pair[0] - 1).tolist()],
    ),
    "dataclass": (
        lambda ids: Outputs(ids[:, None], names_of(ids)),
        lambda found: [found.logits[:, 0].tolist(), numbers(found.names)] + [[]] * (found.loss is not None),
    ),
    "dataclass of tensors": (
        lambda ids: Outputs(ids, ids + 1, ids),
        lambda found: [found.logits.tolist(), (found.names - 1).tolist(), found.loss.tolist()],
    ),
    "strings": (names_of, lambda found: [numbers(found)]),
    "two lists": (lambda ids: (names_of(ids), ids.tolist()), lambda found: [numbers(found[0]), found[1]]),
    "columns": (
        lambda ids: [ids, names_of(ids), None],
        lambda found: [found[0].tolist(), numbers(found[1])] + [[]] * (found[2] is not None),
    ),
    "records": (
        lambda ids: [{"id": int(i), "boxes": torch.full((int(i) % 3, 4), int(i))} for i in ids],
        lambda found: [[one["id"] for one in found]],
    ),
    "array": (lambda ids: ids.numpy(), lambda found: [np.asarray(found).tolist()]),
}


def kinds(size: int, num_ranks: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    keep: dict[str, Any] = {"batch_size": BATCH}
    whole: dict[str, Any] = {"batch_size": BATCH * num_ranks}
    yield "map", DataLoader(range(size), shuffle=size > 0, **keep), {}
    yield "stream", DataLoader(Stream(size), **keep), {"dispatch_batches": False}
    yield "dispatched stream", DataLoader(Stream(size), **keep), {}
    yield "split map", DataLoader(range(size), **whole), {"split_batches": True}
    yield "uneven map", DataLoader(range(size), shuffle=size > 0, **keep), {"even_batches": False}
    yield "uneven split map", DataLoader(range(size), **whole), {"even_batches": False, "split_batches": True}
    sampler = BatchSampler(SequentialSampler(range(size)), BATCH, False)
    yield "uneven batch sampler", DataLoader(range(size), batch_sampler=sampler), {"even_batches": False}


Cell = tuple[str, int, str]


def gathered() -> dict[Cell, list[list[int]]]:
    """By loader, size and output, the numbers of the samples of every part of the output, over the whole loop."""
    accelerator = Accelerator(cpu=True)
    found: dict[Cell, list[list[int]]] = {}
    for size in SIZES:
        for name, loader, settings in kinds(size, accelerator.num_processes):
            accelerator.dataloader_config = DataLoaderConfiguration(**settings)
            cells = {output: found.setdefault((name, size, output), []) for output in OUTPUTS}
            for ids in accelerator.prepare_data_loader(loader):
                for output, (compute, read) in OUTPUTS.items():
                    parts = read(accelerator.gather_for_metrics(compute(ids)))
                    cells[output] += [[] for _ in parts[len(cells[output]) :]]
                    for column, part in zip(cells[output], parts, strict=True):
                        column += part
            accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=slow)])
def test_every_output_is_that_of_bare_evaluation(num_ranks: int) -> None:
    results = run_on_ranks(gathered, num_ranks, timeout_seconds=120)
    for rank, result in enumerate(results):
        for (name, size, output), columns in result.items():
            if rank and name.startswith("uneven"):
                continue  # a rank without a batch in the last round isn't there to be told what is computed in it
            compute, read = OUTPUTS[output]
            expected = read(compute(torch.arange(size))) if size else []
            assert [sorted(column) for column in columns] == [sorted(column) for column in expected], (
                name,
                size,
                output,
            )


def one_value_per_rank() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(7), batch_size=2))
    found = []
    for ids in loader:
        loss = ids.float().mean()
        values = accelerator.gather_for_metrics({"loss": loss, "seconds": 0.5, "rank": accelerator.process_index})
        found.append([accelerator.gather_for_metrics(loss).tolist(), values["loss"].tolist(), values["seconds"]])
    return found


def test_a_rank_without_a_real_sample_has_no_value() -> None:
    full, last = [[0.5, 2.5], [0.5, 2.5], [0.5, 0.5]], [[4.5, 3.0], [4.5, 3.0], [0.5, 0.5]]
    assert run_on_ranks(one_value_per_rank, 2) == [[full, last]] * 2
    *_, last_of_four = run_on_ranks(one_value_per_rank, 4)[0]
    assert len(last_of_four[0]) == 4


def losses_as_the_trainer_gathers_them(size: int, even: bool, as_objects: bool = False) -> float:
    """`loss.repeat(batch_size)`, and the mean over all rows, beside an output with two equal rows per sample."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    loader = accelerator.prepare_data_loader(DataLoader(torch.arange(float(size)), batch_size=4))
    losses, pairs = [], []
    for rows in loader:
        losses.append(accelerator.gather_for_metrics(rows.mean().repeat(4), use_gather_object=as_objects))
        pairs.append(accelerator.gather_for_metrics(torch.ones(2 * len(rows))))
    accelerator.wait_for_everyone()
    assert len(torch.cat(pairs)) == 2 * size or accelerator.process_index > 0
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("size", [5, 6, 7, 8])
def test_repeated_losses_count_once_per_sample_and_equal_rows_are_kept(size: int, as_objects: bool) -> None:
    expected = (size - 1) / 2
    assert run_on_ranks(losses_as_the_trainer_gathers_them, 1, size, True, as_objects)[0] == pytest.approx(expected)


def zipped() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare_data_loader(DataLoader(range(7), batch_size=2))
    second = accelerator.prepare_data_loader(DataLoader(range(100, 108), batch_size=2))
    own: list[list[int]] = [[], [], [], []]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for one, other in zip(first, second, strict=True):
            own[0] += accelerator.gather_for_metrics(one).tolist()
            own[1] += accelerator.gather_for_metrics({"b": other[:, None]})["b"].flatten().tolist()
            together = accelerator.gather_for_metrics((one, other))
            own[2] += together[0].tolist()
            own[3] += together[1].tolist()
        num_before = len(said)
        derived: list[int] = []
        for one, _ in zip(first, second, strict=True):
            derived += accelerator.gather_for_metrics(one + 1).tolist()
            accelerator.gather_for_metrics(one + 2)
    texts = [str(one.message) for one in said if one.category is AssumedLoaderWarning]
    return [own, num_before, derived, texts]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_loaders_in_one_zip_are_told_apart_by_their_tensors(num_ranks: int) -> None:
    results = run_on_ranks(zipped, num_ranks)
    for own, num_before, _, _ in results:
        assert own == [[*range(7)], [*range(100, 108)]] * 2 and num_before == 0
    if num_ranks == 2:  # in one process, no rows are added that could be left out wrongly
        (text,) = results[0][3]
        assert "taken for values of the loader over range of 8 samples" in text and "of 7 samples" in text
        assert results[1][3] == [], "said by the main process"


def evaluates_inside_training() -> list[str]:
    accelerator = Accelerator(cpu=True)
    training = accelerator.prepare_data_loader(DataLoader(range(7), batch_size=2))
    evaluation = accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in training:
            found = [n for held in evaluation for n in accelerator.gather_for_metrics(held + 1).tolist()]
            assert sorted(found) == [1, 2, 3, 4, 5]
            accelerator.gather_for_metrics(rows + 1)
    return [str(one.message) for one in said]


def test_an_evaluation_inside_training_is_not_in_doubt() -> None:
    assert run_on_ranks(evaluates_inside_training, 2) == [[], []]


def other_rows() -> Any:
    """Tensors alone, of as many rows as a rank has seen, and those that a rank didn't leave out of a batch."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare_data_loader(DataLoader(range(19), batch_size=4))
    rows = torch.cat([*loader])
    even = accelerator.gather_for_metrics({"n": rows[rows % 2 == 0], "m": rows})
    with pytest.raises(CollectiveError, match="can't be joined"):
        accelerator.gather_for_metrics(torch.zeros(2, 3 + accelerator.process_index))
    main = accelerator.gather_for_metrics(rows, to="main")
    return sorted(even["n"].tolist()), sorted(even["m"].tolist()), main is None or sorted(main.tolist())


def test_tensors_of_different_numbers_of_rows_are_joined() -> None:
    first, second = run_on_ranks(other_rows, 2)
    expected = [*range(19)]
    assert first == (expected[::2], expected, expected)
    assert second == (expected[::2], expected, True)


IDS = torch.tensor([7])
#: By name: tensors of equal shapes in what ranks 0 and 1 give, and what is gathered; None if it is refused.
CONTAINERS: dict[str, tuple[Any, Any, Any]] = {
    "other keys": ({"a": IDS}, {"b": IDS}, None),
    "other keys inside": ([{"a": IDS}, IDS], [{"b": IDS}, IDS], None),
    "more keys": ({"a": IDS, "b": IDS}, {"a": IDS}, None),
    "other nesting": ((IDS, IDS), ((IDS, IDS),), None),
    "other fields": (Outputs(IDS, IDS, IDS), Outputs(IDS, IDS, (IDS,)), None),
    "another type": (Outputs(IDS, IDS, IDS), {"logits": IDS, "names": IDS, "lost": IDS}, None),
    "a shorter tuple": ((IDS, IDS), (IDS,), None),
    "a tensor and a tuple": (IDS, (IDS,), None),
    "another order": ({"a": IDS, "b": IDS + 1}, {"b": IDS + 1, "a": IDS}, {"a": [7, 7], "b": [8, 8]}),
    "a longer list": ([IDS, IDS], [IDS], [[7], [7], [7]]),
}


def differing_containers() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for name, given in CONTAINERS.items():
        try:
            found[name] = listify(accelerator.gather_for_metrics(given[accelerator.process_index]))
        except CollectiveError as error:
            found[name] = str(error)
        merged = accelerator.gather_for_metrics({accelerator.process_index: IDS}, use_gather_object=True)
        assert merged == {0: IDS, 1: IDS}
    return found


def test_tensors_of_other_names_are_never_joined() -> None:
    for result in run_on_ranks(differing_containers, 2):
        for name, (*_, expected) in CONTAINERS.items():
            if expected is None:
                assert "containers of tensors differ" in result[name], (name, result[name])
                assert "on rank 0" in result[name] and "on rank 1" in result[name], (name, result[name])
            else:
                assert result[name] == expected, name


def after_the_loop() -> Any:
    """Ranks with different numbers of rows gather once, at the end."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare_data_loader(DataLoader(range(19), batch_size=4))
    rows = [*loader]
    ids = accelerator.gather_for_metrics({"ids": torch.cat(rows), "names": names_of(torch.cat(rows))})
    return sorted(ids["ids"].tolist()), sorted(numbers(ids["names"]))


def test_ranks_with_different_numbers_of_batches_gather_once_after_the_loop() -> None:
    assert run_on_ranks(after_the_loop, 2) == [([*range(19)], [*range(19)])] * 2


def sentences(ids: list[int]) -> dict[str, torch.Tensor]:
    """Rows of 1 to 5 tokens, each the number of its sample, padded with -1 to the longest one of the batch."""
    lengths = [1 + index * 7 % 5 for index in ids]
    rows = [[index] * length + [-1] * (max(lengths) - length) for index, length in zip(ids, lengths, strict=True)]
    return {"tokens": torch.tensor(rows), "ids": torch.tensor(ids)}


def padded_kinds(size: int, num_ranks: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    keep: dict[str, Any] = {"batch_size": BATCH, "collate_fn": sentences}
    whole = keep | {"batch_size": BATCH * num_ranks}
    yield "map", DataLoader(range(size), **keep), {}
    yield "uneven map", DataLoader(range(size), **keep), {"even_batches": False}
    yield "split map", DataLoader(range(size), **whole), {"split_batches": True}
    yield "uneven split map", DataLoader(range(size), **whole), {"even_batches": False, "split_batches": True}
    yield "dispatched map", DataLoader(range(size), **keep), {"dispatch_batches": True}
    yield "stream", DataLoader(Stream(size), **keep), {"dispatch_batches": False}
    yield "dispatched stream", DataLoader(Stream(size), **keep), {}


def padded_and_gathered() -> dict[tuple[str, int], list[tuple[list[list[int]], list[int], list[list[int]]]]]:
    """Per round: the padded tokens, their numbers, and generated tokens, whose lengths the ranks decide."""
    accelerator = Accelerator(cpu=True)
    found = {}
    for size in (1, 7, 16):
        for name, loader, settings in padded_kinds(size, accelerator.num_processes):
            accelerator.dataloader_config = DataLoaderConfiguration(**settings)
            rounds = found[name, size] = []
            for batch in accelerator.prepare_data_loader(loader):
                tokens, ids = batch["tokens"], batch["ids"]
                made = ids[:, None].repeat(1, 1 + accelerator.process_index)
                made = accelerator.pad_across_processes(made, dim=1, pad_index=-100, pad_first=True)
                tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=-100)
                tokens, ids = accelerator.gather_for_metrics((tokens, ids))
                made = accelerator.gather_for_metrics(made)
                rounds.append((tokens.tolist(), ids.tolist(), made.tolist()))
            accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_outputs_of_any_length_are_padded_and_gathered_in_full_and_in_short_rounds(num_ranks: int) -> None:
    results = run_on_ranks(padded_and_gathered, num_ranks, timeout_seconds=120)
    for (name, size), rounds in results[0].items():
        assert sorted(index for _, ids, _ in rounds for index in ids) == [*range(size)], (name, size)
        for tokens, ids, made in rounds:
            width = max(1 + index * 7 % 5 for index in ids)
            for row, last, index in zip(tokens, made, ids, strict=True):
                length = 1 + index * 7 % 5
                assert row[:length] == [index] * length and set(row[length:]) <= {-1, -100}, (name, size, row)
                assert len(row) >= width and len({len(each) for each in tokens}) == 1, (name, size)
                assert last[-1] == index and set(last) <= {index, -100}, (name, size, last)
        for result in results[1:]:  # a rank without a batch in the last round isn't there to be told
            theirs = result[name, size]
            assert theirs == rounds[: len(theirs)] and (len(theirs) == len(rounds) or "uneven" in name), (name, size)
