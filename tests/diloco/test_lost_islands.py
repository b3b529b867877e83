"""Islands that are killed: the others go on, a new process joins them, and each sample is trained on once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diloco.training import equal, plain
from tests.multi.test_lost_replica import SHARDED
from tests.slow import slow_for
from tests.torch_needed import MUON

NUM_KILLS = int(os.environ.get("NUM_KILLS", "20"))
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator, DiLoCo
from accelerate.guests.fault_tolerance.membership import Membership
from accelerate.utils import ProjectConfiguration, gather_object
from accelerate.guests.fault_tolerance.shared_epoch import SharedEpoch

folder, num_epochs, pause, deaths = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
arguments, num_back = json.loads(sys.argv[5]), int(sys.argv[6])  # ranks that live afterwards
has_muon = sys.argv[7] == "muon"
project = ProjectConfiguration(folder / "run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
rank, members = accelerator.process_index, accelerator.world.members
is_new = members.is_joining or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
log = (folder / f"log_{rank}_{time.time()}_{os.getpid()}").open("w")
(folder / f"pid_{rank}").write_text(str(os.getpid()))

def say(**what):
    log.write(json.dumps({"time": time.time(), **what}) + "\\n")
    log.flush()

def die(place):
    if not is_new and deaths.get(str(rank)) == [diloco.num_steps, place]:
        os.kill(os.getpid(), signal.SIGKILL)

class Data(torch.utils.data.Dataset):
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return 61
    def __getitem__(self, index):
        return self.x[index], self.x[index].sum().reshape(1), index

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
optimizer = torch.optim.Muon(matrices, lr=1e-2) if has_muon else torch.optim.SGD(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def whole():
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}

commit, exchange = SharedEpoch.commit, Membership.exchange_apart

def noted(self, contributors):
    given = set(contributors)
    say(epoch=loader.progress.epoch, given=sorted(given),
        samples=[index for rank, taken in sorted(self._open.items()) if rank in given for index in taken])
    commit(self, given)

def exchanging(self, operation, own, *rest):
    die("before")
    found = exchange(self, operation, own, *rest)
    say(exchange=operation, step=diloco.num_steps, count=len(found))
    die("after")
    return found

SharedEpoch.commit, Membership.exchange_apart = noted, exchanging
with DiLoCo(accelerator, model, **arguments) as diloco:
    accelerator.resume()
    for epoch in range(loader.iteration, num_epochs):
        for inputs, targets, indices in loader:
            time.sleep(pause)
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            die("backward")
            optimizer.step()
            optimizer.zero_grad()
            say(update=optimizer.num_updates, own=indices[: loader.num_own_samples].tolist(), members=members.members)
            diloco.step()
            while len(members.members) + len(members.joining) < num_back and diloco.num_steps > 7:
                time.sleep(0.05)
                members.exchange("wait")
            if diloco.num_steps % 3 == 2 and any(gather_object([(folder / "save").exists()])):
                accelerator.save_state()
                say(saved=diloco.num_steps)
        if any(gather_object([(folder / "enough").exists()])):
            break
torch.save(whole(), folder / f"end_{rank}.pt")
"""
#: Updates between two exchanges aren't a divisor of those in an epoch.
ROUNDS = {"inner_steps": 3, "fragments": 1, "compression": "none", "overlap": False}
STREAMED = {"inner_steps": 4, "fragments": 2, "compression": "int8", "overlap": True, "overlap_steps": 2}
pytestmark = pytest.mark.timeout(320)
slow = slow_for("several generations of processes", "kills")


