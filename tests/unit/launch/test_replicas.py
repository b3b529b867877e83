"""The launcher's part of a run whose replicas are kept: who is a member, and when an exchange is complete."""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate.guests.fault_tolerance.launcher_members import ReplicaMembers, remove_left_folders
from accelerate.launch import reaper


class Launcher:
    """The members of three ranks, or of another number, with the loop of the supervisor run by hand."""

    def __init__(self, size: int = 3, replica_size: int = 1) -> None:
        self.members = ReplicaMembers(size, 1, replica_size=replica_size)
        self.selector = selectors.DefaultSelector()
        self.members.register(self.selector)
        self.opened: list[socket.socket] = []

    def run(self) -> None:
        while found := self.selector.select(0):
            for key, _ in found:
                key.data()

    def close(self) -> None:
        self.members.close()
        self.selector.close()
        for opened in self.opened:
            opened.close()

    def connect(self, rank: int, **more: object) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.settimeout(30)
        opened.connect(str(self.members.folder / "members"))
        self.opened.append(opened)
        self.send(opened, rank=rank, **more)
        return opened

    def send(self, to: socket.socket, **message: object) -> None:
        to.sendall(json.dumps(message).encode() + b"\n")
        self.run()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


@pytest.fixture
def pairs() -> Iterator[Launcher]:
    """Two replicas, each of two ranks that hold it together."""
    made = Launcher(4, 2)
    yield made
    made.close()


def answer(to: socket.socket) -> dict[str, Any]:
    return json.loads(to.recv(1 << 16).split(b"\n")[0])


