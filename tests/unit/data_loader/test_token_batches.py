"""Batches of equal tokens: each sample once, within the budget, alike over the ranks, and the same after a resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from accelerate import Accelerator
from accelerate.data_loader import TokenBatchSampler, prepare_data_loader, skip_first_batches
from accelerate.data_loader.token_batches import TokenPlan
from accelerate.errors import PreparationError, ResumeWarning, SettingError
from accelerate.utils import DataLoaderConfiguration, set_seed

CPU = torch.device("cpu")
BUDGET = 512
KINDS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


def log_normal(num_samples: int, seed: int = 0, budget: int = BUDGET) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths = np.random.RandomState(seed).lognormal(np.log(budget / 27), 1.0, num_samples)
    return np.clip(lengths, 1, budget).astype(np.int64)


def as_lists(batch: list[int]) -> list[int]:
    return batch


def loader_of(
    lengths: Any, rank: int = 0, num_ranks: int = 1, *, shuffle: bool = True, budget: int = BUDGET, **options: Any
) -> Any:
    """A prepared loader of which a batch is the list of its samples' numbers."""
    loader: DataLoader[Any] = DataLoader(range(len(lengths)), shuffle=shuffle, collate_fn=as_lists)  # pyright: ignore[reportArgumentType]
    chosen = {"use_seedable_sampler": True, "data_seed": 3, **options}
    return prepare_data_loader(loader, CPU, num_ranks, rank, token_budget=budget, length_of=lengths, **chosen)


def steps_of(loaders: list[Any]) -> Iterator[list[list[int]]]:
    """The batches of all ranks of each step, valid samples only."""
    for batches in zip(*loaders, strict=True):
        yield [batch[: loader.own_rows[0]] for loader, batch in zip(loaders, batches, strict=True)]


def flat(steps: Any) -> list[int]:
    return [sample for step in steps for batch in step for sample in batch]


# -- the plan ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=300),
    st.integers(64, 300),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 2**62),
)
def test_a_window_is_planned_as_a_whole_within_the_budget(
    lengths: list[int], budget: int, packed: bool, num_ranks: int, seed: int
) -> None:
    plan, window = TokenPlan(budget, packed, num_ranks), np.array(lengths)
    batches = plan.batches(window, seed)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(0 < plan.cost(window[batch]) <= budget for batch in batches)
    assert len(batches) % num_ranks == 0 or all(len(batch) == 1 for batch in batches) or len(lengths) < 2 * num_ranks
    again = plan.batches(window, seed)
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))


@KINDS
@pytest.mark.parametrize("num_ranks", [8, 24, 64])
def test_ranks_of_a_step_have_equal_costs(packed: bool, num_ranks: int) -> None:
    lengths = log_normal(60_000, budget=8192)
    plan = TokenPlan(8192, packed, num_ranks)
    size = plan.window_size(len(lengths), float(lengths.mean()))
    fullest, mean, tokens, num_batches = 0.0, 0.0, 0, 0
    for start in range(0, len(lengths), size):
        window = lengths[start : start + size]
        costs = np.array([plan.cost(window[batch]) for batch in plan.batches(window, start)])
        steps = costs.reshape(-1, num_ranks)
        fullest, mean = fullest + steps.max(1).sum(), mean + steps.mean(1).sum()
        tokens, num_batches = tokens + int(window.sum()), num_batches + len(costs)
    assert fullest / mean <= (1.01 if packed else 1.05)
    assert tokens / (num_batches * 8192) > (0.96 if packed else 0.85)


@KINDS
def test_steps_of_long_and_of_short_samples_come_mixed(packed: bool) -> None:
    lengths = log_normal(20_000)
    loader = loader_of(lengths, packed=packed)
    counts = np.array([len(batch) for batch in loader])
    first, second = np.array_split(counts, 2)
    assert abs(first.mean() - second.mean()) < 0.1 * counts.mean()
    assert abs(np.corrcoef(counts[1:], counts[:-1])[0, 1]) < 0.2


