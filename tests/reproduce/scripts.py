"""A small training script in two files, as a user writes it, and how tests run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRAIN = """
import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from net import build

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--seed", type=int)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--data")
parser.add_argument("--fails_at", type=int)
parser.add_argument("--api_key")
parser.add_argument("--index_url")
parser.add_argument("--fsdp", action="store_true")
arguments = parser.parse_args()

plugin = None
if arguments.fsdp:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(
    cpu=True,
    fsdp_plugin=plugin,
    project_config=ProjectConfiguration(project_dir=arguments.folder, automatic_checkpoint_naming=True),
)
if arguments.seed is not None:
    set_seed(arguments.seed)
generator = torch.Generator().manual_seed(7)
samples = torch.load(arguments.data) if arguments.data else torch.randn(48, 4, generator=generator)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(samples), batch_size=4 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
update = 0
for epoch in range(loader.iteration, arguments.epochs):
    for (inputs,) in loader:
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        if update == arguments.fails_at:
            raise SystemExit(3)
    accelerator.save_state()
(Path(arguments.folder) / f"result_{accelerator.process_index}.txt").write_text(str(loss.item()))
accelerator.end_training()
"""

NET = """
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))
"""

#: Values that must appear in no file of a run: by the argument or variable that has them.
SECRETS = {
    "--api_key": "abc-is-short",
    "--index_url": "https://reader:pass-of-reader@files.example.com/simple",
    "HF_TOKEN": "hf_QWERTYuiopASDFghjkl12345",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "sk-proj-0123456789abcdefXYZ",
    "NCCL_SOCKET_TOKEN": "plain-token",
    "TORCH_HOME": "https://me:pw-of-me@cache.example.com",
}


def write_scripts(folder: Path) -> Path:
    """Write both files into ``folder``, and return the script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NET)
    (folder / "train.py").write_text(TRAIN)
    return folder / "train.py"


def run_script(
    folder: Path, *arguments: str, num_processes: int = 1, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``train.py`` in ``folder``, as a user does."""
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(num_processes)]
    launcher += ["--main_process_port", "0"]
    return subprocess.run(
        [sys.executable, *(launcher if num_processes > 1 else []), "train.py", *arguments],
        cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
    )  # fmt: skip


def reproduce(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``accelerate reproduce`` in ``folder``."""
    command = [sys.executable, "-m", "accelerate.commands.main", "reproduce", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)
