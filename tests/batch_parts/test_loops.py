"""Loops of other shapes, and checkpoints on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed
from tests.batch_parts.training import Dense, data, digest, state_of
from tests.ranks import RankFailed, run_on_ranks


def prepared(num_parts: int = 6, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, batch_parts=num_parts, **options)
    set_seed(3)
    model: Any = Dense()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(data(41, noisy=True), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def step(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> None:
    rows, targets = batch
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(rows), targets))
        optimizer.step()
        optimizer.zero_grad()


# -- checkpoints -------------------------------------------------------------------------------------------


def goes_on(folder: str, first: int, last: int) -> str:
    """Train from update ``first`` to ``last``, from and to a checkpoint of each."""
    accelerator, model, optimizer, loader = prepared()
    if first:
        accelerator.load_state(f"{folder}/{first}")
    while optimizer.num_updates < last:
        for batch in loader:
            step(accelerator, model, optimizer, batch)
            if optimizer.num_updates == last and accelerator.sync_gradients:
                break
    accelerator.save_state(f"{folder}/{last}")
    return state_of(accelerator, model, optimizer)


@pytest.mark.parametrize("ranks", [(1, 2, 3), (3, 1, 2), (2, 2, 2)], ids=str)
def test_a_run_goes_on_with_the_same_bits_on_another_number_of_ranks(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    (expected,) = run_on_ranks(goes_on, 1, str(tmp_path / "whole"), 0, 11)
    for first, last, num_ranks in zip((0, 3, 8), (3, 8, 11), ranks, strict=True):  # an epoch has 4 updates
        found = run_on_ranks(goes_on, num_ranks, str(tmp_path), first, last)
    assert found == [expected] * ranks[-1]


def saves_inside_an_update(folder: str) -> None:
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        step(accelerator, model, optimizer, batch)
        accelerator.save_state(folder)


def test_a_save_inside_an_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"save_state\(\) inside an update of 6 parts"):
        run_on_ranks(saves_inside_an_update, 2, str(tmp_path / "saved"))


# -- other loops -------------------------------------------------------------------------------------------


def two_losses() -> str:
    accelerator, model, optimizer, loader = prepared()
    for rows, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(rows)
            accelerator.backward(F.cross_entropy(outputs, targets), retain_graph=True)
            accelerator.backward(outputs.square().mean() * 0.1)
            accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return state_of(accelerator, model, optimizer)


def adversaries(alternates: bool = False) -> str:
    """Two models with windows of their own, one of which is in both losses and has BatchNorm."""
    accelerator, critic, critic_optimizer, loader = prepared()
    maker: Any = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
    optimizer: Any = torch.optim.SGD(maker.parameters(), lr=0.1)
    maker, optimizer = accelerator.prepare(maker, optimizer)
    for _ in range(2):
        for rows, targets in loader:
            with accelerator.accumulate(critic):
                made = maker(torch.randn(len(rows), 3)).detach()
                loss = F.cross_entropy(critic(rows), targets) + critic(made).square().mean()
                accelerator.backward(loss)
                if alternates:
                    critic_optimizer.step()
            with accelerator.accumulate(maker):
                critic.requires_grad_(False)
                accelerator.backward(-critic(maker(torch.randn(len(rows), 3))).square().mean())
                critic.requires_grad_(True)
            for one in (critic_optimizer, optimizer):
                one.step()
                one.zero_grad()
    accelerator.free_memory()
    return digest([*critic.state_dict().values(), *maker.state_dict().values()])


def evaluates_in_the_loop() -> str:
    accelerator, model, optimizer, loader = prepared()
    evaluation = accelerator.prepare(DataLoader(data(7), batch_size=1))
    seen = []
    for batch in loader:
        step(accelerator, model, optimizer, batch)
        if accelerator.sync_gradients:
            model.eval()
            with torch.no_grad():
                outputs = [accelerator.gather_for_metrics(model(rows) + torch.rand(1)) for rows, _ in evaluation]
            seen.append(torch.cat(outputs))
            model.train()
    return digest(seen) + state_of(accelerator, model, optimizer)


@pytest.mark.parametrize("loop", [two_losses, adversaries, evaluates_in_the_loop])
def test_other_loops_compute_the_same_bits_too(loop: Any) -> None:
    (expected,) = run_on_ranks(loop, 1)
    for num_ranks in (2, 3):
        assert run_on_ranks(loop, num_ranks) == [expected] * num_ranks
