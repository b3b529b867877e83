"""Checks that training reaches the right answer: the slope and the intercept of a line."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.distributed.random import set_seed
from accelerate.test_utils.training import RegressionDataset, RegressionModel

TOLERANCE = 0.15


def main() -> None:
    """Check that 15 epochs find the line ``2 x + 3``."""
    accelerator = Accelerator()
    set_seed(42)
    model = RegressionModel()
    loader = DataLoader(RegressionDataset(a=2, b=3, length=96, seed=5), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(15):
        for batch in loader:
            accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()
    line = accelerator.unwrap_model(model)
    assert abs(line.a.item() - 2) < TOLERANCE and abs(line.b.item() - 3) < TOLERANCE, (line.a, line.b)
    accelerator.end_training()


if __name__ == "__main__":
    main()
