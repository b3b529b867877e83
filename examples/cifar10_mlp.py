"""Train a multilayer perceptron on digits of the shape of CIFAR-10, or with --download on CIFAR-10.

python examples/cifar10_mlp.py
accelerate launch --cpu --num_processes 2 examples/cifar10_mlp.py --download
"""

from __future__ import annotations

import argparse
import time

import torch
from curves import plot_curves
from offline_data import digits_as_colour_images
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from watch_option import add_watch

from accelerate import Accelerator
from accelerate.utils import set_seed


class MLP(nn.Module):
    """Three layers over the flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * 32 * 3, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def load(accelerator: Accelerator, folder: str, download: bool) -> tuple[str, Dataset, Dataset]:
    """CIFAR-10 from `folder` (downloaded there if asked for), else the digits in its shape."""
    try:
        from torchvision import transforms
        from torchvision.datasets import CIFAR10
    except ImportError:
        return "digits as 3 x 32 x 32 (torchvision is not installed)", *digits_as_colour_images()
    to_tensor = transforms.ToTensor()
    try:
        with accelerator.main_process_first():  # one process downloads, the others find the files
            train_set = CIFAR10(folder, train=True, download=download, transform=to_tensor)
        return "CIFAR-10", train_set, CIFAR10(folder, train=False, transform=to_tensor)
    except (RuntimeError, OSError) as error:
        return f"digits as 3 x 32 x 32 (no CIFAR-10 in {folder}: {error})", *digits_as_colour_images()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data/cifar10", help="folder of the CIFAR-10 files")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data_dir")
    parser.add_argument("--batch_size", type=int, default=10, help="samples a process and step")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--plot", help="write the curves to this PNG file")
    add_watch(parser)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    set_seed(42)
    name, train_set, held_out_set = load(accelerator, arguments.data_dir, arguments.download)
    accelerator.print(f"data: {name}")
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=256)
    model = MLP()
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )

    history = []
    quiet = None if accelerator.is_local_main_process else True
    for epoch in range(1, arguments.num_epochs + 1):
        model.train()
        started = time.perf_counter()
        losses, num_samples = [], 0
        for images, labels in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=quiet):
            optimizer.zero_grad()
            loss = loss_function(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
            num_samples += len(labels) * accelerator.num_processes
        seconds = time.perf_counter() - started

        model.eval()
        correct = 0
        for images, labels in held_out_loader:
            with torch.no_grad():
                guesses = model(images).argmax(dim=1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            correct += int((guesses == labels).sum())
        accuracy = 100 * correct / len(held_out_set)
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        history.append(
            {
                "epoch": epoch,
                "loss": mean_loss,
                "accuracy": accuracy,
                "samples_per_second": num_samples / seconds,
            }
        )
        accelerator.print(
            f"epoch {epoch}: loss {mean_loss:.4f}, accuracy {accuracy:.2f} %, {num_samples / seconds:.0f} samples/s"
        )
    if arguments.plot and accelerator.is_main_process:
        plot_curves({name: history}, arguments.plot, "A multilayer perceptron on CIFAR-10")
    accelerator.end_training()


if __name__ == "__main__":
    main()
