"""Compare `accelerate launch --keep_replicas` with torchft: the same training and SIGKILLs, on the CPU with gloo.

    python -m venv .torchft
    .torchft/bin/pip install opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
    .torchft/bin/pip install --no-deps torchft==0.2.0
    purelib="import sysconfig; print(sysconfig.get_path('purelib'))"  # torch comes from the project's environment
    .venv/bin/python -c "$purelib" > "$(.torchft/bin/python -c "$purelib")/project.pth"
    TORCHFT_PYTHON=.torchft/bin/python .venv/bin/python benchmarks/lost_ranks.py

Three replicas of one process each train a model of 0.1 million parameters; a sleep of 80 ms stands for the forward of a
large model. 1 to 3 s after all three train, a random one gets SIGKILL. It is started again by the launcher, and for
torchft by this program, at once. A run ends when all are back and have finished an epoch. The first epoch has no kills,
and its samples aren't counted: torchft drops some while the replicas join.

The samples of an update are read from the weights: a parameter with an element for each sample changes only where the
sample was used. So gradients that a killed process has sent count, and refused updates don't. The next update of the
others is their first one without the samples that the killed process was working on.

With torchft, each replica reads its shard by `DistributedSampler` and saves its position after each committed update.
Its columns differ in the lighthouse's heartbeat timeout. `Manager.allreduce` averages the gradients in one tensor;
`--ddp` takes torchft's `DistributedDataParallel` instead. With torchft 0.2.0, torch 2.13 and gloo, that one raises an
AssertionError in all survivors when a replica is lost, so the training begins again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

RANKS, SAMPLES, BATCH, HANG_SECONDS, LIMIT_SECONDS = 3, 720, 8, 60.0, 600.0
README: Final = ("--min_replicas", str(RANKS - 1), "--join_timeout_ms", "10000", "--quorum_tick_ms", "100")
LIGHTHOUSES: Final = {
    "torchft, heartbeat timeout 5 s (default)": README,
    "torchft, 1 s": (*README, "--heartbeat_timeout_ms", "1000"),
    "torchft, 0.3 s": (*README[:-1], "20", "--heartbeat_timeout_ms", "300"),
}


@dataclass(frozen=True)
class Event:
    """A batch that a process begins (update 0), or an update that it has finished, with the samples of all replicas."""

    time: float
    rank: int
    pid: int
    epoch: int
    samples: list[int]
    update: int = 0
    weights: str = ""


class Replica(nn.Module):
    """A perceptron, the parameter that shows the samples of an update, the data and the log."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        self.used = nn.Parameter(torch.zeros(SAMPLES))
        groups: list[dict[str, Any]] = [{"params": self.layers.parameters(), "momentum": 0.9}, {"params": [self.used]}]
        self.optimizer = torch.optim.SGD(groups, lr=1e-3)
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._after)
        x = torch.randn(SAMPLES, 128)
        self.data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
        self._log = (folder / f"{rank}_{os.getpid()}.jsonl").open("w")
        self._rank, self._epoch, self._old, self._new = rank, 0, torch.empty(0), torch.empty(0)

    def forward(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y) + self.used[numbers].mean()

    def _before(self, *_: object) -> None:
        self._old = self.used.detach().clone()

    def _after(self, *_: object) -> None:
        self._new = (self.used.detach() != self._old).nonzero().flatten()

    def _say(self, samples: torch.Tensor, update: int = 0, weights: str = "") -> None:
        event = Event(time.time(), self._rank, os.getpid(), self._epoch, samples.tolist(), update, weights)
        self._log.write(json.dumps(asdict(event)) + "\n")
        self._log.flush()

    def begin(self, epoch: int, samples: torch.Tensor) -> None:
        """Log a batch that begins."""
        self._epoch, self._new = epoch, torch.empty(0)
        self._say(samples)

    def end(self, update: int) -> bool:
        """Log the update; False if the optimizer made none."""
        if len(self._new):
            content = parameters_to_vector(self.parameters()).detach().numpy().tobytes()
            self._say(self._new, update, hashlib.sha256(content).hexdigest())
        return len(self._new) > 0


