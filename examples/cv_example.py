"""Classify images: handwritten digits, or Oxford-IIIT pets with a pretrained ResNet-50.

    python examples/cv_example.py                        # digits, seconds on a CPU
    python examples/cv_example.py --data_dir images      # pets: files named label_number.jpg; needs torchvision, timm

Pictures of pets: https://www.robots.ox.ac.uk/~vgg/data/pets/data/images.tar.gz
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from curves import plot_curves
from digits import small_cnn
from offline_data import digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from tqdm import tqdm
from watch_option import add_watch

from accelerate import Accelerator
from accelerate.utils import set_seed


def label_of(file_name: str) -> str:
    """The breed in a name such as `great_pyrenees_173.jpg`: everything before the last number.

    Raises:
        ValueError: the name is not of the form label_number.jpg.
    """
    match = re.match(r"^(.+)_\d+\.jpe?g$", Path(file_name).name)
    if match is None:
        raise ValueError(f"'{file_name}' is not named label_number.jpg, so its label is unknown")
    return match.group(1)


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """The JPEG files of one folder, labelled by their names."""

    def __init__(self, files: list[Path], labels: list[str], transform: Any) -> None:
        self.files = files
        self.numbers = {label: number for number, label in enumerate(labels)}
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        file = self.files[index]
        with Image.open(file) as image:
            return self.transform(image.convert("RGB")), self.numbers[label_of(file.name)]


def pets(folder: str, image_size: int) -> tuple[nn.Module, list[nn.Parameter], Dataset, Dataset]:
    """A ResNet-50 with a new head, the head's parameters, and 80 % / 20 % of the folder's images."""
    try:
        import timm
        from torchvision import transforms
    except ImportError as error:
        raise SystemExit(
            f"--data_dir was given, but {error.name} is not installed: pip install timm torchvision "
            "(or leave --data_dir out to train on digits)"
        ) from error
    files = sorted(path for path in Path(folder).glob("*.jp*g"))
    if not files:
        raise SystemExit(f"--data_dir {folder}: no files named label_number.jpg there")
    labels = sorted({label_of(path.name) for path in files})
    model = timm.create_model("resnet50d", pretrained=True, num_classes=len(labels))
    for parameter in model.parameters():
        parameter.requires_grad = False
    head = list(model.get_classifier().parameters())
    for parameter in head:
        parameter.requires_grad = True

    normalise = transforms.Normalize(model.default_cfg["mean"], model.default_cfg["std"])
    cropped = transforms.RandomResizedCrop(image_size, scale=(0.5, 1.0))
    for_training = transforms.Compose([cropped, transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalise])
    resized = transforms.Resize((image_size, image_size))
    for_evaluation = transforms.Compose([resized, transforms.ToTensor(), normalise])
    num_train = int(0.8 * len(files))
    split = random_split(range(len(files)), [num_train, len(files) - num_train])
    return (
        model,
        head,
        Subset(LabelledImages(files, labels, for_training), split[0].indices),
        Subset(LabelledImages(files, labels, for_evaluation), split[1].indices),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", help="folder of images named label_number.jpg; digits are used without it")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--batch_size", type=int, default=64, help="samples a process and step")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=3e-2)
    parser.add_argument("--image_size", type=int, default=224, help="side of the pets' images")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--plot", help="write the curves to this PNG file")
    add_watch(parser)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    set_seed(arguments.seed)
    if arguments.data_dir:
        model, parameters, train_set, held_out_set = pets(arguments.data_dir, arguments.image_size)
    else:
        model, (train_set, held_out_set) = small_cnn(), digits()
        parameters = list(model.parameters())
        accelerator.print("data: handwritten digits (pass --data_dir for the pets)")
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    optimizer = torch.optim.Adam(parameters, lr=arguments.learning_rate / 25)
    scheduler = OneCycleLR(
        optimizer,
        max_lr=arguments.learning_rate,
        epochs=arguments.num_epochs,
        steps_per_epoch=len(train_loader),
    )
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, train_loader, held_out_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader, scheduler
    )

    history = []
    quiet = None if accelerator.is_local_main_process else True
    for epoch in range(arguments.num_epochs):
        model.train()
        started = time.perf_counter()
        losses, num_samples = [], 0
        for images, labels in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=quiet):
            loss = loss_function(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
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
            f"epoch {epoch}: {accuracy:.2f}  (loss {mean_loss:.4f}, {num_samples / seconds:.0f} samples/s)"
        )
    if arguments.plot and accelerator.is_main_process:
        plot_curves({"run": history}, arguments.plot, "Image classification")
    accelerator.end_training()


if __name__ == "__main__":
    main()
