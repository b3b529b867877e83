"""Real processes that form one world, fail to, adopt one, and leave it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerate.distributed import store_client
from accelerate.distributed.world import current_world, forget_world, join_world, leave_world
from accelerate.errors import WorldError
from tests.ranks import RankFailed, free_port, run_on_ranks
from tests.slow import slow
from tests.torch_needed import needs_torch


def native_threads() -> Counter[str]:
    """The threads of this process by name, as the kernel knows them."""
    folder, found = Path("/proc/self/task"), Counter[str]()
    for task in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[(folder / task / "comm").read_text().strip()] += 1
    return found


def trained_replica() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return model, optimizer, loss


def test_processes_on_a_cpu_host_form_one_gloo_world_without_being_told_to() -> None:
    def seen() -> tuple[Any, ...]:
        world = join_world()
        return world.rank, world.size, world.local_rank, world.local_size, world.backend, world.label, str(world.device)

    # Without ACCELERATE_USE_CPU: what torchrun sets is enough.
    answers = run_on_ranks(seen, 3, environment={"ACCELERATE_USE_CPU": ""})
    assert answers == [(rank, 3, rank, 3, "gloo", "MULTI_CPU", "cpu") for rank in range(3)]


def test_no_rank_goes_on_before_all_are_in_the_group() -> None:
    """One that ended at once failed those that were still connecting to it."""

    def formed() -> tuple[float, float]:
        make, late = dist.init_process_group, 0.5 * int(os.environ["RANK"])

        def make_slowly(*args: Any, **kwargs: Any) -> None:
            make(*args, **kwargs)
            time.sleep(late)
            times.append(time.monotonic())

        times: list[float] = []
        dist.init_process_group = make_slowly
        join_world()
        return times[0], time.monotonic()

    (_, first), (last, _) = run_on_ranks(formed)
    assert first >= last


def test_open_mpi_variables_form_the_same_world() -> None:
    def seen() -> tuple[int, int]:
        rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
        local_rank = os.environ.pop("LOCAL_RANK")
        os.environ.update(
            OMPI_COMM_WORLD_RANK=rank,
            OMPI_COMM_WORLD_SIZE=size,
            OMPI_COMM_WORLD_LOCAL_RANK=local_rank,
            OMPI_COMM_WORLD_LOCAL_SIZE=size,
        )
        world = join_world()
        total = torch.ones(1)
        dist.all_reduce(total)
        return world.rank, int(total)

    assert run_on_ranks(seen) == [(0, 2), (1, 2)]


@needs_torch("2.13.0", "the group's threads may have no name")
def test_leaving_ends_the_groups_threads_while_the_users_variables_keep_the_model() -> None:
    def threads_after_leaving() -> tuple[Counter[str], list[int]]:
        join_world()
        model, optimizer, _loss = trained_replica()
        assert native_threads()["pt_gloo_runloop"] > 0
        leave_world()
        output = model(torch.ones(1, 4))  # the model is still good for inference and for plain training
        output.sum().backward()
        optimizer.step()
        return native_threads(), list(output.shape)

    for threads, shape in run_on_ranks(threads_after_leaving):
        assert threads["pt_gloo_runloop"] == 0
        assert shape == [1, 2]


def test_a_world_that_was_left_can_be_joined_again_at_the_same_address() -> None:
    def join_twice() -> list[float]:
        totals = []
        for _ in range(2):
            world = join_world()
            total = torch.tensor(float(world.rank + 1))
            dist.all_reduce(total)
            totals.append(float(total))
            if world.coordinator is not None:
                world.coordinator.wait_for_everyone()
            leave_world()
        return totals

    assert run_on_ranks(join_twice) == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("adopted", [False, True])
def test_rank_0_which_serves_the_store_stays_until_slower_ranks_have_read_it(adopted: bool) -> None:
    def reads_late() -> bool:
        if adopted:
            dist.init_process_group("gloo")
        coordinator = join_world().coordinator
        assert coordinator is not None
        if coordinator.rank == 0:
            coordinator.set_key("word")  # and its program ends
        else:
            time.sleep(1.0)
            coordinator.wait_for_key("word", setter=0)
        return coordinator.keeps_store

    assert run_on_ranks(reads_late) == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of connections")
@pytest.mark.parametrize("code", [0, 9])
def test_rank_0_does_not_stay_for_a_rank_that_died(code: int, tmp_path: Path) -> None:
    """Rank 1 ends without a word, rank 2 leaves."""

    def survives() -> None:
        coordinator = join_world().coordinator
        assert coordinator is not None
        coordinator.wait_for_everyone()
        if coordinator.rank == 1:
            os._exit(code)
        start = time.monotonic()
        leave_world()
        if coordinator.rank == 0:
            (tmp_path / "seconds").write_text(str(time.monotonic() - start))

    with pytest.raises(RankFailed, match=rf"^rank 1: died with exit code {code}$"):
        run_on_ranks(survives, 3)
    assert float((tmp_path / "seconds").read_text()) < store_client._READERS_SECONDS / 2


@pytest.mark.parametrize("stands_still", [False, True])
def test_rank_0_stays_for_a_rank_that_lives_but_not_for_ever(
    stands_still: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_client, "_READERS_SECONDS", 1.5)

    def leaves() -> None:
        coordinator = join_world().coordinator
        assert coordinator is not None
        coordinator.wait_for_everyone()
        if coordinator.rank == 1:  # it needs the store no more
            (tmp_path / "pid.new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            while not (tmp_path / "seconds").exists():
                time.sleep(0.01)
            return
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        other = int((tmp_path / "pid").read_text())
        if stands_still:
            os.kill(other, signal.SIGSTOP)
        start = time.monotonic()
        leave_world()
        (tmp_path / "seconds").write_text(str(time.monotonic() - start))
        os.kill(other, signal.SIGCONT)

    run_on_ranks(leaves)
    assert float((tmp_path / "seconds").read_text()) >= 1.5


def test_a_group_of_somebody_elses_is_adopted() -> None:
    def adopt() -> tuple[int, int, str | None, bool]:
        dist.init_process_group("gloo")
        world = join_world()
        assert world.coordinator is not None
        world.coordinator.wait_for_everyone()
        still_there = dist.is_initialized()
        leave_world()
        return world.rank, world.size, world.backend, still_there and not dist.is_initialized()

    assert run_on_ranks(adopt) == [(0, 2, "gloo", True), (1, 2, "gloo", True)]


def test_forgetting_keeps_the_group_and_the_meeting() -> None:
    def forget() -> bool:
        before = join_world()
        forget_world()
        assert current_world() is None
        after = join_world()
        assert after.coordinator is before.coordinator
        assert after.coordinator is not None
        after.coordinator.wait_for_everyone()
        return after is not before and after == before

    assert run_on_ranks(forget) == [True, True]


def test_a_file_can_be_the_meeting_place(tmp_path: Path) -> None:
    def meet() -> float:
        world = join_world(init_method=f"file://{tmp_path}/meet/here")
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        assert world.coordinator is not None
        world.coordinator.wait_for_everyone()
        return float(total)

    assert run_on_ranks(meet) == [2.0, 2.0]


def test_a_tcp_address_can_be_given() -> None:
    port = free_port()

    def meet() -> float:
        os.environ["MASTER_PORT"] = "1"  # not the one that counts
        join_world(init_method=f"tcp://127.0.0.1:{port}")
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        return float(total)

    assert run_on_ranks(meet) == [2.0, 2.0]


def test_ranks_that_were_told_different_sizes_all_say_so() -> None:
    def join() -> str:
        if os.environ["RANK"] == "1":
            os.environ["WORLD_SIZE"] = "3"
        try:
            join_world(timeout=timedelta(seconds=10))
        except WorldError as error:
            return str(error)
        return ""

    for message in run_on_ranks(join):
        assert "2" in message
        assert "3" in message
        assert "WORLD_SIZE" in message


def test_two_processes_with_one_rank_are_refused() -> None:
    def join() -> str:
        if os.environ["RANK"] == "2":
            os.environ["RANK"] = "1"
        try:
            join_world(timeout=timedelta(seconds=20))
        except WorldError as error:
            return str(error)
        return ""

    for message in run_on_ranks(join, 3, timeout_seconds=15):
        assert "two processes say that they are rank 1" in message
        assert "RANK" in message


def test_what_an_earlier_attempt_left_in_the_store_is_never_taken_for_the_living() -> None:
    port = free_port()

    def attempt() -> tuple[int, float]:
        # One store outlives the attempts, as a launcher's does. Dead processes sent join requests, of other sizes too.
        rank = os.environ["RANK"]
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == "0", wait_for_workers=False, multi_tenant=True)
        if rank == "0":
            for dead in ("0|2|a", "1|2|b", "1|4|c", "3|4|d"):
                store.set(f"join_request/{store.add('num_join_requests', 1)}", f"{dead}|gone, process 1")
        # The count of restarts is each host's own.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1" if rank == "0" else "0"
        world = join_world(store=store, timeout=timedelta(seconds=30))
        total = torch.ones(1)
        dist.all_reduce(total)
        return world.attempt, float(total)

    assert run_on_ranks(attempt, 2) == [(1, 2.0), (0, 2.0)]


# Ranks share one output, and print() without a buffer hands over a line in two pieces: a line must be one write.
REPORT = """
import os
def report(line):
    os.write(1, (line + chr(10)).encode())
"""

SCRIPT = (
    REPORT
    + """
import torch
from torch.nn.parallel import DistributedDataParallel
from accelerate.state import PartialState

state = PartialState()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
report(f"trained {state.num_processes}")
"""
)


@slow
def test_a_plain_script_under_torchrun_joins_and_ends_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            script,
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("trained 2") == 2


RESTARTED = (
    REPORT
    + """
import os
import torch.distributed as dist, torch
from accelerate.distributed.world import join_world
world = join_world()
if world.attempt == 0 and world.rank == 1:
    os._exit(1)
total = torch.ones(1)
dist.all_reduce(total)
report(f"attempt {world.attempt} total {int(total)}")
"""
)


@slow
def test_processes_that_the_elastic_agent_restarts_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, script],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert finished.stdout.count("attempt 1 total 2") == 2, finished.stderr


def test_a_rank_that_dies_is_reported_and_not_waited_for() -> None:
    def die() -> None:
        world = join_world()
        if world.rank == 1:
            os._exit(3)
        assert world.coordinator is not None
        world.coordinator.timeout = timedelta(seconds=5)
        world.coordinator.wait_for_everyone()

    with pytest.raises(RankFailed, match="died with exit code 3"):
        run_on_ranks(die)
