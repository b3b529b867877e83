"""A command that runs a script ends by Ctrl-C or SIGTERM: its processes end, and no temporary folder stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slow import slow_for

pytestmark = pytest.mark.timeout(600)

slow = slow_for("a command that starts a script", "corpus")

#: Trains a little; with SLEEPS in the environment, it says its process id in a file and waits at the second update.
SCRIPT = """
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, project_dir="run")
torch.manual_seed(1)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (inputs,) in enumerate(loader):
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if "SLEEPS" in os.environ and number:
        Path(f"sleeping_{os.getpid()}").touch()
        time.sleep(600)
accelerator.end_training()
"""

COMMANDS = {
    "bisect": ("bisect", "run", "--when", "loss > 1e9", "--", "--num_processes", "2", "train.py"),
    "replay": ("replay", "run", "--update", "9", "--num_processes", "2", "--", "train.py"),
    "reproduce": ("reproduce", "run", "--num_processes", "2"),
    "verify": ("verify", "train.py"),
    "doctor": ("doctor", "--run", "train.py"),
    "migrate": ("migrate", "plain.py", "--verify"),
}


def is_running(process: int) -> bool:
    """Return whether the process is there and isn't a zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def sleeping(folder: Path) -> list[int]:
    """Return the ids of the script's processes that wait; folders may vanish meanwhile."""
    names = [name for _, _, files in os.walk(folder) for name in files if name.startswith("sleeping_")]
    return [int(name.rpartition("_")[2]) for name in names]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=() if (name, number) == ("reproduce", signal.SIGTERM) else slow)
        for name in COMMANDS
        for number in (signal.SIGTERM, signal.SIGINT)
    ],
)
def test_nothing_stays_of_a_command_that_is_ended(name: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = SCRIPT.replace("from accelerate import Accelerator\n", "").replace("accelerator = Accel", "# ")
    plain = plain.replace("accelerator.backward(", "(").replace(".mean())", ".mean()).backward()")
    lines = [line for line in plain.splitlines() if "prepare(" not in line and "end_training" not in line]
    (tmp_path / "plain.py").write_text("\n".join(lines) + "\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=variables, check=True)
    with (tmp_path / "told").open("wb") as told:
        command = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.main", *COMMANDS[name]],
            cwd=tmp_path, env={**variables, "SLEEPS": "1"}, stdout=told, stderr=told,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        while not (processes := sleeping(tmp_path)):
            assert command.poll() is None, (tmp_path / "told").read_text()
            time.sleep(0.05)
        command.send_signal(number)
        assert command.wait(120) == 128 + number, (tmp_path / "told").read_text()
    finally:
        command.kill()
    assert "Traceback" not in (tmp_path / "told").read_text()
    until = time.monotonic() + 60
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, processes))
    assert not [path.name for path in temporary.iterdir() if path.name.startswith("accelerate")]
