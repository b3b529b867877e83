"""Ranks that hang on purpose: the verdict names the right rank and line, soon, and from outside of any collective."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

THRESHOLD_SECONDS = 1.0


def sleeps(run: Any) -> None:
    time.sleep(60)  # the culprit


def waits_for_data(run: Any) -> None:
    queue.Queue().get(timeout=60)  # the culprit


def waits_for_a_lock(run: Any) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=60)  # the culprit


def computes_for_ever(run: Any) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        sum(range(1000))  # the culprit


def is_stopped(run: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def reads_a_pipe(run: Any) -> None:
    os.read(os.pipe()[0], 1)  # the culprit


def evaluates_alone(run: Any) -> None:
    for _ in range(600):
        torch.ones(10, 10) @ torch.ones(10, 10)
        time.sleep(0.1)  # the culprit


def joins_a_thread(run: Any) -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    threading.enumerate()[-1].join(60)  # the culprit


def is_in_another_barrier(run: Any) -> None:
    torch.distributed.new_group([1]).barrier().wait()
    torch.distributed.recv(torch.ones(1), src=0)  # the culprit


def selects(run: Any) -> None:
    import select

    select.select([os.pipe()[0]], [], [], 60)  # the culprit


def waits_for_a_child(run: Any) -> None:
    import subprocess

    subprocess.run(["sleep", "60"], check=False)  # the culprit


def waits_for_a_condition(run: Any) -> None:
    condition = threading.Condition()
    with condition:
        condition.wait(60)  # the culprit


FAULTS: list[Callable[[Any], None]] = [
    *(sleeps, is_stopped, is_in_another_barrier),
    *(waits_for_data, waits_for_a_lock, reads_a_pipe, evaluates_alone, joins_a_thread),
    *(computes_for_ever, selects, waits_for_a_child, waits_for_a_condition),
]


class Heard(logging.Handler):
    """Ends both ranks when the verdict is there, with how long that took."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes, self.start = notes, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        with open(self.notes, "w") as file:
            file.write(f"{time.monotonic() - self.start}\n{record.getMessage()}")
        with open(self.notes + ".pid") as file, contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read()), signal.SIGKILL)  # the culprit sleeps, or is stopped
        os._exit(17)


@pytest.mark.parametrize("fault", FAULTS if IS_SLOW else FAULTS[:3], ids=lambda fault: fault.__name__)
def test_the_rank_and_the_line_are_named(fault: Callable[[Any], None], tmp_path: Any) -> None:
    notes = str(tmp_path / "verdict")

    def go() -> None:
        run = Accelerator(cpu=True)
        model = run.prepare(torch.nn.Linear(2, 2))
        run.backward(model(torch.ones(1, 2)).sum())
        logging.getLogger("accelerate.distributed.watchdog").addHandler(Heard(notes))
        loss = model(torch.ones(1, 2)).sum()
        if run.process_index == 1:
            os.write(os.open(notes + ".pid", os.O_CREAT | os.O_WRONLY), str(os.getpid()).encode())
            fault(run)
        run.backward(loss)  # DDP's all-reduce: nothing of ours

    with pytest.raises(Exception, match=r"17|died|rank"):
        run_on_ranks(go, 2, environment={"ACCELERATE_HANG_SECONDS": str(THRESHOLD_SECONDS)}, timeout_seconds=40)
    with open(notes) as file:
        seconds, _, text = file.read().partition("\n")
    assert float(seconds) < THRESHOLD_SECONDS + 10
    conclusion = text.partition("Verdict: ")[2]
    if fault is is_stopped:
        assert "rank 1 doesn't respond" in conclusion
        return
    expected = "in different calls: rank 0 at" if fault is is_in_another_barrier else "the others wait for rank 1"
    assert expected in conclusion
    assert "test_hangs.py:" in conclusion
    assert "# the culprit" in conclusion
    assert "run.backward(loss)" in text
