"""After one seed on all ranks the host streams stay equal; on one process they stand where torch's loop leaves them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.distributed.random import capture_host_streams, same_stream_state, set_seed
from accelerate.distributed.world import join_world
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks
from tests.slow import slow_for

SIZE = 19
CPU = torch.device("cpu")
slow = slow_for("starts workers")


def draw() -> None:
    """One draw from each stream."""
    torch.rand(()), random.random(), np.random.rand()


class Rows(Dataset):
    def __init__(self, augments: bool = False) -> None:
        self.augments = augments

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.augments:
            draw()
        return torch.tensor(float(index))


class Drawn(Rows):
    """What is drawn from each stream while a sample is read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random()])


class Stream(IterableDataset):
    def __init__(self, augments: bool = False) -> None:
        self.augments = augments

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(SIZE):
            if self.augments:
                draw()
            yield torch.tensor(float(index))


class ByPython(Sampler):
    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(order)


class ByNumpy(ByPython):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SIZE).tolist())


class Lazy(ByPython):
    """Draws from every stream for every sample."""

    def __iter__(self) -> Iterator[int]:
        for index in range(SIZE):
            draw()
            yield index


class Batches(Sampler):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = list(ByPython())
        yield from (order[start : start + 4] for start in range(0, SIZE, 4))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


Make = Callable[..., DataLoader]
loads = partial(partial, DataLoader)
# What is loaded: the loader, and the arguments of prepare_data_loader.
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sequential": (loads(Rows(), 4), {}),
    "shuffled": (loads(Rows(), 4, shuffle=True), {}),
    "shuffled, dropping the last": (loads(Rows(), 4, shuffle=True, drop_last=True), {}),
    "not batched": (loads(Rows(), None, shuffle=True), {}),
    "augmented": (loads(Rows(augments=True), 4, shuffle=True), {}),
    "weighted": (loads(Rows(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)), {}),
    "subset": (loads(Rows(), 4, sampler=SubsetRandomSampler(range(SIZE))), {}),
    "with replacement": (loads(Rows(), 4, sampler=RandomSampler(Rows(), replacement=True)), {}),
    "by python": (loads(Rows(), 4, sampler=ByPython()), {}),
    "by numpy": (loads(Rows(), 4, sampler=ByNumpy()), {}),
    "lazy": (loads(Rows(), 4, sampler=Lazy()), {}),
    "batches": (loads(Rows(), batch_sampler=Batches()), {}),
    "split": (loads(Rows(), 4, shuffle=True), {"split_batches": True}),
    "uneven": (loads(Rows(), 4, shuffle=True), {"even_batches": False}),
    "stateful": (loads(Rows(), 4, shuffle=True), {"use_stateful_dataloader": True}),
    "index-free": (loads(Rows(), 4, shuffle=True), {"index_free_shuffle": True}),
    "seedable": (loads(Rows(), 4, shuffle=True), {"use_seedable_sampler": True}),
    "augmented by sample": (loads(Rows(augments=True), 4, shuffle=True), {"augment_by_sample": True}),
    "stream": (loads(Stream(), 4), {"dispatch_batches": False}),
    "augmented stream": (loads(Stream(augments=True), 4), {"dispatch_batches": False}),
    "generator": (lambda **options: DataLoader(Rows(), 4, shuffle=True, generator=seeded(), **options), {}),
    "sampler with a generator": (
        lambda **options: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), generator=seeded()), **options),
        {},
    ),
}
DISPATCHED = [
    "sequential",
    "shuffled",
    "shuffled, dropping the last",
    "augmented",
    "weighted",
    "by python",
    "by numpy",
    "lazy",
    "batches",
    "stateful",
    "seedable",
    "generator",
    "stream",
    "augmented stream",
]
for _name in DISPATCHED:
    KINDS[f"{_name}, dispatched"] = (KINDS[_name][0], {**KINDS[_name][1], "dispatch_batches": True})

# The order of these is decided by a seed of their own, so they draw less than the loader that they replace.
OF_THEIR_OWN_SEED = {
    name for name in KINDS if name.partition(",")[0] in ("seedable", "index-free", "augmented by sample")
}
# What is drawn while the next batch is read ahead (to know the last one) is drawn before the body of the loop.
READ_AHEAD = {name for name in KINDS if name.startswith(("augmented stream", "lazy"))}

# Among four ranks, or with one batch left out, some have none left where others have one.
HAVE_UNEQUAL_PARTS = {"uneven", "not batched", "lazy"}

States = list[dict[str, Any]]


def walk(loader: Any, inside: bool = True) -> States:
    """The states of the host streams along two epochs and one that is left early."""
    states = [capture_host_streams()]
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 1 and inside:
                states.append(capture_host_streams())
                draw()
        states.append(capture_host_streams())
    for _ in loader:
        break
    return [*states, capture_host_streams()] if inside else states


