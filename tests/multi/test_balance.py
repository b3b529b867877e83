"""Ranks that read micro-batches of different sizes train as ranks with equal ones."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import Accelerator
from accelerate.guests.balance.loop import Balance, set_sizes, shard_of
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    set_seed,
)
from tests.ranks import run_on_ranks
from tests.slow import slow_for

Sample = tuple[int, torch.Tensor]
GLOBAL_BATCH = 12


class Numbered(Dataset[Sample]):
    """Samples that know their number."""

    def __init__(self, size: int) -> None:
        self.values = torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Sample:
        return index, self.values[index]


@dataclass(frozen=True)
class Way:
    """How a loop is written."""

    steps: int = 1  # micro-batches of an update
    split: bool = False
    weighted: bool = False  # the loop states its own weights
    drop_last: bool = False
    num_samples: int = 41


def network() -> nn.Module:
    set_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def prepared(way: Way, sizes: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    config = DataLoaderConfiguration(
        balance=True, split_batches=way.split, use_seedable_sampler=True, data_seed=4, **options
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=way.steps)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    size = GLOBAL_BATCH if way.split else GLOBAL_BATCH // accelerator.num_processes
    dataset = Numbered(way.num_samples)
    loader = DataLoader(dataset, size, shuffle=True, drop_last=way.drop_last)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if len(sizes) > 1:
        force(loader, sizes)
    return accelerator, model, optimizer, loader


def sizes_of(loader: Any) -> tuple[int, ...]:
    shard = shard_of(loader)
    assert shard is not None
    return shard.sizes


def force(loader: Any, sizes: tuple[int, ...]) -> None:
    shard = shard_of(loader)
    assert shard is not None
    set_sizes(shard, sizes)
    assert shard.sizes == sizes


@dataclass
class Seen:
    """What happened in the updates: gradients, the samples of all ranks, and this rank's rows."""

    gradients: list[torch.Tensor]
    samples: list[list[int]]
    rows: list[int]


def train(objects: tuple[Any, ...], way: Way, epochs: int = 1, save_after: int = 0, folder: str = "") -> Seen:
    accelerator, model, optimizer, loader = objects
    seen, num_batches = Seen([], [], []), 0
    for _ in range(epochs):
        for numbers, values in loader:
            with accelerator.accumulate(model):
                losses = model(values).square().sum(1)
                if way.weighted:
                    accelerator.backward(losses.sum(), weight=len(losses))
                else:
                    accelerator.backward(losses.mean())
                seen.samples.append(accelerator.gather_for_metrics(numbers).tolist())
                seen.rows.append(len(numbers))
                if accelerator.sync_gradients:
                    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
                    seen.gradients.append(torch.cat(gradients))
                optimizer.step()
                optimizer.zero_grad()
            num_batches += 1
            if num_batches == save_after:
                accelerator.save_state(folder)
                return seen
    return seen


def even_and(sizes: tuple[int, ...], way: Way) -> tuple[Seen, Seen]:
    """Train with equal and with the given sizes."""
    found: list[Seen] = []
    for chosen in ((), sizes):
        objects = prepared(way, chosen)
        for hook in objects[0].gradient_state.hooks.of(Balance):
            hook._seconds_of_all = lambda shard, own: [0.0]  # type: ignore[method-assign]  # the sizes stay as forced
        found.append(train(objects, way, epochs=2))
        objects[0].free_memory()
    return found[0], found[1]


WAYS = [
    Way(),
    Way(steps=3),  # the last window of an epoch is short
    Way(steps=2, weighted=True),
    Way(split=True, steps=2),
    Way(drop_last=True),
    Way(num_samples=36),  # the last global batch is complete
    Way(num_samples=5),  # less than one global batch
]


@pytest.mark.parametrize("sizes", [(12,), (9, 3), (1, 11), (1, 2, 3, 6)], ids=str)
def test_gradients_are_those_of_equal_parts(sizes: tuple[int, ...]) -> None:
    def every_way() -> list[tuple[Seen, Seen]]:
        return [even_and(sizes, way) for way in WAYS]

    ranks = run_on_ranks(every_way, len(sizes), timeout_seconds=300)
    for number, way in enumerate(WAYS):
        for rank, found in enumerate(ranks):
            even, uneven = found[number]
            assert uneven.samples == even.samples and uneven.samples[0], way
            assert len(uneven.gradients) == len(even.gradients) > 0
            for mine, theirs in zip(uneven.gradients, even.gradients, strict=True):
                assert (mine - theirs).abs().max() <= 1e-12 * max(1.0, float(theirs.abs().max())), way
            assert set(uneven.rows) == {sizes[rank]} or len(sizes) == 1
            if not way.drop_last:
                assert sorted(chain.from_iterable(uneven.samples)) == sorted([*range(way.num_samples)] * 2)


def test_any_number_of_ranks_trains_as_one() -> None:
    way = Way(num_samples=36, steps=2)

    def gradients(sizes: tuple[int, ...]) -> list[torch.Tensor]:
        return train(prepared(way, sizes), way).gradients

    one, *others = [run_on_ranks(gradients, len(sizes), sizes)[0] for sizes in ((12,), (4, 8), (1, 2, 3, 6))]
    for found in others:
        assert len(found) == len(one) == 2
        assert all((mine - theirs).abs().max() <= 1e-12 for mine, theirs in zip(found, one, strict=True))


