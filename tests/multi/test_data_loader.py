"""Prepared loaders between real processes: one order, each sample once, one account on all ranks."""

from __future__ import annotations

import multiprocessing
import random
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.distributed.random import set_seed, synchronize_rng_states
from accelerate.distributed.world import join_world
from accelerate.training.accumulation import GradientState
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import slow

SIZE = 19


class Stream(IterableDataset):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Ragged(IterableDataset):
    """Sentences of growing length, padded batch by batch, with their text."""

    def __iter__(self):
        for index in range(SIZE):
            yield {"id": index, "tokens": [index] * (index + 1), "text": f"sentence {index}"}


def pad(items: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(item["tokens"]) for item in items)
    return {
        "id": torch.tensor([item["id"] for item in items]),
        "tokens": torch.tensor([item["tokens"] + [0] * (width - len(item["tokens"])) for item in items]),
        "text": [item["text"] for item in items],
    }


class Odd(Sampler):
    def __iter__(self):
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


def loader_of(kind: str, **arguments: Any) -> DataLoader:
    arguments = {"batch_size": 4, **arguments}
    samplers = {
        "random": lambda: RandomSampler(range(SIZE)),
        "generator": lambda: RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(3)),
        "weighted": lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, replacement=False),
        "odd": Odd,
    }
    if kind == "stream":
        return DataLoader(Stream(), **arguments)
    if kind == "ragged":
        return DataLoader(Ragged(), collate_fn=pad, **arguments)
    if kind == "objects":
        return DataLoader(Stream(), collate_fn=lambda items: [f"object {item}" for item in items], **arguments)
    if kind == "sequential":
        return DataLoader(range(SIZE), **arguments)
    return DataLoader(range(SIZE), sampler=samplers[kind](), **arguments)


def prepared(kind: str, prepare: dict[str, Any] | None = None, **arguments: Any) -> Any:
    world = join_world(cpu=True)
    options = {"put_on_device": True, "rng_types": ["generator"], **(prepare or {})}
    return prepare_data_loader(loader_of(kind, **arguments), world.device, **options)


def ids(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return batch["id"].tolist()
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def passes(kind: str, num_passes: int = 2, prepare: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    """Per pass, the batches of this rank with their accounts."""
    world = join_world(cpu=True)
    set_seed(3, device_specific=True)  # ranks draw differently, as their augmentation does
    loader = prepared(kind, prepare, **arguments)
    seen = []
    for _ in range(num_passes):
        seen.append([(ids(batch), loader.coverage, loader.end_of_dataloader) for batch in loader])
        torch.rand(1 + world.rank)  # what ranks draw between passes differs
    return seen


def real_of(results: list[list[Any]], number: int) -> list[Any]:
    found = []
    for rank, seen in enumerate(results):
        for batch, coverage, _ in seen[number]:
            assert coverage.size[rank] == len(batch)
            found += batch[: coverage.valid[rank]]
    return found


@pytest.mark.parametrize("kind", ["sequential", "random", "generator", "weighted", "odd"])
@pytest.mark.parametrize("split", [False, True])
def test_ranks_share_one_order_and_see_each_sample_once(kind: str, split: bool) -> None:
    results = run_on_ranks(lambda: passes(kind, prepare={"split_batches": split}))
    for number in range(2):
        assert sorted(real_of(results, number)) == list(range(SIZE))
        accounts = [[(coverage, is_last) for _, coverage, is_last in seen[number]] for seen in results]
        assert accounts[0] == accounts[1]
        assert [is_last for _, is_last in accounts[0]] == [False] * (len(accounts[0]) - 1) + [True]
    if kind != "sequential" and kind != "generator":
        assert real_of(results, 0) != real_of(results, 1)


def test_workers_change_nothing() -> None:
    assert run_on_ranks(lambda: passes("random")) == run_on_ranks(lambda: passes("random", num_workers=2))


@pytest.mark.parametrize("kind", ["random", "weighted", "odd"])
def test_the_order_is_that_of_the_bare_loader_on_rank_0(kind: str) -> None:
    def ranks() -> list[list[int]]:
        set_seed(3, device_specific=True)
        loader = prepared(kind)
        return [batch.tolist() for _ in range(2) for batch in loader]

    set_seed(3)
    bare = loader_of(kind)
    expected = [batch.tolist() for _ in range(2) for batch in bare]
    first, second = run_on_ranks(ranks)
    dealt = [batch for pair in zip(first, second, strict=True) for batch in pair]
    real = list(expected)
    # 5 batches: the sixth is completion, and the fifth is completed
    assert [batch for number in (0, 6) for batch in dealt[number : number + 4]] == [
        batch for number in (0, 5) for batch in real[number : number + 4]
    ]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 16])
