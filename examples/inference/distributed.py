"""Divide prompts among the ranks, and collect the answers in order.

accelerate launch --cpu --num_processes 2 examples/inference/distributed.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed

sys.path.append(str(Path(__file__).resolve().parent.parent))
from offline_data import digits


def inference_function(arguments: argparse.Namespace) -> list[int]:
    """What a model says about each image, in the order of the images, on every rank."""
    state = PartialState(cpu=arguments.cpu)
    set_seed(arguments.seed)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    model.to(state.device).eval()
    images = [image for image, _ in digits()[1]][: arguments.num_images]

    answers: list[int] = []
    with state.split_between_processes(images) as mine, torch.no_grad():
        for image in mine:
            answers.append(int(model(image[None].to(state.device)).argmax()))
    everybody = gather_object(answers)
    state.print(f"{len(everybody)} answers, {len(answers)} of them from the first rank")
    state.destroy_process_group()
    return everybody


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--num_images", type=int, default=101)
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--cpu", action="store_true", help="stay on the CPU")
    return options


if __name__ == "__main__":
    inference_function(parser().parse_args())
