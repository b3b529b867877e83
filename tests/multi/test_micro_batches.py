"""Memory runs out on one rank, in any step and at any place of it: the run ends with the same weights."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.devices.memory import find_executable_batch_size
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import Network, plugin_of, samples

NUM_STEPS = 12


class OutOfMemory(RuntimeError):
    """What torch's own error says."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate 20.00 MiB")


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: FullDevice) -> torch.Tensor:
        ctx.device = device
        ctx.size = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.device.allocate(ctx.size, "backward")
        return gradients[0], None


class FullDevice:
    """A device on which from step ``since`` on no more than ``limit`` samples fit."""

    def __init__(self, limit: int, since: int, place: str) -> None:
        self.limit, self.since, self.place, self.step, self.failures = limit, since, place, 0, 0

    def allocate(self, size: int, place: str) -> None:
        if place == self.place and self.step >= self.since and size > self.limit:
            self.failures += 1
            raise OutOfMemory


class Hungry(nn.Module):
    """A network that asks the device for memory in the middle of its forward and of its backward."""

    def __init__(self, device: FullDevice) -> None:
        super().__init__()
        self.first, self.rest, self.device = nn.Linear(8, 8), Network(), device
        self.norm = nn.BatchNorm1d(8, affine=False, momentum=0.5)
        self.norm.eval()  # a buffer that DDP sends, and no statistics that depend on the parts

    def train(self, mode: bool = True) -> Hungry:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.device.allocate(len(x), "forward")
        return self.rest(_FailInBackward.apply(self.norm(hidden), self.device))


