"""Training with optimizer state and activations in host memory equals training without, bit for bit.

Here the device is the host, so a pretended one stands in: what has left it is destroyed there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.big_models import training_offload as training
from accelerate.big_models.training_offload import offload_activations, offload_optimizer
from accelerate.errors import SettingError


class PretendedStream:
    """A fake copy stream that overwrites a tensor where it is copied from."""

    def __init__(self) -> None:
        self.on_device = self.most_on_device = self.num_copies = 0
        self.arriving: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        self.on_device += sum(tensor.numel() for tensor in tensors)
        self.most_on_device = max(self.most_on_device, self.on_device)
        self.arriving += tensors
        return [torch.full_like(tensor, torch.nan) for tensor in tensors], None  # not there yet

    def receive(self, sent: tuple[list[torch.Tensor], None]) -> None:
        for tensor, source in zip(sent[0], self.arriving, strict=True):
            tensor.copy_(source)
        self.arriving = []

    def to_host(self, tensor: torch.Tensor, waiting: torch.Tensor | None) -> torch.Tensor:
        if waiting is not None:
            self.on_device -= tensor.numel()
        waiting = tensor.clone() if waiting is None else waiting.copy_(tensor)
        tensor.fill_(torch.nan)
        self.num_copies += 1
        return waiting

    def synchronize(self) -> None:
        assert not self.arriving


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any = None, count: int = 6) -> list[float]:
    losses = []
    for inputs, targets in batches(count):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw, all at once": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


def offload(optimizer: torch.optim.Optimizer, chunk_bytes: int = 1024) -> PretendedStream:
    stream = PretendedStream()
    training._OffloadedState(optimizer, stream, chunk_bytes)
    return stream


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_waiting_state_changes_nothing(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    plain, offloaded = network(), network()
    expected = train(plain, make(plain.parameters()))
    optimizer = make(offloaded.parameters())
    offload(optimizer)
    assert train(offloaded, optimizer) == expected
    for one, other in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_two_chunks_of_state_are_on_the_device() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10)))
    optimizer = torch.optim.Adam(model.parameters())
    stream = offload(optimizer, chunk_bytes=2 * 8 * 8 * 4)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    assert stream.on_device == 0
    assert stream.most_on_device == 2 * (2 * 8 * 8)  # two parameters, two values for each of their numbers
    assert stream.num_copies == 3 * 10 * 2


def test_a_schedule_made_before_or_after_sees_its_steps() -> None:
    losses = []
    for order in ("before", "after", "never"):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if order == "before":
            offload(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        if order == "after":
            offload(optimizer)
        losses.append(
            train(model, optimizer, schedule)
        )  # a warning is an error: the schedule sees that steps were made
    assert losses[0] == losses[1] == losses[2]


def test_several_groups_and_parameters_without_gradients() -> None:
    results = []
    for offloaded in (False, True):
        model = network()
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        if offloaded:
            offload(optimizer)
        for parameter in model[2].parameters():
            parameter.requires_grad_(False)
        results.append(train(model, optimizer))
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert results[0] == results[1]


def test_state_is_saved_and_loaded_in_the_middle() -> None:
    plain, offloaded = network(), network()
    first, second = torch.optim.Adam(plain.parameters()), torch.optim.Adam(offloaded.parameters())
    offload(second)
    train(plain, first, count=3)
    train(offloaded, second, count=3)
    saved = copy.deepcopy(second.state_dict())
    for index, state in first.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][index][name]) for name, value in state.items())
    fresh_model = network()
    fresh_model.load_state_dict(offloaded.state_dict())
    fresh = torch.optim.Adam(fresh_model.parameters())
    offload(fresh)
    fresh.load_state_dict(saved)
    assert train(fresh_model, fresh) == train(plain, first) == train(offloaded, second)


def test_what_others_hook_to_a_step_happens_once() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    offload(optimizer, chunk_bytes=1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, count=2)
    assert calls == ["before", "after", "before", "after"]


def test_a_closure_is_called_once_a_step() -> None:
    model, other = network(), network()
    optimizer, plain = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    offload(optimizer, chunk_bytes=1)
    (inputs, targets), calls = next(batches()), []

    def closure(of: nn.Module, to: torch.optim.Optimizer) -> torch.Tensor:
        calls.append(1)
        to.zero_grad()
        loss = nn.functional.mse_loss(of(inputs), targets)
        loss.backward()
        return loss

    assert optimizer.step(lambda: closure(model, optimizer)) == plain.step(lambda: closure(other, plain))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_error_in_a_step_leaves_the_groups_whole() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    offload(optimizer, chunk_bytes=1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 6


def test_prepared_optimizers_are_understood_and_on_the_host_nothing_changes() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(network(), torch.optim.Adam(network().parameters()))
    step = optimizer.optimizer.step
    offload_optimizer(optimizer)
    assert optimizer.optimizer.step == step
    del model


def test_lbfgs_is_refused() -> None:
    with pytest.raises(SettingError, match="LBFGS needs the state of all parameters at once"):
        offload_optimizer(torch.optim.LBFGS(network().parameters()))


# --------------------------------------------------------------------------------------------- activations


@pytest.fixture
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Offload activations as from a device, and count the elements moved."""
    seen = SimpleNamespace(moved=0, brought=0)

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        seen.moved += tensor.numel()
        return tensor.clone()

    def unpacked(packed: Any) -> torch.Tensor:
        if isinstance(packed, tuple):
            seen.brought += packed[1].numel()
            return packed[1].clone()
        return packed

    monkeypatch.setattr(training, "_is_worth_moving", lambda tensor, smallest: tensor.numel() * 4 >= smallest)
    monkeypatch.setattr(training, "_to_host", to_host)
    monkeypatch.setattr(training, "_unpacked", unpacked)
    return seen


def test_offloaded_activations_change_nothing(pretended_device: SimpleNamespace) -> None:
    plain, offloaded = network(), network()
    offload_activations(offloaded, smallest_bytes=0)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert train(offloaded, torch.optim.SGD(offloaded.parameters(), lr=0.1)) == expected
    assert pretended_device.moved == pretended_device.brought > 0


def test_weights_and_small_activations_stay(pretended_device: SimpleNamespace) -> None:
    model = nn.Linear(64, 64, bias=False)
    offload_activations(model, smallest_bytes=4 * 64)
    inputs = torch.ones(2, 64, requires_grad=True)
    model(inputs).sum().backward()
    assert pretended_device.moved == 2 * 64  # the inputs; the weight is kept by the model anyway
    offload_activations(model, smallest_bytes=0)  # a second time changes nothing
    model(torch.ones(1, 32).repeat(1, 2)[:, :64].requires_grad_()).sum().backward()
    assert pretended_device.moved == 3 * 64


def test_without_gradients_nothing_leaves(pretended_device: SimpleNamespace) -> None:
    model = network()
    offload_activations(model, smallest_bytes=0)
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert pretended_device.moved == 0


def test_a_copy_of_the_module_runs_its_own_forward(pretended_device: SimpleNamespace) -> None:
    model = nn.Linear(4, 4)
    offload_activations(model, smallest_bytes=0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.zero_()
        assert torch.equal(other(torch.ones(1, 4))[0], other.bias)
    other(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert pretended_device.moved == 4


def test_on_the_host_activations_stay() -> None:
    plain, model = network(), network()
    offload_activations(model, smallest_bytes=0)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.1)) == expected