def launch(
    folder: Path, num_ranks: int, deaths: dict[int, tuple[int, str]], *, num_epochs: int = 3, pause: float = 0.0,
    num_back: int = 0, arguments: dict[str, Any] = ROUNDS, options: tuple[str, ...] = (), kind: str = "sgd",
) -> subprocess.Popen[str]:  # fmt: skip
    (folder / "train.py").write_text(SCRIPT)
    start = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes"]
    words = [str(folder), str(num_epochs), str(pause), json.dumps(deaths), json.dumps(arguments), str(num_back), kind]
    command = [*start, str(num_ranks), "--keep_replicas", "50", *options, str(folder / "train.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def lines_of(folder: Path) -> list[list[dict[str, Any]]]:
    """The lines of each process, in the order of their starts."""
    logs = sorted(folder.glob("log_*"), key=lambda path: float(path.name.split("_")[2]))
    texts = [path.read_text() for path in logs]
    return [[json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()] for text in texts]


def taken_in(process: list[dict[str, Any]]) -> list[tuple[int, tuple[int, ...]]]:
    """The epochs and samples of the exchanges that a process took part in."""
    return [(line["epoch"], tuple(line["samples"])) for line in process if line.get("samples")]


def check(folder: Path, num_ends: int, num_epochs: int = 3, before: Sequence[tuple[int, tuple[int, ...]]] = ()) -> None:
    """Each sample was trained on once in each epoch, and all islands are equal at the end.

    ``before`` is what was trained on before a checkpoint.
    """
    epochs: dict[int, list[int]] = defaultdict(list)
    noted = {taken for process in lines_of(folder) for taken in taken_in(process)}  # every rank notes the same
    for epoch, samples in [*noted, *before]:
        epochs[epoch] += samples
    assert sorted(epochs) == [*range(num_epochs)]
    for epoch, samples in epochs.items():
        assert sorted(samples) == [*range(61)], f"epoch {epoch}"
    ends = [torch.load(path, weights_only=True) for path in sorted(folder.glob("end_*"))]
    assert len(ends) == num_ends
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("deaths", "arguments"),
    [
        ({1: (4, "backward")}, ROUNDS),
        pytest.param({0: (3, "before")}, ROUNDS, marks=slow),
        pytest.param({2: (6, "after"), 1: (11, "backward")}, ROUNDS, marks=slow),
        pytest.param({2: (4, "before"), 0: (7, "backward")}, STREAMED, marks=slow),
    ],
)
def test_a_lost_island_costs_no_sample_and_no_restart(
    tmp_path: Path, deaths: dict[int, tuple[int, str]], arguments: dict[str, Any]
) -> None:
    launched = launch(tmp_path, 3, deaths, num_back=3, arguments=arguments)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("was lost (SIGKILL)") == len(deaths), errors
    check(tmp_path, 3)
    counts = {line["count"] for process in lines_of(tmp_path) for line in process if "count" in line}
    assert {2, 3} <= counts  # a round without the island, and one with it or its new process


@slow
@pytest.mark.parametrize("kind", ["sgd", pytest.param("muon", marks=MUON)])
def test_an_island_of_shards_is_lost_with_all_of_its_ranks(tmp_path: Path, kind: str) -> None:
    launched = launch(tmp_path, 4, {3: (4, "backward")}, num_back=4, options=SHARDED, kind=kind)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("its replica is started again") == 1, errors
    check(tmp_path, 4)


@slow
@pytest.mark.parametrize(
    "made",
    [
        pytest.param({"num_ranks": 3, "arguments": ROUNDS}, id="rounds"),
        pytest.param({"num_ranks": 3, "arguments": STREAMED}, id="streamed"),
        pytest.param({"num_ranks": 4, "options": SHARDED, "kind": "muon"}, id="shards with Muon", marks=MUON),
    ],
)
def test_a_checkpoint_has_the_samples_of_the_island_that_saves_it(tmp_path: Path, made: dict[str, Any]) -> None:
    """Between two exchanges, what the other islands have trained on since the last one is read again after a resume."""
    launched = launch(tmp_path, deaths={}, pause=0.2, **made)
    for word in ("update", "saved"):
        while not any(word in line for process in lines_of(tmp_path) for line in process):
            assert launched.poll() is None, launched.communicate()[1]
            time.sleep(0.05)
        (tmp_path / "save").touch()
    launched.kill()
    launched.communicate()
    (tmp_path / "save").unlink()
    main = next(process for process in lines_of(tmp_path) if any("saved" in line for line in process))
    last = max(number for number, line in enumerate(main) if "saved" in line)
    for log in tmp_path.glob("log_*"):
        log.unlink()
    launched = launch(tmp_path, deaths={}, **made)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0 and "was lost" not in errors, errors
    check(tmp_path, made["num_ranks"], before=taken_in(main[:last]))


@pytest.mark.timeout(45 * NUM_KILLS)
@slow_for("20 kills take minutes", "kills")
@pytest.mark.parametrize("arguments", [ROUNDS, STREAMED], ids=["rounds", "streamed"])
def test_random_kills_of_islands(tmp_path: Path, arguments: dict[str, Any]) -> None:
    launched = launch(tmp_path, 3, {}, num_epochs=100_000, pause=0.05, arguments=arguments)
    draw, num_killed = random.Random(5), 0
    while len(list(tmp_path.glob("pid_*"))) < 3:
        time.sleep(0.1)
    while num_killed < NUM_KILLS:
        assert launched.poll() is None, launched.communicate()[1]
        time.sleep(draw.random() * 6)
        lines = [line for process in lines_of(tmp_path) for line in process if "members" in line]
        living = max(lines, key=lambda line: line["time"])["members"] if lines else []
        if len(living) > 1:
            with contextlib.suppress(ProcessLookupError):  # it was killed before, and its new process hasn't begun
                os.kill(int((tmp_path / f"pid_{draw.choice(living)}").read_text()), signal.SIGKILL)
                num_killed += 1
    (tmp_path / "enough").touch()
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0 or "without rank 0" in errors, errors
    epochs = {line["epoch"] for process in lines_of(tmp_path) for line in process if line.get("samples")}
    check(tmp_path, len(list(tmp_path.glob("end_*"))), len(epochs))


PLAIN = """
import json, sys
import torch
from accelerate import Accelerator
from tests.diloco.training import train

accelerator = Accelerator(cpu=True)
found = train(15, accelerator, **json.loads(sys.argv[2]))
torch.save(found["inside"], f"{sys.argv[1]}/inside_{accelerator.process_index}.pt")
torch.save(found["after"], f"{sys.argv[1]}/after_{accelerator.process_index}.pt")
"""


@pytest.mark.parametrize("arguments", [ROUNDS, STREAMED], ids=["rounds", "streamed"])
def test_islands_that_may_be_lost_train_as_a_plain_loop(tmp_path: Path, arguments: dict[str, Any]) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    start = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    command = [*start, "--keep_replicas", "1", str(tmp_path / "train.py"), str(tmp_path), json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run(command, env=environment, check=True, timeout=200)
    expected = plain(15, 2, **arguments)
    for rank in (0, 1):
        assert equal(torch.load(tmp_path / f"inside_{rank}.pt", weights_only=True), expected["inside"][rank])
        assert equal(torch.load(tmp_path / f"after_{rank}.pt", weights_only=True), expected["after"])