def test_the_rules_hold_in_real_processes(size: int) -> None:
    def ranks() -> list[list[int]]:
        world = join_world(cpu=True)
        return [batch.tolist() for batch in prepare_data_loader(DataLoader(range(size), batch_size=4), world.device)]

    pretended = [
        [batch.tolist() for batch in prepare_data_loader(DataLoader(range(size), batch_size=4), None, 2, share)]
        for share in range(2)
    ]
    assert run_on_ranks(ranks) == pretended


# -- dispatching -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "ragged", "objects", "random"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=slow)])
def test_rank_0_deals_every_sample_once(kind: str, split: bool, num_processes: int) -> None:
    options = {"dispatch_batches": True, "split_batches": split}
    results = run_on_ranks(lambda: passes(kind, prepare=options, batch_size=6), num_processes)
    for number in range(2):
        found = real_of(results, number)
        expected = [f"object {i}" for i in range(SIZE)] if kind == "objects" else list(range(SIZE))
        assert sorted(found, key=str) == sorted(expected, key=str)
        assert len({len(seen[number]) for seen in results}) == 1
        assert [batch[2] for batch in results[0][number]][-1]


def test_the_documented_example_of_dispatching_holds() -> None:
    def ranks() -> Any:
        world = join_world(cpu=True)
        loader = prepare_data_loader(DataLoader(Stream(11), batch_size=4), world.device, put_on_device=True)
        seen = [(batch.tolist(), loader.remainder) for batch in loader]
        return [batch for batch, _ in seen], seen[-1][1]

    assert run_on_ranks(ranks) == [([[0, 1, 2, 3], [8, 9]], 3), ([[4, 5, 6, 7], [10, 0]], 3)]


def test_dispatching_drops_an_incomplete_round() -> None:
    def ranks() -> Any:
        world = join_world(cpu=True)
        loader = DataLoader(range(11), batch_size=2, drop_last=True)
        loader = prepare_data_loader(loader, world.device, put_on_device=True, dispatch_batches=True)
        return [(batch.tolist(), loader.end_of_dataloader) for batch in loader], len(loader)

    assert run_on_ranks(ranks) == [
        ([([0, 1], False), ([4, 5], True)], 2),
        ([([2, 3], False), ([6, 7], True)], 2),
    ]


@pytest.mark.parametrize("size", range(1, 6))
def test_fewer_samples_than_ranks_are_dispatched_once(size: int) -> None:
    def ranks() -> Any:
        world = join_world(cpu=True)
        loader = prepare_data_loader(DataLoader(Stream(size), batch_size=1), world.device, put_on_device=True)
        return [[(batch.tolist(), loader.coverage, loader.end_of_dataloader) for batch in loader]]

    assert sorted(real_of(run_on_ranks(ranks, 4), 0)) == list(range(size))


