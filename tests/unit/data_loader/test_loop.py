"""The loop of a prepared loader in one process, and with pretended shares."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accelerate.data_loader import (
    AlreadyShardedWarning,
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.data_loader.adapter import FixedAttributeWarning
from accelerate.errors import PreparationError, SettingError
from accelerate.training.accumulation import GradientState

CPU = torch.device("cpu")


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Measured(Stream):
    def __len__(self) -> int:
        return self.size


class Counting(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def __len__(self) -> int:
        return self.size


def numbers(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def prepared(dataset, share: int = 0, count: int = 1, *, prepare: dict | None = None, **arguments):
    loader = DataLoader(dataset, **arguments)
    return prepare_data_loader(loader, CPU, count, share, put_on_device=True, **(prepare or {}))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_length_is_the_number_of_batches_on_every_rank(
    count: int, split: bool, even: bool, drop_last: bool
) -> None:
    settings = {"split_batches": split, "even_batches": even, "dispatch_batches": False}
    sizes = {"batch_size": 2 * count if split else 2, "drop_last": drop_last}
    for size in (0, 1, 3, 5, 6, 7, 8, 12):
        for share in range(count):
            for dataset in (range(size), Measured(size)):
                loader = prepared(dataset, share, count, prepare=settings, **sizes)
                assert len(loader) == len([*loader]), (size, share, dataset)
                skipped = skip_first_batches(loader, 1)
                assert len(skipped) == len([*skipped]), (size, share, dataset)
            if not drop_last and not split:
                loader = prepared(torch.arange(size), share, count, prepare=settings, batch_size=None)
                assert len(loader) == len([*loader]), (size, share)


# -- what the loop tells -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [range(10), Stream(10)], ids=["map", "stream"])
def test_the_last_batch_is_known_while_it_is_current(dataset, num_workers: int) -> None:
    arguments = {"dispatch_batches": False}
    if num_workers and isinstance(dataset, Stream):
        pytest.skip("each worker would read the whole stream")
    loader = prepared(dataset, batch_size=4, num_workers=num_workers, prepare=arguments)
    seen = [(batch.tolist(), loader.end_of_dataloader, loader.coverage.valid) for batch in loader]
    assert seen == [([0, 1, 2, 3], False, (4,)), ([4, 5, 6, 7], False, (4,)), ([8, 9], True, (2,))]
    assert loader.coverage is None


@pytest.mark.parametrize("dataset", [range(0), Stream(0)], ids=["map", "stream"])
def test_an_empty_loader_ends_at_once(dataset) -> None:
    gradient_state = GradientState.create()
    assert numbers(prepared(dataset, batch_size=4, prepare={"gradient_state": gradient_state})) == []
    assert not gradient_state.in_dataloader


def test_the_clock_follows_the_loop_by_every_road() -> None:
    gradient_state = GradientState.create()
    loader = prepared(range(8), batch_size=2, prepare={"gradient_state": gradient_state})
    for _ in loader:
        assert gradient_state.active_dataloader is loader
        break
    assert not gradient_state.in_dataloader
    with pytest.raises(RuntimeError, match="stop"):
        for _ in loader:
            raise RuntimeError("stop")
    assert not gradient_state.in_dataloader
    batches = iter(loader)
    next(batches)
    assert gradient_state.in_dataloader
    batches.close()
    assert not gradient_state.in_dataloader
    held = iter(loader)  # never closed, replaced by the next pass
    next(held)
    assert len(numbers(loader)) == 4
    assert not gradient_state.in_dataloader
    held.close()
    assert not gradient_state.in_dataloader


def test_loops_over_the_same_loader_may_be_nested() -> None:
    gradient_state = GradientState.create()
    loader = prepared(range(4), batch_size=2, prepare={"gradient_state": gradient_state})
    seen = [(outer.tolist(), inner.tolist()) for outer in loader for inner in loader]
    assert seen == [([0, 1], [0, 1]), ([0, 1], [2, 3]), ([2, 3], [0, 1]), ([2, 3], [2, 3])]
    assert not gradient_state.in_dataloader


def test_a_pass_that_is_closed_late_leaves_the_running_one_alone() -> None:
    gradient_state = GradientState.create()
    loader = prepared(range(4), batch_size=2, prepare={"gradient_state": gradient_state})
    held = iter(loader)
    next(held)
    for _ in loader:
        held.close()
        assert gradient_state.active_dataloader is loader and loader.coverage is not None
    assert not gradient_state.in_dataloader


def test_a_loop_that_stops_at_its_last_batch_has_finished_the_epoch() -> None:
    loader = prepared(range(4), batch_size=2)
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.iteration == 0
    list(loader)
    assert loader.iteration == 2
    for _ in loader:
        pass
    loader.set_epoch(0)
    list(loader)
    assert loader.iteration == 1


def shuffled(kind: str, workers: int = 0) -> DataLoaderShard:
    """A loader whose order differs from epoch to epoch."""
    arguments: dict = {"batch_size": 2, "num_workers": workers}
    if kind == "seedable":
        return prepared(range(7), **arguments, shuffle=True, prepare={"use_seedable_sampler": True, "data_seed": 1})
    if kind == "stream":
        return prepared(Stream(7), **arguments)
    return prepared(range(7), **arguments, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize("kind", ["generator", "seedable", "stream"])
def test_a_position_after_the_last_batch_is_the_beginning_of_the_next_epoch(kind: str, sets_epoch: bool) -> None:
    loader, epochs, states = shuffled(kind), [], {}
    for epoch in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            states[epoch, len(epochs[-1])] = copy.deepcopy(loader.state_dict())
    assert kind == "stream" or epochs[0] != epochs[1] != epochs[2]
    for (epoch, count), state in states.items():
        resumed = shuffled(kind)
        resumed.load_state_dict(state)
        following = epoch + (count == len(epochs[epoch]))  # how scripts count: batches seen // batches per epoch
        if following == 3:
            continue
        if sets_epoch:
            resumed.set_epoch(following)
        assert numbers(resumed) == (epochs[epoch][count:] or epochs[following])
        assert resumed.iteration == following + 1
        if following < 2:
            assert numbers(resumed) == epochs[following + 1]


def test_batches_skipped_after_a_finished_epoch_are_those_of_the_next() -> None:
    loader = shuffled("generator")
    for _ in loader:
        state = copy.deepcopy(loader.state_dict())
    expected = numbers(loader)
    resumed = shuffled("generator")
    resumed.load_state_dict(state)
    assert numbers(skip_first_batches(resumed, 1)) == expected[1:]


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, np.random.rand])
def test_the_next_sample_of_a_resumed_stream_draws_as_in_the_saved_pass(draw: Callable[[], float]) -> None:
    class Noisy(Stream):
        def __iter__(self):
            return (index + draw() for index in range(self.size))

    batches = iter(loader := prepare_data_loader(DataLoader(Noisy(5))))
    next(batches), next(batches)
    state = copy.deepcopy(loader.state_dict())
    expected = next(batches)
    draw()
    resumed = prepare_data_loader(DataLoader(Noisy(5)))
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == expected


def test_a_stream_that_saves_its_position_reads_nothing_twice() -> None:
    class Counted(Stream):
        position = 0

        def __iter__(self):
            while self.position < self.size:
                self.position += 1
                yield self.position - 1

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]
            loaded.append(self.position)

    loaded: list[int] = []
    batches = iter(loader := prepare_data_loader(DataLoader(Counted(6))))
    next(batches), next(batches)
    state = copy.deepcopy(loader.state_dict())
    resumed = prepare_data_loader(DataLoader(Counted(6)))
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == [2]
    assert loaded == [2]


def test_the_loader_that_delivered_last_is_the_active_one() -> None:
    gradient_state = GradientState.create()
    first, second = (prepared(range(6), batch_size=2, prepare={"gradient_state": gradient_state}) for _ in range(2))
    ones, twos = iter(first), iter(second)
    next(ones), next(twos)
    assert gradient_state.active_dataloader is second
    next(ones)
    assert gradient_state.active_dataloader is first
    list(twos)
    assert gradient_state.active_dataloader is first
    list(ones)
    assert not gradient_state.in_dataloader


def test_remainder_has_its_documented_meaning() -> None:
    def remainder(dataset, **arguments) -> int:
        loader = prepared(dataset, 0, 2, batch_size=4, prepare={"dispatch_batches": False}, **arguments)
        for _ in loader:
            return loader.remainder
        raise AssertionError

    assert remainder(range(11)) == 3
    assert remainder(range(16)) == 0
    assert remainder(range(11), drop_last=True) == -1
    assert remainder(Stream(11)) == -1


# -- what the loader shows ---------------------------------------------------------------------------------


def test_a_prepared_loader_is_a_dataloader_with_the_users_attributes() -> None:
    dataset = range(11)
    collate = torch.as_tensor
    loader = prepared(dataset, 1, 2, batch_size=4, shuffle=True, collate_fn=collate)
    assert isinstance(loader, DataLoader) and isinstance(loader, DataLoaderShard)
    assert loader._is_accelerate_prepared
    assert (loader.dataset, loader.collate_fn, loader.batch_size, loader.num_workers) == (dataset, collate, 4, 0)
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (8, 11, 2)
    shard = loader.batch_sampler
    assert isinstance(shard, BatchSamplerShard) and (shard.num_processes, shard.process_index) == (2, 1)
    assert type(shard.batch_sampler) is BatchSampler
    assert loader.sampler is get_sampler(loader) is loader.get_sampler() is shard.batch_sampler.sampler


def test_in_one_process_the_batch_sampler_is_the_users() -> None:
    sampler = BatchSampler(SequentialSampler(range(6)), 4, False)
    loader = prepared(range(6), batch_sampler=sampler)
    assert loader.batch_sampler is sampler
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5]]


def test_sharding_can_be_neutralised_by_the_caller() -> None:
    loader = prepared(range(6), 1, 2, batch_size=2)
    loader.batch_sampler.num_processes, loader.batch_sampler.process_index = 1, 0
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5]]


def test_a_sampler_can_be_replaced() -> None:
    loader = prepared(range(4), batch_size=2)
    loader.set_sampler(SubsetRandomSampler([3]))
    assert numbers(loader) == [[3]]
    assert isinstance(loader.sampler, SubsetRandomSampler)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_loader_can_be_copied_in_the_middle_of_a_pass(copied) -> None:
    loader = prepared(TensorDataset(torch.arange(6)), batch_size=2)
    for _ in loader:
        twin = copied(loader)
        break
    assert [batch[0].tolist() for batch in twin] == [[0, 1], [2, 3], [4, 5]]
    assert type(twin) is type(loader)


def test_settings_of_the_loader_may_be_changed_between_passes() -> None:
    loader = prepared(range(4), batch_size=2)
    assert numbers(loader) == [[0, 1], [2, 3]]
    loader.collate_fn = lambda items: torch.tensor([-item for item in items])
    assert numbers(loader) == [[0, -1], [-2, -3]]


Pair = namedtuple("Pair", "x y")


class Encoding(UserDict):
    moved = False

    def to(self, device, non_blocking: bool = False):
        twin = Encoding({key: item.to(device) for key, item in self.items()})
        twin.moved = True
        return twin


@pytest.mark.parametrize("kind", ["dict", "pair", "nested", "encoding"])
def test_batches_of_any_nesting_are_moved_and_keep_their_type(kind: str) -> None:
    def collate(items):
        x = torch.tensor(items)
        return {
            "dict": {"x": x, "name": "text"},
            "pair": Pair(x, x),
            "nested": [{"x": (x, [x])}],
            "encoding": Encoding(x=x),
        }[kind]

    loader = DataLoader(range(2), batch_size=2, collate_fn=collate)
    moved = next(iter(prepare_data_loader(loader, torch.device("meta"), put_on_device=True)))
    expected = {"dict": dict, "pair": Pair, "nested": list, "encoding": Encoding}[kind]
    assert type(moved) is expected
    leaf = {
        "dict": lambda: moved["x"],
        "pair": lambda: moved.y,
        "nested": lambda: moved[0]["x"][1][0],
        "encoding": lambda: moved["x"],
    }[kind]()
    assert leaf.device.type == "meta"


def test_batches_stay_where_they_are_without_device_placement() -> None:
    loader = prepare_data_loader(DataLoader(range(2), batch_size=2), torch.device("meta"))
    assert next(iter(loader)).device.type == "cpu"


# -- which samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16])
def test_each_rank_reads_only_its_own_items(size: int, num_workers: int) -> None:
    seen: list[int] = []
    for share in range(2):
        dataset = Counting(size)
        loader = prepared(dataset, share, 2, batch_size=4, num_workers=num_workers)
        for batch in loader:
            seen += batch[: loader.coverage.valid[share]].tolist()
        if not num_workers:
            assert len(dataset.read) == len(loader) * 4
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("split", [False, True])
def test_streams_of_unknown_length_are_covered_exactly(size: int, split: bool) -> None:
    seen: list[int] = []
    options = {"dispatch_batches": False, "split_batches": split}
    for share in range(2):
        loader = prepared(Stream(size), share, 2, batch_size=4, prepare=options)
        for batch in loader:
            assert len(batch) == (2 if split else 4) == loader.coverage.size[share]
            seen += batch[: loader.coverage.valid[share]].tolist()
    assert sorted(seen) == list(range(size))


def test_a_stream_read_by_workers_gives_its_coverage_to_the_loop() -> None:
    loader = prepared(Stream(5), 1, 2, batch_size=2, num_workers=1, prepare={"dispatch_batches": False})
    assert [(batch.tolist(), loader.coverage.valid) for batch in loader] == [([2, 3], (2, 2)), ([1, 2], (1, 0))]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_loaders_that_dont_batch_are_divided(count: int) -> None:
    seen: list[int] = []
    for share in range(count):
        loader = prepared(range(7), share, count, batch_size=None)
        for item in loader:
            if loader.coverage.valid[share]:
                seen.append(int(item))
    assert sorted(seen) == list(range(7))


def test_a_batch_sampler_in_the_place_of_the_sampler_is_divided() -> None:
    class Table(Dataset):
        def __getitem__(self, index):
            return torch.tensor(index)

        def __len__(self) -> int:
            return 5

    assigned = []
    for share in range(2):
        sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
        assigned.append(numbers(prepared(Table(), share, 2, sampler=sampler, batch_size=None)))
    assert assigned == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]


class Buckets(Sampler):
    """Variable batches in an order drawn from the global streams."""

    def __iter__(self):
        cuts = [list(range(start, start + 1 + start % 3)) for start in range(0, 12, 3)]
        random.shuffle(cuts)
        yield from cuts

    def __len__(self) -> int:
        return 4


def test_variable_batches_have_a_coverage() -> None:
    loaders = [prepared(range(20), share, 3, batch_sampler=Buckets()) for share in range(3)]
    seen = []
    for share, loader in enumerate(loaders):
        random.seed(0)
        for batch in loader:
            assert loader.coverage.size[share] == len(batch)
            seen += batch[: loader.coverage.valid[share]].tolist()
    assert sorted(seen) == sorted(sample for batch in Buckets() for sample in batch)


# -- which order -------------------------------------------------------------------------------------------


class Odd(Sampler):
    """A sampler of the user's that draws from all three global streams when it begins."""

    def __iter__(self):
        order = torch.randperm(20).tolist()
        random.shuffle(order)
        return iter([order[int(i)] for i in np.random.permutation(20)])

    def __len__(self) -> int:
        return 20


