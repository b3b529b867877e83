"""A small training script, in which causes are planted by replacing a piece of its text, and its runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from accelerate.guests.rewind import rerun

#: Trains for a number of updates with a counter in its checkpoints; logs each update, and saves every 10.
SCRIPT: Final = """
import argparse
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--project")
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()


class Points(Dataset):
    def __init__(self):
        stream = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(SAMPLES, 8, generator=stream)
        self.targets = self.inputs @ torch.randn(8, 1, generator=stream) * 0.3
        pass  # data

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.act = nn.Tanh()
        self.middle = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.act(self.first(inputs))
        hidden = self.drop(self.middle(hidden))
        return self.last(hidden)


class Progress:
    update = 0

    def state_dict(self):
        return {"update": self.update}

    def load_state_dict(self, state):
        self.update = state["update"]


config = ProjectConfiguration(project_dir=options.project, automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=config, gradient_accumulation_steps=PARTS)
accelerator.init_trackers("training")
set_seed(3)
model = Net()
pass  # model
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5)
loader = DataLoader(Points(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)
pass  # begin
accelerator.resume()
while progress.update < UPDATES:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            pass  # batch
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        progress.update += 1
        pass  # updated
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            with open(__file__.replace(".py", ".updates"), "a") as file:
                numbers = {"loss": mean, "grad_norm": float(norm), "lr": optimizer.param_groups[0]["lr"]}
                print(json.dumps({"update": progress.update, **numbers}), file=file)
        if progress.update % LOG_EVERY == 0:
            accelerator.log({"loss": mean, "grad_norm": float(norm)}, step=progress.update)
        if progress.update % SAVE_EVERY == 0:
            accelerator.save_state()
        if progress.update >= UPDATES:
            break
accelerator.end_training()
"""


def script(
    folder: Path,
    *planted: tuple[str, str],
    name: str = "train.py",
    **numbers: int,
) -> Path:
    """Write the script with pieces of its text replaced, and return its path."""
    text = SCRIPT
    for before, after in planted:
        assert before in text, before
        text = text.replace(before, after)
    defaults = {"SAMPLES": 160, "PARTS": 1, "UPDATES": 40, "LOG_EVERY": 1, "SAVE_EVERY": 10}
    for key, value in {**defaults, **numbers}.items():
        text = text.replace(key, str(value))
    path = folder / name
    path.write_text(text)
    return path


def train(
    path: Path, project: Path, *arguments: str, ranks: int = 1, flags: Iterable[str] = (), **variables: str
) -> None:
    """Run the script as `accelerate launch` does, and expect that it ends well."""
    output = path.with_suffix(".output")
    words = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks), *flags]
    words += [str(path), "--project", str(project), *arguments]
    assert rerun.start(words, {**os.environ, **variables}, None, output) == 0, output.read_text()[-4000:]


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file below ``folder``, and its time of change."""
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