def test_a_wrong_weight_would_be_noticed() -> None:
    """The comparison above has power: without the weight of the rows, gradients differ."""

    def unweighted() -> float:
        objects = prepared(Way(), (9, 3))
        even = train(prepared(Way(), ()), Way()).gradients[0]
        hooks = objects[0].gradient_state.hooks
        for hook in hooks.of(Balance):
            hooks.remove(hook)
        return float((train(objects, Way()).gradients[0] - even).abs().max())

    assert min(run_on_ranks(unweighted, 2)) > 1e-6


class Cloned(nn.Sequential):
    """Layers whose output is no view, which FSDP would warn of."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).clone()


def gradients_on_a_mesh(sizes: tuple[int, ...], axes: dict[str, int]) -> list[torch.Tensor]:
    """The gradients of each update under FSDP 2, of parameters as a whole."""
    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    config = ParallelismConfig(**axes)  # pyright: ignore[reportArgumentType]
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=config,
        dataloader_config=DataLoaderConfiguration(balance=True),
    )
    model: Any = Cloned(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model.tp_plan = {"0": "colwise", "2": "rowwise"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    dataset: Any = Numbered(30).values
    size = GLOBAL_BATCH // accelerator.mesh.data_share().count
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, size))
    if sizes:
        force(loader, sizes)
    found: list[torch.Tensor] = []
    for values in loader:
        assert len(values) == (sizes[accelerator.mesh.data_share().index] if sizes else size)
        accelerator.backward(model(values).square().mean())
        found.append(torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("count", "axes"),
    [
        pytest.param(2, {"dp_shard_size": 2}, id="fsdp2"),
        pytest.param(
            4, {"dp_replicate_size": 2, "dp_shard_size": 2}, id="hsdp", marks=slow_for("four ranks", "meshes")
        ),
        pytest.param(4, {"dp_shard_size": 2, "tp_size": 2}, id="tp", marks=slow_for("four ranks", "meshes")),
    ],
)
def test_shards_get_the_gradients_of_equal_parts(count: int, axes: dict[str, int]) -> None:
    sizes = (10, 2) if count == 2 or "tp_size" in axes else (1, 6, 3, 2)
    even, uneven = (run_on_ranks(gradients_on_a_mesh, count, chosen, axes)[0] for chosen in ((), sizes))
    assert len(even) == len(uneven) == 3
    assert all((mine - theirs).abs().max() <= 1e-12 for mine, theirs in zip(uneven, even, strict=True))


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_sizes_bit_for_bit(tmp_path: Path) -> None:
    way, folder = Way(num_samples=83, steps=2), str(tmp_path / "state")

    def interrupted(sizes: tuple[int, ...]) -> bool:
        whole = train(prepared(way, sizes), way)
        train(prepared(way, sizes), way, save_after=4, folder=folder)
        objects = prepared(way, ())
        objects[0].load_state(folder)
        assert sizes_of(objects[3]) == sizes
        rest = train(objects, way)
        assert rest.samples == whole.samples[4:] and rest.rows == whole.rows[4:]
        return all(map(torch.equal, rest.gradients, whole.gradients[2:])) and len(rest.gradients) == 2

    for sizes in ((10, 2), (1, 2, 8, 1)):
        assert all(run_on_ranks(partial(interrupted, sizes), len(sizes), timeout_seconds=120))


def test_another_number_of_ranks_begins_with_equal_parts(tmp_path: Path) -> None:
    way, folder = Way(num_samples=83), str(tmp_path / "state")

    def saved() -> Seen:
        return train(prepared(way, (10, 2)), way, save_after=3, folder=folder)

    def resumed() -> Seen:
        objects = prepared(way, ())
        objects[0].load_state(folder)
        assert sizes_of(objects[3]) == ()
        return train(objects, way)

    before, after = run_on_ranks(saved, 2)[0], run_on_ranks(resumed, 4)
    for rank in after:
        assert set(rank.rows) == {3}
        assert sorted(chain.from_iterable(before.samples + rank.samples)) == list(range(83))


def test_a_checkpoint_without_sizes_makes_parts_equal(tmp_path: Path) -> None:
    def loaded() -> tuple[int, ...]:
        objects = prepared(Way(), ())
        folder = objects[0].save_state(str(tmp_path / "state"))
        force(objects[3], (8, 4))
        objects[0].load_state(folder)
        return sizes_of(objects[3])

    assert run_on_ranks(loaded, 2) == [(), ()]


# -- measured speeds -----------------------------------------------------------------------------------------


class Slow(nn.Module):
    """A layer that takes a time for each row."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(values))
        return self.linear(values)