def equal(one: States, other: States) -> list[bool]:
    assert len(one) == len(other)
    return [
        all(same_stream_state(state[name], against[name]) for name in state)
        for state, against in zip(one, other, strict=True)
    ]


def generators_of(loader: Any) -> list[torch.Tensor]:
    found = [loader.generator, getattr(loader.get_sampler(), "generator", None)]
    return [generator.get_state() for generator in found if isinstance(generator, torch.Generator)]


# -- one process, and pretended ones -----------------------------------------------------------------------


#: In workers, whose start draws too: one of each kind of loader.
QUICK_IN_WORKERS = ("shuffled", "by python", "generator", "stateful", "augmented stream", "shuffled, dispatched")


@pytest.mark.parametrize(
    ("num_workers", "kind"),
    [
        pytest.param(num_workers, kind, marks=slow if num_workers and kind not in QUICK_IN_WORKERS else ())
        for num_workers in (0, 2)
        for kind in sorted(set(KINDS) - OF_THEIR_OWN_SEED)
    ],
)
def test_on_one_process_the_streams_stand_where_those_of_torchs_loop_stand(kind: str, num_workers: int) -> None:
    make, options = KINDS[kind]
    inside = kind not in READ_AHEAD
    bare = make(num_workers=num_workers)
    set_seed(5)
    expected = walk(bare, inside)
    loader = make(num_workers=num_workers)
    set_seed(5)
    prepared = prepare_data_loader(loader, CPU, 1, 0, put_on_device=True, **options)
    assert all(equal(walk(prepared, inside), expected))
    assert bare.generator is None or torch.equal(bare.generator.get_state(), prepared.generator.get_state())


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {name for name in KINDS if "dispatched" in name}))
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_share_draws_what_the_others_draw(kind: str, count: int, num_workers: int) -> None:
    if num_workers and (count == 4 or kind not in ("shuffled", "by python", "generator", "stateful", "stream")):
        pytest.skip("how many shares there are is nothing to the workers")
    if count == 4 and kind in HAVE_UNEQUAL_PARTS:
        pytest.skip("here a share has less batches than others, so it reads less")
    make, options = KINDS[kind]
    found = []
    for share in range(count):
        loader = make(num_workers=num_workers)
        set_seed(5)
        found.append(walk(prepare_data_loader(loader, CPU, count, share, put_on_device=True, **options)))
    for other in found[1:]:
        assert all(equal(other, found[0]))


@pytest.mark.parametrize(
    "kind", ["shuffled", *(pytest.param(kind, marks=slow) for kind in ("sequential", "batches")), "generator"]
)
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_first_epoch_of_a_skipped_copy_draws_what_torchs_loop_draws(
    kind: str, num_workers: int, persistent: bool, skipped: int
) -> None:
    """Trainers that resume read their first epoch from a copy, and the others from the loader: each starts workers."""
    make, options = KINDS[kind]

    def epochs(loader: Any) -> States:
        states = []
        for one in (skip_first_batches(loader, skipped), loader, skip_first_batches(loader, 1), loader):
            for _ in one:
                pass
            states.append(capture_host_streams())
        return states

    bare, loader = (make(num_workers=num_workers, persistent_workers=persistent) for _ in range(2))
    set_seed(5)
    expected = epochs(bare)
    set_seed(5)
    prepared = prepare_data_loader(loader, CPU, 1, 0, put_on_device=True, **options)
    assert all(equal(epochs(prepared), expected))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_not_reseeded_draw_what_torchs_workers_draw(persistent: bool, stateful: bool) -> None:
    def epochs(loader: Any) -> list[list[float]]:
        return [[row for batch in loader for row in batch.flatten().tolist()] for _ in range(2)]

    def loader() -> DataLoader:
        return DataLoader(Drawn(), 4, shuffle=True, num_workers=2, persistent_workers=persistent)

    bare = loader()
    options: dict[str, Any] = {"use_stateful_dataloader": stateful}
    set_seed(5)
    expected = epochs(bare)
    set_seed(5)
    assert epochs(prepare_data_loader(loader(), CPU, 1, 0, reseed_workers=False, **options)) == expected
    set_seed(5)
    assert epochs(prepare_data_loader(loader(), CPU, 1, 0, **options)) != expected


# -- real ranks --------------------------------------------------------------------------------------------


def along_all(kinds: list[str], num_workers: int, skipped: int = 0) -> list[tuple[States, list[torch.Tensor]]]:
    world = join_world(cpu=True)
    found = []
    for kind in kinds:
        make, options = KINDS[kind]
        loader = make(num_workers=num_workers)
        set_seed(5)
        loader = prepare_data_loader(loader, world.device, put_on_device=True, rng_types=["generator"], **options)
        if skipped:
            loader = skip_first_batches(loader, skipped)
        states = walk(loader)
        found.append((states, generators_of(loader) if "generator" in kind else []))
    return found


