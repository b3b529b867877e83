"""Members on several hosts: launchers that forward what their ranks send, in one process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from accelerate.errors import LaunchError
from accelerate.guests.fault_tolerance import launcher_members, other_hosts
from accelerate.guests.fault_tolerance.connections import HostLink
from accelerate.guests.fault_tolerance.launcher_members import Hosts, LauncherMembers, ReplicaMembers
from accelerate.guests.fault_tolerance.other_hosts import RemoteMembers
from accelerate.ports import get_free_port


class Machines:
    """Launchers of machines with two ranks each; machine 0 keeps the members."""

    def __init__(self, number: int, replica_size: int = 1) -> None:
        self.hosts = Hosts(number, 0, 2, "127.0.0.1", get_free_port(), "token")
        self.replica_size = replica_size
        self.holder = ReplicaMembers(2 * number, 9, replica_size=replica_size, hosts=self.hosts)
        self.launchers: dict[int, LauncherMembers] = {}
        self.selectors: dict[int, selectors.BaseSelector] = {}
        self.opened: dict[int, socket.socket] = {}
        self.add(0, self.holder)

    def add(self, machine: int, launcher: LauncherMembers) -> None:
        self.launchers[machine], self.selectors[machine] = launcher, selectors.DefaultSelector()
        launcher.register(self.selectors[machine])

    def start(self, machine: int, **changes: Any) -> RemoteMembers:
        """Start the launcher of a machine, which waits for the one of machine 0."""
        done = threading.Event()

        def greet() -> None:
            while not done.wait(0.01):
                self.run(0)

        answering = threading.Thread(target=greet)
        answering.start()
        try:
            hosts = replace(self.hosts, machine=machine, **changes)
            launcher = RemoteMembers(hosts, 2 * self.hosts.number, 9, replica_size=self.replica_size)
        finally:
            done.set()
            answering.join()
        self.add(machine, launcher)
        return launcher

    def run(self, *machines: int) -> None:
        """Handle all that has arrived; by default at all machines, until nothing does any more."""
        is_quiet = 0
        while is_quiet < 3:
            is_quiet += 1
            for machine in machines or [*self.selectors]:
                for key, _ in self.selectors[machine].select(0.005):
                    is_quiet = 0
                    key.data()

    def connect(self, rank: int, pid: int = 0, start: int = 0) -> None:
        if rank in self.opened:
            self.opened[rank].close()
            self.run()
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.settimeout(30)
        opened.connect(str(self.launchers[rank // 2].folder / "members"))
        self.opened[rank] = opened
        self.send(rank, {"rank": rank, "pid": pid, "start": start})

    def send(self, rank: int, message: dict[str, Any]) -> None:
        self.opened[rank].sendall(json.dumps(message).encode() + b"\n")
        self.run()

    def give(self, rank: int, content: bytes = b"", operation: str = "update", value: Any = None) -> None:
        """Send a value with a file, as a rank does."""
        name = f"gradients_{rank}_0_5"
        (self.launchers[rank // 2].folder / name).write_bytes(content)
        self.send(rank, {"operation": operation, "value": value, "file": name if content else None})

    def lose(self, rank: int) -> None:
        """The process of a rank ends, and another takes its place."""
        launcher = self.launchers[rank // 2]
        launcher.lost(rank)
        variables = launcher.replace(rank)
        self.run()
        assert variables is not None
        self.connect(rank, start=int(variables["ACCELERATE_REPLICA_START"]))

    def answer(self, rank: int) -> dict[str, Any] | None:
        self.opened[rank].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return json.loads(self.opened[rank].recv(1 << 16).split(b"\n")[0])
        return None

    def has(self, machine: int, rank: int) -> bytes:
        path = self.launchers[machine].folder / f"gradients_{rank}_0_5"
        return path.read_bytes() if path.exists() else b""

    def cut(self, machine: int) -> None:
        """Lose the launcher of a machine, as by a SIGKILL."""
        self.selectors.pop(machine).close()
        launcher: Any = self.launchers.pop(machine)
        launcher._link.close()
        launcher._ranks.close()
        self.run()

    def close(self) -> None:
        for machine in sorted(self.launchers, reverse=True):
            launcher: Any = self.launchers[machine]
            if machine:
                launcher._link.close()
            launcher.close()
            self.selectors[machine].close()
        for opened in self.opened.values():
            opened.close()


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    made = Machines(*getattr(request, "param", (2,)))
    for machine in range(1, made.hosts.number):
        assert not made.start(machine).joins
    for rank in range(2 * made.hosts.number):
        made.connect(rank)
    yield made
    made.close()


@pytest.mark.parametrize("machines", [(3,)], indirect=True)
def test_what_a_rank_gives_is_on_all_hosts_before_the_answer(machines: Machines) -> None:
    content = {rank: os.urandom(3_000_000 + rank) for rank in range(6)}
    for rank in range(5):
        machines.give(rank, content[rank], value=rank)
    assert [machines.answer(rank) for rank in range(6)] == [None] * 6
    machines.give(5, content[5], value=5)
    for rank in range(6):
        answer = machines.answer(rank)
        assert answer is not None and answer["values"] == {str(rank): rank for rank in range(6)}
        assert all(machines.has(machine, rank) == content[rank] for machine in range(3))


@pytest.mark.parametrize("machines", [(3,)], indirect=True)
def test_a_lost_host_counts_with_what_reached_machine_0(machines: Machines, capfd: pytest.CaptureFixture[str]) -> None:
    machines.give(2, b"whole", value=2)  # its other rank gives nothing
    machines.cut(1)
    assert machines.has(0, 2) == machines.has(2, 2) == b"whole"
    for rank in (0, 1, 4, 5):
        machines.give(rank, b"own", value=rank)
    answer = machines.answer(4)
    assert answer is not None
    assert answer["members"] == [0, 1, 4, 5] and [*answer["values"]] == ["2", "0", "1", "4", "5"]
    assert "machine 1 was lost with ranks 2 and 3" in capfd.readouterr().err


def test_half_a_file_does_not_count(machines: Machines) -> None:
    link: Any = machines.launchers[1]
    header = {"rank": 2, "message": {"operation": "update", "value": 2}, "file": "gradients_2_0_5", "bytes": 9}
    link._link.socket.send(json.dumps(header).encode() + b"\nhalf")
    machines.run(0)
    machines.cut(1)
    for rank in (0, 1):
        machines.give(rank, b"own", value=rank)
    answer = machines.answer(0)
    assert answer is not None and [*answer["values"]] == ["0", "1"]


def test_a_host_that_is_started_again_joins_with_the_state_of_the_others(machines: Machines) -> None:
    machines.cut(1)
    assert machines.start(1).joins
    for rank in (2, 3):
        machines.connect(rank, start=1)
    machines.send(2, {"operation": "join", "value": None})
    for rank in (0, 1):
        machines.give(rank, value=rank)
        machines.answer(rank)
    (machines.holder.folder / "state_0_7_1").write_bytes(b"state")
    machines.send(0, {"operation": "admit", "value": {"path": "state_0_7_1", "updates": 4}, "file": "state_0_7_1"})
    machines.send(1, {"operation": "admit", "value": {"path": None, "updates": 4}})
    answer = machines.answer(2)
    assert answer is not None and answer["values"] == {"0": "state_0_7_1", "1": None, "-1": 4}
    assert answer["members"] == [0, 1, 2] and machines.answer(3) is None
    assert (machines.launchers[1].folder / "state_0_7_1").read_bytes() == b"state"


def test_a_host_that_comes_while_a_state_is_given_has_it_too(machines: Machines) -> None:
    machines.cut(1)
    (machines.holder.folder / "state_0_7_1").write_bytes(b"state")
    machines.send(0, {"operation": "admit", "value": {"path": "state_0_7_1", "updates": 4}, "file": "state_0_7_1"})
    machines.start(1)
    machines.run()
    assert (machines.launchers[1].folder / "state_0_7_1").read_bytes() == b"state"


def test_a_host_waits_for_the_next_start_of_a_run_that_ends(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.holder.minimum = 3
    machines.cut(1)
    assert machines.holder.ending
    monkeypatch.setattr(other_hosts, "_CONNECT_SECONDS", 1.0)
    with pytest.raises(LaunchError, match="the end of the run before"):
        machines.start(1)


def test_a_side_without_machine_0_ends(machines: Machines, capfd: pytest.CaptureFixture[str]) -> None:
    remote: Any = machines.launchers[1]
    with subprocess.Popen(["sleep", "60"]) as rank:
        machines.opened.pop(2).close()
        machines.run()
        machines.connect(2, pid=rank.pid)
        remote._link.heard_at -= launcher_members.SILENCE_SECONDS + 1
        remote._tick()
        assert rank.wait(30) == -signal.SIGKILL
    assert remote.is_cut_off and not remote.members and not remote.replace(2)
    machines.run(0)
    assert machines.holder.members == {0, 1}
    said = capfd.readouterr().err
    assert "machine 1 has lost machine 0" in said and "nothing was heard from it for 7 s" in said
    assert "machine 1 was lost with ranks 2 and 3" in said


def test_a_silent_host_is_lost_and_one_that_computes_is_not(machines: Machines) -> None:
    holder: Any = machines.holder
    (link,) = holder._links
    link.heard_at -= launcher_members.SILENCE_SECONDS + 1
    machines.launchers[1]._tick()
    holder._tick()  # this one has come to read as late
    assert holder.members == {0, 1, 2, 3}
    link.heard_at -= launcher_members.SILENCE_SECONDS + 1
    holder._tick()
    assert holder.members == {0, 1}


def test_ranks_of_another_host_that_end_well_are_not_missed(machines: Machines) -> None:
    machines.holder.minimum = 4
    for rank in (0, 1):
        machines.holder.lost(rank, has_failed=False)
    waiting = threading.Thread(target=machines.holder.wait_for_hosts)
    waiting.start()
    remote = machines.launchers[1]
    for rank in (2, 3):
        assert waiting.is_alive()
        remote.lost(rank, has_failed=False)
    machines.run(1)
    remote.close()
    del machines.launchers[1], machines.selectors[1]
    waiting.join(30)
    assert not waiting.is_alive() and not machines.holder.ending


@pytest.mark.parametrize(
    ("changes", "text"), [({"token": "other"}, "belongs to another run"), ({"machine": 5}, "no machine 5 among 2")]
)
def test_a_launcher_of_another_run_is_refused(changes: dict[str, Any], text: str) -> None:
    made = Machines(2)
    try:
        with pytest.raises(LaunchError, match=text):
            made.start(**{"machine": 1, **changes})
    finally:
        made.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"token": "\\u00e9", "machine": "x"}\n',
        b'{"file": "gradients_0_0_5", "bytes": 4}\nevil',
        b'{"rank": 2, "failed": true}\n',
        b"x" * (2 << 20),
        b"",
    ],
)
def test_what_is_no_launcher_changes_nothing(data: bytes) -> None:
    made = Machines(2)
    try:
        with socket.create_connection(("127.0.0.1", made.hosts.port)) as opened:
            sender = threading.Thread(target=_send, args=(opened, data))
            sender.start()
            made.run(0)
            sender.join(30)
            made.run(0)
        made.run(0)
        assert made.holder.members == {0, 1, 2, 3} and not made.has(0, 0)
        assert not made.start(1).joins
    finally:
        made.close()


def _send(opened: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        opened.sendall(data)


@pytest.mark.parametrize("name", ["../gradients_0_0_5", "members", "/etc/passwd", "state_0_7_1.new"])
def test_no_other_file_is_written_for_another_host(tmp_path: Any, name: str) -> None:
    ours, theirs = socket.socketpair()
    link = HostLink.__new__(HostLink)
    link.__dict__.update(_folder=tmp_path, takes_files=True)
    with ours, theirs, pytest.raises(ValueError, match="isn't a file of ranks"):
        link._create(name)
    assert not [*tmp_path.iterdir()]


def lines(operation: str) -> bytes:
    return json.dumps({"operation": operation, "value": None}).encode() + b"\n"


@pytest.mark.parametrize(
    ("safe", "late"),
    [
        ({0: "prepare"}, {0: "update"}),  # at the start, a rank may load for as long as it wants
        ({1: "busy", 0: "save_state"}, {1: "save_state", 0: "update"}),  # and save
        ({}, {0: "save_state"}),  # but it has to begin
        ({}, {2: "join"}),  # which a process that waits to join sees too
    ],
)
def test_a_rank_that_does_not_answer_is_killed(safe: dict[int, str], late: dict[int, str]) -> None:
    members: Any = ReplicaMembers(3, 1, lost_after_seconds=0.2)
    selector = selectors.DefaultSelector()
    members.register(selector)
    opened = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    members.members = {1} if 2 in late else {0, 1}

    def run(messages: dict[int, str], seconds: float) -> bool:
        for number, operation in messages.items():
            opened[number].sendall(lines(operation))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and rank.poll() is None:
            for key, _ in selector.select(0.1):
                key.data()
        return rank.poll() is not None

    try:
        with subprocess.Popen(["sleep", "600"]) as rank:
            os.kill(rank.pid, signal.SIGSTOP)
            for number, one in enumerate(opened):
                one.connect(str(members.folder / "members"))
                one.sendall(json.dumps({"rank": number, "pid": rank.pid if number == 1 else 0}).encode() + b"\n")
            assert not run(safe, 2)
            assert run(late, 60)
            assert rank.returncode == -signal.SIGKILL
    finally:
        members.close()
        selector.close()
        for one in opened:
            one.close()


@pytest.fixture
def processes() -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    made = {rank: subprocess.Popen(["sleep", "600"]) for rank in range(8)}
    yield made
    for process in made.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("machines", [(4, 4)], indirect=True)
def test_a_replica_of_two_machines_is_lost_and_joins_as_one(
    machines: Machines, processes: dict[int, subprocess.Popen[bytes]]
) -> None:
    for rank in range(8):
        machines.connect(rank, processes[rank].pid)
    machines.lose(5)  # on machine 2; those of machine 3 belong to its replica
    assert [processes[rank].wait(30) for rank in (4, 6, 7)] == [-signal.SIGKILL] * 3
    assert machines.holder.members == {0, 1, 2, 3} and all(processes[rank].poll() is None for rank in range(4))
    late: Any = machines.launchers[3]
    late._link.send({"rank": 7, "start": 0, "message": {"operation": "join", "value": None}})  # it was on its way
    late._link.send({"rank": 7, "start": 0, "failed": True})
    for rank in (4, 6, 7):
        machines.lose(rank)
    for rank in (6, 5, 7, 4):
        assert machines.answer(5) is None
        machines.send(rank, {"operation": "meet", "value": "tcp://here" if rank == 4 else None})
    for rank in range(4, 8):
        met = machines.answer(rank)
        assert met is not None and met["values"]["4"] == "tcp://here"
        assert machines.holder._joining() == []
        machines.send(rank, {"operation": "join", "value": None})
    assert machines.holder._joining() == [4, 5, 6, 7]
    assert [launcher.num_replaced for launcher in machines.launchers.values()] == [0, 0, 1, 1]


@pytest.mark.parametrize("machines", [(4, 4)], indirect=True)
def test_a_machine_that_comes_back_knows_how_often_its_replicas_were_lost(
    machines: Machines, processes: dict[int, subprocess.Popen[bytes]]
) -> None:
    for rank in (4, 5):  # machine 3 is lost while these load
        machines.connect(rank, processes[rank].pid)
    machines.cut(3)
    assert [processes[rank].wait(30) for rank in (4, 5)] == [-signal.SIGKILL] * 2
    for rank in (4, 5):
        machines.lose(rank)
    launcher = machines.start(3)
    assert launcher.joins
    for rank in (6, 7):
        assert launcher.variables_of(rank) == {"ACCELERATE_REPLICA_START": "1"}
        machines.connect(rank, start=1)
    for rank in range(4, 8):
        machines.send(rank, {"operation": "join", "value": None})
    assert machines.holder._joining() == [4, 5, 6, 7]


def test_a_process_that_nobody_is_left_to_join_is_ended(
    machines: Machines, processes: dict[int, subprocess.Popen[bytes]]
) -> None:
    for rank in (0, 1):
        machines.holder.lost(rank)
        assert machines.holder.replace(rank)
    machines.connect(0, processes[0].pid, start=1)
    for rank in (2, 3):
        machines.launchers[1].lost(rank, has_failed=False)
    machines.run()
    assert processes[0].wait(30) == -signal.SIGKILL and machines.holder.given_up == {0}
    machines.connect(1, processes[1].pid, start=1)  # it has only just imported torch
    machines.send(1, {"operation": "join", "value": None})
    assert processes[1].wait(30) == -signal.SIGKILL and machines.holder.given_up == {0, 1}


def test_a_machine_that_comes_too_late_is_told_that_the_run_is_over(
    machines: Machines, processes: dict[int, subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]
) -> None:
    remote: Any = machines.launchers[1]
    for rank in (2, 3):
        remote.lost(rank)
        assert remote.replace(rank)
    machines.connect(2, processes[2].pid, start=1)
    for rank in (0, 1):
        machines.holder.lost(rank, has_failed=False)
    machines.run()
    assert processes[2].wait(30) == -signal.SIGKILL and remote.has_finished and remote.given_up == {2}
    machines.connect(3, processes[3].pid, start=1)  # it has only just imported torch
    machines.send(3, {"operation": "join", "value": None})
    assert processes[3].wait(30) == -signal.SIGKILL
    remote.lost(3)
    assert not remote.replace(3)
    remote._lose_holder("the launcher there has ended")
    assert not remote.is_cut_off and not capfd.readouterr().err


def test_a_launcher_that_was_cut_off_accepts_no_more(machines: Machines) -> None:
    remote: Any = machines.launchers[1]
    remote._lose_holder("a test")
    remote._ranks._accept()  # the selector had found a process before
    assert remote.is_cut_off and not remote._ranks._unknown
    remote.is_cut_off = False  # for the end of this test


def test_the_ranks_of_a_lost_replica_are_no_members(machines: Machines) -> None:
    remote: Any = machines.launchers[1]
    remote.replica_size = 2
    remote.lost(3)
    assert remote.members == {0, 1} and remote.is_ended(2)
