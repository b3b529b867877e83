"""A rank that the kernel really kills for its memory: the launcher says so, and so does the run's record."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slow import slow_for

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(4, 4)
loader = torch.utils.data.DataLoader(torch.randn(640, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
watch, held = accelerator.watch_run(every=2), []
for number, batch in enumerate(loader):
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    watch.step(loss)
    if number > 4 and accelerator.process_index == 1:
        held.append(torch.ones(50 * 2**20 // 4))
"""
LIMIT_MIB = 1200
#: Where a control group is made, by version, and the file of its limit.
PLACES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of little memory."""
    for place, name in PLACES:
        folder = place / f"accelerate_{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text(str(LIMIT_MIB * 2**20))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        deadline = time.monotonic() + 20
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        return folder.rmdir()
    pytest.skip("no control group with a limit of memory can be made here (root, Linux)")


@slow_for("fills a control group's memory", "kills")
def test_a_rank_that_the_kernel_kills_for_its_memory_is_told(group: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    launch = [*command, "launch", "--cpu", "--num_processes", "2", str(script), str(tmp_path / "run")]
    done = subprocess.run(
        ["sh", "-c", enter, "sh", *launch], capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 137, done.stderr
    told = done.stderr[done.stderr.index("First cause: ") :].splitlines()
    assert told[0].startswith("First cause: rank 1 of 2 (") and "was killed by SIGKILL" in told[0]
    assert told[1].startswith("Out of memory: ")
    shown = subprocess.run(
        [*command, "monitor", str(tmp_path / "run"), "--once"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "run  FAILED" in shown.stdout
    assert "ended: the process was killed by SIGKILL. Out of memory: " in " ".join(shown.stdout.split())
