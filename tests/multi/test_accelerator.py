"""The Accelerator on real ranks: replicas, gradients, collectives, guards, metrics."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from tests.ranks import RankFailed, run_on_ranks


def batches(size: int, batch_size: int, **kwargs: Any) -> DataLoader[Any]:
    """A loader over numbered samples: ``(features [batch, 3], number [batch])``."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(size, 3, generator=generator)
    return DataLoader(TensorDataset(features, torch.arange(size)), batch_size=batch_size, **kwargs)


class Network(nn.Module):
    """A model with a method beside forward, an attribute, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.greeting = "hello"
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One number per row."""
        return self.linear(inputs)

    def describe(self) -> str:
        """Touches no layer."""
        return f"{self.greeting} {self.linear.in_features}"

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        """Computes through a layer without passing through forward."""
        return self.linear(inputs) * 2


# -- training --------------------------------------------------------------------------------------------------


def train(batch_size: int, seed_by_rank: bool = False) -> tuple[list[float], torch.Tensor]:
    """Losses (mean over ranks) and final weights of two epochs."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index if seed_by_rank else 0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(16, batch_size))
    losses = []
    for _ in range(2):
        for inputs, numbers in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), numbers.float() / 16)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, accelerator.unwrap_model(model).linear.weight.detach()


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_train_like_one_process_with_the_same_global_batch(ranks: int) -> None:
    (expected, weight), *_ = run_on_ranks(train, 1, 8)
    for losses, ours in run_on_ranks(train, ranks, 8 // ranks):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert torch.allclose(ours, weight, atol=1e-6)


def test_every_rank_starts_from_the_weights_of_rank_zero_and_stays_equal() -> None:
    (_, first), (_, second) = run_on_ranks(train, 2, 4, True)
    assert torch.equal(first, second)


def test_a_model_is_wrapped_unless_it_has_nothing_to_train() -> None:
    def work() -> tuple[bool, bool, bool]:
        accelerator = Accelerator(cpu=True)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        trained, kept = accelerator.prepare(nn.Linear(2, 2), frozen)
        evaluated = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
        return isinstance(trained, DistributedDataParallel), kept is frozen, isinstance(evaluated, nn.Linear)

    assert run_on_ranks(work) == [(True, True, True)] * 2


def test_gradients_are_reduced_at_the_end_of_a_window_only() -> None:
    def work() -> list[bool]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        equal = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
            gathered = accelerator.gather(model.module.weight.grad.view(1))
            equal.append(bool(gathered[0] == gathered[1]))
            if accelerator.sync_gradients:
                model.zero_grad()
        return equal

    assert run_on_ranks(work) == [[False, True, False, True]] * 2


def test_the_sync_can_be_triggered_after_forwards_without_it() -> None:
    def work() -> float:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        inputs = torch.full((1, 1), float(accelerator.process_index + 1))
        with accelerator.no_sync(model):
            first, second = model(inputs).sum(), model(inputs).sum()
            accelerator.backward(first)
            accelerator.trigger_sync_in_backward(model)
            accelerator.backward(second)
        return model.module.weight.grad.item()

    assert run_on_ranks(work) == [3.0, 3.0]


def test_ddp_arguments_reach_the_replica() -> None:
    def work() -> bool:
        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        model.forward = model[0].forward  # type: ignore[method-assign]
        prepared = accelerator.prepare(model)
        accelerator.backward(prepared(torch.ones(1, 1)).sum())
        return prepared.find_unused_parameters

    assert run_on_ranks(work) == [True, True]


# -- methods beside forward ------------------------------------------------------------------------------------


def test_other_methods_and_attributes_of_a_replica_are_the_models_own() -> None:
    def work() -> tuple[str, str, float]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Network())
        with torch.no_grad():
            encoded = model.encode(torch.zeros(1, 3)).abs().sum().item()
        return model.greeting, model.describe(), encoded - 2 * model.linear.bias.abs().item()

    for greeting, description, difference in run_on_ranks(work):
        assert (greeting, description) == ("hello", "hello 3") and difference == pytest.approx(0.0)


def test_gradients_that_would_bypass_the_reduction_are_refused_with_the_way_out() -> None:
    def work() -> str:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Network())
        try:
            model.encode(torch.ones(1, 3))
        except ValueError as error:
            return str(error)
        return "not refused"

    for text in run_on_ranks(work):
        assert "Network.encode" in text and "unwrap_model" in text


def test_unwrapping_a_compiled_replica_leaves_it_a_replica() -> None:
    def work() -> list[bool]:
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        model = nn.Linear(2, 2)
        prepared = accelerator.prepare(model)
        inner = accelerator.unwrap_model(prepared)
        return [
            isinstance(prepared._orig_mod, DistributedDataParallel),
            inner._orig_mod is model,
            accelerator.unwrap_model(prepared, keep_torch_compile=False) is model,
        ]

    assert run_on_ranks(work) == [[True, True, True]] * 2


# -- metrics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_is_gathered_exactly_once(ranks: int) -> None:
    def work() -> list[list[int]]:
        accelerator = Accelerator(cpu=True)
        answers = []
        for size in (0, 1, 5, 11, 12):
            loader = accelerator.prepare(batches(size, 4))
            seen: list[int] = []
            for _, numbers in loader:
                seen += accelerator.gather_for_metrics({"n": [numbers]})["n"][0].tolist()
            answers.append(seen)
        return answers

    for answer in run_on_ranks(work, ranks):
        assert [sorted(seen) for seen in answer] == [list(range(size)) for size in (0, 1, 5, 11, 12)]


def test_metrics_can_be_gathered_on_the_main_process_only() -> None:
    def work() -> list[Any]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(batches(5, 2))
        return [accelerator.gather_for_metrics(numbers, to="main") for _, numbers in loader]

    main, other = run_on_ranks(work)
    assert torch.cat(main).tolist() == [0, 1, 2, 3, 4] and other == [None] * len(main)


def test_objects_are_gathered_one_per_sample() -> None:
    def work() -> list[str]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(batches(5, 2))
        seen: list[str] = []
        for _, numbers in loader:
            seen += accelerator.gather_for_metrics([f"sample {n}" for n in numbers.tolist()])
        return seen

    assert run_on_ranks(work) == [[f"sample {n}" for n in range(5)]] * 2


# -- several ranks, one program --------------------------------------------------------------------------------


def test_a_trigger_set_anywhere_is_seen_everywhere_once() -> None:
    def work() -> list[bool]:
        accelerator = Accelerator(cpu=True)
        if accelerator.is_last_process:
            accelerator.set_trigger()
        return [accelerator.check_trigger(), accelerator.check_trigger()]

    assert run_on_ranks(work) == [[True, False]] * 2


def test_guards_run_where_they_say() -> None:
    def work() -> list[Any]:
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        return [
            accelerator.on_main_process(lambda: "main")(),
            accelerator.on_last_process(lambda: "last")(),
            accelerator.on_process(lambda: rank, process_index=1)(),
            accelerator.on_local_process(lambda: rank, local_process_index=0)(),
        ]

    assert run_on_ranks(work) == [["main", None, None, 0], [None, "last", 1, None]]


def test_ranks_with_unequal_batches_can_join() -> None:
    def work() -> tuple[int, float]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(3, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches(10, 4)
        )
        count = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for inputs, _ in loader:
                optimizer.zero_grad()
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                count += 1
        return count, model.module.weight.sum().item()

    (first, weight), (second, same) = run_on_ranks(work)
    assert (first, second) == (2, 1) and weight == same


def test_a_failure_before_the_others_releases_them() -> None:
    def work() -> str:
        accelerator = Accelerator(cpu=True)
        try:
            with accelerator.main_process_first():
                if accelerator.is_main_process:
                    raise ValueError("no dataset")
        except ValueError as error:
            return str(error)
        return "went on"

    start = time.monotonic()
    assert run_on_ranks(work, timeout_seconds=30)[0] == "no dataset"
    assert time.monotonic() - start < 20


def test_a_barrier_that_one_rank_never_reaches_is_an_error_and_not_a_hang() -> None:
    def work() -> None:
        accelerator = Accelerator(cpu=True)
        if not accelerator.is_main_process:
            accelerator.wait_for_everyone()
        accelerator.end_training()

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?i)barrier|wait_for_everyone"):
        run_on_ranks(work, timeout_seconds=50)
    assert time.monotonic() - start < 45