SAMPLERS = {
    "random": lambda: RandomSampler(range(20)),
    "replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=50),
    "generator": lambda: RandomSampler(range(20), generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 20, 20),
    "subset": lambda: SubsetRandomSampler(list(range(3, 17))),
    "odd": Odd,
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_is_that_of_the_bare_loader(name: str, num_workers: int) -> None:
    def run(prepare: bool) -> list:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        loader = DataLoader(range(20), batch_size=3, sampler=SAMPLERS[name](), num_workers=num_workers)
        if prepare:
            loader = prepare_data_loader(loader, CPU, put_on_device=True)
        return [numbers(loader), torch.rand(1).item(), random.random(), numbers(loader), torch.rand(1).item()]

    assert run(True) == run(False)


def test_shuffle_changes_with_the_epoch() -> None:
    loader = prepared(range(20), batch_size=20, shuffle=True)
    assert numbers(loader) != numbers(loader)


def test_the_seedable_sampler_depends_on_seed_and_epoch_only() -> None:
    def orders() -> list[list[list[int]]]:
        options = {"use_seedable_sampler": True, "data_seed": 7}
        loader = prepared(range(20), batch_size=20, shuffle=True, prepare=options)
        assert isinstance(loader.sampler, SeedableRandomSampler)
        torch.rand(random.randrange(1, 9))
        first = [numbers(loader), numbers(loader)]
        loader.set_epoch(0)
        return [*first, numbers(loader)]

    first, second = orders(), orders()
    assert first == second
    assert first[0] == first[2] != first[1]


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "dataset"])
def test_the_epoch_reaches_whoever_listens(place: str) -> None:
    epochs: list[int] = []

    class Listening(Sampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

        def __iter__(self):
            return iter([0, 1]) if place == "sampler" else iter([[0, 1]])

        def __len__(self) -> int:
            return 2

    class Table(Dataset):
        if place == "dataset":

            def set_epoch(self, epoch: int) -> None:
                epochs.append(epoch)

        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 2

    arguments = {"dataset": {"batch_size": 2}}.get(place, {place: Listening()} if place != "dataset" else {})
    loader = prepared(Table(), 0, 2, **arguments)
    numbers(loader), numbers(loader)
    loader.set_epoch(7)
    numbers(loader)
    assert epochs == [0, 1, 7]


# -- skipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_skipped", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_skipping_continues_the_same_sharding(num_skipped: int, count: int) -> None:
    for share in range(count):
        loader = prepared(range(19), share, count, batch_size=4)
        expected = [(batch.tolist(), loader.coverage) for batch in loader][num_skipped:]
        skipped = skip_first_batches(prepared(range(19), share, count, batch_size=4), num_skipped)
        assert [(batch.tolist(), skipped.coverage) for batch in skipped] == expected
        assert len(skipped) == len(expected)
        assert isinstance(skipped.batch_sampler, SkipBatchSampler) and type(skipped) is type(loader)


def test_skipping_reads_no_data() -> None:
    dataset = Counting(100)
    skipped = skip_first_batches(prepared(dataset, batch_size=4), 20)
    next(iter(skipped))
    assert dataset.read == [80, 81, 82, 83]


@pytest.mark.parametrize("share", [0, 1])
def test_skipping_in_a_stream_continues_the_same_sharding(share: int) -> None:
    options = {"dispatch_batches": False}
    loader = prepared(Stream(19), share, 2, batch_size=4, prepare=options)
    expected = [(batch.tolist(), loader.coverage) for batch in loader][1:]
    skipped = skip_first_batches(prepared(Stream(19), share, 2, batch_size=4, prepare=options), 1)
    assert [(batch.tolist(), skipped.coverage) for batch in skipped] == expected


def test_a_skipped_loader_advances_the_epoch_of_its_original() -> None:
    loader = prepared(range(20), batch_size=5, shuffle=True, prepare={"use_seedable_sampler": True, "data_seed": 1})
    plain = prepared(range(20), batch_size=5, shuffle=True, prepare={"use_seedable_sampler": True, "data_seed": 1})
    first, second = numbers(plain), numbers(plain)
    assert numbers(skip_first_batches(loader, 2)) == first[2:]
    assert numbers(loader) == second


@pytest.mark.parametrize("count", [-1, 1.5, "1", None])
def test_only_a_number_of_batches_can_be_skipped(count: Any) -> None:
    with pytest.raises(SettingError, match=r"skip_first_batches\(.* 0 or more"):
        skip_first_batches(DataLoader(list(range(8)), batch_size=2), count)


def test_loaders_that_arent_prepared_can_be_skipped() -> None:
    assert numbers(skip_first_batches(DataLoader(range(5), batch_size=2), 1)) == [[2, 3], [4]]
    stream = skip_first_batches(DataLoader(Stream(5), batch_size=2), 1)
    assert isinstance(stream, SkipDataLoader)
    assert numbers(stream) == numbers(stream) == [[2, 3], [4]]
    assert numbers(SkipDataLoader(range(5), skip_batches=2, batch_size=2)) == [[4]]
    assert list(SkipBatchSampler([1, 2, 3], skip_batches=2)) == [3]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_batches_to_skip_can_be_set_on_a_loader(kind: str, dispatch: bool) -> None:
    dataset = range(9) if kind == "map" else Stream(9)
    loader = prepared(dataset, batch_size=2, prepare={"dispatch_batches": dispatch})
    loader.skip_batches = 3
    assert (loader.skip_batches, numbers(loader), numbers(loader)) == (3, [[6, 7], [8]], [[6, 7], [8]])
    assert loader.end_of_dataloader
    assert numbers(skip_first_batches(loader, 1)) == [[8]]
    loader.skip_batches = 1
    assert numbers(loader) == [[2, 3], [4, 5], [6, 7], [8]]
    if kind == "map":
        assert len(loader) == 4
    loader.skip_batches = 0
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
@pytest.mark.parametrize("sampling", [{"batch_size": 2}, {"batch_sampler": [[0, 1], [2, 3], [4]]}])
def test_batches_to_skip_are_an_argument_of_the_classes(kind: Any, sampling: dict[str, Any]) -> None:
    loader = kind(range(5), skip_batches=1, **sampling)
    assert (len(loader), loader.skip_batches, numbers(loader)) == (2, 1, [[2, 3], [4]])


def test_a_skipped_loader_leaves_out_further_batches() -> None:
    loader = skip_first_batches(prepared(range(9), batch_size=2), 1)
    loader.skip_batches = 2
    assert numbers(loader) == [[6, 7], [8]]
    loader.skip_batches = 0
    assert numbers(loader) == [[2, 3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", range(100, 105)),
        ("batch_size", 3),
        ("drop_last", True),
        ("sampler", SequentialSampler(range(2))),
        ("batch_sampler", BatchSampler(SequentialSampler(range(2)), 1, False)),
        ("persistent_workers", True),
    ],
)
def test_what_a_loader_has_for_good_is_kept_with_a_remark(name: str, value: Any) -> None:
    loader = prepared(range(5), batch_size=2)
    before = getattr(loader, name)
    with pytest.warns(FixedAttributeWarning, match=f"^{name} = "):
        setattr(loader, name, value)
    assert getattr(loader, name) is before
    assert numbers(loader) == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="multiprocessing_context"):  # torch's own
        loader.multiprocessing_context = "fork"


