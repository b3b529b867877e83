"""A loader that continues from a saved position gives what the uninterrupted one would have given.

The run draws from the global streams between batches, as dropout does, and the datasets draw while they read, as
augmentation does; all of that has to be equal too, for the rest of the epoch and the whole next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset

from accelerate.data_loader import ResumeWarning, prepare_data_loader, skip_first_batches
from accelerate.distributed.random import capture_rng_states, restore_rng_states, set_seed
from accelerate.errors import CheckpointError
from tests.slow import IS_SLOW, slow_for

CPU = torch.device("cpu")
SIZE = 23
OF_LOADER = ("augments", "persistent_workers", "worker_init_fn", "batch_size")


class Noisy(Dataset):
    """Items with augmentation from the global stream of the process that reads."""

    def __init__(self, size: int = SIZE, augment: bool = True) -> None:
        self.size, self.augment, self.read = size, augment, []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        noise = torch.rand(()) + random.random() if self.augment else torch.zeros(())
        return torch.stack([torch.tensor(float(index)), noise])

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset):
    """A stream without state, with augmentation."""

    def __init__(self, augment: bool = True) -> None:
        self.augment = augment

    def __iter__(self):
        for index in range(SIZE):
            noise = torch.rand(()) + random.random() if self.augment else torch.zeros(())
            yield torch.stack([torch.tensor(float(index)), noise])


class Shuffled(IterableDataset):
    """A stream whose order comes from a generator of its own."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        for index in torch.randperm(self.size, generator=self.generator).tolist():
            yield torch.tensor([float(index), 0.0])


class Stateful(IterableDataset):
    """A stream that can tell where it stands."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.position, self.num_read = 0, 0

    def __iter__(self):
        while self.position < self.size:
            self.position += 1
            self.num_read += 1
            yield torch.stack([torch.tensor(float(self.position)), torch.rand(())])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Noted(IterableDataset):
    """A stream whose `load_state_dict` only notes a start, which the next pass uses up; each epoch has its order."""

    def __init__(self, size: int = SIZE, epoch_in_state: bool = True) -> None:
        self.size = size
        self.epoch, self.position, self.start, self.epoch_in_state = 0, 0, 0, epoch_in_state

    def __iter__(self):
        start, self.start = self.start, 0
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for number in range(start, self.size):
            self.position = number + 1
            yield torch.stack([torch.tensor(float(order[number])), torch.rand(())])
        if self.epoch_in_state:
            self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.epoch = state["position"], state["epoch"]


class Lazy(Sampler):
    """Draws from the global streams when it begins, and from a generator of its own while it runs."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(11)

    def __iter__(self):
        order = np.random.permutation(self.size)
        for index in order:
            if torch.rand((), generator=self.generator) < 0.8:
                yield int(index)

    def __len__(self) -> int:
        return self.size


class Buckets(Sampler):
    """Variable batches in random order."""

    def __iter__(self):
        cuts = [list(range(start, min(start + 2 + start % 3, SIZE))) for start in range(0, SIZE, 5)]
        random.shuffle(cuts)
        yield from cuts

    def __len__(self) -> int:
        return 5


def loader_of(kind: str, num_workers: int = 0, augments: bool | None = None, **options: Any) -> DataLoader:
    augment = num_workers == 0 if augments is None else augments
    keep: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, **options}
    if kind == "stream":
        return DataLoader(Stream(augment), **keep)
    if kind == "shuffled stream":
        return DataLoader(Shuffled(), **keep)
    if kind == "noted stream":
        return DataLoader(Noted(), **keep)
    if kind == "stateful stream":
        return DataLoader(Stateful(), **keep)
    dataset = Noisy(augment=augment)
    if kind == "buckets":
        return DataLoader(dataset, batch_sampler=Buckets(), num_workers=num_workers)
    if kind == "no batches":
        return DataLoader(dataset, shuffle=True, **{**keep, "batch_size": None})
    if kind == "drop last":
        return DataLoader(dataset, shuffle=True, drop_last=True, **keep)
    samplers: dict[str, Callable[[], Any]] = {
        "sequential": lambda: None,
        "random": lambda: RandomSampler(dataset),
        "generator": lambda: RandomSampler(dataset, generator=torch.Generator().manual_seed(3)),
        "replacement": lambda: RandomSampler(dataset, replacement=True, num_samples=40),
        "seedable": lambda: RandomSampler(dataset),
        "lazy": Lazy,
    }
    return DataLoader(dataset, sampler=samplers[kind](), **keep)


def prepare(kind: str, num_workers: int = 0, share: int = 0, count: int = 1, **options: Any) -> Any:
    of_loader = {name: options.pop(name) for name in OF_LOADER if name in options}
    options = {"use_seedable_sampler": kind == "seedable", "dispatch_batches": False, **options}
    loader = loader_of(kind, num_workers, **of_loader)
    return prepare_data_loader(loader, CPU, count, share, put_on_device=True, **options)


