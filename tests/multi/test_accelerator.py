"""The Accelerator on real ranks: replicas, gradients, collectives, guards, metrics."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.errors import DistributedOperationException
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from accelerate.plugins.handlers import DataLoaderConfiguration, GradScalerKwargs, TorchDynamoPlugin
from accelerate.settings.labels import DDPCommunicationHookType
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import GeneralTracker
from tests.ranks import RankFailed, run_on_ranks


def batches(size: int, batch_size: int, **kwargs: Any) -> DataLoader[Any]:
    """A loader over numbered samples: ``(features [batch, 3], number [batch])``."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(size, 3, generator=generator)
    return DataLoader(TensorDataset(features, torch.arange(size)), batch_size=batch_size, **kwargs)


class Stream(IterableDataset[torch.Tensor]):
    """Ten numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """From zero."""
        return iter(torch.arange(10.0))


class Spy(nn.Module):
    """Remembers the dtype in which it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.computed: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product."""
        outputs = self.linear(inputs)
        self.computed = outputs.dtype
        return outputs


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
    def work() -> list[float]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        inputs = torch.full((1, 1), float(accelerator.process_index + 1))
        gradients = []
        for named in (model, nn.ModuleList([model]), nn.Sequential(model), torch.compile(model, backend="eager")):
            model.zero_grad()
            with accelerator.no_sync(named):
                first, second = model(inputs).sum(), model(inputs).sum()
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(named):
                    accelerator.backward(second)
            gradients.append(model.module.weight.grad.item())
        return gradients

    assert run_on_ranks(work) == [[3.0] * 4] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_triggering_the_sync_is_a_block_after_which_no_sync_holds_again(num_ranks: int) -> None:
    def work() -> tuple[Any, bool, bool]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        with accelerator.no_sync(model):
            loss = model(torch.ones(1, 1)).sum()
            before = getattr(model, "require_backward_grad_sync", False)
            with accelerator.trigger_sync_in_backward(model) as entered:
                accelerator.backward(loss)
                inside = getattr(model, "require_backward_grad_sync", True)
            after = getattr(model, "require_backward_grad_sync", False)
        return entered, inside, before or after

    assert run_on_ranks(work, num_ranks) == [(None, True, False)] * num_ranks


class Branches(nn.Module):
    """Two layers, of which a forward may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, inputs: torch.Tensor, through_both: bool = False) -> dict[str, torch.Tensor]:
        """Through one layer or both."""
        outputs = self.always(inputs)
        return {"outputs": self.sometimes(outputs) if through_both else outputs}


@pytest.mark.parametrize("last_uses_both", [False, True])
def test_the_sync_can_be_triggered_where_parameters_stay_unused(last_uses_both: bool) -> None:
    def work() -> list[float]:
        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = accelerator.prepare(Branches())
        inputs = torch.full((1, 1), float(accelerator.process_index + 1))
        for _ in range(2):  # twice: the second round starts from what the first one left
            model.zero_grad()
            with accelerator.no_sync(model):
                first = model(inputs, through_both=not last_uses_both)["outputs"].sum()
                second = model(inputs, through_both=last_uses_both)["outputs"].sum()
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(second)
        return [parameter.grad.item() for parameter in model.parameters()]

    assert run_on_ranks(work) == [[3.0, 1.5], [3.0, 1.5]]


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