def test_a_failure_of_the_reading_rank_reaches_all_ranks() -> None:
    class Broken(IterableDataset):
        def __iter__(self):
            yield from range(8)
            raise KeyError("no such file")

    def ranks() -> str:
        world = join_world(cpu=True)
        loader = prepare_data_loader(DataLoader(Broken(), batch_size=4), world.device, put_on_device=True)
        try:
            list(loader)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, second = run_on_ranks(ranks)
    assert "KeyError" in first or "no such file" in first
    assert "Rank 0" in second and "no such file" in second


def test_a_slice_function_cuts_what_rank_0_read() -> None:
    def every_other(data: Any, cut: slice, process_index: int, num_processes: int) -> Any:
        return data[process_index::num_processes]

    options = {"dispatch_batches": True, "slice_fn_for_dispatch": every_other}
    results = run_on_ranks(lambda: passes("sequential", 1, options))
    assert next(batch for batch, _, _ in results[0][0]) == [0, 2, 4, 6]
    assert next(batch for batch, _, _ in results[1][0]) == [1, 3, 5, 7]


def test_skipping_counts_rounds_when_rank_0_deals() -> None:
    def ranks(kind: str) -> Any:
        whole = prepared(kind, {"dispatch_batches": True})
        expected = [batch.tolist() for batch in whole][1:]
        skipped = skip_first_batches(prepared(kind, {"dispatch_batches": True}), 1)
        return [batch.tolist() for batch in skipped] == expected

    assert run_on_ranks(ranks, 2, "stream") == [True, True]
    assert run_on_ranks(ranks, 2, "sequential") == [True, True]


# -- streams of random numbers -----------------------------------------------------------------------------


def test_named_streams_are_taken_over_from_rank_0_when_a_pass_begins() -> None:
    def ranks(kind: str) -> tuple[float, float]:
        world = join_world(cpu=True)
        set_seed(world.rank)
        loader = prepared(kind, {"rng_types": ["torch", "generator"]})
        next(iter(loader))
        return torch.rand(()).item(), random.random()

    for kind in ("sequential", "random", "generator"):
        first, second = run_on_ranks(ranks, 2, kind)
        assert first[0] == second[0], kind
        assert first[1] != second[1]


def test_synchronize_rng_states_takes_over_each_named_stream() -> None:
    def ranks() -> tuple[Any, ...]:
        world = join_world(cpu=True)
        set_seed(5, device_specific=True)
        generator = torch.Generator().manual_seed(world.rank)
        synchronize_rng_states(["torch", "python", "numpy", "generator"], generator)
        import numpy

        return torch.rand(()).item(), random.random(), numpy.random.rand(), torch.rand((), generator=generator).item()

    first, second = run_on_ranks(ranks)
    assert first == second


# -- continuing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "odd", "generator"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_ranks_continue_from_a_saved_position(kind: str, dispatch: bool) -> None:
    def ranks() -> tuple[Any, Any]:
        set_seed(3, device_specific=True)
        loader = prepared(kind, {"dispatch_batches": dispatch})
        seen, state, streams = [], None, None
        from accelerate.distributed.random import capture_rng_states, restore_rng_states

        for _ in range(2):
            for batch in loader:
                seen.append(batch.tolist())
                if len(seen) == 2:
                    state, streams = loader.state_dict(), capture_rng_states()
        set_seed(99)
        other = prepared(kind, {"dispatch_batches": dispatch})
        other.load_state_dict(state)
        restore_rng_states(streams)
        after = [batch.tolist() for _ in range(2) for batch in other]
        return seen[2:], after

    for expected, after in run_on_ranks(ranks):
        assert after == expected


def test_a_rank_that_leaves_its_loop_frees_the_clock() -> None:
    def ranks() -> bool:
        gradient_state = GradientState.create()
        loader = prepared("random", {"gradient_state": gradient_state})
        for _ in loader:
            break
        return gradient_state.in_dataloader

    assert run_on_ranks(ranks) == [False, False]