@pytest.mark.parametrize(
    ("num_processes", "num_workers", "skipped"),
    [(2, 0, 0), pytest.param(2, 2, 0, marks=slow), (4, 0, 0), (2, 0, 1)],
    ids=str,
)
def test_after_the_same_seed_the_streams_are_equal_on_all_ranks(
    num_processes: int, num_workers: int, skipped: int
) -> None:
    kinds = [kind for kind in KINDS if (num_processes, skipped) == (2, 0) or kind not in HAVE_UNEQUAL_PARTS]
    if num_workers:
        kinds = [kind for kind in kinds if kind.startswith(("shuffled", "by python", "generator", "augmented stream"))]
    first, *others = run_on_ranks(along_all, num_processes, kinds, num_workers, skipped)
    for other in others:
        for kind, (states, generators), (expected, same) in zip(kinds, other, first, strict=True):
            assert equal(states, expected) == [True] * len(states), kind
            assert all(torch.equal(one, two) for one, two in zip(generators, same, strict=True)), kind


def test_ranks_that_stand_elsewhere_draw_as_much_and_keep_what_is_theirs() -> None:
    """With a seed of its own each rank goes on in its own stream, one draw further, and has the order of rank 0."""

    def ranks() -> tuple[list[float], float, float]:
        world = join_world(cpu=True)
        set_seed(5, device_specific=True)
        random.seed(1)
        loader = prepare_data_loader(DataLoader(Rows(), 2, shuffle=True), world.device, rng_types=["generator"])
        order = [index for batch in loader for index in batch.tolist()]
        return order, torch.rand(()).item(), random.random()

    results = run_on_ranks(ranks)
    assert sorted({index for order, _, _ in results for index in order}) == list(range(SIZE))
    for rank, (_, drawn, _) in enumerate(results):
        torch.manual_seed(5 + rank)
        list(DataLoader(Rows(), 2, shuffle=True))
        assert drawn == torch.rand(()).item()
    assert results[0][2] == results[1][2]


# -- every public call -------------------------------------------------------------------------------------

# Public calls that aren't made below, and why no stream can be moved by them, or why it has to be.
NOT_CALLED = {
    "backward_in_parts": "restores the streams between its attempts itself; its own tests compare the draws",
    "deepspeed_ulysses_dl_adapter": "hands back the loader, where DeepSpeed's engine isn't",
    "load_state": "sets the streams: the test below",
    "lomo_backward": "needs an optimizer of a package that isn't a requirement, and calls only that",
    "pipeline_step": "is refused, where no pipeline is",
    "resume": "is load_state, with a folder that it looks for",
}


def public_methods() -> set[str]:
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    return {name for name in public if not isinstance(getattr(Accelerator, name), property)}