def windows(precision: str, ranks: int) -> tuple[list[float], torch.Tensor]:
    """Gradient norms before clipping, and final weights, of eight windows of two micro-batches."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=4.0, growth_interval=3)],
    )
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(64, 4 // ranks))
    norms = []
    for inputs, numbers in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs).squeeze(1), numbers.float() / 16))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
    assert precision == "no" or accelerator.scaler.get_scale() > 4.0
    return norms, accelerator.unwrap_model(model).linear.weight.detach()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accumulated_and_clipped_windows_are_those_of_one_process(precision: str) -> None:
    ((expected, weight),) = run_on_ranks(windows, 1, precision, 1)
    (norms, first), (_, second) = run_on_ranks(windows, 2, precision, 2)
    tolerance = 1e-6 if precision == "no" else 1e-2
    assert len(norms) == 8 and norms == pytest.approx(expected, rel=tolerance)
    assert torch.equal(first, second) and torch.allclose(first, weight, atol=tolerance)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd", "batched_power_sgd"])
def test_compressed_gradients_are_the_same_on_every_rank_and_near_the_mean(hook: str) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor]:
        handler = DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType(hook), comm_state_option={"start_powerSGD_iter": 2}
        )
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        torch.manual_seed(accelerator.process_index)
        inputs, model = torch.randn(4, 8), nn.Linear(8, 8, bias=False)  # its gradient has rank one
        prepared = accelerator.prepare(model)
        for _ in range(4):  # past the iterations that low-rank hooks leave uncompressed
            prepared.zero_grad()
            accelerator.backward(prepared(inputs).sum())
        own = torch.autograd.grad(model(inputs).sum(), model.weight)[0]
        return model.weight.grad, accelerator.reduce(own, "mean")

    (first, mean), (second, _) = run_on_ranks(work)
    assert torch.equal(first, second) and torch.allclose(first, mean, atol=0.05, rtol=0.05)


def test_a_replica_that_is_still_held_goes_on_synchronising_after_free_memory() -> None:
    def work() -> list[Any]:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = Spy()
        prepared = accelerator.prepare(model)
        accelerator.free_memory()
        accelerator.backward(prepared(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
        again = accelerator.prepare(prepared)
        return [model.linear.weight.grad.item(), model.computed, again is prepared, accelerator._models == [model]]

    assert run_on_ranks(work) == [[1.5, torch.bfloat16, True, True]] * 2


def test_a_model_evaluated_first_is_a_replica_when_it_is_trained() -> None:
    def work() -> bool:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        accelerator.prepare_model(model, evaluation_mode=True)
        accelerator.free_memory()
        return isinstance(accelerator.prepare(model), DistributedDataParallel)

    assert run_on_ranks(work) == [True, True]


@pytest.mark.parametrize("compiled", ["by the user", "by regions"])
def test_gradients_stay_local_in_a_window_when_the_model_inside_the_replica_is_compiled(compiled: str) -> None:
    def work() -> list[bool]:
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True) if compiled == "by regions" else None
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
        model = nn.ModuleList([nn.Linear(1, 1, bias=False)] * 1)
        whole = nn.Sequential(*model)
        prepared = accelerator.prepare(whole if plugin else torch.compile(whole, backend="eager"))
        own = []
        for context in (accelerator.no_sync(model=prepared), nullcontext()):
            whole.zero_grad()
            with context:
                accelerator.backward(prepared(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
            own.append(whole[0].weight.grad.item() == accelerator.process_index + 1)
        return own

    assert run_on_ranks(work) == [[True, False]] * 2


def test_models_with_windows_of_their_own_are_synchronised_in_turn() -> None:
    def work() -> list[tuple[bool, bool]]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        models = accelerator.prepare(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        seen = []
        for model in models * 2:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
            gathered = accelerator.gather(model.module.weight.grad.view(1))
            seen.append((accelerator.sync_gradients, bool(gathered[0] == gathered[1])))
        return seen

    assert run_on_ranks(work) == [[(False, False), (False, False), (True, True), (True, True)]] * 2


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


def test_rows_that_are_not_one_per_sample_are_gathered_by_the_account_of_the_batch() -> None:
    def work() -> list[Any]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(batches(5, 2))
        answers: list[Any] = [[], [], [], []]
        for _, numbers in loader:
            two_rows, per_rank = numbers.repeat_interleave(2), torch.tensor(float(len(numbers)))
            answers[0] += accelerator.gather_for_metrics(two_rows).tolist()
            answers[1].append(accelerator.gather_for_metrics(per_rank).numel())
            answers[2].append(accelerator.gather_for_metrics(torch.ones(3, 7)).shape[0])
            answers[3] += [int(n) for n in accelerator.gather_for_metrics([*numbers], use_gather_object=True)]
        return answers

    for two_rows, per_rank, strangers, objects in run_on_ranks(work):
        assert two_rows == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert per_rank == [2, 1], "a rank without a real sample has no value"
        assert strangers == [6, 6], "rows that can't belong to the samples come back whole"
        assert objects == [0, 1, 2, 3, 4]


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


def joined(even_batches: bool | None, configured: bool = True, stops_at: int = -1) -> tuple[list[int], bool]:
    """How many batches there were inside and after the block, and whether the setting was restored."""
    configuration = DataLoaderConfiguration(even_batches=configured)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model, loader = accelerator.prepare(nn.Linear(3, 1), batches(10, 4))
    counts = [0, 0]
    with contextlib.suppress(KeyError), accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for inputs, _ in loader:
            accelerator.backward(model(inputs).sum())
            counts[0] += 1
            if counts[0] == stops_at:
                raise KeyError
    counts[1] = len(list(loader))
    return counts, loader.batch_sampler.even_batches is configured


def test_even_batches_are_overridden_inside_the_block_only() -> None:
    assert run_on_ranks(joined, 2, None) == [([2, 2], True)] * 2, "even batches leave nothing to join"
    assert run_on_ranks(joined, 2, False) == [([2, 2], True), ([1, 2], True)]
    assert run_on_ranks(joined, 2, None, False) == [([2, 2], True), ([1, 1], True)]
    assert run_on_ranks(joined, 2, True, False) == [([2, 2], True), ([2, 1], True)]
    assert run_on_ranks(joined, 2, True, True, 1) == [([1, 2], True)] * 2, "restored after an error too"


def test_what_cannot_be_joined_takes_part_as_it_is() -> None:
    def work() -> list[int]:
        accelerator = Accelerator(cpu=True)
        frozen = accelerator.prepare(nn.Linear(3, 1).requires_grad_(False))
        model, loader = accelerator.prepare(nn.Linear(3, 1), batches(10, 4))
        streamed = accelerator.prepare(DataLoader(Stream(), batch_size=4))
        counts = [0, 0]
        with accelerator.join_uneven_inputs([frozen, model], even_batches=False):
            for inputs, _ in loader:
                accelerator.backward((model(inputs) + frozen(inputs)).sum())
                counts[0] += 1
        counts[1] = len(list(streamed))
        return counts

    assert run_on_ranks(work) == [[2, 2], [1, 2]]


def test_in_debug_mode_unequal_shapes_are_an_error_that_names_them() -> None:
    def work() -> str:
        accelerator = Accelerator(cpu=True)
        assert accelerator.world.debug and accelerator.state.debug
        loader = accelerator.prepare(batches(8, 2))
        assert [len(accelerator.gather(numbers)) for _, numbers in loader] == [4, 4]
        try:
            accelerator.gather(torch.ones(accelerator.process_index + 1, 2))
        except DistributedOperationException as error:
            return str(error)
        return "no error"

    for text in run_on_ranks(work, environment={"ACCELERATE_DEBUG_MODE": "1"}):
        assert "[1, 2]" in text and "[2, 2]" in text and "gather" in text


def test_an_accelerator_with_replicas_survives_pickling() -> None:
    def work() -> tuple[bool, float]:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(1, 1, bias=False))
        again = pickle.loads(pickle.dumps(accelerator))
        prepared = again.prepare(again._models[0])
        again.backward(prepared(torch.full((1, 1), float(again.process_index + 1))).sum())
        return isinstance(prepared, DistributedDataParallel), again._models[0].weight.grad.item()

    assert run_on_ranks(work) == [(True, 1.5)] * 2


def test_an_accelerator_that_was_pickled_alone_accumulates_on_all_ranks() -> None:
    def saved() -> bytes:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        return pickle.dumps((accelerator, accelerator.prepare(nn.Linear(1, 1, bias=False))))

    def work(pickled: bytes) -> list[float]:
        again, model = pickle.loads(pickled)
        prepared = again.prepare(model)
        seen = []
        for _ in range(2):
            with again.accumulate(prepared):
                assert prepared.require_backward_grad_sync is again.sync_gradients
                again.backward(prepared(torch.full((1, 1), float(again.process_index + 1))).sum())
            seen.append(model.weight.grad.item())
        return seen

    # Each rank's own gradient, then the mean.
    assert run_on_ranks(work, 2, run_on_ranks(saved, 1)[0]) == [[0.5, 1.5], [1.0, 1.5]]


class Distilled(Network):
    """Calls another model, which it doesn't hold, from a method of its own."""

    def distance(self, teacher: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Compares with another model's output, and with one of another thread."""
        with ThreadPoolExecutor(1) as other:
            mine, others = teacher(inputs), other.submit(self, inputs)
            return (mine - others.result()).square().sum()


def test_a_method_may_call_another_prepared_model_and_other_threads_go_on() -> None:
    def work() -> tuple[float, float]:
        accelerator = Accelerator(cpu=True)
        student, teacher = accelerator.prepare(Distilled(), Network())
        distance = student.distance(teacher, torch.ones(2, 3, device=accelerator.device))
        accelerator.backward(distance)
        grads: Any = [accelerator.unwrap_model(model).linear.weight.grad for model in (student, teacher)]
        return distance.item(), (grads[0] + grads[1]).abs().max().item()

    for distance, difference in run_on_ranks(work):
        assert distance > 0 and difference < 1e-6


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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_views_and_accelerators_go_on_over_resets(num_ranks: int) -> None:
    """The group is kept, the views are filled again, an old Accelerator says what to do, a second follows the first."""

    def work() -> tuple[Any, ...]:
        first = Accelerator(cpu=True, mixed_precision="bf16")
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # what the launcher says by default
        PartialState._reset_state()
        second = Accelerator(gradient_accumulation_steps=2)
        seen = [PartialState._shared_state["num_processes"], second.mixed_precision, first.gradient_accumulation_steps]
        model = second.prepare(nn.Linear(1, 1, bias=False))
        for _ in range(2):
            with second.accumulate(model):
                inputs = torch.full((1, 1), float(second.process_index + 1))
                second.backward(model(inputs).sum())
                seen.append(second.sync_gradients)
        seen.append(second.unwrap_model(model).weight.grad.item())
        AcceleratorState._reset_state()
        with pytest.raises(AttributeError, match="Make the Accelerator anew"):
            second.prepare(nn.Linear(1, 1))
        third = Accelerator(cpu=True)
        seen += [third.mixed_precision, third.reduce(torch.ones(1), "sum").item()]
        return tuple(seen)

    average = sum(range(1, num_ranks + 1)) / num_ranks
    assert run_on_ranks(work, num_ranks) == [(num_ranks, "bf16", 1, False, True, average, "no", num_ranks)] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trackers_are_what_was_asked_for_on_the_main_process_and_none_elsewhere(num_ranks: int, tmp_path: Path) -> None:
    class Mine(GeneralTracker):
        name, requires_logging_directory = "mine", False

        @property
        def tracker(self) -> str:
            return "raw"

    def work() -> tuple[list[str], str]:
        accelerator = Accelerator(cpu=True, log_with=Mine(), project_dir=tmp_path)
        accelerator.init_trackers("run")
        accelerator.log({"loss": 1.0})
        names = [tracker.name for tracker in accelerator.trackers]
        name = accelerator.get_tracker("mine").name
        accelerator.end_training()
        return names, name

    assert run_on_ranks(work, num_ranks) == [(["mine"], "mine"), ([], "mine")][:num_ranks]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1