Trace = list[tuple[Any, ...]]


def train(loader: Any, trace: Trace, num_epochs: int = 1, stop_after: int | None = None) -> dict[str, Any] | None:
    """Goes through the loader as a training loop does; returns the state where it was told to stop."""
    for _ in range(num_epochs):
        for batch in loader:
            dropout = (torch.rand(()).item(), random.random(), float(np.random.rand()))
            trace.append((batch.tolist(), loader.coverage, loader.end_of_dataloader, dropout))
            if stop_after is not None and len(trace) == stop_after:
                return {"loader": loader.state_dict(), "streams": capture_rng_states()}
    return None


KINDS = ["sequential", "random", "generator", "replacement", "seedable", "lazy", "buckets", "no batches", "drop last"]
STREAMS = ["stream", "shuffled stream", "stateful stream", "noted stream"]


def check(kind: str, stop_after: int, num_workers: int = 0, share: int = 0, count: int = 1, **options: Any) -> None:
    set_seed(42)
    uninterrupted: Trace = []
    train(prepare(kind, num_workers, share, count, **options), uninterrupted, num_epochs=3)

    set_seed(42)
    before: Trace = []
    state = train(prepare(kind, num_workers, share, count, **options), before, num_epochs=3, stop_after=stop_after)
    if state is None:  # the run ended before
        assert before == uninterrupted
        return

    set_seed(7)  # another process: nothing but the checkpoint is known
    torch.rand(3)
    loader = prepare(kind, num_workers, share, count, **options)
    loader.load_state_dict(state["loader"])
    assert restore_rng_states(state["streams"]) == []
    after: Trace = []
    # The end of an epoch is the beginning of the next: a position there has nothing left of its own epoch.
    ended = state["loader"]["epoch"] + state["loader"]["_iterator_finished"]
    train(loader, after, num_epochs=3 - ended)
    assert before + after == uninterrupted


@pytest.mark.parametrize("kind", [*KINDS, *STREAMS])
def test_the_rest_of_the_run_is_equal_after_a_stop_at_every_batch(kind: str) -> None:
    trace: Trace = []
    train(prepare(kind), trace, num_epochs=3)
    for stop_after in range(1, len(trace) + 1):
        if kind == "stream" and not trace[stop_after - 1][2]:
            continue  # its augmentation would have to be replayed among the run's own draws
        check(kind, stop_after)


