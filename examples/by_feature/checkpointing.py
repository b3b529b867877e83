"""Save checkpoints and resume: a killed run continues in the middle of an epoch with the same numbers.

python examples/by_feature/checkpointing.py --project_dir run --checkpointing_steps 20
python examples/by_feature/checkpointing.py --project_dir run --checkpointing_steps 20    # resumes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from offline_data import digits
from watch_option import add_watch


class Progress:
    """How far the run has come; a part of every checkpoint."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The run stands where the checkpoint was taken."""
        self.steps = state["steps"]


def training_function(arguments: argparse.Namespace) -> float:
    """The share of held-out digits that the trained model gets right."""
    project = ProjectConfiguration(arguments.project_dir, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision, project_config=project)
    set_seed(arguments.seed)
    train_set, held_out_set = digits()
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = LambdaLR(optimizer, lambda step: 0.999**step)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, train_loader, held_out_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader, scheduler
    )

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    resumed = accelerator.resume()  # loads the newest valid checkpoint, if there is one
    if resumed:
        accelerator.print(f"resumed from {resumed}, after {progress.steps} steps")
    accuracy = 0.0
    for epoch in range(progress.steps // len(train_loader), arguments.num_epochs):
        model.train()
        for images, labels in train_loader:
            loss = loss_function(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.steps += 1
            if progress.steps % arguments.checkpointing_steps == 0:
                accelerator.save_state()

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
    options.add_argument("--project_dir", default="run", help="where checkpoints are kept")
    options.add_argument("--checkpointing_steps", type=int, default=30, help="steps between two checkpoints")
    options.add_argument("--cpu", action="store_true", help="stay on the CPU")
    options.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    add_watch(options)
    return options


if __name__ == "__main__":
    training_function(parser().parse_args())
