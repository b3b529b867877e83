"""Accumulate batches with different numbers of tokens: the gradient is that of the mean over all tokens.

    python examples/by_feature/gradient_accumulation_for_autoregressive_models.py --gradient_accumulation_steps 4

The mean of the batches' means is another number. So each batch passes its sum and its number of tokens, and the
gradient is that of one large batch, on any number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from offline_data import standard_library_files
from watch_option import add_watch

IGNORED = -100  # the label of positions that don't count


class ByteModel(nn.Module):
    """Predicts the next byte from the bytes before it, with one recurrent layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, 256]`` for the byte after each position."""
        return self.head(self.layer(self.embedding(tokens))[0])


def lines(num_lines: int) -> list[torch.Tensor]:
    """Lines of Python source, of many lengths, as bytes."""
    source = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in standard_library_files(8))
    chosen = [line for line in source.splitlines() if 8 < len(line) < 120][:num_lines]
    return [torch.tensor(list(line.encode()[:128])) for line in chosen]


def collate(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), both ``[batch, longest]``; positions after the end of a line have the ignored label."""
    tokens = nn.utils.rnn.pad_sequence([line[:-1] for line in batch], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([line[1:] for line in batch], batch_first=True, padding_value=IGNORED)
    return tokens, labels


def training_function(arguments: argparse.Namespace) -> float:
    """The mean loss per token of the last epoch, over all ranks."""
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
    )
    set_seed(arguments.seed)
    train_loader = DataLoader(
        lines(arguments.num_lines), batch_size=arguments.batch_size, shuffle=True, collate_fn=collate
    )
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

    mean_loss = 0.0
    for epoch in range(arguments.num_epochs):
        per_token = accelerator.streaming_mean()
        for tokens, labels in train_loader:
            with accelerator.accumulate(model):
                logits = model(tokens)
                loss_sum = nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                num_tokens = (labels != IGNORED).sum()
                accelerator.backward(loss_sum, weight=num_tokens)
                optimizer.step()
                optimizer.zero_grad()
            per_token.update(loss_sum.detach(), weight=num_tokens)
        mean_loss = float(per_token.mean())
        accelerator.print(f"epoch {epoch}: loss per token {mean_loss:.4f}")
    accelerator.end_training()
    return mean_loss


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch_size", type=int, default=8, help="lines a process and step")
    options.add_argument("--gradient_accumulation_steps", type=int, default=2, help="batches an update")
    options.add_argument("--num_lines", type=int, default=1024)
    options.add_argument("--num_epochs", type=int, default=3)
    options.add_argument("--learning_rate", type=float, default=3e-3)
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--cpu", action="store_true", help="stay on the CPU")
    options.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    add_watch(options)
    return options


if __name__ == "__main__":
    training_function(parser().parse_args())
