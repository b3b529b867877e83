"""A save between two updates in one process: what its gradients and windows may look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import set_seed

STEPS = 4


class Images(nn.Module):
    """Of whose weights the strides are those of channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 64, 3)
        self.back = nn.Conv2d(64, 16, 3)
        for layer in (self.wide, self.back):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        images = (numbers.float().view(-1, 1, 1, 1) * torch.linspace(-1, 1, 108).view(1, 3, 6, 6)).sin()
        return self.back(self.wide(images.contiguous(memory_format=torch.channels_last)).relu())


class Words(nn.Module):
    """An embedding whose gradients name the rows that were used, some of them several times."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 4, sparse=True)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.rows(torch.stack([numbers % 9, numbers % 4, numbers % 3])).sin()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=0.05)


def trained(
    build: Callable[[], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    folder: Path,
    numbers: range,
    save_at: int | None = None,
    clip: bool = False,
) -> tuple[nn.Module, list[float]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    set_seed(5)
    model, norms = build(), []
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    if numbers.start:
        accelerator.load_state(folder)
    for number in numbers:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.arange(number, number + 5)).square().mean())
            if clip and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.01).item())
            optimizer.step()
            optimizer.zero_grad()
        if number == save_at:
            accelerator.save_state(folder)
    return model, norms


@pytest.mark.parametrize(
    ("build", "optimizer_of", "clip"), [(Images, adam, True), (Words, sparse_adam, False)], ids=["strides", "sparse"]
)
def test_gradients_of_every_layout_go_on_exactly(tmp_path: Path, build: Any, optimizer_of: Any, clip: bool) -> None:
    last = 5 * STEPS
    model, norms = trained(build, optimizer_of, tmp_path, range(last), clip=clip)
    saved, norms_saved = trained(build, optimizer_of, tmp_path, range(last), save_at=5, clip=clip)
    again, norms_again = trained(build, optimizer_of, tmp_path, range(6, last), clip=clip)
    assert norms == norms_saved and norms[1:] == norms_again
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name]), name
        assert torch.equal(value, again.state_dict()[name]), name


class Rival:
    """Two models that take turns, one of them every second time only."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
        set_seed(5)
        self.often, self.seldom = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (self.often, self.seldom)]
        self.often, self.seldom, *self.optimizers = self.accelerator.prepare(self.often, self.seldom, *optimizers)

    def train(self, numbers: range) -> list[bool]:
        """In which turns something was updated."""
        updated: list[bool] = []
        for number in numbers:
            turns = [(self.often, self.optimizers[0])] + [(self.seldom, self.optimizers[1])] * (number % 2)
            for model, optimizer in turns:
                with self.accelerator.accumulate(model):
                    self.accelerator.backward(model(torch.arange(3.0) + number).sin().square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                updated.append(self.accelerator.sync_gradients)
        return updated

    def weights(self) -> list[list[float]]:
        return [p.flatten().tolist() for model in (self.often, self.seldom) for p in model.parameters()]


@pytest.mark.parametrize("save_at", [3, 6, 12])
def test_every_window_goes_on_at_its_own_place(tmp_path: Path, save_at: int) -> None:
    undisturbed = Rival()
    updated = [*undisturbed.train(range(save_at)), *undisturbed.train(range(save_at, 20))]
    saved = Rival()
    before = saved.train(range(save_at))
    saved.accelerator.save_state(tmp_path)
    again = Rival()
    again.accelerator.load_state(tmp_path)
    assert before + again.train(range(save_at, 20)) == updated
    assert again.weights() == undisturbed.weights()


def test_a_run_that_goes_back_forgets_the_update_that_it_had_begun(tmp_path: Path) -> None:
    undisturbed = Rival()
    undisturbed.train(range(16))
    run = Rival()
    run.train(range(8))
    run.accelerator.save_state(tmp_path)
    run.train(range(8, 11))
    for parameter in run.often.parameters():
        parameter.grad.fill_(float("nan"))  # pyright: ignore[reportOptionalMemberAccess]
    run.accelerator.load_state(tmp_path)
    run.train(range(8, 16))
    assert run.weights() == undisturbed.weights()