def _train(
    limit: int | None,
    since: int = 0,
    place: str = "backward",
    accumulation: int = 2,
    by_hand: int = 1,
    precision: str = "no",
    ddp: dict[str, Any] | None = None,
    hungry_rank: int = -1,
    **options: Any,
) -> dict[str, Any]:
    handlers = [DistributedDataParallelKwargs(**ddp)] if ddp is not None else None
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation * by_hand,
        kwargs_handlers=handlers,
    )
    here = accelerator.process_index == hungry_rank % accelerator.num_processes
    device = FullDevice(limit if limit is not None and here else 1000, since, place)
    torch.manual_seed(0)
    model = Hungry(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    global_batch = 16 // by_hand
    loader = DataLoader(samples(NUM_STEPS * 16), batch_size=global_batch // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            if by_hand > 1:
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
            else:
                loss = accelerator.backward_in_parts(
                    lambda part: nn.functional.cross_entropy(model(part[0]), part[1]), (x, y), **options
                )
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            device.step += 1
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    weights = {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}
    return {
        "losses": losses,
        "weights": weights,
        "failures": device.failures,
        "parts": getattr(accelerator._micro_batches, "num_parts", 1),
    }


def _alone(limit: int | None = None, **options: Any) -> dict[str, Any]:
    return run_on_ranks(functools.partial(_train, limit, **options), 1)[0]


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    """Two micro-batches of eight, as a loop would write it."""
    return _alone(by_hand=2)


def _assert_same(run: dict[str, Any], reference: dict[str, Any]) -> None:
    for name, value in reference["weights"].items():
        torch.testing.assert_close(
            torch.tensor(run["weights"][name]), torch.tensor(value), rtol=1e-5, atol=1e-6, msg=name
        )


@pytest.mark.parametrize(
    ("place", "since", "accumulation"),
    [("forward", 0, 2), ("backward", 1, 2), ("backward", 0, 1)],
)
def test_memory_that_runs_out_on_one_rank_leaves_the_weights_of_manual_accumulation(
    place: str, since: int, accumulation: int
) -> None:
    reference = _alone(accumulation=accumulation, by_hand=2)
    runs = run_on_ranks(_train, 2, 3, since, place, accumulation)
    assert [run["failures"] > 0 for run in runs] == [False, True]
    assert [run["parts"] for run in runs] == [1, 4]
    for run in runs:
        _assert_same(run, reference)


def test_one_process_splits_too(by_hand: dict[str, Any]) -> None:
    run = _alone(5)
    assert run["failures"] and run["parts"] == 4
    _assert_same(run, by_hand)


def test_nothing_is_given_up_where_everything_fits(by_hand: dict[str, Any]) -> None:
    runs = run_on_ranks(_train, 2, None)
    assert [run["parts"] for run in runs] == [1, 1]
    for run in runs:
        _assert_same(run, by_hand)


def test_the_first_batches_may_be_split_from_the_start(by_hand: dict[str, Any]) -> None:
    for run in run_on_ranks(functools.partial(_train, 2, num_parts=4), 2):
        assert run["failures"] == 0
        _assert_same(run, by_hand)


def test_a_shape_that_did_fit_before_can_be_computed_again_if_asked(by_hand: dict[str, Any]) -> None:
    runs = run_on_ranks(functools.partial(_train, 3, 6, always_careful=True), 2)
    assert [run["parts"] for run in runs] == [1, 4]
    for run in runs:
        _assert_same(run, by_hand)


def test_a_shape_that_did_fit_before_names_the_way_out() -> None:
    with pytest.raises(RankFailed, match=r"num_parts=2\), or give up the overlap.*always_careful"):
        run_on_ranks(functools.partial(_train, 3, 6), 2)


def test_replicas_that_look_for_unused_parameters_are_reduced_too(by_hand: dict[str, Any]) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    for run in run_on_ranks(functools.partial(_train, 3, 1, ddp=ddp), 2):
        _assert_same(run, by_hand)


def test_a_promised_static_graph_is_refused() -> None:
    with pytest.raises(RankFailed, match="static_graph"):
        run_on_ranks(functools.partial(_train, None, ddp={"static_graph": True}), 2)


def test_bf16_splits() -> None:
    reference = _alone(precision="bf16", by_hand=2)
    run = _alone(5, precision="bf16")
    assert run["failures"]
    torch.testing.assert_close(
        torch.tensor(run["weights"]["first.weight"]),
        torch.tensor(reference["weights"]["first.weight"]),
        rtol=0.05,
        atol=0.02,
    )


def test_one_sample_that_does_not_fit_says_so() -> None:
    with pytest.raises(RankFailed, match="MemoryExhausted: One sample at a time"):
        _alone(0, place="forward")


def test_random_numbers_of_a_failed_attempt_are_drawn_again() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    drawn: list[float] = []

    def compute(part: torch.Tensor) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        if len(part) > 2:
            raise OutOfMemory
        return model(part).mean()

    torch.manual_seed(3)
    accelerator.backward_in_parts(compute, torch.ones(4, 1))
    assert len(drawn) == 3 and drawn[0] == drawn[1] != drawn[2]


def test_other_errors_pass_and_leave_the_gradients_alone() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    model.weight.grad = torch.full((1, 1), 7.0)

    def compute(part: torch.Tensor) -> torch.Tensor:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        accelerator.backward_in_parts(compute, torch.ones(4, 1))
    assert model.weight.grad.item() == 7.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parts_add_up_as_asked(reduction: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    batch = {"x": torch.arange(5.0).view(5, 1), "names": list("abcde"), "scale": torch.tensor(2.0)}
    seen = []

    def compute(part: dict[str, Any]) -> torch.Tensor:
        assert len(part["names"]) == len(part["x"]) and part["scale"].item() == 2.0
        seen.append("".join(part["names"]))
        total = (model(part["x"]) * part["scale"]).sum()
        return total / len(part["x"]) if reduction == "mean" else total / 5

    loss = accelerator.backward_in_parts(compute, batch, reduction=reduction, num_parts=3)
    assert seen == ["a", "bc", "de"]
    assert model.weight.grad.item() == pytest.approx(4.0)
    assert loss.item() == pytest.approx(4.0 * model.weight.item())
    with pytest.raises(ValueError, match="reduction='max'"):
        accelerator.backward_in_parts(compute, batch, reduction="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="can't split"):
        accelerator.backward_in_parts(compute, {"names": ["a"]})


# ------------------------------------------------------------------------------ begin again with a smaller batch


def _find_size(plugin: dict[str, Any] | None, full_ranks: tuple[int, ...], in_parts: bool) -> tuple[list[int], Any]:
    gc.freeze()  # what the process was forked with need not be looked through after every failure
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_of(plugin))
    here = accelerator.process_index in full_ranks
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda size: size // 2)
    def train(batch_size: int) -> dict[str, Any]:
        tried.append(batch_size)
        accelerator.free_memory()
        torch.manual_seed(0)
        device = FullDevice(0 if here and batch_size > 4 else 1000, 1, "backward")  # full in the second step
        model = Hungry(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(samples(32), batch_size=batch_size // accelerator.num_processes)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            if in_parts:
                accelerator.backward_in_parts(lambda part: nn.functional.cross_entropy(model(part[0]), part[1]), (x, y))
            else:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            device.step += 1
        return {"weights": {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}}

    return tried, train()


@pytest.mark.parametrize(
    ("plugin", "full_ranks", "in_parts"),
    [
        (None, (0, 1), False),
        ({"fsdp_version": 2}, (0, 1), False),
        ({"fsdp_version": 2}, (1,), True),  # all ranks hear that one sample doesn't fit on one of them
    ],
    ids=["replicas, all of them full", "shards, all of them full", "shards, one of them full"],
)
def test_ranks_begin_again_with_the_same_smaller_batch(
    plugin: dict[str, Any] | None, full_ranks: tuple[int, ...], in_parts: bool
) -> None:
    (_, reference) = run_on_ranks(functools.partial(_find_size, None, (0,), False), 1)[0]
    found = run_on_ranks(functools.partial(_find_size, plugin, full_ranks, in_parts), 2)
    assert [tried for tried, _ in found] == [[16, 8, 4]] * 2
    _assert_same(found[0][1], reference)


def test_a_small_batch_does_not_undo_the_split() -> None:
    """The last batch of an epoch has fewer samples than parts; the next one is large again."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    sizes: list[int] = []

    def compute(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return model(part).mean()

    for size in (8, 2, 8):
        accelerator.backward_in_parts(compute, torch.ones(size, 1), num_parts=4 if not sizes else 1)
    assert sizes == [2] * 4 + [1] * 2 + [2] * 4
