"""Checks two models under DeepSpeed, each with its own plugin: a student (ZeRO-2) learns from a teacher (ZeRO-3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin

BATCH_SIZE = 4


def main() -> None:
    """Check that the student's loss falls, and each model has its plugin's stage."""
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    trainer = Accelerator(deepspeed_plugins=plugins)
    torch.manual_seed(0)
    model, answers = nn.Linear(8, 4), nn.Linear(8, 4)
    loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    student: Any  # DeepSpeed's engines
    teacher: Any
    student, optimizer, loader = trainer.prepare(model, optimizer, loader)
    judge = Accelerator()
    AcceleratorState().select_deepspeed_plugin("teacher")
    plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH_SIZE
    teacher = judge.prepare(answers)
    assert (student.zero_optimization_stage(), teacher.zero_optimization_stage()) == (2, 3)
    losses: list[float] = []
    for (inputs,) in loader:
        with torch.no_grad():
            goal = teacher(inputs)
        loss = F.mse_loss(student(inputs), goal)
        trainer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    trainer.print(f"a student of a teacher: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    trainer.end_training()


if __name__ == "__main__":
    main()
