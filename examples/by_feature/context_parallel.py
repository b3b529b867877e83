"""Split each sequence across the processes: each computes some rows of every image, and attention sees all rows.

accelerate launch --cpu --num_processes 2 examples/by_feature/context_parallel.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import set_seed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from offline_data import digits
from watch_option import add_watch


class Rows(nn.Module):
    """Guesses the digit from every row of its image, each of which attends to all."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance, self.places = nn.Linear(8, 256), nn.Embedding(8, 256)
        self.parts, self.head = nn.Linear(256, 768), nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Ten scores for every row."""
        hidden = torch.relu(self.entrance(rows) * self.places(places))
        query, key, value = (part.unflatten(-1, (8, 32)).transpose(1, 2) for part in self.parts(hidden).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(hidden + mixed.transpose(1, 2).flatten(2))


def training_function(arguments: argparse.Namespace) -> float:
    """The share of held-out digits that the trained model gets right."""
    parallelism = fsdp = None
    num_processes = PartialState(cpu=arguments.cpu).num_processes
    if num_processes > 1:
        parallelism = ParallelismConfig(cp_size=num_processes)
        fsdp = FullyShardedDataParallelPlugin(fsdp_version=2)  # averages the gradients of the parts
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        parallelism_config=parallelism,
        fsdp_plugin=fsdp,
    )
    set_seed(arguments.seed)
    train_set, held_out_set = digits()
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = LambdaLR(optimizer, lambda step: 0.999**step)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, train_loader, held_out_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader, scheduler
    )

    accuracy = 0.0
    for epoch in range(arguments.num_epochs):
        model.train()
        for images, labels in train_loader:
            # The sequences that are cut: rows, where they are in the image, and what they should guess.
            buffers = [images.squeeze(1), torch.arange(8).expand(len(images), 8), labels.unsqueeze(1).expand(-1, 8)]
            rows, places, goals = buffers = [buffer.contiguous().to(images.device) for buffer in buffers]
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ):
                loss = loss_function(model(rows, places).flatten(0, 1), goals.flatten())
                accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = 0
        for images, labels in held_out_loader:
            with torch.no_grad():
                places = torch.arange(8, device=images.device).expand(len(images), 8)
                guesses = model(images.squeeze(1), places).mean(dim=1).argmax(dim=1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            correct += int((guesses == labels).sum())
        accuracy = correct / len(held_out_set)
        accelerator.print(f"epoch {epoch}: {accuracy:.1%} of the held-out digits")
    accelerator.end_training()
    return accuracy


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch_size", type=int, default=32, help="samples a process and step")
    options.add_argument("--num_epochs", type=int, default=3)
    options.add_argument("--learning_rate", type=float, default=3e-3)
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--cpu", action="store_true", help="stay on the CPU")
    options.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    add_watch(options)
    return options


if __name__ == "__main__":
    training_function(parser().parse_args())
