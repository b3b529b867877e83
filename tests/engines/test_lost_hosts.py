"""Ranks and hosts that are lost one after the other, in a run that nobody starts again: network namespaces as hosts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import Launch, Running
from tests.engines.network import ADDRESSES, cut, kill_all, mend, network, pull
from tests.multi.test_lost_replica import SCRIPT, _check, _lines
from tests.slow import slow_for

#: Two ranks shard a replica.
SHARDED = (
    *("--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config"),
    *("--parallelism_config_dp_shard_size", "2", "--parallelism_config_dp_replicate_size"),
)
#: Ten times of what they take on two idle cores.
JOIN_SECONDS, GO_ON_SECONDS = 200.0, 30.0


@dataclass
class Run:
    """A run on several hosts with some ranks each, of which machine 0 keeps the members."""

    folder: Path
    hosts: tuple[Launch, ...]
    options: tuple[str, ...] = ()
    per_host: int = 2
    launchers: dict[int, Running] = field(default_factory=dict)
    outputs: dict[int, list[Running]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "train.py").write_text(SCRIPT)
        self.num_ranks = self.per_host * len(self.hosts)
        for host in range(len(self.hosts)):
            self.start(host)
        self.all_train()

    def ranks_of(self, host: int) -> list[int]:
        return [*range(self.per_host * host, self.per_host * (host + 1))]

    def lost_with(self, *ranks: int) -> list[int]:
        """The ranks that are lost with ``ranks``."""
        size = 2 if "--use_fsdp" in self.options else 1
        return [rank for rank in range(self.num_ranks) if rank // size in {one // size for one in ranks}]

    def start(self, host: int) -> None:
        """Start the launcher of a host, as an engine does."""
        meeting = ("--main_process_ip", ADDRESSES[0], "--main_process_port", "29557", "--machine_rank", str(host))
        counts = ("--num_machines", str(len(self.hosts)), "--num_processes", str(self.num_ranks))
        words = ("--cpu", *meeting, *counts, "--keep_replicas", "1000", *self.options)
        arguments = (str(self.folder / "train.py"), str(self.folder), "600", "1000000", "0.02", "{}", "0")
        running = self.hosts[host].start(*words, *arguments)
        self.launchers[host] = running
        self.outputs.setdefault(host, []).append(running)

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
        """All ranks make updates."""
        self.wait("all train", lambda: self.newest[1] == [*range(self.num_ranks)], JOIN_SECONDS)

    def others_train(self, lost: list[int], what: str) -> None:
        """An update is made without the ranks ``lost``, after now."""
        now = time.time()
        self.wait(what, lambda: self.newest[0] > now and not set(self.newest[1]) & set(lost), GO_ON_SECONDS)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(int((self.folder / f"pid_{rank}").read_text()), number)

    def said(self) -> str:
        return "\n----\n".join(running.output for each in self.outputs.values() for running in each)

    def lose_host(self, host: int, what: str) -> tuple[int, str]:
        """Wait until the others go on without a host; return how its launcher ended."""
        lost = self.launchers.pop(host)
        self.others_train(self.lost_with(*self.ranks_of(host)), what)
        os.kill(lost.process.pid, signal.SIGCONT)
        return lost.ended(GO_ON_SECONDS)

    def finish(self) -> None:
        """Let the run end, compare it with one process that makes the same updates, and print the times."""
        (self.folder / "enough").touch()
        for index, running in self.launchers.items():
            code, output = running.ended(100)
            assert code == 0 or not (self.folder / "end_0.pt").exists(), f"machine {index}: {output}"
        epochs = {line["epoch"] for line in _lines(self.folder) if "samples" in line}
        _check(self.folder, self.num_ranks, len(list(self.folder.glob("end_*"))), 600, len(epochs))
        for what, seconds in self.times.items():
            middle, most = sorted(seconds)[len(seconds) // 2], max(seconds)
            print(f"{what}: {len(seconds)} times, {middle:.1f} s, at most {most:.1f} s")


#: What is lost: a rank, or a host other than machine 0.
RANK_LOSSES = {"rank killed": signal.SIGKILL, "rank stopped": signal.SIGSTOP}
HOST_LOSSES: dict[str, Callable[[Run, int], Any]] = {
    "launcher killed": lambda run, host: run.launchers[host].process.kill(),
    "launcher stopped": lambda run, host: os.kill(run.launchers[host].process.pid, signal.SIGSTOP),
    "host killed": lambda run, host: kill_all(host),
    "cable pulled": lambda run, host: pull(host),
    "one direction cut": lambda run, host: cut(host),
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with network(2, tmp_path) as hosts:
        yield Run(tmp_path, hosts, ("--lost_after_seconds", "5"))


@pytest.mark.timeout(1000)
def test_the_others_go_on_whatever_is_lost(run: Run) -> None:
    run.kill(3)
    run.others_train([3], "rank killed")
    run.all_train()
    run.kill(2, signal.SIGSTOP)
    run.others_train([2], "rank stopped")
    run.all_train()
    run.launchers[1].process.kill()
    assert run.lose_host(1, "launcher killed")[0] == -signal.SIGKILL
    run.start(1)
    run.all_train()
    for what, lose in (("cable pulled", pull), ("one direction cut", cut)):
        lose(1)
        code, output = run.lose_host(1, what)
        assert code == 75 and "machine 1 has lost machine 0" in output, output
        mend(1)
        run.start(1)
        run.all_train()
    run.finish()


@pytest.mark.timeout(1000)
def test_a_replica_of_two_machines_is_lost_and_starts_again_as_one(tmp_path: Path) -> None:
    with network(4, tmp_path) as hosts:
        run = Run(tmp_path, hosts, ("--lost_after_seconds", "5", *SHARDED, "2"), per_host=1)
        run.kill(3)  # its neighbour is on another machine
        run.others_train([2, 3], "rank killed")
        run.all_train()
        run.launchers[1].process.kill()  # machine 0 has the other half, and goes on keeping the members
        run.lose_host(1, "launcher killed")
        run.start(1)
        run.all_train()
        pull(3)
        assert run.lose_host(3, "cable pulled")[0] == 75
        mend(3)
        run.start(3)
        run.all_train()
        run.finish()


@pytest.mark.timeout(400)
def test_a_process_that_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    with network(2, tmp_path) as hosts:
        run = Run(tmp_path, hosts, ("--max_restarts", "2"), per_host=1)
        (tmp_path / "enough").touch()
        run.kill(0)  # its successor imports torch while rank 1, on the other machine, comes to the end
        assert run.launchers[1].ended()[0] == 0, run.said()
        code, output = run.launchers[0].ended()  # a restart would wait for machine 1
        assert code == 1 and "came to its end without rank 0" in output, output


@pytest.mark.timeout(400)
def test_a_machine_whose_process_comes_too_late_has_lost_nothing(tmp_path: Path) -> None:
    with network(2, tmp_path) as hosts:
        run = Run(tmp_path, hosts, per_host=1)
        (tmp_path / "enough").touch()
        run.kill(1)
        assert run.launchers[0].ended()[0] == 0, run.said()
        code, output = run.launchers[1].ended()
        assert code == 0 and "has lost machine 0" not in output, output


@pytest.mark.timeout(400)
def test_a_machine_without_replacements_fails_and_the_others_go_on(tmp_path: Path) -> None:
    with network(2, tmp_path) as hosts:
        run = Run(tmp_path, hosts, ("--keep_replicas", "1"), per_host=1)
        run.kill(1)
        run.others_train([1], "rank killed")
        run.all_train()
        run.kill(1)
        code, output = run.launchers.pop(1).ended()
        assert code == 1 and "all ranks of this machine were lost" in output, output
        run.others_train([1], "rank killed")
        run.finish()


@pytest.mark.timeout(300)
def test_without_machine_0_nobody_goes_on(run: Run) -> None:
    run.launchers[0].process.kill()
    run.launchers.pop(0).ended()
    code, output = run.launchers.pop(1).ended()
    assert code == 75 and "machine 1 has lost machine 0" in output, output


@pytest.mark.timeout(3600)
@slow_for("random losses take half an hour", "kills")
@pytest.mark.parametrize(
    ("num_hosts", "per_host", "num_losses", "options"),
    [(2, 2, 30, ()), (3, 2, 30, (*SHARDED, "3")), (4, 1, 30, (*SHARDED, "2"))],
    ids=["2", "3", "replicas over 2 of 4"],
)
def test_random_losses(
    tmp_path: Path, num_hosts: int, per_host: int, num_losses: int, options: tuple[str, ...]
) -> None:
    draw = random.Random(5)
    with network(num_hosts, tmp_path) as hosts:
        run = Run(tmp_path, hosts, ("--lost_after_seconds", "5", *options), per_host)
        for _ in range(int(os.environ.get("NUM_LOSSES", num_losses))):
            time.sleep(draw.random() * 3)
            what = draw.choice([*HOST_LOSSES, *RANK_LOSSES])
            if what in RANK_LOSSES:
                rank = draw.randrange(run.num_ranks)
                run.kill(rank, RANK_LOSSES[what])
                run.others_train(run.lost_with(rank), what)
            else:
                host = draw.randrange(1, num_hosts)
                HOST_LOSSES[what](run, host)
                run.lose_host(host, what)
                mend(host)
                run.start(host)
            run.all_train()
        run.finish()