def train(folder: Path, options: argparse.Namespace) -> None:
    """Train as a rank of `accelerate launch --keep_replicas`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Replica(folder, accelerator.process_index)
    model, optimizer, loader = accelerator.prepare(net, net.optimizer, DataLoader(net.data, batch_size=BATCH))
    for epoch in count(loader.iteration):
        for x, y, samples in loader:
            net.begin(epoch, samples)
            optimizer.zero_grad()
            time.sleep(options.step_seconds)
            accelerator.backward(model(x, y, samples))
            optimizer.step()
            net.end(optimizer.num_updates)


def train_torchft(folder: Path, options: argparse.Namespace) -> None:
    """Train as a replica group of torchft."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    net, store = Replica(folder, options.rank), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, Any]]) -> None:
        net.load_state_dict(state["model"])
        net.optimizer.load_state_dict(state["optimizer"])

    local = {"rank": 0, "world_size": 1, "hostname": "127.0.0.1", "store_addr": "127.0.0.1", "store_port": store.port}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": net.optimizer.state_dict()},
        min_replica_size=RANKS - 1,
        timeout=timedelta(seconds=30),
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica_{options.rank}",
        **local,
    )
    model, optimizer = DistributedDataParallel(manager, net) if options.ddp else net, Optimizer(manager, net.optimizer)
    sampler = DistributedSampler(net.data, options.rank, RANKS, group_rank=0, num_replicas=1, shuffle=False)
    loader, position = DataLoader(net.data, batch_size=BATCH, sampler=sampler), folder / f"position_{options.rank}"
    first, done = json.loads(position.read_text()) if position.exists() else (0, 0)
    for epoch in count(first):
        for number, (x, y, samples) in islice(enumerate(loader), done if epoch == first else 0, None):
            net.begin(epoch, samples)
            optimizer.zero_grad()  # begins the quorum
            time.sleep(options.step_seconds)
            model(x, y, samples).backward()
            if not options.ddp:
                gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
                mean = parameters_to_vector(gradients)
                manager.allreduce(mean).wait()
                vector_to_parameters(mean, gradients)
            optimizer.step()
            if net.end(manager.current_step()):
                position.with_suffix(".new").write_text(json.dumps([epoch, number + 1]))
                position.with_suffix(".new").replace(position)


@dataclass
class Run:
    """What the logs say so far."""

    folder: Path
    kills: list[tuple[float, int, int]] = field(default_factory=list)  # time, rank, pid
    events: list[Event] = field(default_factory=list)
    begun: dict[int, Event] = field(default_factory=dict)  # pid -> its last batch
    newest: dict[int, int] = field(default_factory=dict)  # rank -> pid
    updated: dict[int, float] = field(default_factory=dict)  # pid -> its last update
    trained: dict[int, float] = field(default_factory=dict)  # pid -> the first update with its own samples
    num_hung: int = 0
    _read: dict[Path, int] = field(default_factory=lambda: defaultdict(int))

    def read(self) -> None:
        """Read what was added to the logs."""
        for path in self.folder.glob("*.jsonl"):
            content = path.read_bytes()[self._read[path] :]
            content = content[: content.rfind(b"\n") + 1]
            self._read[path] += len(content)
            for event in [Event(**json.loads(line)) for line in content.splitlines()]:
                self.events.append(event)
                if event.pid not in self.begun:
                    self.newest[event.rank] = event.pid
                if not event.update:
                    self.begun[event.pid] = event
                    continue
                self.updated[event.pid] = event.time
                if set(event.samples) & set(self.begun[event.pid].samples):
                    self.trained.setdefault(event.pid, event.time)
        old = [pid for pid in self.newest.values() if self.updated.get(pid, time.time()) < time.time() - HANG_SECONDS]
        self.num_hung = sum(Path(f"/proc/{pid}").exists() for pid in old)

    def num_epochs(self) -> int:
        """Return the number of epochs that all replicas have finished."""
        return min(max(e.epoch for e in self.begun.values() if e.rank == rank) for rank in range(RANKS))

    def all_train(self) -> bool:
        living = set(self.newest.values()) - {pid for _, _, pid in self.kills}
        return len(living) == RANKS and living <= self.trained.keys()


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "errors.txt").open("ab") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=errors, stderr=errors, cwd=folder)


