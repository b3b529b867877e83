"""Ranks and hosts that are lost one after the other, in a run that nobody starts again: network namespaces as hosts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import Launch, Running
from tests.engines.test_two_hosts import NAMES, hosts, ip, machine
from tests.multi.test_lost_replica import SCRIPT, _check, _lines
from tests.slow import slow_for

__all__ = ["hosts"]

LINKS = ("acc-va", "acc-vb")
NUM_LOSSES = 50
#: Ten times of what they take on two idle cores.
JOIN_SECONDS, GO_ON_SECONDS = 200.0, 30.0


@dataclass
class Run:
    """A run on two hosts with two ranks each, of which machine 0 keeps the members."""

    folder: Path
    hosts: tuple[Launch, Launch]
    options: tuple[str, ...] = ()
    launchers: dict[int, Running] = field(default_factory=dict)
    outputs: dict[int, list[Running]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def start(self, index: int) -> None:
        """Start the launcher of a host, as an engine does."""
        words = ("--keep_replicas", "1000", *self.options, str(self.folder / "train.py"), str(self.folder))
        arguments = ("600", "1000000", "0.02", "{}", "0")
        running = self.hosts[index].start(*machine(index), *words, *arguments)
        self.launchers[index] = running
        self.outputs.setdefault(index, []).append(running)

    @property
    def newest(self) -> tuple[float, list[int]]:
        """When the last update was made, and by which ranks."""
        found = [(line["time"], line["members"]) for line in _lines(self.folder) if "members" in line]
        return max(found, default=(0.0, []))

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait, and note how long it took."""
        began = time.time()
        while not is_so():
            assert time.time() < began + seconds, f"{what}: {self.newest}\n{self.said()}"
            assert all(running.process.poll() is None for running in self.launchers.values()), self.said()
            time.sleep(0.05)
        self.times.setdefault(what, []).append(time.time() - began)

    def all_train(self) -> None:
        """All four ranks make updates."""
        self.wait("all train", lambda: self.newest[1] == [0, 1, 2, 3], JOIN_SECONDS)

    def others_train(self, lost: list[int], what: str) -> None:
        """An update is made without the ranks ``lost``, after now."""
        now, left = time.time(), [rank for rank in range(4) if rank not in lost]
        self.wait(what, lambda: self.newest[0] > now and not set(self.newest[1]) & set(lost), GO_ON_SECONDS)
        assert set(self.newest[1]) <= set(left)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(int((self.folder / f"pid_{rank}").read_text()), number)

    def said(self) -> str:
        return "\n----\n".join(running.output for each in self.outputs.values() for running in each)

    def lose_host(self, what: str, is_stopped: bool = False) -> tuple[int, str]:
        """Wait until the others go on without the second host; return how its launcher ended."""
        lost = self.launchers.pop(1)
        self.others_train([2, 3], what)
        if is_stopped:
            os.kill(lost.process.pid, signal.SIGCONT)
        return lost.ended(GO_ON_SECONDS)

    def finish(self) -> None:
        """Let the run end, and compare it with one process that makes the same updates."""
        (self.folder / "enough").touch()
        for index, running in self.launchers.items():
            code, output = running.ended(100)
            assert code == 0 or not (self.folder / "end_0.pt").exists(), f"machine {index}: {output}"
        epochs = {line["epoch"] for line in _lines(self.folder) if "samples" in line}
        _check(self.folder, 4, len(list(self.folder.glob("end_*"))), 600, len(epochs))


@pytest.fixture
def run(tmp_path: Path, hosts: tuple[Launch, Launch]) -> Run:
    (tmp_path / "train.py").write_text(SCRIPT)
    made = Run(tmp_path, hosts, ("--lost_after_seconds", "5"))
    for index in (0, 1):
        made.start(index)
    made.all_train()
    return made


def pull(is_down: bool) -> None:
    ip("-n", NAMES[1], "link", "set", LINKS[1], "down" if is_down else "up")


@pytest.mark.timeout(1000)
def test_the_others_go_on_whatever_is_lost(run: Run) -> None:
    run.kill(3)
    run.others_train([3], "rank killed")
    run.all_train()
    run.kill(2, signal.SIGSTOP)
    run.others_train([2], "rank stopped")
    run.all_train()
    run.launchers[1].process.kill()
    assert run.lose_host("launcher killed")[0] == -signal.SIGKILL
    run.start(1)
    run.all_train()
    pull(True)
    code, output = run.lose_host("cable pulled")
    assert code == 75 and "machine 1 has lost machine 0" in output, output
    pull(False)
    run.start(1)
    run.all_train()
    run.finish()
    print({what: [round(seconds, 1) for seconds in each] for what, each in run.times.items()})


@pytest.mark.timeout(300)
def test_without_machine_0_nobody_goes_on(run: Run) -> None:
    run.launchers[0].process.kill()
    run.launchers.pop(0).ended()
    code, output = run.launchers.pop(1).ended()
    assert code == 75 and "machine 1 has lost machine 0" in output, output


@pytest.mark.timeout(3000)
@slow_for("50 losses take half an hour", "kills")
def test_random_losses(run: Run) -> None:
    draw = random.Random(5)

    def kill_host() -> None:
        left = subprocess.run(["ip", "netns", "pids", NAMES[1]], capture_output=True, text=True, check=True)
        for pid in map(int, left.stdout.split()):
            os.kill(pid, signal.SIGKILL)

    on_host: dict[str, Callable[[], Any]] = {
        "launcher killed": lambda: run.launchers[1].process.kill(),
        "launcher stopped": lambda: os.kill(run.launchers[1].process.pid, signal.SIGSTOP),
        "host killed": kill_host,
        "cable pulled": lambda: pull(True),
    }
    on_rank = {"rank killed": signal.SIGKILL, "rank stopped": signal.SIGSTOP}
    for _ in range(NUM_LOSSES):
        time.sleep(draw.random() * 3)
        what = draw.choice([*on_host, *on_rank])
        if what in on_rank:
            rank = draw.randrange(4)
            run.kill(rank, on_rank[what])
            run.others_train([rank], what)
        else:
            on_host[what]()
            run.lose_host(what, is_stopped=what == "launcher stopped")
            pull(False)
            run.start(1)
        run.all_train()
    run.finish()
    print({what: [round(seconds, 1) for seconds in each] for what, each in run.times.items()})