def has_answer(to: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(to, selectors.EVENT_READ)
        return bool(selector.select(0))


def test_what_a_rank_gave_before_it_died_counts(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    for rank in (0, 1):
        launcher.send(ranks[rank], operation="update", value=rank)
    launcher.members.lost(1)
    assert not has_answer(ranks[0])
    launcher.send(ranks[2], operation="update", value=2)
    expected = {"values": {"0": 0, "1": 1, "2": 2}, "members": [0, 2], "joining": [], "awaited": [], "ending": ""}
    assert answer(ranks[0]) == answer(ranks[2]) == expected


def test_half_a_line_does_not_count(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    for rank in (0, 1):
        launcher.send(ranks[rank], operation="update", value=rank)
    ranks[2].sendall(b'{"operation": "update", "val')
    launcher.run()
    launcher.members.lost(2)
    assert answer(ranks[1]) == {
        "values": {"0": 0, "1": 1},
        "members": [0, 1],
        "joining": [],
        "awaited": [],
        "ending": "",
    }


def test_a_process_joins_with_the_state_that_a_member_gave(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    launcher.members.lost(1)
    new = launcher.connect(1, start=1)
    launcher.send(new, operation="join", value=None)
    for rank in (0, 2):
        launcher.send(ranks[rank], operation="update", value=rank)
    assert answer(ranks[0])["joining"] == answer(ranks[2])["joining"] == [1]
    launcher.members.lost(0)  # before it has given its state
    launcher.send(ranks[2], operation="admit", value={"path": None, "updates": 5})
    assert answer(ranks[2])["members"] == [2]
    launcher.send(ranks[2], operation="admit", value={"path": "state", "updates": 5})
    assert answer(new)["values"] == {"2": "state", "-1": 5}
    assert answer(ranks[2])["members"] == [1, 2]


def test_ranks_in_different_operations_hear_which(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    launcher.send(ranks[0], operation="update", value=0)
    launcher.send(ranks[1], operation="update", value=1)
    launcher.send(ranks[2], operation="wait_for_everyone", value=None)
    assert "rank 0 is in update; rank 1 is in update; rank 2 is in wait_for_everyone" in answer(ranks[1])["error"]


def test_a_second_process_is_no_rank(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    other = launcher.connect(1)
    assert "--num_processes 1" in answer(other)["error"]
    launcher.send(other, operation="update", value=-1)
    for rank in range(3):
        launcher.send(ranks[rank], operation="update", value=rank)
    assert answer(ranks[0])["values"] == {"0": 0, "1": 1, "2": 2}


def test_no_more_processes_than_asked_for_take_the_places_of_lost_ranks(launcher: Launcher) -> None:
    for rank, may_be_replaced in ((0, True), (1, False)):
        launcher.members.lost(rank)
        assert bool(launcher.members.replace(rank)) is may_be_replaced


def test_too_few_members_hear_that_they_end_and_nobody_joins_them(launcher: Launcher) -> None:
    launcher.members.minimum = 2
    ranks = [launcher.connect(rank) for rank in range(3)]
    launcher.members.lost(0)
    new = launcher.connect(0, start=1)
    launcher.send(new, operation="join", value=None)
    launcher.send(ranks[1], operation="update", value=1)
    launcher.send(ranks[2], operation="update", value=2)
    assert answer(ranks[1])["ending"] == ""
    launcher.send(ranks[1], operation="update", value=1)
    launcher.members.lost(2)
    heard = answer(ranks[1])
    assert heard["ending"] == "only rank 1 of 3 lives, fewer than --min_replicas 2"
    assert (heard["members"], heard["joining"]) == ([1], [])
    assert not launcher.members.replace(0)


def test_a_notice_to_one_rank_is_one_to_all(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    for rank in range(3):
        launcher.send(ranks[rank], operation="update", value=rank, notice="SIGTERM" if rank == 1 else None)
    assert [answer(one)["ending"] for one in ranks] == ["preempted by SIGTERM"] * 3
    launcher.members.lost(0)
    assert launcher.members.is_preempted and not launcher.members.replace(0)


def test_ranks_that_end_well_are_not_missed(launcher: Launcher) -> None:
    launcher.members.minimum = 3
    launcher.connect(0)
    launcher.members.lost(0, has_failed=False)
    assert not launcher.members.ending


def test_an_update_after_the_end_of_the_others_is_refused(launcher: Launcher) -> None:
    launcher.connect(0)
    launcher.members.lost(1)
    assert launcher.members.replace(1)
    new = launcher.connect(1, start=1)
    launcher.members.members.add(1)
    launcher.connect(2)
    launcher.members.lost(2, has_failed=False)
    launcher.members.lost(0, has_failed=False)
    launcher.send(new, operation="update", value=1)
    assert "ranks 0 and 2 came to the end, and rank 1 makes one more update" in answer(new)["error"]


def test_a_new_process_that_ends_early_ends_no_other(launcher: Launcher) -> None:
    ranks = [launcher.connect(rank) for rank in range(3)]
    launcher.members.lost(1)
    assert launcher.members.replace(1)
    launcher.connect(1, start=1)
    launcher.members.members.add(1)
    launcher.members.lost(1, has_failed=False)
    for rank in (0, 2):
        launcher.send(ranks[rank], operation="update", value=rank)
    assert answer(ranks[0])["members"] == [0, 2]


def test_a_rank_that_ends_before_it_is_known_leaves_its_place_to_another(launcher: Launcher) -> None:
    died = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    died.connect(str(launcher.members.folder / "members"))
    for key, _ in launcher.selector.select(0):
        key.data()  # accepted; what it says isn't read yet
    died.sendall(b'{"rank": 1}\n{"operation": "join", "value": null}\n')
    died.close()
    launcher.members.lost(1)
    launcher.run()
    ranks = [launcher.connect(0), launcher.connect(2)]
    assert not has_answer(launcher.connect(1, start=1))
    launcher.send(ranks[0], operation="update", value=0)
    launcher.send(ranks[1], operation="update", value=2)
    assert answer(ranks[0])["joining"] == []


def test_states_of_a_lost_rank_are_removed_but_for_the_newest_two(launcher: Launcher) -> None:
    for number in range(4):
        (launcher.members.folder / f"state_1_77_{number}").touch()
    launcher.members.lost(1)
    assert len(list(launcher.members.folder.glob("state_1_*"))) == 2


def test_folders_of_killed_launchers_are_removed(request: pytest.FixtureRequest) -> None:
    tmp_path = Path(tempfile.mkdtemp())  # a socket's address is short
    request.addfinalizer(lambda: shutil.rmtree(tmp_path, ignore_errors=True))
    opened = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
    for name, one in zip(("lives", "killed"), opened, strict=True):
        folder = tmp_path / f"accelerate_replicas_{name}"
        folder.mkdir()
        one.bind(str(folder / "members"))
        one.listen()
    opened[1].close()
    (tmp_path / "accelerate_replicas_begins").mkdir()
    remove_left_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accelerate_replicas_begins",
        "accelerate_replicas_lives",
    ]
    opened[0].close()
    for path in tmp_path.iterdir():
        lines = f"={path}\n"
        subprocess.run([sys.executable, "-I", "-S", reaper.__file__], input=lines, text=True, check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_a_process_in_the_place_of_one_that_was_lost_while_it_saved_is_not_busy(launcher: Launcher) -> None:
    launcher.send(launcher.connect(1), operation="busy", value="save_state")
    assert launcher.members._busy == {1}
    launcher.members.lost(1)
    assert not launcher.members._busy


def test_of_a_lost_replica_what_all_of_its_ranks_gave_counts(pairs: Launcher) -> None:
    ranks = [pairs.connect(rank) for rank in range(4)]
    for rank in (0, 2, 3):
        pairs.send(ranks[rank], operation="update", value=rank)
    pairs.members.lost(0)
    assert answer(ranks[2]) == {
        "values": {"2": 2, "3": 3},
        "members": [2, 3],
        "joining": [],
        "awaited": [],
        "ending": "",
    }
    with contextlib.suppress(BrokenPipeError):  # it comes too late, and is no part of the next exchange
        pairs.send(ranks[1], operation="update", value=1)
    ranks = [pairs.connect(rank, start=1) for rank in (0, 1)] + ranks[2:]
    for rank in (2, 3):
        pairs.send(ranks[rank], operation="update", value=rank)
    assert answer(ranks[3])["values"] == {"2": 2, "3": 3}


def test_a_replica_that_gave_all_before_it_was_lost_counts(pairs: Launcher) -> None:
    ranks = [pairs.connect(rank) for rank in range(4)]
    for rank in (0, 1, 2):
        pairs.send(ranks[rank], operation="update", value=rank)
    pairs.members.lost(1)
    pairs.send(ranks[3], operation="update", value=3)
    assert answer(ranks[2])["values"] == {"0": 0, "1": 1, "2": 2, "3": 3}
    assert pairs.members.members == {2, 3}


def test_a_replica_joins_when_all_of_its_ranks_wait(pairs: Launcher) -> None:
    ranks = [pairs.connect(rank) for rank in range(4)]
    pairs.members.lost(3)
    pairs.members.lost(2)  # killed, because rank 3 is lost
    assert pairs.members.replace(3) == pairs.members.replace(2)
    assert pairs.members.num_replaced == 1  # two processes are one replacement
    new = {rank: pairs.connect(rank, start=1) for rank in (3, 2)}
    pairs.send(new[3], operation="join", value=None)
    for rank in (0, 1):
        pairs.send(ranks[rank], operation="update", value=rank)
    assert answer(ranks[0])["joining"] == []
    assert answer(ranks[1])["joining"] == []
    pairs.send(new[2], operation="join", value=None)
    for rank in (0, 1):
        pairs.send(ranks[rank], operation="admit", value={"path": f"state_{rank}", "updates": 1})
    assert answer(new[2]) == answer(new[3])
    assert pairs.members.members == {0, 1, 2, 3}


def test_what_a_process_of_a_lost_replica_sends_on_connecting_is_ignored(pairs: Launcher) -> None:
    pairs.members.lost(1)
    assert pairs.members.replace(1)
    new = pairs.connect(1, start=1)
    pairs.send(new, operation="meet", value=None)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    pairs.opened.append(opened)
    opened.connect(str(pairs.members.folder / "members"))
    opened.sendall(b'{"rank": 0, "start": 0}\n{"operation": "meet", "value": "tcp://gone"}\n')
    pairs.run()
    assert not has_answer(new)
    pairs.send(pairs.connect(0, start=1), operation="meet", value="tcp://here")
    assert answer(new)["values"] == {"0": "tcp://here", "1": None}


def test_the_others_of_a_lost_replica_are_killed_even_if_they_connect_later(pairs: Launcher) -> None:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    try:
        pairs.connect(1, pid=processes[0].pid)
        pairs.connect(2, pid=processes[1].pid)
        pairs.members.lost(0)
        pairs.members.replace(0)
        assert processes[0].wait(30) == -9
        pairs.connect(1, pid=processes[2].pid)  # started with the first rank 0, which is gone
        assert processes[2].wait(30) == -9
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