def held(accelerator: Accelerator) -> tuple[Any, ...]:
    """What the gradient state and this process hold of loaders, outside of every loop."""
    gradient_state = accelerator.gradient_state
    running = [reference for reference in gradient_state.dataloader_references if reference is not None]
    told = (
        gradient_state.active_dataloader,
        gradient_state.in_dataloader,
        gradient_state.end_of_dataloader,
        gradient_state.remainder,
    )
    return (running, *told, multiprocessing.active_children())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_deleted_loader_leaves_nothing_behind(num_workers: int, num_ranks: int) -> None:
    def ranks() -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        free = accelerator.free_memory
        cases = (
            ("random", False, "raise"),
            ("random", True, "drop"),
            ("stream", False, "drop"),
            ("stream", True, "raise"),
        )
        for kind, dispatch, leave in cases:
            accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=dispatch)
            base = loader_of(kind, num_workers=num_workers, persistent_workers=num_workers > 0)
            loader = accelerator.prepare(base)
            gone = weakref.ref(loader)
            assert accelerator.prepare(loader) is loader and accelerator._dataloaders == [loader]
            batches = iter(loader)
            next(batches)
            assert accelerator.gradient_state.active_dataloader is loader
            if leave == "raise":
                with pytest.raises(KeyError):
                    batches.throw(KeyError("left"))
            del batches
            assert held(accelerator)[:-1] == ([], None, False, False, -1), (kind, dispatch, leave)
            del loader, base
            assert accelerator._dataloaders == [gone()], "prepared loaders are saved with the rest"
            free = accelerator.clear if free == accelerator.free_memory else accelerator.free_memory
            free()
            assert accelerator._dataloaders == [] and gone() is None, (kind, dispatch, leave)
            assert held(accelerator) == ([], None, False, False, -1, []), (kind, dispatch, leave)
            # A later loop counts its own batches.
            loader = accelerator.prepare(DataLoader(range(10 * num_ranks - 1), batch_size=2))
            steps = []
            for _ in loader:
                with accelerator.accumulate():
                    steps.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader))
                    remainder = accelerator.gradient_state.remainder
                    assert remainder == (10 * num_ranks - 1) % (2 * num_ranks)
            assert steps == [*[(False, False)] * 3, (True, False), (True, True)]
            del loader
            accelerator.free_memory()

    run_on_ranks(ranks, num_ranks, timeout_seconds=120)


def test_an_error_in_a_dataset_is_not_swallowed() -> None:
    def ranks() -> None:
        world = join_world(cpu=True)
        list(prepare_data_loader(DataLoader([1, None, 3]), world.device))

    with pytest.raises(RankFailed, match="TypeError"):
        run_on_ranks(ranks)


def dispatched_with_a_generator(shuffle: bool, num_workers: int) -> tuple[list[list[int]], list[list[int]], bool]:
    """Two epochs, dispatched and bare, joined in the order of the ranks; whether torch's own stream stays equal."""

    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        keep: Any = {"batch_size": 2, "num_workers": num_workers, "generator": generator}
        if shuffle:
            return DataLoader(range(11), shuffle=True, **keep)
        return DataLoader(range(11), sampler=RandomSampler(range(11)), **keep)  # draws from torch's stream

    set_seed(3)
    bare = [[n for batch in one for n in batch.tolist()] for one in [loader()] for _ in range(2)]
    after_bare = torch.rand(())
    set_seed(3)
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config, rng_types=[])
    prepared = accelerator.prepare(loader())
    found = []
    for _ in range(2):
        epoch = []
        for batch in prepared:
            epoch += accelerator.gather_for_metrics(batch).tolist()
        found.append(epoch)
    return found, bare, bool(torch.rand(()) == after_bare)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dispatched_batches_come_in_the_bare_order(num_ranks: int, shuffle: bool, num_workers: int) -> None:
    for rank, (found, bare, is_stream_equal) in enumerate(
        run_on_ranks(dispatched_with_a_generator, num_ranks, shuffle, num_workers)
    ):
        assert found == bare
        assert is_stream_equal or rank > 0