def test_workers_start_in_the_context_of_the_loader() -> None:
    context = multiprocessing.get_context(multiprocessing.get_start_method())
    started = []

    class Recording(type(context)):
        def Process(self, *args: Any, **kwargs: Any) -> Any:
            started.append(args)
            return context.Process(*args, **kwargs)

    loader = prepared(range(4), batch_size=2, num_workers=1, multiprocessing_context=Recording())
    assert numbers(loader) == [[0, 1], [2, 3]]
    assert len(started) == 1


# -- dispatching in one process, refusals ------------------------------------------------------------------


def test_one_process_can_dispatch_to_itself() -> None:
    loader = prepared(Stream(5), batch_size=2)
    assert isinstance(loader, DataLoaderDispatcher)
    seen = [(batch.tolist(), loader.end_of_dataloader, loader.coverage.valid) for batch in loader]
    assert seen == [([0, 1], False, (2,)), ([2, 3], False, (2,)), ([4], True, (1,))]


@pytest.mark.parametrize("share", [0, 1])
def test_each_member_of_a_dispatched_batch_is_divided(share: int) -> None:
    def collate(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, list[int], tuple[torch.Tensor, ...]]:
        values = torch.stack([row[0] for row in rows])
        return values, values.tolist(), (values * 10,)

    split = {"dispatch_batches": True, "split_batches": True}
    loader = prepared(TensorDataset(torch.arange(4)), share, 2, prepare=split, batch_size=4, collate_fn=collate)
    ((values, plain, (tens,)),) = loader
    mine = [2 * share, 2 * share + 1]
    assert (values.tolist(), plain, (tens // 10).tolist()) == (mine, mine, mine)


def test_dispatching_needs_device_placement() -> None:
    with pytest.raises(PreparationError, match="dispatch_batches"):
        prepare_data_loader(DataLoader(Stream(5)), dispatch_batches=True)


@pytest.mark.parametrize("dataset", [range(6), Stream(6)], ids=["map", "stream"])
def test_batches_that_cant_be_split_are_refused(dataset) -> None:
    with pytest.raises(PreparationError, match="batch size is 3"):
        prepared(dataset, 0, 2, batch_size=3, prepare={"split_batches": True, "dispatch_batches": False})
    with pytest.raises(PreparationError, match="batch_size"):
        prepared(dataset, 0, 2, batch_size=None, prepare={"split_batches": True, "dispatch_batches": False})


# -- loaders that divide their data themselves -------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 8, 9, 17])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_is_used_as_it_is_with_its_coverage(size: int, drop_last: bool) -> None:
    from torch.utils.data.distributed import DistributedSampler

    seen: list[int] = []
    for rank in range(3):
        sampler = DistributedSampler(range(size), 3, rank, shuffle=False, drop_last=drop_last)
        with pytest.warns(AlreadyShardedWarning, match="DistributedSampler"):
            loader = prepared(range(size), rank, 3, batch_size=2, sampler=sampler)
        assert numbers(loader) == numbers(DataLoader(range(size), batch_size=2, sampler=sampler))
        for batch in loader:
            real = len(batch) if drop_last else loader.coverage.valid[rank]
            seen += batch[:real].tolist()
    assert sorted(seen) == list(range(size - size % 3 if drop_last else size))


def test_a_stream_that_knows_its_rank_is_used_as_it_is() -> None:
    class Own(Stream):
        rank, world_size = 1, 2

    with pytest.warns(AlreadyShardedWarning, match="Own"):
        loader = prepared(Own(5), 1, 2, batch_size=2, prepare={"dispatch_batches": False})
    assert numbers(loader) == [[0, 1], [2, 3], [4]]


def test_a_dataset_of_several_files_gives_each_rank_its_own() -> None:
    class Files(IterableDataset):
        num_shards = 4

        def __init__(self, files: range) -> None:
            self.files = files

        def shard(self, num_shards: int, index: int) -> Files:
            return Files(self.files[index::num_shards])

        def __iter__(self):
            for file in self.files:
                yield from (10 * file, 10 * file + 1)

    seen = []
    for rank in range(2):
        loader = prepared(Files(range(4)), rank, 2, batch_size=2, prepare={"dispatch_batches": False})
        for batch in loader:
            assert loader.coverage is None or loader.coverage.is_complete
            seen += batch.tolist()
    assert sorted(seen) == [0, 1, 10, 11, 20, 21, 30, 31]


def test_persistent_workers_serve_pass_after_pass() -> None:
    loader = prepared(range(10), batch_size=3, num_workers=1, persistent_workers=True)
    expected = numbers(DataLoader(range(10), batch_size=3))
    for _ in loader:
        break
    assert numbers(loader) == numbers(loader) == expected
    assert loader.base_dataloader is not loader
    state = None
    for number, _ in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert numbers(loader) == expected[2:]


class Mesh:
    """As much of a device mesh as decides who reads what."""

    def __init__(self, **sizes: int) -> None:
        self.mesh_dim_names = tuple(sizes)
        self.mesh = torch.zeros(*sizes.values())


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp": 2, "tp": 2}])
def test_ranks_that_differ_in_model_axes_only_read_the_same(axes: dict[str, int]) -> None:
    def batches(rank: int) -> list[list[int]]:
        loader = DataLoader(range(8), batch_size=2)
        return numbers(prepare_data_loader(loader, None, 4, rank, torch_device_mesh=Mesh(**axes)))

    assert [batches(rank) for rank in range(4)] == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2
