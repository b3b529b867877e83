"""With use_stateful_dataloader a prepared loader is torchdata's, and exchanges positions with it in both directions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    ResumeWarning,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from tests.ranks import run_on_ranks
from tests.slow import slow

pytest.importorskip("torchdata")
SIZE = 23
CPU = torch.device("cpu")


def stateful(*arguments: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*arguments, **options)


def is_stateful(loader: Any) -> bool:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return isinstance(loader, StatefulDataLoader)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Stateful(IterableDataset):
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < SIZE:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


KINDS = ["sequential", "shuffled by torchdata", "generator", "stream", "stateful stream"]
#: With the number of workers; the order of some kinds is nothing to them.
CASES = [
    pytest.param(num_workers, kind, marks=slow if num_workers and kind in ("sequential", "generator") else ())
    for num_workers in (0, 2)
    for kind in KINDS
]


def bare(kind: str, num_workers: int, share: int = 0, count: int = 1) -> Any:
    if count > 1:
        whole = BatchSampler(range(SIZE), 4, drop_last=False)
        return stateful(range(SIZE), batch_sampler=BatchSamplerShard(whole, count, share), num_workers=num_workers)
    if kind == "stream":
        return stateful(Stream(), 4, num_workers=num_workers)
    if kind == "stateful stream":
        return stateful(Stateful(), 4, num_workers=num_workers)
    if kind == "generator":
        sampler = RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(2))
        return stateful(range(SIZE), 4, sampler=sampler, num_workers=num_workers)
    return stateful(range(SIZE), 4, shuffle="shuffled" in kind, num_workers=num_workers)


def prepared(kind: str, num_workers: int, share: int = 0, count: int = 1, dispatch_batches: bool = False) -> Any:
    base = bare(kind, num_workers)
    options: dict[str, Any] = {"use_stateful_dataloader": True, "dispatch_batches": dispatch_batches}
    return prepare_data_loader(base, CPU, count, share, put_on_device=True, **options)


def after(loader: Any, num_batches: int) -> tuple[dict[str, Any], list[list[int]]]:
    """The position after some batches, and what comes after it."""
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    return state, [batch.tolist() for batch in batches]


def test_prepared_loaders_are_torchdatas() -> None:
    shard, dispatcher = (prepared("sequential", 0, dispatch_batches=dispatches) for dispatches in (False, True))
    stream = prepared("stream", 0)
    loaders = [shard, dispatcher, stream, *(skip_first_batches(loader, 1) for loader in (shard, dispatcher, stream))]
    loaders += [SkipDataLoader(range(4), 1, use_stateful_dataloader=True)]
    loaders += [DataLoaderShard(range(4), use_stateful_dataloader=True)]
    assert all(is_stateful(loader) for loader in loaders)
    assert isinstance(shard, DataLoaderShard) and isinstance(dispatcher, DataLoaderDispatcher)
    assert not is_stateful(prepare_data_loader(bare("sequential", 0)))
    again = pickle.loads(pickle.dumps(shard))
    assert is_stateful(again) and [batch.tolist() for batch in again] == [batch.tolist() for batch in shard]


def test_prepared_loaders_of_two_ranks_are_torchdatas() -> None:
    def ranks() -> list[bool]:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        found = []
        for dispatches in (False, True):
            config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatches)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            loader = accelerator.prepare(DataLoader(range(16), 2))
            state, rest = after(loader, 2)
            other = accelerator.prepare(DataLoader(range(16), 2))
            other.load_state_dict(state)
            found += [is_stateful(loader), is_stateful(skip_first_batches(loader, 1))]
            found += [[batch.tolist() for batch in other] == rest]
        return found

    assert run_on_ranks(ranks) == [[True] * 6] * 2


@pytest.mark.parametrize(("num_workers", "kind"), CASES)
@pytest.mark.parametrize("dispatch_batches", [False, True])
def test_torchdata_continues_from_a_position_of_a_prepared_loader(
    kind: str, num_workers: int, dispatch_batches: bool
) -> None:
    state, rest = after(prepared(kind, num_workers, dispatch_batches=dispatch_batches), 2)
    other = bare(kind, num_workers)
    other.load_state_dict(state)
    assert rest and [batch.tolist() for batch in other] == rest


@pytest.mark.parametrize(("num_workers", "kind"), CASES)
@pytest.mark.parametrize("dispatch_batches", [False, True])
def test_a_prepared_loader_continues_from_a_position_of_torchdatas(
    kind: str, num_workers: int, dispatch_batches: bool
) -> None:
    state, rest = after(bare(kind, num_workers), 2)
    loader = prepared(kind, num_workers, dispatch_batches=dispatch_batches)
    # A sampler of torch's is asked for its order again, by torchdata too: what its generator drew isn't held.
    with pytest.warns(ResumeWarning, match="hold the order") if kind == "generator" else nullcontext():
        loader.load_state_dict(state)
    ends = []
    found = []
    for batch in loader:
        found.append(batch.tolist())
        ends.append(loader.end_of_dataloader)
    assert rest and found == rest
    assert ends == [False] * (len(rest) - 1) + [True]


@pytest.mark.parametrize("num_workers", [0, 2])
# (A stream without state isn't among them: when torchdata itself continues one again, it counts what it skips twice.)
@pytest.mark.parametrize("kind", ["sequential", "shuffled by torchdata", "stateful stream"])
def test_a_position_goes_back_and_forth(kind: str, num_workers: int) -> None:
    state, _ = after(bare(kind, num_workers), 1)
    loader = prepared(kind, num_workers)
    loader.load_state_dict(state)
    state, _ = after(loader, 1)
    other = bare(kind, num_workers)
    other.load_state_dict(state)
    state, rest = after(other, 1)
    loader = prepared(kind, num_workers)
    loader.load_state_dict(state)
    assert rest and [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_another_number_of_ranks_continues_is_whole_in_the_next_epoch(num_workers: int) -> None:
    saved = prepared("stream", num_workers, 0, 2)
    for _ in saved:
        break
    loader = prepared("stream", num_workers)
    loader.load_state_dict(saved.position_state())
    epochs = [[sample for batch in loader for sample in batch.tolist()] for _ in range(2)]
    assert epochs == [list(range(8, SIZE)), list(range(SIZE))]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("share", [0, 1])
def test_shares_of_a_loader_exchange_positions(share: int, num_workers: int) -> None:
    state, rest = after(prepared("sequential", num_workers, share, 2), 1)
    other = bare("sequential", num_workers, share, 2)
    other.load_state_dict(state)
    assert rest and [batch.tolist() for batch in other] == rest
    state, rest = after(bare("sequential", num_workers, share, 2), 1)
    loader = prepared("sequential", num_workers, share, 2)
    loader.load_state_dict(state)
    assert rest and [batch.tolist() for batch in loader] == rest


def test_the_order_of_torchs_own_random_sampler_is_a_part_of_the_position() -> None:
    def loader() -> Any:
        base = DataLoader(range(SIZE), 4, shuffle=True)
        return prepare_data_loader(base, CPU, 1, 0, use_stateful_dataloader=True)

    state, rest = after(loader(), 2)
    other = bare("shuffled by torchdata", 0)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generator"])
def test_between_two_epochs_both_begin_the_next_one(kind: str) -> None:
    loader = prepared(kind, 0)
    length = len(list(loader))
    other = bare(kind, 0)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == length
    again = prepared(kind, 0)
    again.load_state_dict(other.state_dict())
    assert len(list(again)) == length


def keys_of(state: Any) -> Any:
    """The keys of a state and of the states inside of it; a sampler's or a stream's own state is its own affair."""
    if not isinstance(state, dict):
        return None
    opaque = ("_index_sampler_state", "_sampler_iter_state", "dataset_state")
    return {key: None if key in opaque else keys_of(value) for key, value in state.items()}


@pytest.mark.parametrize(("num_workers", "kind"), CASES)
def test_the_state_is_torchdatas_key_for_key(kind: str, num_workers: int) -> None:
    bare_loader, loader = bare(kind, num_workers), prepared(kind, num_workers)
    if num_workers == 0:
        assert loader.state_dict().keys() == bare_loader.state_dict().keys()
    length = sum(1 for _ in prepared(kind, num_workers))
    for num_batches in (2, length - 1):
        torch.manual_seed(4)
        expected, _ = after(bare(kind, num_workers), num_batches)
        torch.manual_seed(4)
        state, _ = after(prepared(kind, num_workers), num_batches)
        assert keys_of(state) == keys_of(expected)
        if kind in ("sequential", "stream", "stateful stream") and num_workers == 0:
            assert state == expected
    again = prepared(kind, num_workers)
    again.load_state_dict(state)
    assert keys_of(again.state_dict()) == keys_of(state), "loaded and not continued yet"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["sequential", "shuffled", "generator", "seedable", "batches"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_continues_from_its_own_state_three_times(kind: str, num_workers: int, count: int) -> None:
    def loader() -> Any:
        options: dict[str, Any] = {"shuffle": kind in ("shuffled", "seedable")}
        if kind == "generator":
            options = {"sampler": RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(2))}
        base = DataLoader(range(SIZE), 2, num_workers=num_workers, **options)
        if kind == "batches":
            own = BatchSampler(RandomSampler(range(SIZE)), 2, drop_last=False)
            base = DataLoader(range(SIZE), batch_sampler=own, num_workers=num_workers)
        seedable = kind == "seedable"
        return prepare_data_loader(base, CPU, count, 0, use_stateful_dataloader=True, use_seedable_sampler=seedable)

    torch.manual_seed(6)
    expected = [batch.tolist() for batch in loader()]
    torch.manual_seed(6)
    found, state = [], None
    for _ in range(3):
        one = loader()
        if state is not None:
            one.load_state_dict(state)
            assert one.state_dict().keys() == state.keys()
        batches = iter(one)
        found.append(next(batches).tolist())
        state = pickle.loads(pickle.dumps(one.state_dict()))
        torch.manual_seed(7)
    one = loader()
    one.load_state_dict(state)
    assert found + [batch.tolist() for batch in one] == expected


def test_a_position_without_the_order_says_so() -> None:
    base = stateful(range(SIZE), batch_sampler=BatchSampler(RandomSampler(range(SIZE)), 4, False))
    state, _ = after(base, 2)
    loader = prepare_data_loader(DataLoader(range(SIZE), 4, shuffle=True), CPU, 1, 0, use_stateful_dataloader=True)
    with pytest.warns(ResumeWarning, match="doesn't hold the order"):
        loader.load_state_dict(state)
    assert len(list(loader)) == 4


# -- a checkpoint that was written by another program ------------------------------------------------------

# `dl_state_dict.bin` as release 1.15 of the documented interface writes it, after two batches of each rank.
FOREIGN: dict[int, dict[str, Any]] = {
    0: {
        "_index_sampler_state": None,
        "_sampler_iter_state": None,
        "_sampler_iter_yielded": 2,
        "_num_yielded": 2,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
    },
    2: {
        "_snapshot": {
            "_snapshot_step": 2,
            "_last_yielded_worker_id": 1,
            "_main_snapshot": {
                "_num_workers": 2,
                "_sampler_iter_state": None,
                "_index_sampler_state": None,
                "_sampler_iter_yielded": 2,
                "_IterableDataset_len_called": None,
                "_shared_seed": None,
                "_base_seed": 6736226498938626863,
            },
            "_worker_snapshots": {
                "worker_0": {"worker_id": 0, "dataset_state": None, "fetcher_state": None},
                "worker_1": {"worker_id": 1, "dataset_state": None, "fetcher_state": None},
            },
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
    },
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_checkpoint_with_torchdatas_positions_resumes(num_workers: int, num_processes: int, tmp_path: Path) -> None:
    def ranks() -> tuple[list[list[int]], list[list[int]]]:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

        accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
            project_config=ProjectConfiguration(checkpoint_format="classic"),
        )
        _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(SIZE), 2, num_workers=num_workers))
        whole = [batch.tolist() for batch in loader]
        accelerator.save_state(tmp_path / "state")
        if accelerator.is_main_process:
            torch.save(FOREIGN[num_workers], tmp_path / "state" / "dl_state_dict.bin")
            (tmp_path / "state" / "manifest.json").unlink(missing_ok=True)  # the other program writes none
        accelerator.wait_for_everyone()
        accelerator.load_state(tmp_path / "state")
        return whole[2:], [batch.tolist() for batch in loader]

    for expected, found in run_on_ranks(ranks, num_processes):
        assert found == expected
