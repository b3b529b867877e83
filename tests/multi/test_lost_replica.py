"""Ranks that are killed in the middle of a step: the others go on, and new processes take their places."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate.ports import get_free_port
from tests.slow import slow_for

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.guests.fault_tolerance.shared_epoch import SharedEpoch
from accelerate.guests.fault_tolerance.membership import Membership

folder, num_samples, num_epochs, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
deaths, num_back = json.loads(sys.argv[5]), int(sys.argv[6])  # rank -> (update, place); ranks that live afterwards
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=folder / "run")
rank, members = accelerator.process_index, accelerator.world.members
is_new = members.is_joining or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
log = (folder / f"log_{rank}_{os.getpid()}").open("w")
(folder / f"pid_{rank}").write_text(str(os.getpid()))

def say(**what):
    log.write(json.dumps({"time": time.time(), **what}) + "\\n")
    log.flush()

def die(place):
    if not is_new and deaths.get(str(rank)) == [optimizer.num_updates, place]:
        os.kill(os.getpid(), signal.SIGKILL)

class Data(torch.utils.data.Dataset):
    x = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return num_samples
    def __getitem__(self, index):
        if accelerator.world.members.members:
            die("data")
        return self.x[index], self.x[index].sum().reshape(1), index

torch.manual_seed(7 + rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model._tp_plan = {"0": "colwise", "2": "rowwise"}  # for a mesh with such an axis
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.999**n)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
def whole(state):
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state

if not is_new:
    torch.save(whole(model.state_dict()), folder / f"start_{rank}.pt")
accelerator.resume()

commit, exchange, send = SharedEpoch.commit, Membership.exchange, Membership._send

def noted(self, contributors):
    given = set(contributors)
    say(update=optimizer.num_updates, epoch=loader.progress.epoch,
        samples=[index for rank, taken in sorted(self._open.items()) if rank in given for index in taken])
    commit(self, given)

def sending(self, message):
    if message.get("operation") == "update":
        die("given")  # its gradients lie in memory, and don't count
    send(self, message)
    if message.get("operation") == "update":
        die("agreement")

SharedEpoch.commit, Membership._send = noted, sending
for epoch in range(0 if "FROM_0" in os.environ else loader.iteration, num_epochs):
    accelerator.wait_for_everyone()
    for inputs, targets, _ in loader:
        with accelerator.accumulate(model):
            time.sleep(pause * torch.rand(()).item())
            outputs = model(inputs)
            die("forward")
            accelerator.backward(torch.nn.functional.mse_loss(outputs, targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            say(done=optimizer.num_updates, members=members.members)
            while len(members.members) + len(members.joining) < num_back:
                if optimizer.num_updates < 6 or members.ending:
                    break
                time.sleep(0.05)
                members.exchange("wait")
    if any(gather_object([(folder / "enough").exists()])):
        break
accelerator.save_model(model, folder / "weights")
state = [whole(model.state_dict()), whole(optimizer.state_dict()["state"]), scheduler.get_last_lr()]
torch.save(state, folder / f"end_{rank}.pt")
accelerator.wait_for_everyone()
"""

#: Two replicas, each of two ranks that shard it.
SHARDED = (
    *("--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config"),
    *("--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"),
)
#: Several generations of processes, which begin one after the other.
pytestmark = pytest.mark.timeout(320)
slow = slow_for("several generations of processes", "kills")


