"""The blog post that introduced the library: sharded data parallel, which it names by the library of its day."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks

row = pytest.mark.row


def losses(shards: bool) -> list[float]:
    """Two epochs on this rank, replicated or sharded."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shards else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    assert accelerator.distributed_type == ("FSDP" if shards else "MULTI_CPU")
    seen = []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            seen.append(loss.item())
    return seen


@row("001-04")
def test_shards_train_like_replicas() -> None:
    sharded, replicated = run_on_ranks(losses, 2, True), run_on_ranks(losses, 2, False)
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
