"""Ranks that are killed while the script reads several loaders: together, in turns, one inside of another."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.multi.test_lost_replica import _launch, _lines
from tests.slow import slow_for

pytestmark = pytest.mark.timeout(320)
slow = slow_for("several generations of processes", "kills")

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.guests.fault_tolerance.shared_epoch import SharedEpoch

folder, kind, form, update = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(cpu=True)
rank, members = accelerator.process_index, accelerator.world.members
is_new = members.is_joining
log = (folder / f"log_{rank}_{os.getpid()}").open("w")
torch.manual_seed(rank)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

def loader_of(size, seed):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    data = torch.utils.data.TensorDataset(x, torch.arange(size))
    return torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)

sizes = (48, 48) if kind == "zip" else (18, 30)
model, optimizer, first, second = accelerator.prepare(model, optimizer, loader_of(sizes[0], 1), loader_of(sizes[1], 2))
if not is_new:
    torch.save(model.state_dict(), folder / f"start_{rank}.pt")
commit = SharedEpoch.commit

def noted(self, contributors):
    given = set(contributors)
    number = 0 if self is first.epoch_shared else 1
    samples = [index for reader, taken in sorted(self._open.items()) if reader in given for index in taken]
    epoch = first.num_passes if kind == "nested" and number else (first, second)[number].progress.epoch
    line = {"update": int(optimizer.num_updates), "loader": number, "epoch": epoch, "samples": samples}
    log.write(json.dumps(line) + "\\n")
    log.flush()
    commit(self, given)

SharedEpoch.commit = noted

def train(*batches):
    time.sleep(0.02)
    if rank == 1 and not is_new and optimizer.num_updates == update:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(sum(model(x).square().mean() for x, _ in batches))
    optimizer.step()
    optimizer.zero_grad()
    while optimizer.num_updates >= update + 3 and len(members.members) + len(members.joining) < 2:
        members.exchange("wait")

for epoch in range(3) if form == "0" else range(first.iteration, 3):
    if kind == "zip":
        for batches in zip(first, second):
            train(*batches)
    elif kind == "nested":
        for outer in first:
            for inner in second:
                train(outer, inner)
    else:
        for loader in (first, second):
            for batch in loader:
                train(batch)
torch.save([model.state_dict(), int(optimizer.num_updates)], folder / f"end_{rank}.pt")
"""


def run(folder: Path, kind: str, form: str, update: int) -> None:
    launched = _launch(folder, 2, 1, kind, form, str(update), script=SCRIPT)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("was lost (SIGKILL)") == 1, errors
    ends = [torch.load(path) for path in sorted(folder.glob("end_*"))]
    assert len(ends) == 2
    assert ends[0][1] == ends[1][1]
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=0, atol=0)


@slow
@pytest.mark.parametrize("update", [3, 9])
@pytest.mark.parametrize("form", ["0", "iteration"])
@pytest.mark.parametrize("kind", ["zip", "in turns"])
def test_each_sample_of_each_loader_is_in_one_update(tmp_path: Path, kind: str, form: str, update: int) -> None:
    run(tmp_path, kind, form, update)
    recorded: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for line in _lines(tmp_path):
        found = (line["epoch"], line["samples"])
        assert recorded.setdefault((line["update"], line["loader"]), found) == found
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (_, loader), (epoch, samples) in recorded.items():
        read[loader, epoch] += samples
    sizes = (48, 48) if kind == "zip" else (18, 30)
    for loader, size in enumerate(sizes):
        for epoch in range(3):
            assert sorted(read[loader, epoch]) == [*range(size)], json.dumps(sorted(read[loader, epoch]))
    if kind == "zip":
        data = [torch.randn(48, 8, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2)]
        model = torch.nn.Linear(8, 1).double()
        model.load_state_dict(torch.load(tmp_path / "start_0.pt"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(1 + max(number for number, _ in recorded)):
            for loader, x in enumerate(data):
                model(x[recorded[number, loader][1]]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        end, _ = torch.load(tmp_path / "end_0.pt")
        torch.testing.assert_close(end, dict(model.state_dict()), rtol=1e-9, atol=1e-12)


@slow
@pytest.mark.parametrize("form", ["0", "iteration"])
def test_a_process_joins_between_two_batches_of_the_outer_loop(tmp_path: Path, form: str) -> None:
    run(tmp_path, "nested", form, 7)


TWO_MODELS = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator

folder = Path(sys.argv[1])
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
models = [torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
data = torch.utils.data.TensorDataset(torch.randn(23, 8, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(data, batch_size=3)
*models, first, second, loader = accelerator.prepare(*models, *optimizers, loader)
torch.save([model.state_dict() for model in models], folder / f"start_{accelerator.process_index}.pt")
for (x,) in loader:
    for model, optimizer in zip(models, (first, second)):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
torch.save([model.state_dict() for model in models], folder / f"end_{accelerator.process_index}.pt")
"""


def test_two_models_train_with_the_same_batch(tmp_path: Path) -> None:
    launched = _launch(tmp_path, 2, 1, script=TWO_MODELS)
    _, errors = launched.communicate(timeout=100)
    assert launched.returncode == 0, errors
    x = torch.randn(23, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for number, start in enumerate(torch.load(tmp_path / "start_0.pt")):
        model = torch.nn.Linear(8, 1).double()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for rows in x.split(6):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for rank in range(2):
            end = torch.load(tmp_path / f"end_{rank}.pt")[number]
            torch.testing.assert_close(end, dict(model.state_dict()), rtol=1e-9, atol=1e-12)