def _launch(
    folder: Path,
    num_ranks: int,
    num_replacements: int,
    *arguments: str,
    options: tuple[str, ...] = (),
    script: str = SCRIPT,
) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
    counts = ["--num_processes", str(num_ranks), "--keep_replicas", str(num_replacements)]
    command = [*launch, *counts, *options, str(folder / "train.py"), str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _lines(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for log in folder.glob("log_*"):
        text = log.read_text()
        found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return found


def _check(folder: Path, num_ranks: int, num_ends: int, num_samples: int, num_epochs: int) -> None:
    """Compare with one process that makes the recorded updates; each sample is in one update of each epoch."""
    updates: dict[int, tuple[int, list[int]]] = {}
    for line in _lines(folder):
        if "samples" in line:
            recorded = (line["epoch"], line["samples"])
            assert updates.setdefault(line["update"], recorded) == recorded
    assert sorted(updates) == list(range(len(updates)))
    read: dict[int, list[int]] = defaultdict(list)
    for epoch, samples in updates.values():
        read[epoch] += samples
    assert sorted(read) == [*range(num_epochs)]
    assert all(sorted(samples) == [*range(num_samples)] for samples in read.values())
    ends = [torch.load(path, weights_only=True) for path in sorted(folder.glob("end_*"))]
    assert len(ends) == num_ends
    if (folder / "end_0.pt").exists():  # else the launcher says that nobody did what the main process does
        weights = load_file(folder / "weights" / "model.safetensors")
        assert all(torch.equal(weights[name], value) for name, value in ends[0][0].items())
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=0, atol=0)
    x = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    model.load_state_dict(torch.load(next(folder.glob("start_*")), weights_only=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.999**n)
    for number in range(len(updates)):
        chosen = x[updates[number][1]]
        if len(chosen):  # else the ranks that had samples were lost
            torch.nn.functional.mse_loss(model(chosen), chosen.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(num_ranks):
            scheduler.step()
    torch.testing.assert_close(ends[0][0], dict(model.state_dict()), rtol=1e-7, atol=1e-9)


def test_a_lost_rank_costs_no_sample_and_no_restart(tmp_path: Path) -> None:
    launched = _launch(tmp_path, 2, 1, "60", "2", "0", json.dumps({1: (2, "given")}), "2")
    _, errors = launched.communicate(timeout=100)
    assert launched.returncode == 0, errors
    assert errors.count("was lost (SIGKILL)") == 1, errors
    _check(tmp_path, 2, 2, 60, 2)


@pytest.mark.parametrize(
    ("minimum", "size"), [("1", 1), pytest.param("2", 1, marks=slow), pytest.param("1", 2, marks=slow)]
)
def test_a_launcher_of_another_machine_that_is_started_again_joins(tmp_path: Path, minimum: str, size: int) -> None:
    """Two launchers on this machine; `make kills` does it with network namespaces.

    With a minimum of 2, the ranks of machine 0 save and end instead, and it starts the run again. Each machine has a
    replica of ``size`` ranks.
    """
    port, ranks, sharded = str(get_free_port()), [*range(2 * size)], SHARDED if size > 1 else ()

    def start(machine: int) -> subprocess.Popen[str]:
        where = ("--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank", str(machine))
        options = ("--num_machines", "2", "--min_replicas", minimum, "--max_restarts", "1", *where)
        return _launch(tmp_path, len(ranks), 1, "40", "100000", "0.05", "{}", "0", options=(*options, *sharded))

    def wait_for(members: list[int], since: float) -> None:
        def newest() -> tuple[float, list[int]]:
            found = [(line["time"], line["members"]) for line in _lines(tmp_path) if "members" in line]
            return max(found, default=(0.0, []))

        while newest()[0] <= since or newest()[1] != members:
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)

    first, second = start(0), start(1)
    wait_for(ranks, 0)
    second.kill()
    second.communicate()
    if minimum == "1":
        wait_for(ranks[:size], time.time() + 0.5)
    second = start(1)
    wait_for(ranks, time.time())
    (tmp_path / "enough").touch()
    errors = [launched.communicate(timeout=200)[1] for launched in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), errors
    assert errors[0].count("machine 1 was lost with rank") == 1, errors
    assert errors[0].count("it is started again (restart 1 of 1)") == int(minimum) - 1, errors
    epochs = {line["epoch"] for line in _lines(tmp_path) if "samples" in line}
    _check(tmp_path, len(ranks), len(ranks), 40, len(epochs))


@slow
def test_too_few_ranks_save_and_are_started_again(tmp_path: Path) -> None:
    deaths = {0: (2, "forward"), 1: (8, "given"), 2: (8, "forward")}  # so the only one left had joined
    options = ("--min_replicas", "2", "--max_restarts", "1")
    launched = _launch(tmp_path, 3, 1, "150", "2", "0", json.dumps(deaths), "3", options=options)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("was lost (SIGKILL)") == 3, errors
    assert "only rank 0 of 3 lives, fewer than --min_replicas 2: the run saves and ends." in errors, errors
    assert "only rank 0 of 3 lives, fewer than --min_replicas 2. Saved " in errors, errors
    assert errors.count("it is started again (restart 1 of 1)") == 1, errors
    _check(tmp_path, 3, 3, 150, 2)


@slow
@pytest.mark.parametrize(
    ("deaths", "num_replaced"), [({1: (2, "forward"), 2: (2, "given")}, 1), ({0: (3, "agreement"), 2: (2, "data")}, 2)]
)
def test_lost_ranks_cost_no_sample_and_no_restart(
    tmp_path: Path, deaths: dict[int, tuple[int, str]], num_replaced: int
) -> None:
    num_ends = 3 - len(deaths) + num_replaced
    launched = _launch(tmp_path, 3, num_replaced, "150", "2", "0", json.dumps(deaths), str(num_ends))
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("was lost (SIGKILL)") == 2, errors
    _check(tmp_path, 3, num_ends, 150, 2)


@slow
@pytest.mark.parametrize(
    "deaths", [{1: (2, "given")}, {2: (2, "agreement")}, {0: (3, "forward"), 3: (9, "data")}], ids=str
)
def test_a_lost_rank_takes_along_those_that_shard_with_it(tmp_path: Path, deaths: dict[int, tuple[int, str]]) -> None:
    launched = _launch(tmp_path, 4, 2, "200", "2", "0", json.dumps(deaths), "4", options=SHARDED)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("its replica is started again") == len(deaths), errors
    _check(tmp_path, 4, 4, 200, 2)


@slow
def test_a_loop_over_all_epochs_is_joined_where_the_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_0", "1")
    launched = _launch(tmp_path, 3, 2, "150", "3", "0", json.dumps({1: (8, "given"), 0: (9, "forward")}), "3")
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    _check(tmp_path, 3, 3, 150, 3)


@slow
def test_a_run_that_ends_without_its_main_process_has_failed(tmp_path: Path) -> None:
    launched = _launch(tmp_path, 2, 1, "40", "1", "0", json.dumps({0: (2, "given")}), "0")
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 1 and "the run came to its end without rank 0" in errors, errors


@slow
@pytest.mark.parametrize(
    ("to_launcher", "num_ranks", "options"),
    [(False, 3, ()), (True, 3, ()), (False, 4, SHARDED)],
    ids=["rank", "launcher", "sharded"],
)
def test_a_notice_to_one_rank_saves_and_the_next_launch_goes_on(
    tmp_path: Path, to_launcher: bool, num_ranks: int, options: tuple[str, ...]
) -> None:
    arguments = ("150", "2", "0.05", "{}", "0")
    of_notices = ("--save_on_signal", "--max_restarts", "1")
    launched = _launch(tmp_path, num_ranks, 1, *arguments, options=(*of_notices, *options))
    while not _lines(tmp_path):
        time.sleep(0.1)
    notice = signal.SIGTERM if to_launcher else signal.SIGUSR1
    os.kill(launched.pid if to_launcher else int((tmp_path / "pid_1").read_text()), notice)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 75, errors
    assert f"preempted by {notice.name}. Saved " in errors and "started again (restart" not in errors, errors
    (tmp_path / "start_0.pt").rename(tmp_path / "start.pt")
    for start in tmp_path.glob("start_*"):
        start.unlink()
    launched = _launch(tmp_path, num_ranks, 1, *arguments, options=options)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    for start in tmp_path.glob("start_*"):
        start.unlink()
    (tmp_path / "start.pt").rename(tmp_path / "start_0.pt")
    _check(tmp_path, num_ranks, num_ranks, 150, 2)


@pytest.mark.timeout(1800)
@slow_for("100 kills take ten minutes", "kills")
def test_a_hundred_random_kills(tmp_path: Path) -> None:
    num_kills, num_samples, num_epochs = 100, 1500, 60
    launched = _launch(tmp_path, 4, num_kills, str(num_samples), str(num_epochs), "0.06", "{}", "0")
    draw, killed = random.Random(11), list[float]()
    while len(list(tmp_path.glob("start_*"))) < 4:
        time.sleep(0.1)
    while len(killed) < num_kills and launched.poll() is None:
        time.sleep(draw.random() * 5 if draw.random() < 0.9 else 0.05)
        at, newest = max(
            ((line["time"], line["members"]) for line in _lines(tmp_path) if "members" in line), default=(0, [])
        )
        if killed and at < killed[-1] + 0.1:
            continue  # who lives is known at the next update
        num_lost = 2 if draw.random() < 0.2 and len(newest) > 2 else 1
        for rank in draw.sample(newest, num_lost) if len(newest) > num_lost else ():
            killed.append(time.time())
            os.kill(int((tmp_path / f"pid_{rank}").read_text()), signal.SIGKILL)
    _, errors = launched.communicate(timeout=1200)
    assert launched.returncode == int(not (tmp_path / "end_0.pt").exists()), errors
    (tmp_path / "killed.json").write_text(json.dumps(killed))  # for docs/benchmarks.md
    assert len(killed) >= num_kills
    _check(tmp_path, 4, len(list(tmp_path.glob("end_*"))), num_samples, num_epochs)


@pytest.mark.timeout(1800)
@slow_for("20 kills take minutes", "kills")
def test_random_kills_of_sharded_replicas(tmp_path: Path) -> None:
    num_kills = 20
    launched = _launch(tmp_path, 4, num_kills, "800", "100000", "0.06", "{}", "0", options=SHARDED)
    draw, known, num_killed = random.Random(12), set[Path](), 0
    while launched.poll() is None:
        time.sleep(draw.random())
        trained = {path for path in tmp_path.glob("log_*") if '"members": [0, 1, 2, 3]' in path.read_text()}
        if len(trained - known) < (2 if known else 4):
            continue  # the last replica hasn't joined yet
        if num_killed == num_kills:
            (tmp_path / "enough").touch()
            break
        os.kill(int((tmp_path / f"pid_{draw.randrange(4)}").read_text()), signal.SIGKILL)
        known, num_killed = trained, num_killed + 1
    _, errors = launched.communicate(timeout=1200)
    assert launched.returncode == 0 and num_killed == num_kills, errors
    epochs = {line["epoch"] for line in _lines(tmp_path) if "samples" in line}
    _check(tmp_path, 4, 4, 800, len(epochs))


EVALUATION = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

folder, precision = Path(sys.argv[1]), sys.argv[2]
accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
rank, members = accelerator.process_index, accelerator.world.members
torch.manual_seed(0)
x = torch.randn(53, 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, torch.arange(53))
training = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
evaluation = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
start = {name: value.clone() for name, value in model.state_dict().items()}
model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, training, evaluation)
samples, scales = [], []
for number, (inputs, indices) in enumerate(training):
    with accelerator.accumulate(model):
        if accelerator.scaler is not None and rank == 1 and number == 3:
            inputs = inputs * torch.inf  # the sum is infinite on all ranks, which skip this update
        losses = model(inputs).float().square().mean(1)
        accelerator.backward(losses.sum(), weight=2 * len(losses))
        optimizer.step()
        optimizer.zero_grad()
    samples.append(accelerator.gather_for_metrics(indices).tolist())  # of which each is in one update all the same
    scales.append(accelerator.scaler.get_scale() if accelerator.scaler else 1.0)
found, means = [], accelerator.streaming_mean()
for number, (inputs, indices) in enumerate(evaluation):
    if rank == 1 and number == 2 and not members.is_joining:
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        values = model(inputs).float()[:, 0]
    values, labels, names = accelerator.gather_for_metrics((values, indices, [str(int(one)) for one in indices]))
    found += zip(labels.tolist(), values.tolist(), names)
    if rank == 0:
        means.update(inputs[:, 0])  # a rank without samples reads an extra one, which doesn't count
    else:
        means.update(inputs[:, 0] * 0)
given = [{"a": torch.tensor([rank + 1.0])}, f"{rank}"]
number, text = torch.tensor(float(rank)), [str(rank)]
accelerator.wait_for_everyone()
(folder / f"{rank}.json").write_text(json.dumps({
    "samples": samples, "scales": scales, "found": found, "updates": optimizer.num_updates,
    "weights": model.weight.tolist(), "start": start["weight"].tolist(), "bias": start["bias"].tolist(),
    "gather": accelerator.gather(given[0])["a"].tolist(), "objects": gather_object([given[1]]),
    "sum": accelerator.reduce(given[0]["a"], "sum").tolist(),
    "mean": accelerator.reduce(given[0]["a"], "mean").tolist(),
    "padded": accelerator.gather(accelerator.pad_across_processes(torch.ones(1, rank + 1), dim=1)).tolist(),
    "from_2": broadcast_object_list(text, from_process=2),
    "count": means.sum_and_count()[1],
}))
try:
    broadcast_object_list(text, from_process=1)
except RuntimeError as error:
    (folder / f"error_{rank}").write_text(str(error))
"""


@pytest.mark.parametrize("precision", [pytest.param("no", marks=slow), "fp16"])
def test_an_evaluation_without_a_lost_rank_has_each_sample_once(tmp_path: Path, precision: str) -> None:
    """The collectives answer with what the living ranks gave, and an overflow on one rank skips the step on all."""
    (tmp_path / "train.py").write_text(EVALUATION)
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "3"]
    command = [*launch, "--keep_replicas", "1", str(tmp_path / "train.py"), str(tmp_path)]
    ended = subprocess.run([*command, precision], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2))
    for name, value in first.items():
        assert value == last[name] or name == "padded", name
    assert sorted(chain(*first["samples"])) == [*range(53)]
    assert sorted(label for label, _, _ in first["found"]) == [*range(53)]
    assert all(name == str(label) for label, _, name in first["found"])
    assert (first["gather"], first["objects"], first["from_2"]) == ([1, 3], ["0", "2"], ["2"])
    assert (first["sum"], first["mean"], first["padded"]) == ([4], [2], [[1, 0, 0], [1, 1, 1]])
    assert all("rank 1 was lost" in (tmp_path / f"error_{rank}").read_text() for rank in (0, 2))
    torch.manual_seed(0)
    x, windows = torch.randn(53, 8), [first["samples"][at : at + 2] for at in range(0, len(first["samples"]), 2)]
    scales = [65536.0 if precision == "fp16" else 1.0, *first["scales"][1::2], *first["scales"][-1:]]
    skipped = {number for number in range(len(windows)) if scales[number + 1] < scales[number]}
    assert (1 in skipped) == (precision == "fp16")
    weight, bias = (torch.tensor(first[name], requires_grad=True) for name in ("start", "bias"))
    for number, window in enumerate(windows):
        if number not in skipped:
            chosen = x[[*chain(*window)]]
            gradients = torch.autograd.grad(((chosen @ weight.T + bias).square().mean() / 2), (weight, bias))
            with torch.no_grad():
                for parameter, gradient in zip((weight, bias), gradients, strict=True):
                    parameter -= 0.1 * gradient
    tolerance = 5e-3 if skipped else 1e-5
    torch.testing.assert_close(torch.tensor(first["weights"]), weight.detach(), rtol=tolerance, atol=tolerance)
    assert first["updates"] == len(windows) - len(skipped)
    by_sample = {label: value for label, value, _ in first["found"]}
    computed = (x @ torch.tensor(first["weights"]).T)[:, 0]
    difference = torch.tensor([by_sample[index] for index in range(53)]) - computed
    assert difference.max() - difference.min() < 0.1  # the bias


def test_a_watch_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    """Not at its first report, after minutes of training."""
    script = "from accelerate import Accelerator\nAccelerator(cpu=True).watch_run()\nprint('trains')\n"
    (tmp_path / "train.py").write_text(script)
    command = ["launch", "--cpu", "--num_processes", "2", "--keep_replicas", "1", str(tmp_path / "train.py")]
    ended = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", *command],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 1 and "trains" not in ended.stdout
    assert "SettingError: `watch_run()` under `accelerate launch --keep_replicas`" in ended.stderr


#: What a script does on rank 1 alone, and what is said about it.
PARTING = {
    "raw": "Call `accelerator.backward(loss)` in its place",
    "nostep": "have made different numbers of optimizer steps (by rank: {0: 4, 1: 3})",
    "continue": "have different numbers of samples left in this epoch: {0: 12, 1: 4}",
    "uneven": "have different numbers of samples left in this epoch: {0: 36, 1: 53}",
    "break": "rank 0 is in update; rank 1 is in the beginning of an epoch",
}
PARTING_SCRIPT = """
import sys
import torch
from accelerate import Accelerator

case = sys.argv[1]
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
num_samples = 61 if case == "uneven" and accelerator.process_index else 44
loader = torch.utils.data.DataLoader(torch.randn(num_samples, 3), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for number, rows in enumerate(loader):
        is_odd = accelerator.process_index == 1 and number == 3
        if is_odd and case == "continue":
            continue
        if is_odd and case == "break":
            break
        loss = model(rows).square().mean()
        loss.backward() if case == "raw" else accelerator.backward(loss)
        if not (is_odd and case == "nostep"):
            optimizer.step()
        optimizer.zero_grad()
"""


@slow
@pytest.mark.parametrize("case", PARTING)
def test_what_would_part_the_ranks_is_refused_and_told(tmp_path: Path, case: str) -> None:
    (tmp_path / "train.py").write_text(PARTING_SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
    command = [*launch, "--num_processes", "2", "--keep_replicas", "1", str(tmp_path / "train.py"), case]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 1 and PARTING[case] in ended.stderr, ended.stderr


def test_ranks_that_all_fail_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    command = ["launch", "--cpu", "--num_processes", "2", "--keep_replicas", "1", str(tmp_path / "train.py")]
    ended = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", *command],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