@pytest.mark.parametrize("kind", ["sequential", "random", "generator", "stream", "stateful stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_position_after_the_last_batch_is_the_beginning_of_the_next_epoch(kind: str, num_workers: int) -> None:
    """Scripts that count global steps start the next epoch there; an empty pass would cost them a whole one."""
    length = len(list(prepare(kind)))
    running = prepare(kind, num_workers)
    state = train(running, [], stop_after=length)
    assert state is not None
    continued = prepare(kind, num_workers)
    continued.load_state_dict(state["loader"])
    assert len(list(continued)) == length and continued.iteration == 2


@pytest.mark.parametrize("kind", [*KINDS, *STREAMS])
@pytest.mark.parametrize("count", [2, 3])
def test_each_share_of_a_sharded_loader_continues_alike(kind: str, count: int) -> None:
    if kind == "stream":
        pytest.skip("augmentation of a stream without state: tested in one process")
    for share in range(count):
        check(kind, 2, share=share, count=count)
        check(kind, 5, share=share, count=count)


@pytest.mark.parametrize("kind", ["random", "generator", "buckets", "lazy", "no batches"])
@pytest.mark.parametrize(
    "stop_after", [*(pytest.param(number, marks=slow_for("starts workers", "oracle")) for number in (1, 4, 7)), 6]
)
def test_loaders_with_workers_continue_alike(kind: str, stop_after: int) -> None:
    check(kind, stop_after, num_workers=2)


@pytest.mark.parametrize("kind", ["random", "generator"])
@pytest.mark.parametrize(
    ("stop_after", "persistent"),
    [(9, False), (2, True), *([(2, False), (6, True), (9, True)] if IS_SLOW else [])],
)
def test_augmentation_in_workers_continues_alike(kind: str, stop_after: int, persistent: bool) -> None:
    check(kind, stop_after, num_workers=2, augments=True, persistent_workers=persistent)


def test_augmentation_in_workers_continues_alike_where_each_worker_seeds_itself() -> None:
    check("random", 3, num_workers=2, augments=True, worker_init_fn=seed_from_own_seed)


def test_batches_of_one_epoch_and_equal_batches_of_two_are_augmented_differently() -> None:
    loader = prepare("sequential", 2, augments=True)
    epochs = [torch.cat([batch[:, 1] for batch in loader]) for _ in range(2)]
    assert len(set(torch.cat(epochs).tolist())) == 2 * SIZE


def seed_from_own_seed(worker_id: int) -> None:
    """As libraries do it: their seed, plus the rank, plus what torch gave this worker."""
    set_seed(torch.initial_seed() % 2**32 + 7)


@pytest.mark.parametrize("kind", ["stream", "shuffled stream"])
def test_streams_in_a_worker_continue_alike(kind: str) -> None:
    check(kind, 2, num_workers=1)
    check(kind, 8, num_workers=1)


@pytest.mark.parametrize("kind", ["random", "stateful stream", "noted stream", "shuffled stream"])
def test_dispatched_loaders_continue_alike(kind: str) -> None:
    for stop_after in (1, 5, 6, 9):
        check(kind, stop_after, dispatch_batches=True)


@pytest.mark.parametrize("batch_size", [4, SIZE, 1])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["stateful stream", "noted stream"])
def test_a_stream_saved_at_its_last_batch_continues_with_a_whole_epoch(kind: str, count: int, batch_size: int) -> None:
    length = -(-SIZE // (batch_size * count))
    for share in range(count):
        for stop_after in (length, 2 * length):
            check(kind, stop_after, share=share, count=count, batch_size=batch_size)


@pytest.mark.parametrize("settings", [{}, {"dispatch_batches": True}])
@pytest.mark.parametrize("bumps", [False, True])
@pytest.mark.parametrize("kind", ["stateful stream", "noted stream"])
def test_a_stream_saved_between_two_epochs_continues_with_a_whole_epoch(
    kind: str, bumps: bool, settings: dict[str, Any]
) -> None:
    def run() -> Any:
        loader = prepare(kind, **settings)
        if kind == "noted stream":
            loader.dataset.epoch_in_state = bumps
        return loader

    set_seed(3)
    running = run()
    train(running, [])
    state, streams = running.state_dict(), capture_rng_states()
    expected: Trace = []
    train(running, expected, num_epochs=2)
    set_seed(4)
    continued = run()
    continued.load_state_dict(state)
    restore_rng_states(streams)
    found: Trace = []
    train(continued, found, num_epochs=2)
    assert found == expected


# -- what it costs, and what it replaces -------------------------------------------------------------------


def test_seeking_reads_no_data() -> None:
    dataset = Noisy(10_000)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=2, shuffle=True))
    state = train(loader, [], stop_after=4000)
    assert state is not None
    dataset.read.clear()
    resumed = prepare_data_loader(DataLoader(dataset, batch_size=2, shuffle=True))
    resumed.load_state_dict(state["loader"])
    next(iter(resumed))
    assert len(dataset.read) == 2


def test_a_stream_with_state_is_not_read_again() -> None:
    state = train(prepare("stateful stream"), [], stop_after=2)
    assert state is not None
    loader = prepare("stateful stream")
    loader.load_state_dict(state["loader"])
    next(iter(loader))
    assert loader.dataset.num_read == 8  # the batch, and the one that tells whether it is the last


@pytest.mark.parametrize("kind", ["random", "buckets", "stateful stream", "shuffled stream"])
def test_skipping_by_hand_takes_the_place_of_the_restored_position(kind: str) -> None:
    set_seed(1)
    trace: Trace = []
    state = train(prepare(kind), trace, stop_after=3)
    set_seed(1)
    whole: Trace = []
    train(prepare(kind), whole, num_epochs=2)
    loader = prepare(kind)
    assert state is not None
    loader.load_state_dict(state["loader"])
    restore_rng_states(state["streams"])
    first = loader if kind == "stateful stream" else skip_first_batches(loader, 3)
    after: Trace = []
    train(first, after)
    train(loader, after)
    assert [row[0][0] for row in after] == [row[0][0] for row in whole[3:]] or kind == "shuffled stream"
    assert [row[1] for row in after] == [row[1] for row in whole[3:]]
    assert loader.iteration == 2


def test_the_position_is_kept_when_a_loop_is_left_early() -> None:
    loader = prepare("random")
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["rounds"], state["samples"]) == (0, 3, 12)


def test_a_position_that_was_loaded_is_saved_again_as_it_was() -> None:
    state = train(prepare("random"), [], stop_after=3)
    assert state is not None
    loader = prepare("random")
    loader.load_state_dict(state["loader"])
    again = loader.state_dict()
    assert {key: again[key] for key in ("epoch", "rounds", "groups", "samples", "witnesses")} == {
        key: state["loader"][key] for key in ("epoch", "rounds", "groups", "samples", "witnesses")
    }