def calls(accelerator: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """The public calls of a training script, in an order in which they can be made."""
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    base = DataLoader(Rows(), 4, shuffle=True)
    tensor = torch.ones(2, 2)
    ready: dict[str, Any] = {}

    def prepare() -> None:
        ready["all"] = accelerator.prepare(model, optimizer, schedule, base)

    def backward() -> None:
        with accelerator.accumulate(ready["all"][0]), accelerator.autocast():
            accelerator.backward(ready["all"][0](tensor).sum())

    def with_configuration() -> nn.Module:
        model.config = {"size": 2}  # type: ignore[assignment]
        return model

    def enter(name: str, *arguments: Any) -> None:
        with getattr(accelerator, name)(*arguments):
            pass

    return {
        "prepare": prepare,
        "prepare_data_loader": lambda: accelerator.prepare_data_loader(DataLoader(Rows(), 4, shuffle=True)),
        "prepare_model": lambda: accelerator.prepare_model(nn.Identity(), evaluation_mode=True),
        "backward": backward,
        "clip_grad_norm_": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        "unscale_gradients": accelerator.unscale_gradients,
        "prepared.step": lambda: [part.step() for part in ready["all"][1:3]],
        "accumulate": lambda: enter("accumulate", ready["all"][0]),
        "autocast": lambda: enter("autocast"),
        "maybe_context_parallel": lambda: enter("maybe_context_parallel"),
        "average_weights": lambda: accelerator.average_weights(ready["all"][0]).update(),
        "streaming_mean": lambda: accelerator.streaming_mean(),
        "watch_run": lambda: accelerator.watch_run(),
        "prepare_optimizer": lambda: accelerator.prepare_optimizer(torch.optim.SGD(model.parameters())),
        "prepare_scheduler": lambda: accelerator.prepare_scheduler(schedule),
        "verify_device_map": lambda: accelerator.verify_device_map(model),
        "on_main_process": lambda: accelerator.on_main_process(tensor.sum)(),
        "on_local_main_process": lambda: accelerator.on_local_main_process(tensor.sum)(),
        "on_last_process": lambda: accelerator.on_last_process(tensor.sum)(),
        "on_process": lambda: accelerator.on_process(tensor.sum, 1)(),
        "on_local_process": lambda: accelerator.on_local_process(tensor.sum, 1)(),
        "register_for_checkpointing": lambda: accelerator.register_for_checkpointing(nn.Identity()),
        "register_save_state_pre_hook": lambda: accelerator.register_save_state_pre_hook(lambda *_: None),
        "register_load_state_pre_hook": lambda: accelerator.register_load_state_pre_hook(lambda *_: None),
        "gather": lambda: accelerator.gather(tensor),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(tensor),
        "reduce": lambda: accelerator.reduce(tensor),
        "pad_across_processes": lambda: accelerator.pad_across_processes(tensor),
        "wait_for_everyone": accelerator.wait_for_everyone,
        "no_sync": lambda: enter("no_sync", ready["all"][0]),
        "trigger_sync_in_backward": lambda: enter("trigger_sync_in_backward", ready["all"][0]),
        "join_uneven_inputs": lambda: enter("join_uneven_inputs", [ready["all"][0]]),
        "split_between_processes": lambda: enter("split_between_processes", [1, 2, 3]),
        "main_process_first": lambda: enter("main_process_first"),
        "local_main_process_first": lambda: enter("local_main_process_first"),
        "profile": lambda: enter("profile"),
        "set_trigger": accelerator.set_trigger,
        "check_trigger": accelerator.check_trigger,
        "unwrap_model": lambda: accelerator.unwrap_model(ready["all"][0]),
        "get_state_dict": lambda: accelerator.get_state_dict(ready["all"][0]),
        "skip_first_batches": lambda: accelerator.skip_first_batches(ready["all"][3], 1),
        "save": lambda: accelerator.save({"a": 1}, folder / "object.bin"),
        "save_model": lambda: accelerator.save_model(ready["all"][0], folder / "weights"),
        "export_model": lambda: accelerator.export_model(with_configuration(), folder / "exported"),
        "save_state": lambda: accelerator.save_state(folder / "state"),
        "wait_for_checkpoint": accelerator.wait_for_checkpoint,
        "compare_replicas": accelerator.compare_replicas,
        "fingerprint": accelerator.fingerprint,
        "stream_weights": lambda: list(accelerator.stream_weights(ready["all"][0])),
        "init_trackers": lambda: accelerator.init_trackers("run"),
        "get_tracker": lambda: accelerator.get_tracker("none"),
        "log": lambda: accelerator.log({"loss": 1.0}),
        "print": lambda: accelerator.print(""),
        "end_training": accelerator.end_training,
        "free_memory": lambda: accelerator.free_memory(),
        "clear": lambda: accelerator.clear(),
    }


def along_the_calls(folder: Path) -> dict[str, bool]:
    accelerator = Accelerator(cpu=True)
    unmoved: dict[str, bool] = {}
    for name, call in calls(accelerator, folder).items():
        set_seed(5)
        before = capture_host_streams()
        call()
        unmoved[name] = equal([capture_host_streams()], [before]) == [True]
    set_seed(5)
    before = capture_host_streams()
    Accelerator(cpu=True)
    return {**unmoved, "Accelerator": equal([capture_host_streams()], [before]) == [True]}


def test_every_public_call_is_made_or_has_a_reason() -> None:
    accelerator = Accelerator(cpu=True)
    made = {name for name in calls(accelerator, Path()) if not name.startswith("prepared.")}
    assert made.isdisjoint(NOT_CALLED) and made | set(NOT_CALLED) == public_methods()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_no_public_call_moves_a_stream(num_processes: int, tmp_path: Path) -> None:
    for moved in run_on_ranks(along_the_calls, num_processes, tmp_path):
        assert [name for name, unmoved in moved.items() if not unmoved] == []


def saved_and_loaded(folder: Path) -> States:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration())
    set_seed(5)
    loader = accelerator.prepare(DataLoader(Rows(), 4, shuffle=True))
    next(iter(loader))
    accelerator.save_state(folder / "state")
    saved = capture_host_streams()
    set_seed(8)
    accelerator.load_state(folder / "state")
    states = [saved, capture_host_streams()]
    list(loader)
    AcceleratorState._reset_state(True)
    return [*states, capture_host_streams()]


def test_a_loaded_state_leaves_the_streams_equal_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(saved_and_loaded, 2, tmp_path)
    assert equal(first, second) == [True] * 3
    assert equal(first[:1], first[1:2]) == [True]
