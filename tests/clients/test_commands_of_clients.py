"""Commands that clients ship, started as their manuals say: by our launcher, or by their own command through it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.test_clients import environment, folder  # noqa: F401

pytestmark = pytest.mark.timeout(1000)

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
SFT = [
    "--dataset_name", "TEXT", "--model_name_or_path", "LLAMA", "--max_steps", "3", "--learning_rate", "1e-2",
    "--per_device_train_batch_size", "4", "--use_cpu", "--bf16", "false", "--report_to", "none", "--logging_steps", "1",
    "--save_strategy", "no", "--gradient_checkpointing", "false", "--max_length", "32",
]  # fmt: skip


def run(words: list[str], where: Path) -> str:
    """What the command printed; it succeeded."""
    assets = where / "assets"
    words = [word.replace("TEXT", str(assets / "text")).replace("LLAMA", str(assets / "llama")) for word in words]
    done = subprocess.run(
        words, env=environment(where), cwd=where, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", output)]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_script_that_trl_ships_trains_under_our_launcher(folder: Path, num_processes: int) -> None:  # noqa: F811
    import trl

    script = Path(trl.__file__).parent / "scripts" / "sft.py"
    out = ["--output_dir", str(folder / f"sft{num_processes}")]
    distributed = ["--ddp_backend", "gloo"] if num_processes > 1 else []
    output = run([*LAUNCH, "--num_processes", str(num_processes), str(script), *SFT, *out, *distributed], folder)
    found = losses(output)
    assert len(found) == 3 and found[-1] < found[0]


def test_trls_own_command_launches_by_us(folder: Path) -> None:  # noqa: F811
    words = [sys.executable, "-c", "from trl.cli import main; main()", "sft", *SFT, "--output_dir", str(folder / "cli")]
    found = losses(run([*words, "--num_processes", "1"], folder))
    assert len(found) == 3 and found[-1] < found[0]


def test_the_harness_evaluates_under_our_launcher(folder: Path) -> None:  # noqa: F811
    assets = folder / "assets"
    words = ["--model", "hf", "--model_args", f"pretrained={assets / 'gpt2'},dtype=float32", "--tasks", "cats"]
    where = ["--include_path", str(assets / "task"), "--batch_size", "4", "--device", "cpu"]
    alone = run([sys.executable, "-m", "lm_eval", *words, *where], folder)
    together = run([*LAUNCH, "--num_processes", "2", "-m", "lm_eval", *words, *where], folder)
    assert accuracy(together) == accuracy(alone)


def accuracy(output: str) -> str:
    """The number in the line of the table that begins with the task's name."""
    [line] = [line for line in output.splitlines() if line.startswith("|cats")]
    return re.sub(r"\s", "", line)
