"""Train one model per fold in one run, and evaluate all of them together on held-out digits.

python examples/by_feature/cross_validation.py --num_folds 3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from offline_data import digits
from watch_option import add_watch


def training_function(arguments: argparse.Namespace) -> float:
    """The share of held-out digits that the trained model gets right."""
    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    train_set, held_out_set = digits()
    folds = torch.arange(len(train_set)) % arguments.num_folds
    votes = torch.zeros(len(held_out_set), 10)
    for fold in range(arguments.num_folds):
        rest = Subset(train_set, torch.nonzero(folds != fold).flatten().tolist())
        accelerator.print(f"without fold {fold}:")
        votes += train(accelerator, arguments, rest, held_out_set).softmax(dim=1)
    accuracy = float((votes.argmax(dim=1) == held_out_set.tensors[1]).float().mean())
    accelerator.print(f"all folds together: {accuracy:.1%}")
    accelerator.end_training()
    return accuracy


def train(
    accelerator: Accelerator, arguments: argparse.Namespace, train_set: Subset, held_out_set: TensorDataset
) -> torch.Tensor:
    """What the model that was trained on ``train_set`` says about the held-out digits: ``[samples, 10]``."""
    set_seed(arguments.seed)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = LambdaLR(optimizer, lambda step: 0.999**step)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, train_loader, held_out_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader, scheduler
    )

    logits_of_all = torch.empty(0, 10)
    for epoch in range(arguments.num_epochs):
        model.train()
        for images, labels in train_loader:
            loss = loss_function(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        gathered = []
        for images, _ in held_out_loader:
            with torch.no_grad():
                logits = model(images)
            gathered.append(accelerator.gather_for_metrics(logits).cpu())
        logits_of_all = torch.cat(gathered)
        accuracy = float((logits_of_all.argmax(dim=1) == held_out_set.tensors[1]).float().mean())
        accelerator.print(f"epoch {epoch}: {accuracy:.1%} of the held-out digits")
    accelerator.free_memory()
    return logits_of_all


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch_size", type=int, default=32, help="samples a process and step")
    options.add_argument("--num_epochs", type=int, default=3)
    options.add_argument("--learning_rate", type=float, default=3e-3)
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--num_folds", type=int, default=3)
    options.add_argument("--cpu", action="store_true", help="stay on the CPU")
    options.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    add_watch(options)
    return options


if __name__ == "__main__":
    training_function(parser().parse_args())
