"""Train with DeepSpeed and a configuration file, which may define the optimizer and the schedule.

accelerate launch --num_processes 2 examples/by_feature/deepspeed_with_config_support.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, set_seed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from offline_data import digits
from watch_option import add_watch


def training_function(arguments: argparse.Namespace) -> float:
    """The share of held-out digits that the trained model gets right."""
    plugin = DeepSpeedPlugin(hf_ds_config=arguments.deepspeed_config_file)
    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision, deepspeed_plugin=plugin)
    set_seed(arguments.seed)
    train_set, held_out_set = digits()
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    if "optimizer" in plugin.deepspeed_config:  # then the file makes the schedule too; "auto" is filled in from here
        optimizer = DummyOptim(model.parameters(), lr=arguments.learning_rate, weight_decay=0.01)
        num_steps = arguments.num_epochs * len(train_loader)
        scheduler = DummyScheduler(optimizer, total_num_steps=num_steps, warmup_num_steps=num_steps // 10)
    else:
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
            loss = loss_function(model(images), labels)
            accelerator.backward(loss)  # the engine clips, steps and clears here
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = 0
        for images, labels in held_out_loader:
            with torch.no_grad():
                guesses = model(images).argmax(dim=1)
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
    config = Path(__file__).resolve().parent.parent / "deepspeed_config_templates" / "zero_stage2_config.json"
    options.add_argument("--deepspeed_config_file", default=str(config))
    add_watch(options)
    return options


if __name__ == "__main__":
    training_function(parser().parse_args())
