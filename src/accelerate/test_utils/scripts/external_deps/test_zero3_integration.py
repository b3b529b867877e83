"""Checks ZeRO-3 in a process group made by the script, and one step in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.utils import DeepSpeedPlugin

CONFIG: dict[str, object] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
}


def main() -> None:
    """Check that an earlier process group is used, and a step changes the weights."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG, zero3_init_flag=True))
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    dataset = TensorDataset(torch.randn(16, 8), torch.randint(0, 2, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    epochs: list[float] = []
    for _ in range(2):
        losses: list[float] = []
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        epochs.append(sum(losses))
    assert epochs[1] < epochs[0], epochs
    plugin = accelerator.deepspeed_plugin
    assert plugin is not None
    accelerator.print(f"ZeRO-{plugin.zero_stage}: loss {epochs[0]:.3f} -> {epochs[1]:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