def test_asking_for_another_epoch_gives_up_the_restored_position() -> None:
    state = train(prepare("sequential"), [], stop_after=3)
    assert state is not None
    loader = prepare("sequential")
    loader.load_state_dict(state["loader"])
    loader.set_epoch(0)
    assert next(iter(loader))[0, 0] == 12
    loader.load_state_dict(state["loader"])
    loader.set_epoch(1)
    assert next(iter(loader))[0, 0] == 0


def test_an_order_that_cant_be_begun_again_is_noticed() -> None:
    class Forgetful(Sampler):
        def __init__(self, seed: int) -> None:
            self.random = random.Random(seed)

        def __iter__(self):
            return iter(self.random.sample(range(SIZE), SIZE))

        def __len__(self) -> int:
            return SIZE

    def loader(seed: int) -> Any:
        return prepare_data_loader(DataLoader(range(SIZE), batch_size=4, sampler=Forgetful(seed)))

    state = train(loader(1), [], stop_after=2)
    assert state is not None
    other = loader(2)
    other.load_state_dict(state["loader"])
    with pytest.warns(ResumeWarning, match="doesn't give the order"):
        next(iter(other))


@pytest.mark.parametrize("generator", [random.Random(3), torch.Generator(), np.random.default_rng(3)])
def test_a_generator_that_a_dataset_keeps_to_itself_is_noticed(generator: Any) -> None:
    class Noise:
        rng: Any

    class Augmented(Dataset):
        def __init__(self) -> None:
            self.transforms = [Noise()]
            self.transforms[0].rng = generator
            self.rows = torch.arange(SIZE)

        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.rows[index]

    def loader(dataset: Any) -> Any:
        return prepare_data_loader(DataLoader(Subset(dataset, range(SIZE)), batch_size=4, shuffle=True))

    state = train(loader(Augmented()), [], stop_after=2)
    assert state is not None
    with pytest.warns(ResumeWarning, match=r"dataset\.dataset\.transforms\[0\]\.rng"):
        loader(Augmented()).load_state_dict(state["loader"])
    loader(range(SIZE)).load_state_dict(state["loader"])  # says nothing: a warning would be an error here


def test_what_isnt_a_position_is_refused() -> None:
    with pytest.raises(CheckpointError, match="state_dict"):
        prepare("random").load_state_dict({"epoch": 1})


# -- another number of ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "generator", "sequential", "buckets", "stateful stream", "shuffled stream"])
@pytest.mark.parametrize("saved_on", [1, 2, 4])
@pytest.mark.parametrize("continued_on", [1, 2, 3, 8])
def test_another_number_of_ranks_sees_each_sample_once(kind: str, saved_on: int, continued_on: int) -> None:
    def real(loader: Any, share: int, batch: torch.Tensor) -> list[float]:
        return batch[: loader.coverage.valid[share], 0].tolist()

    first = 1.0 if kind == "stateful stream" else 0.0
    seen: list[float] = []
    states = []
    for share in range(saved_on):
        set_seed(5)
        loader = prepare(kind, share=share, count=saved_on, rng_types=[])
        for batch in loader:
            seen += real(loader, share, batch)
            states.append(loader.state_dict())
            break
    for share in range(continued_on):
        set_seed(6)
        loader = prepare(kind, share=share, count=continued_on, rng_types=[])
        loader.load_state_dict(states[0])
        for batch in loader:
            seen += real(loader, share, batch)
    expected = sorted({i for cut in Buckets() for i in cut}) if kind == "buckets" else range(SIZE)
    assert sorted(seen) == [first + i for i in expected]


def test_a_position_moves_between_split_and_whole_batches() -> None:
    loader = prepare_data_loader(DataLoader(range(40), batch_size=4), CPU, 2, 0)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    split = prepare_data_loader(DataLoader(range(40), batch_size=8), CPU, 2, 0, split_batches=True)
    split.load_state_dict(state)
    assert next(iter(split)).tolist() == [8, 9, 10, 11]


# -- torchdata's loader ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["random", "stateful stream"])
def test_stateful_loaders_continue_the_order_and_the_dataset(kind: str, num_workers: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return prepare(kind, num_workers, use_stateful_dataloader=True)

    def samples(batches: Any) -> list[float]:
        return [sample for batch in batches for sample in batch[:, 0].tolist()]

    for stop_after in range(1, 7):
        set_seed(3)
        running = loader()
        batches = iter(running)
        for _ in range(stop_after):
            next(batches)
        state, streams = running.state_dict(), capture_rng_states()
        rests = [samples(batches), samples(running)]
        expected = [rest for rest in rests if rest]  # after the last batch nothing is left of the epoch
        continued = loader()
        continued.load_state_dict(state)
        restore_rng_states(streams)
        assert [samples(continued) for _ in expected] == expected