def run(name: str, folder: Path, options: argparse.Namespace) -> Run:
    """Train and kill, until all replicas are back and have finished an epoch."""
    from accelerate.ports import get_free_port

    words = [os.path.abspath(__file__), "--folder", str(folder), "--step_seconds", str(options.step_seconds)]
    python, address = os.path.abspath(os.environ.get("TORCHFT_PYTHON", "")), f"127.0.0.1:{get_free_port()}"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes"]
    commands = [[*command, str(RANKS), "--keep_replicas", "1000", *words]]
    if name in LIGHTHOUSES:
        commands = [[str(Path(python).with_name("torchft_lighthouse")), "--bind", address, *LIGHTHOUSES[name]]]
        words += ["--lighthouse", f"http://{address}", *(["--ddp"] if options.ddp else [])]
        commands += [[python, *words, "--rank", str(rank)] for rank in range(RANKS)]
    processes = [start(command, folder) for command in commands]
    found, generator, due, last_epoch, began = Run(folder), random.Random(options.seed), 0.0, 0, time.time()
    try:
        while not found.num_hung and processes[0].poll() is None and time.time() < began + LIMIT_SECONDS:
            time.sleep(0.02)
            for number in range(1, len(processes)):
                if processes[number].poll() is not None:
                    processes[number] = start(commands[number], folder)
            found.read()
            if not found.all_train() or not found.num_epochs():
                continue
            if len(found.kills) == options.kills:
                last_epoch = last_epoch or max(event.epoch for event in found.begun.values()) + 1
                if found.num_epochs() >= last_epoch:
                    break
            elif not due:
                due = time.time() + generator.uniform(1, 3)
            elif time.time() > due:
                rank, due = generator.randrange(RANKS), 0.0
                found.kills.append((time.time(), rank, found.newest[rank]))
                os.kill(found.newest[rank], signal.SIGKILL)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    assert len(found.newest) == RANKS, (folder / "errors.txt").read_text()[-4000:]
    return found


def seconds(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "never"


def measures(found: Run, num_kills: int) -> dict[str, str]:
    """Return a column of the table."""
    updates: dict[tuple[int, int], list[Event]] = defaultdict(list)  # by the beginning of the training, and number
    batches: dict[int, list[tuple[float, int]]] = defaultdict(list)  # sample -> when it was read, and in which epoch
    num_beginnings, newest = 0, 0
    for event in sorted(found.events, key=lambda event: event.time):
        if event.update:
            num_beginnings += event.update < newest - 1
            newest = event.update
            updates[num_beginnings, newest].append(event)
        for sample in () if event.update else event.samples:
            batches[sample].append((event.time, event.epoch))
    num_uses: dict[tuple[int, int], int] = defaultdict(int)
    for same in updates.values():
        for sample in {sample for event in same for sample in event.samples}:
            num_uses[batches[sample][bisect(batches[sample], (same[0].time, 0)) - 1][1], sample] += 1
    without, again = [], []
    for moment, rank, killed in found.kills:
        lost = set(found.begun[killed].samples)
        later = [e for same in updates.values() for e in same if e.time > moment and e.pid != killed]
        without += sorted(e.time - moment for e in later if not lost & set(e.samples))[:1]
        trained = [t for pid, t in found.trained.items() if found.begun[pid].rank == rank and t > moment]
        again += sorted(t - moment for t in trained)[:1]
    uses = [num_uses[epoch, sample] for epoch in range(1, found.num_epochs()) for sample in range(SAMPLES)]
    ended = [same[0].time for same in updates.values()]
    return {
        "kills": f"{len(found.kills)} of {num_kills}",
        "updates": f"{len(updates)} in {max(ended) - min(ended):.0f} s",
        "seconds from a kill to the next update of the others, median / max": seconds(without),
        "seconds from a kill to an update with samples of the new process, median / max": seconds(again),
        "updates with different weights": str(sum(len({e.weights for e in same}) > 1 for same in updates.values())),
        "samples in no update": f"{uses.count(0)} of {len(uses):,} ({len(uses) // SAMPLES} epochs)",
        "samples in more than one update of an epoch": str(sum(number > 1 for number in uses)),
        "survivors that crashed / hung": f"{len(found.begun) - RANKS - len(found.kills)} / {found.num_hung}",
    }


def main() -> None:
    """Run each system, and print the table; or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step_seconds", type=float, default=0.08)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        (train_torchft if options.lighthouse else train)(options.folder, options)
        return
    names = ["`--keep_replicas`", *(LIGHTHOUSES if "TORCHFT_PYTHON" in os.environ else ())]
    columns: dict[str, dict[str, str]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            columns[name] = measures(run(name, Path(folder), options), options.kills)
    print("\n".join(["| |" + "".join(f" {name} |" for name in names), "|---|" + "---|" * len(names)]))
    for measure in columns[names[0]]:
        print(f"| {measure} |" + "".join(f" {column[measure]} |" for column in columns.values()))
    if len(names) == 1:
        print("torchft was not run: TORCHFT_PYTHON is not set.")


if __name__ == "__main__":
    main()