# -- a loader ------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_each_sample_comes_once_an_epoch(packed: bool, num_ranks: int) -> None:
    lengths = log_normal(3000)
    loaders = [loader_of(lengths, rank, num_ranks, packed=packed) for rank in range(num_ranks)]
    epochs = [list(steps_of(loaders)) for _ in range(2)]
    plan = TokenPlan(BUDGET, packed, num_ranks)
    for steps in epochs:
        assert sorted(flat(steps)) == list(range(3000))
        assert all(plan.cost(lengths[batch]) <= BUDGET for step in steps for batch in step)
        assert abs(len(loaders[0]) - len(steps)) <= 0.02 * len(steps) + 1
    assert flat(epochs[0]) != flat(epochs[1])
    assert epochs[0] == list(
        steps_of([loader_of(lengths, rank, num_ranks, packed=packed) for rank in range(num_ranks)])
    )


def test_the_last_batch_is_known_and_ranks_know_each_others_sizes() -> None:
    lengths = log_normal(500)
    loaders = [loader_of(lengths, rank, 2) for rank in range(2)]
    ends: list[bool] = []
    for batches in zip(*loaders, strict=True):
        assert loaders[0].coverage == loaders[1].coverage
        assert loaders[0].coverage.size == tuple(len(batch) for batch in batches)
        ends.append(loaders[0].end_of_dataloader)
    assert ends == [False] * (len(ends) - 1) + [True]
    assert loaders[0].remainder == -1


@pytest.mark.parametrize("even_batches", [True, False])
def test_fewer_samples_than_ranks_follow_even_batches(even_batches: bool) -> None:
    loaders = [loader_of([5, 4, 3], rank, 4, even_batches=even_batches) for rank in range(4)]
    found = [list(loader) for loader in loaders]
    assert sorted(flat(found[:3])) == [0, 1, 2]
    assert len(found[3]) == (1 if even_batches else 0)
    if even_batches:
        assert sorted(flat(steps_of(loaders))) == [0, 1, 2]


def test_the_number_of_steps_is_known_without_shuffling() -> None:
    lengths = log_normal(5000)
    loader = loader_of(lengths, 0, 2, shuffle=False, use_seedable_sampler=False)
    assert len(loader) == sum(1 for _ in loader)


def test_an_empty_dataset_has_no_batches() -> None:
    assert list(loader_of(np.zeros(0, dtype=np.int64), shuffle=False)) == []


def test_other_samplers_keep_their_samples() -> None:
    lengths = log_normal(400)

    class Odd(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(1, 400, 2))

        def __len__(self) -> int:
            return 200

    loader = DataLoader(range(400), sampler=Odd(), collate_fn=as_lists)  # pyright: ignore[reportArgumentType]
    prepared = [prepare_data_loader(loader, CPU, 2, rank, token_budget=BUDGET, length_of=lengths) for rank in range(2)]
    assert sorted(flat(steps_of(prepared))) == list(range(1, 400, 2))
    assert len(prepared[0]) >= 1


def test_a_loader_of_several_is_given_its_own_batch_sampler() -> None:
    lengths = log_normal(600)
    set_seed(1)
    sampler = TokenBatchSampler(RandomSampler(range(600)), lengths, BUDGET, packed=True)
    plain = list(sampler)
    assert sorted(flat([plain])) == list(range(600))
    loader: DataLoader[Any] = DataLoader(range(600), batch_sampler=sampler, collate_fn=as_lists)  # pyright: ignore[reportArgumentType]
    prepared = [prepare_data_loader(loader, CPU, 3, rank, use_seedable_sampler=True, data_seed=1) for rank in range(3)]
    assert sorted(flat(steps_of(prepared))) == list(range(600))
    assert sampler.plan.num_ranks == 1


