"""`accelerate launch --pretend` shows that gradients stay inside of islands, and what leaves them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow
from tests.torch_needed import FSDP2_ON_CPU

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DiLoCo, FullyShardedDataParallelPlugin, ParallelismConfig

shards = sys.argv[1] == "shards"
plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shards else None
config = ParallelismConfig(dp_replicate_size=4, dp_shard_size=8) if shards else None
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(4000, 64)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with DiLoCo(accelerator, model, inner_steps=4, fragments=2, islands=None if shards else 4) as diloco:
    while True:
        for (inputs,) in loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
"""


@pytest.mark.parametrize("kind", ["replicas", pytest.param("shards", marks=[FSDP2_ON_CPU, slow])])
def test_only_changes_leave_an_island(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "--cpu", "--pretend", "32", "--num_steps", "8", "train.py", kind]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    _, _, report = ran.stdout.partition("Collectives of a step")
    found = re.findall(r"^ +\w+ +([a-z-]+) .*\((\d+) ranks on (\d+) host", report, re.MULTILINE)
    inside = {name for name, ranks, _ in found if int(ranks) == 8}
    between = [name for name, ranks, hosts in found if (ranks, hosts) == ("4", "4")]
    assert between == ["all-gather"] and len(found) == len(inside) + 1, report
    assert ("all-reduce" if kind == "replicas" else "reduce-scatter") in inside
