"""Train a small CNN on handwritten digits, on one process or many; `make demo` runs this script.

    python examples/digits.py
    accelerate launch --cpu --num_processes 2 examples/digits.py --batch_size 32

`--batch_size` is per process: 64 on one process and 32 on two take the same steps over the same samples. With
`accelerate launch --batch_parts 4` it is that of a part: 16 on 1, 2 or 4 processes gives the same results, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from curves import plot_curves
from offline_data import digits
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from watch_option import add_watch

from accelerate import Accelerator
from accelerate.utils import set_seed


def small_cnn(width: int = 16, num_classes: int = 10) -> nn.Module:
    """A classifier of 1 x 8 x 8 images, whose convolutions have `width` and twice as many channels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, num_classes),
    )


def train(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The history of a run: one entry an epoch, equal on all processes."""
    accelerator = Accelerator(
        cpu=arguments.cpu, mixed_precision=arguments.mixed_precision, project_dir=arguments.project_dir
    )
    set_seed(arguments.seed)
    train_set, held_out_set = digits()
    # Without the short last batch every step sees a full global batch, whatever the number of processes.
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    model = small_cnn(arguments.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )

    history = []
    quiet = None if accelerator.is_local_main_process else True  # None: a bar only where there is a terminal
    for epoch in range(1, arguments.num_epochs + 1):
        model.train()
        started = time.perf_counter()
        losses, num_samples = [], 0
        for images, labels in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=quiet):
            with accelerator.accumulate(model):
                loss = loss_function(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            num_samples += len(labels) * accelerator.num_processes
        seconds = time.perf_counter() - started

        model.eval()
        correct = num_held_out = 0
        for images, labels in held_out_loader:
            with torch.no_grad():
                guesses = model(images).argmax(dim=1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            correct += int((guesses == labels).sum())
            num_held_out += len(labels)
        if num_held_out != len(held_out_set):
            raise RuntimeError(f"{num_held_out} of {len(held_out_set)} held-out samples were counted")

        # Sums of so few float32 losses are exact in float64, so their order doesn't matter.
        sum_of_losses = accelerator.reduce(torch.stack(losses).double().sum(), reduction="sum").item()
        mean_loss = sum_of_losses / (len(losses) * accelerator.num_processes)
        history.append(
            {
                "epoch": epoch,
                "loss": mean_loss,
                "accuracy": 100 * correct / num_held_out,
                "samples_per_second": num_samples / seconds,
            }
        )
        if arguments.report:
            history[-1]["fingerprint"] = accelerator.fingerprint()
        accelerator.print(
            f"epoch {epoch}: loss {mean_loss:.4f}, accuracy {100 * correct / num_held_out:.2f} %, "
            f"{num_samples / seconds:.0f} samples/s"
        )
    if accelerator.is_main_process:
        if arguments.report:
            Path(arguments.report).write_text(json.dumps(history, indent=2))
        if arguments.plot:
            plot_curves({"digits": history}, arguments.plot, "A small CNN on handwritten digits")
    accelerator.end_training()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=64, help="samples a process and step")
    parser.add_argument("--num_epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--project_dir", help="keep a record of the run in this folder, for `accelerate reproduce`")
    parser.add_argument("--report", help="write the history to this JSON file")
    parser.add_argument("--plot", help="write the curves to this PNG file")
    add_watch(parser)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
