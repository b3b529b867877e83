"""Batches of equal tokens on two ranks train like one process that has the whole batch."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.ranks import run_on_ranks

NUM_TEXTS, WORDS, BUDGET = 60, 11, 40


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 20, (NUM_TEXTS,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def packed_batch(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([number for number, _ in samples]), torch.cat([text for _, text in samples])


def padded_batch(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    padded = nn.utils.rnn.pad_sequence([text for _, text in samples], batch_first=True)
    return torch.tensor([number for number, _ in samples]), padded


def length(sample: tuple[int, torch.Tensor]) -> int:
    return len(sample[1])


def network() -> nn.Module:
    set_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).double()


def loss_sum(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of all real tokens: 0 is padding."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten(), reduction="sum", ignore_index=0)


def prepared(packed: bool, steps: int = 1) -> tuple[Any, ...]:
    config = DataLoaderConfiguration(
        token_budget=BUDGET, length_of=length, packed=packed, use_seedable_sampler=True, data_seed=4
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=steps)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    collate = packed_batch if packed else padded_batch
    loader: DataLoader[Any] = DataLoader(list(enumerate(texts())), shuffle=True, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def trained(packed: bool, steps: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Trains an epoch; this rank's samples of every micro-batch, and the parameters after each update."""
    accelerator, model, optimizer, loader = prepared(packed, steps)
    seen, parameters = [], []
    for numbers, tokens in loader:
        assert tokens.numel() <= BUDGET
        assert loader.own_rows[0] == len(numbers)
        with accelerator.accumulate(model):
            accelerator.backward(loss_sum(model, tokens), weight=(tokens != 0).sum())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(numbers.tolist())
        if accelerator.sync_gradients:
            parameters.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
    return seen, parameters


@pytest.mark.parametrize(("ranks", "packed", "steps"), [(2, True, 1), (2, False, 3), (4, True, 2)])
def test_ranks_train_like_one_process_with_the_whole_batch(ranks: int, packed: bool, steps: int) -> None:
    found_on = run_on_ranks(trained, ranks, packed, steps)
    batches, parameters = [seen for seen, _ in found_on], found_on[0][1]
    assert sorted(chain.from_iterable(chain(*batches))) == list(range(NUM_TEXTS))
    assert len({len(seen) for seen in batches}) == 1
    model, all_texts = network(), texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update, expected in enumerate(parameters):
        window = slice(update * steps, (update + 1) * steps)
        numbers = chain.from_iterable(batch for seen in batches for batch in seen[window])
        tokens = torch.cat([all_texts[number] for number in numbers])
        optimizer.zero_grad()
        (loss_sum(model, tokens) / len(tokens)).backward()
        optimizer.step()
        found = torch.cat([one.detach().flatten() for one in model.parameters()])
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)


def begun(folder: str, num_steps: int) -> list[int]:
    accelerator, _, _, loader = prepared(packed=True)
    seen: list[int] = []
    for number, (numbers, _) in enumerate(loader, 1):
        seen += numbers.tolist()
        if number == num_steps:
            accelerator.save_state(folder)
            break
    return seen


def finished(folder: str) -> tuple[list[int], list[int]]:
    accelerator, _, _, loader = prepared(packed=True)
    accelerator.load_state(folder)
    rest = [number for numbers, _ in loader for number in numbers[: loader.own_rows[0]].tolist()]
    gathered = [number for numbers, _ in loader for number in accelerator.gather_for_metrics(numbers).tolist()]
    return rest, gathered


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_checkpoint_goes_on_with_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    seen = run_on_ranks(begun, before, folder, 2)
    found = run_on_ranks(finished, after, folder)
    assert sorted(chain(*seen, *(rest for rest, _ in found))) == list(range(NUM_TEXTS))
    for _, gathered in found:  # the next epoch, with all ranks' samples in every step
        assert sorted(gathered) == list(range(NUM_TEXTS))
