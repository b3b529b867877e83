"""A short run over real digits that logs to the services named on the command line, offline, under a folder.

python run.py FOLDER SERVICE... [--steps N] [--at STEP COMMAND]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed

PROJECT = "digits"


def constructor_arguments(folder: Path) -> dict[str, dict[str, object]]:
    """What each service wants besides the environment to keep to this folder."""
    return {
        "dvclive": {"dir": str(folder / "dvclive"), "save_dvc_exp": False},
        "swanlab": {"mode": "offline", "logdir": str(folder / "swanlab")},
        "wandb": {"mode": "offline", "dir": str(folder)},
        "clearml": {"auto_connect_frameworks": False, "auto_resource_monitoring": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("services", nargs="+")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step_seconds", type=float, default=0.0, help="what a step takes at least")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--finish_seconds", type=float, default=GeneralTracker.finish_timeout_seconds)
    arguments = parser.parse_args()
    folder: Path = arguments.folder

    accelerator = Accelerator(cpu=True, log_with=arguments.services, project_dir=folder)
    set_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    settings = {"learning_rate": 0.5, "batch_size": 32, "model": "linear"}
    every = constructor_arguments(folder)
    accelerator.init_trackers(PROJECT, settings, {name: every.get(name, {}) for name in arguments.services})
    for tracker in accelerator.trackers:
        tracker.finish_timeout_seconds = arguments.finish_seconds
    print("ready", flush=True)

    seconds: list[float] = []
    batches = iter(loader)
    for step in range(1, arguments.steps + 1):
        begun = time.perf_counter()
        images, labels = next(batches, None) or next(batches := iter(loader))
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        # A number, a tensor, and what only some services take.
        accelerator.log({"train_loss": loss.item(), "lr": torch.tensor(0.5)}, step=step)
        seconds.append(time.perf_counter() - begun)
        if arguments.images and step == arguments.steps // 2:
            for name in arguments.services:
                log_pictures(accelerator.get_tracker(name), images[:2], step)
        if step in (1, arguments.steps // 2):
            print(f"step {step}", flush=True)
        time.sleep(max(0.0, arguments.step_seconds - (time.perf_counter() - begun)))
    begun = time.perf_counter()
    accelerator.end_training()
    report = {"step_seconds": seconds, "end_seconds": time.perf_counter() - begun, "ended_at": time.time()}
    (folder / "report.json").write_text(json.dumps(report))


def log_pictures(tracker: GeneralTracker, images: torch.Tensor, step: int) -> None:
    """Two digits, in the form that the service takes."""
    pictures = (images.reshape(-1, 8, 8) * 255).to(torch.uint8).numpy()
    if tracker.name == "tensorboard":
        tracker.log_images({"digits": images.reshape(-1, 1, 8, 8)}, step=step)
    elif tracker.name in ("wandb", "swanlab"):
        tracker.log_images({"digits": list(pictures)}, step=step)
    elif tracker.name == "aim":
        from PIL import Image

        tracker.log_images({"digits": (Image.fromarray(pictures[0]), "a digit")}, step=step)
    elif tracker.name == "clearml":
        tracker.log_images({"digits": pictures[0]}, step=step)


if __name__ == "__main__":
    main()