# -- resume --------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": False}, {"index_free_shuffle": True}])
def test_a_resume_at_any_step_is_the_rest_of_the_epoch(packed: bool, options: dict[str, bool]) -> None:
    lengths = log_normal(1200)
    set_seed(5)
    loader = loader_of(lengths, packed=packed, **options)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    following = list(loader)
    for number in (0, 1, len(batches) // 2, len(batches) - 2):
        set_seed(77)
        resumed = loader_of(lengths, packed=packed, **options)
        resumed.load_state_dict(states[number])
        assert list(resumed) == batches[number + 1 :]
        if "use_seedable_sampler" not in options:
            assert list(resumed) == following
    resumed = loader_of(lengths, packed=packed, **options)
    resumed.load_state_dict(states[-1])
    if "use_seedable_sampler" not in options:
        assert list(resumed) == following


@KINDS
@pytest.mark.parametrize(("before", "between", "after"), [(4, 2, 3), (2, 8, 1), (1, 4, 4)])
def test_chains_of_ranks_lose_and_double_nothing(packed: bool, before: int, between: int, after: int) -> None:
    lengths = log_normal(6000, budget=256)

    def group(num_ranks: int, state: Any = None) -> list[Any]:
        loaders = [loader_of(lengths, rank, num_ranks, packed=packed, budget=256) for rank in range(num_ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        return loaders

    seen: list[int] = []
    state = None
    for num_ranks, num_steps in ((before, 31), (between, 7)):
        loaders = group(num_ranks, state)
        for _, step in zip(range(num_steps), steps_of(loaders), strict=False):
            seen += flat([step])
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.end()
    loaders = group(after, state)
    rest = list(steps_of(loaders))
    assert sorted(seen + flat(rest)) == list(range(6000))
    fresh = group(after)
    for loader in fresh:
        loader.set_epoch(1)
    assert list(steps_of(loaders)) == list(steps_of(fresh))  # the next epoch is planned for the ranks that there are


def test_a_position_far_inside_plans_its_own_window_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.full(200_000, 64)
    loader = loader_of(lengths, budget=1024)
    batches = iter(loader)
    for _ in range(9000):
        expected = next(batches)
    state = loader.state_dict()
    expected = next(batches)
    planned: list[int] = []
    plain = TokenPlan.batches

    def counted(self: TokenPlan, window: Any, seed: int) -> Any:
        planned.append(len(window))
        return plain(self, window, seed)

    monkeypatch.setattr(TokenPlan, "batches", counted)
    resumed = loader_of(lengths, budget=1024)
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == expected
    assert sum(planned) <= 2 * 17_000


def test_skipping_counts_batches() -> None:
    lengths = log_normal(3000)
    everything = [list(loader_of(lengths, rank, 2)) for rank in range(2)]
    for rank in range(2):
        skipped = skip_first_batches(loader_of(lengths, rank, 2), 11)
        batches = iter(skipped)
        assert next(batches) == everything[rank][11]
        state = skipped.state_dict()
        assert list(batches) == everything[rank][12:]
        resumed = loader_of(lengths, rank, 2)
        resumed.load_state_dict(state)
        assert list(resumed) == everything[rank][12:]
        assert len(skipped) == len(loader_of(lengths, rank, 2)) - 11


def test_a_changed_budget_counts_from_the_next_epoch() -> None:
    lengths = log_normal(1000, budget=200)
    loader = loader_of(lengths)
    batches = iter(loader)
    seen = [*next(batches), *next(batches)]
    resumed = loader_of(lengths, budget=200)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(ResumeWarning, match="token_budget=200, packed=False count from the next epoch on"):
        rest = flat([list(resumed)])
    assert sorted(seen + rest) == list(range(1000))
    assert all(max(lengths[batch]) * len(batch) <= 200 for batch in resumed)


def test_an_epoch_isnt_continued_with_samples_over_its_budget() -> None:
    """Its plan would never end."""
    loader = loader_of(log_normal(1000, budget=200), budget=200)
    next(iter(loader))
    longer = loader_of(np.full(1000, 300), budget=400)
    longer.load_state_dict(loader.state_dict())
    with warnings.catch_warnings(), pytest.raises(PreparationError, match="token_budget=200, and a sample has 300"):
        warnings.simplefilter("ignore", ResumeWarning)
        list(longer)


def test_workers_read_the_same_batches() -> None:
    lengths = log_normal(300)
    loader: DataLoader[Any] = DataLoader(range(300), shuffle=True, collate_fn=as_lists, num_workers=1)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"token_budget": BUDGET, "length_of": lengths, "use_seedable_sampler": True}
    assert list(prepare_data_loader(loader, CPU, 2, 1, data_seed=3, **options)) == list(loader_of(lengths, 1, 2))


# -- lengths -------------------------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """A dataset with a column, of which reading draws from torch's stream."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = list(lengths)

    def __getitem__(self, index: Any) -> Any:
        if index == "length":
            return self.lengths
        if isinstance(index, str):
            raise KeyError(index)
        torch.rand(1)
        return torch.full((self.lengths[index],), index)

    def __len__(self) -> int:
        return len(self.lengths)


@pytest.mark.parametrize("kind", ["function", "column", "list", "tensor", "array"])
def test_lengths_come_from_samples_a_column_or_a_sequence(kind: str) -> None:
    lengths = log_normal(50).tolist()
    forms = {"function": len, "column": "length", "list": lengths, "tensor": torch.tensor(lengths)}
    before = torch.get_rng_state()
    config = DataLoaderConfiguration(token_budget=BUDGET, length_of=forms.get(kind, np.array(lengths, dtype=np.int16)))
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(Texts(lengths), collate_fn=as_lists))
    assert torch.equal(before, torch.get_rng_state())
    found = list(loader)
    assert sorted(int(text[0]) for batch in found for text in batch) == list(range(50))
    assert all(max(map(len, batch)) * len(batch) <= BUDGET for batch in found)


def test_an_empty_sample_counts_as_one_token() -> None:
    assert sorted(map(len, loader_of([0] * 8, shuffle=False, budget=4, packed=True))) == [4, 4]


@pytest.mark.parametrize(
    ("length_of", "message"),
    [
        ([3, 700, 4], r"Sample 1 has 700 tokens, more than token_budget=512 .*1 of 3 samples"),
        ([3, -1, 4], "Sample 1 has a length of -1"),
        ([1.0, 2.0, 3.0], "whole numbers, one for each; these are float64"),
        ([3, 4], "2 lengths, but range has 3 samples"),
        ("words", "name of a column of lengths, but range has none"),
        (None, "needs length_of"),
    ],
)
def test_lengths_that_cant_be_used_are_refused(length_of: Any, message: str) -> None:
    loader: DataLoader[Any] = DataLoader(range(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PreparationError, match=message):
        prepare_data_loader(loader, CPU, 1, 0, token_budget=BUDGET, length_of=length_of)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(Stream()), {}, "Stream is a stream"),
        (DataLoader(range(4), batch_size=None), {}, "doesn't batch"),  # pyright: ignore[reportArgumentType]
        (DataLoader(range(4), batch_size=2), {"split_batches": True}, "split_batches=True"),  # pyright: ignore[reportArgumentType]
        (DataLoader(range(4)), {"dispatch_batches": True, "put_on_device": True}, "dispatch_batches=True"),  # pyright: ignore[reportArgumentType]
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), {}, "divides the data"),  # pyright: ignore[reportArgumentType]
        (
            DataLoader(range(4), batch_sampler=type("Own", (BatchSampler,), {})(range(4), 2, False)),  # pyright: ignore[reportArgumentType]
            {},
            "this loader has Own",
        ),
    ],
)
def test_loaders_that_make_their_own_batches_are_refused(loader: Any, options: Any, message: str) -> None:
    with pytest.raises(PreparationError, match=message):
        prepare_data_loader(loader, CPU, 2, 0, token_budget=4, length_of=[1, 2, 3, 4], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 8}, "needs the lengths"),
        ({"length_of": len}, "token_budget isn't"),
        ({"packed": True}, "isn't"),
    ],
)
def test_settings_that_need_each_other(options: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        DataLoaderConfiguration(**options)
