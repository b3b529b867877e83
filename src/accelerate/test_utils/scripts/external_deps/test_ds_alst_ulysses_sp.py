"""Checks Ulysses sequence parallelism: all processes share each sequence, and train as one process does alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.plugins.parallelism import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState

LENGTH, NUM_WORDS, WIDTH, NUM_HEADS, NUM_STEPS = 16, 32, 16, 4, 4
TOLERANCE = 1e-5


class Reader(nn.Module):
    """One layer of causal attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words: nn.Embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.places: nn.Embedding = nn.Embedding(LENGTH, WIDTH)
        self.projection: nn.Linear = nn.Linear(WIDTH, 3 * WIDTH)
        self.head: nn.Linear = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token at every position."""
        hidden = self.words(words) + self.places(places)
        parts = self.projection(hidden).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.head(hidden + mixed.transpose(1, 2).flatten(2))


def sentences() -> TensorDataset:
    """Return tokens and the ones that follow, the same in every process."""
    words = torch.randint(0, NUM_WORDS, (2 * NUM_STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def alone() -> list[float]:
    """Return the losses of one process, by a loop in plain torch."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for words, following in DataLoader(sentences(), batch_size=2):
        places = torch.arange(LENGTH).repeat(len(words), 1)
        loss = F.cross_entropy(model(words, places).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def together(num_processes: int) -> list[float]:
    """Return the losses of all processes, each of which holds a part of every sequence."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=num_processes, sp_backend="torch"))
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sentences(), batch_size=2))
    losses: list[float] = []
    for words, following in loader:
        places = torch.arange(LENGTH, device=accelerator.device).repeat(len(words), 1)
        buffers = [words, following, places]
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            loss = F.cross_entropy(model(words, places).flatten(0, 1), following.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    accelerator.end_training()
    return losses


def main() -> None:
    """Run the check; one process can't split a sequence, and skips it."""
    state = PartialState()
    if state.num_processes == 1:
        state.print("One process has nobody to share a sequence with.")
        return
    AcceleratorState._reset_state()
    expected, found = alone(), together(state.num_processes)
    worst = max(abs(one - other) for one, other in zip(expected, found, strict=True))
    assert worst < TOLERANCE, (expected, found)
    print(f"{state.num_processes} processes share each sequence: losses differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
