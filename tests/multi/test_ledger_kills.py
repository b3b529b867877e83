"""The ledger of a run that is killed at random instants and started again, compared with a clock outside of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from accelerate.guests.monitor.document import Hours
from accelerate.guests.monitor.hours import hours, read_ledgers
from tests.slow import slow_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

SCRIPT = """
import json, os, sys, time
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

folder, until = sys.argv[1], int(sys.argv[2])
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
inner = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(400, 4))
model, optimizer, loader, rows = accelerator.prepare(
    inner, torch.optim.SGD(inner.parameters(), lr=0.001), torch.utils.data.DataLoader(data, batch_size=4),
    torch.utils.data.DataLoader(data, batch_size=100),
)
watch = accelerator.watch_run(every=5, log=False)
accelerator.resume()
diary = os.open(folder + "/diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
last = time.time()

def note(kind):
    global last
    now = time.time()
    os.write(diary, (json.dumps([os.getpid(), kind, watch.updates, now, now - last]) + "\\n").encode())
    last = now

while True:
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
        watch.step()
        note("step")
        if watch.updates % 60 == 0:
            accelerator.save_state()
            note("save")
    if watch.updates >= until:
        break
    with torch.no_grad():
        for (batch,) in rows:
            model(batch)
            time.sleep(0.02)
    note("evaluation")
accelerator.end_training()
note("end")
"""


class Note(NamedTuple):
    """What the script itself wrote down, at the end of each step, save or evaluation."""

    pid: int
    kind: str
    updates: int
    time: float
    seconds: float


class Seen(NamedTuple):
    """A run as it was seen from outside, and the hours that it tells."""

    began: float
    ended: float
    notes: list[Note]
    hours: Hours


def run_with_kills(folder: Path, kills: int, longest: float) -> Seen:
    """Run the script, killing it so often at random instants; the last start runs to its end."""
    script, draw = folder / "script.py", random.Random(kills)
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    began = time.time()
    for start in range(1, kills + 2):
        until = "1000000" if start <= kills else "1"
        with subprocess.Popen([sys.executable, str(script), str(folder), until], env=environment) as process:
            try:
                if start <= kills:
                    wait_for_ledger(folder, process, start)
                    seconds = draw.uniform(0, longest)
                    print(f"start {start}: a kill {seconds:.1f} s after the first sign", flush=True)
                    time.sleep(seconds)
                else:
                    assert process.wait() == 0
            finally:
                process.kill()
    ended = time.time()
    notes = [Note(*json.loads(line)) for line in (folder / "diary").read_text().splitlines()]
    found = hours(folder)
    assert found is not None
    return Seen(began, ended, notes, found)


def wait_for_ledger(folder: Path, process: subprocess.Popen[bytes], number: int) -> None:
    """Wait until the process keeps its ledger: the time of one that is killed before is time until the next start."""
    while len(list((folder / "monitor" / "ledger").glob("*.jsonl"))) < number:
        assert process.poll() is None, f"no ledger number {number}"
        time.sleep(0.02)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "longest"),
    [
        (1, 1.5),
        pytest.param(20, 3.0, marks=slow_for("20 kills", "kills")),
    ],
)
def test_the_hours_of_a_run_that_is_killed(tmp_path: Path, kills: int, longest: float) -> None:
    seen = run_with_kills(tmp_path, kills, longest)
    found, seconds = seen.hours, seen.hours["seconds"]
    print(json.dumps(found), "outside:", seen.ended - seen.began)

    assert found["starts"] == kills + 1
    # every second is in it once, and there are as many as outside, but for the very last exit of a process
    assert sum(seconds.values()) == pytest.approx(found["wall_seconds"], abs=0.01 * kills)
    assert found["began"] == pytest.approx(seen.began, abs=0.5)
    assert seen.notes[-1].time <= found["began"] + found["wall_seconds"] + 0.01
    assert found["wall_seconds"] <= seen.ended - seen.began + 0.1

    # what the script noted up to the last sign of each process is what the process has told
    ends = {lines[0].pid: lines[-1].time for lines in read_ledgers(tmp_path)}
    known = [note for note in seen.notes if note.time <= ends[note.pid]]
    noted = {kind: sum(note.seconds for note in known if note.kind == kind) for kind in ("step", "evaluation", "save")}
    steps = seconds["step"] + seconds["data_wait"] + seconds["lost"]
    tolerance = 0.2 * (kills + 1)
    assert steps == pytest.approx(noted["step"], rel=0.05, abs=tolerance)
    assert seconds["evaluation"] == pytest.approx(noted["evaluation"], rel=0.05, abs=tolerance)
    assert seconds["save"] == pytest.approx(noted["save"], rel=0.05, abs=tolerance)

    # an update that was done twice was lost once, and so was one to which the last start didn't come
    updates = [note.updates for note in known if note.kind == "step"]
    counted = {update for update in updates if update <= seen.notes[-1].updates}
    assert found["lost_updates"] == pytest.approx(len(updates) - len(counted), abs=kills)


WAITS = """
import sys, time
import torch
from accelerate import Accelerator

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(4)

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
inner = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    inner, torch.optim.SGD(inner.parameters(), lr=0.001), torch.utils.data.DataLoader(Rows(), batch_size=1)
)
watch = accelerator.watch_run(every=5, log=False)
compiled = torch.compile(model, backend="aot_eager")
for number, rows in enumerate(loader):
    accelerator.backward(compiled(rows).sum())
    optimizer.step()
    if number == 20:
        time.sleep(6)
    watch.step()
accelerator.end_training()
"""


@pytest.mark.timeout(600)
@slow_for("waits, compiles and hangs for seconds", "kills")
def test_waits_hangs_and_compiling_of_a_real_process_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    environment = {**os.environ, "ACCELERATE_HANG_SECONDS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(tmp_path / "script.py"), str(tmp_path)], env=environment, check=True)
    found = hours(tmp_path)
    assert found is not None
    seconds = found["seconds"]
    assert seconds["data_wait"] >= 40 * 0.05 * 0.9 and seconds["hang"] >= 3 and seconds["compile"] > 0
    assert found["updates"] == 40 and found["lost_updates"] == 0
    assert sum(seconds.values()) == pytest.approx(found["wall_seconds"], abs=0.02)