def measured(sharded: bool, epochs: int = 2) -> list[tuple[int, ...]]:
    """The sizes after each epoch, where rank 1 takes four times as long for a row."""
    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(balance=True),
        **({"fsdp_plugin": plugin} if sharded else {}),
    )
    seconds = 0.004 * 4**accelerator.process_index
    model = nn.Sequential(Slow(seconds), Slow(seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(100, 3), 5))
    found: list[tuple[int, ...]] = []
    for _ in range(epochs):
        for values in loader:
            accelerator.backward(model(values).mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(sizes_of(loader))
        with torch.no_grad():  # a loader that trains nothing changes nothing, and needs no other rank
            for _values in accelerator.prepare(DataLoader(torch.randn(4, 3), 1)) if accelerator.is_main_process else ():
                pass
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_a_slow_rank_reads_less_from_the_next_epoch_on(sharded: bool) -> None:
    first, second = run_on_ranks(measured, 2, sharded, timeout_seconds=120)
    assert first == second
    for fast, slow in first:
        assert fast + slow == 10 and fast > slow >= 1


def broken_off() -> tuple[int, ...]:
    accelerator, model, _, loader = prepared(Way(num_samples=120), ())
    model = model.module  # its gradients stay on the rank
    for number, (_, values) in enumerate(loader):
        accelerator.backward(model(values).mean())
        if number == 7 + accelerator.process_index:  # not the same on all ranks
            break
    return sizes_of(loader)


def test_a_loop_that_is_broken_off_agrees_on_nothing() -> None:
    assert run_on_ranks(broken_off, 2) == [(), ()]


# -- what is refused -----------------------------------------------------------------------------------------


def messages(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    found: list[str] = []
    for config, arguments in cases:
        try:
            Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(balance=True, **config), **arguments)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dispatch_batches=True", {"dispatch_batches": True}, {}),
    ("token_budget", {"token_budget": 8, "length_of": len}, {}),
    ("even_batches=False", {"even_batches": False}, {}),
    ("already_sharded=True", {"already_sharded": True}, {}),
    ("batch_parts", {}, {"batch_parts": 2}),
    ("FSDP version 1", {}, {"fsdp_plugin": partial(FullyShardedDataParallelPlugin, fsdp_version=1)}),
    (
        "FSDP and torch.compile",
        {},
        {
            "fsdp_plugin": partial(FullyShardedDataParallelPlugin, fsdp_version=2),
            "dynamo_plugin": partial(TorchDynamoPlugin, backend="eager"),
        },
    ),
    (
        "pipeline parallelism",
        {},
        {"parallelism_config": partial(ParallelismConfig, pp_size=2, dp_replicate_size=2)},
    ),
]


def test_what_contradicts_is_refused_by_name() -> None:
    def refusals() -> list[str]:
        made = [
            (config, {name: value() if callable(value) else value for name, value in arguments.items()})
            for _, config, arguments in REFUSED
        ]
        return messages(made)

    found = run_on_ranks(refusals, 4, timeout_seconds=120)
    for (name, *_), message in zip(REFUSED, found[0], strict=True):
        assert message.startswith("balance=True") and f"with {name}:" in message, (name, message)
    assert all(one == found[0] for one in found)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter(torch.ones(8, 3))


class Mine(torch.utils.data.BatchSampler):
    pass


def loader_refusals() -> list[str]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(balance=True))
    model = accelerator.prepare(nn.Linear(3, 1))
    data, found = torch.ones(8, 3), list[str]()
    loaders = [
        DataLoader(Stream(), 2),
        DataLoader(data, batch_size=None),
        DataLoader(data, batch_sampler=Mine(range(8), 2, False)),
    ]
    for loader in accelerator.prepare(*loaders):
        for _values in loader:
            pass  # a loop without a backward pass isn't balanced, and so not refused
        try:
            for values in loader:
                accelerator.backward(model(values).mean())
        except ValueError as error:
            found.append(str(error))
    loader = accelerator.prepare(DataLoader(data, 2))
    try:
        for values in loader:
            accelerator.backward_in_parts(lambda part: model(part).mean(), values)
    except ValueError as error:
        found.append(str(error))
    return found


def test_a_loader_that_cannot_be_balanced_is_refused_at_its_first_backward_pass() -> None:
    names = ("an iterable dataset", "batch_size=None", "the batch sampler Mine", "forward and backward in one call")
    for messages in run_on_ranks(loader_refusals, 2):
        assert len(messages) == len(names), messages
        assert all(
            message.startswith(f"balance=True with {name}") for message, name in zip(messages, names, strict=True)
        )


def in_turns(sizes: tuple[int, ...]) -> str:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(balance=True))
    model = accelerator.prepare(nn.Linear(3, 1))
    one, other = accelerator.prepare(DataLoader(torch.ones(24, 3), 2), DataLoader(torch.ones(24, 3), 2))
    if sizes:
        force(other, sizes)
    try:
        for first, second in zip(one, other, strict=True):
            accelerator.backward(model(first).mean() + model(second).mean())
    except ValueError as error:
        return str(error)
    return str(sizes_of(other))


def test_loaders_in_turn_keep_equal_parts() -> None:
    assert run_on_ranks(in_turns, 2, ()) == ["()", "()"]
    for message in run_on_ranks(in_turns, 2, (3, 1)):
        assert "several loaders in turn" in message
