"""A tracker has a thread of its own: what it does to its calls, and what it can't do to the training loop."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.tracking import BlankTracker, GeneralTracker, choose, finish, init_trackers, log
from accelerate.tracking.background_queue import BackgroundQueue, Size, copied
from accelerate.tracking.choose import find_tracker, init_run_log
from tests.fresh import run_fresh


class Service(GeneralTracker):
    """A service whose connection a test can cut or hold."""

    name = "service"
    requires_logging_directory = False
    logs_in_background = True

    def __init__(self) -> None:
        super().__init__()
        self.received: list[tuple[dict[str, Any], int | None]] = []
        self.threads: set[str] = set()
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_down = False
        self.finished = False

    @property
    def tracker(self) -> Any:
        return self.received

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.is_open.wait()
        if self.is_down:
            raise ConnectionError("connection refused")
        self.received.append((values, step))

    def finish(self) -> None:
        self.is_open.wait()
        self.finished = True


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.is_open.set()


def test_calls_are_made_in_order_on_one_thread_that_is_not_the_loop_s(service: Service) -> None:
    init_trackers([service], "run")
    for step in range(200):
        log([service], {"loss": step}, step, {})
    finish([service])
    assert [step for _, step in service.received] == list(range(200))
    assert service.threads == {"tracker service"}
    assert service.finished


class OfAProgram(Service):
    logs_in_background = GeneralTracker.logs_in_background


def test_a_tracker_that_a_program_brings_can_be_read_back_at_once() -> None:
    own = OfAProgram()
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=3)
    assert own.received == accelerator.get_tracker("service", unwrap=True) == [({"loss": 1.0}, 3)]
    assert own.threads == {threading.current_thread().name}


def test_the_object_of_a_service_is_handed_out_when_it_was_told_what_was_logged(service: Service) -> None:
    init_trackers([service], "run")
    service.is_open.clear()
    log([service], {"loss": 1}, 0, {})
    threading.Timer(0.2, service.is_open.set).start()
    assert find_tracker([service], "service", unwrap=True) == [({"loss": 1}, 0)]
    finish([service])


def test_a_service_that_hangs_hands_out_its_object_after_a_limit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "CATCH_UP_SECONDS", 0.1)
    init_trackers([service], "run")
    service.is_open.clear()
    log([service], {"loss": 1}, 0, {})
    assert find_tracker([service], "service", unwrap=True) == []


def test_a_tracker_that_asks_for_it_is_called_by_the_loop(service: Service) -> None:
    service.logs_in_background = False
    init_trackers([service], "run")
    log([service], {"loss": 1}, 0, {})
    assert service.received == [({"loss": 1}, 0)]
    service.is_down = True
    log([service], {"loss": 1}, 1, {})
    finish([service])
    assert service.threads == {threading.current_thread().name} and service.finished


def test_a_backend_that_dies_costs_its_records_and_is_named_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    init_trackers([service], "run")
    log([service], {"loss": 0}, 0, {})
    assert service._background_queue is not None and service._background_queue.wait(10)
    service.is_down = True
    for step in range(1, 50):
        log([service], {"loss": step}, step, {})
    assert service._background_queue.wait(10)
    service.is_down = False
    log([service], {"loss": 50}, 50, {})
    finish([service])
    assert [step for _, step in service.received] == [0, 50]
    first, summary = caplog.records
    assert "'service' failed (log at step 1: ConnectionError: connection refused)" in first.getMessage()
    assert "of 52, 49 failed" in summary.getMessage()


def test_a_backend_that_hangs_costs_no_step_and_fills_its_queue_only(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """5 000 steps while the service hangs: none waits, memory is bounded, the JSONL log has every one."""
    service.queue_limit_bytes = 100 * 1024
    service.finish_timeout_seconds = 0.2
    accelerator = Accelerator(cpu=True, log_with=service, project_dir=tmp_path)
    accelerator.init_trackers("run")
    service.is_open.clear()
    slowest = 0.0
    for step in range(5000):
        begun = time.perf_counter()
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
        slowest = max(slowest, time.perf_counter() - begun)
    begun = time.perf_counter()
    accelerator.end_training()
    assert time.perf_counter() - begun < 10
    assert slowest < 20.0  # the service hangs for good; a loaded machine may still hold us up
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(5000))
    full, summary = [record.getMessage() for record in caplog.records if "service" in record.getMessage()]
    assert "more slowly than they come" in full
    assert "found no room" in summary and "were not told within the 0.2 s" in summary
    # What was dropped stays dropped: a service that wakes up after the end is not told old news.
    service.is_open.set()
    time.sleep(0.05)
    assert len(service.received) <= 1 and not service.finished


def test_a_service_that_can_t_be_reached_at_the_start_is_replaced_by_a_blank(caplog: pytest.LogCaptureFixture) -> None:
    class Down(Service):
        def start(self) -> None:
            raise ConnectionError("no route to host")

    accelerator = Accelerator(cpu=True, log_with=Down())
    accelerator.init_trackers("run", config={"lr": 1})
    assert "'service' could not start (ConnectionError: no route to host)" in caplog.text
    accelerator.log({"loss": 1})
    blank = accelerator.get_tracker("service")
    assert isinstance(blank, BlankTracker) and blank.name == "service"
    blank.writer.add_images("samples", [1]).close()
    blank.log_images({"samples": []}, step=1)
    accelerator.get_tracker("service", unwrap=True).anything()
    accelerator.end_training()


@pytest.mark.parametrize("mistake", [TypeError, ValueError, ImportError])
def test_mistakes_in_the_call_raise_before_training_begins(mistake: type[Exception]) -> None:
    class Wrong(Service):
        def start(self) -> None:
            raise mistake("no such argument")

    with pytest.raises(mistake):
        init_trackers([Wrong()], "run")


def test_what_is_told_is_what_was_logged_also_if_it_changes_later(service: Service) -> None:
    init_trackers([service], "run")
    service.is_open.clear()
    loss, history, array = torch.ones(()), {"deep": [1]}, np.ones(2)
    log([service], {"loss": loss, "history": history, "array": array}, 0, {})
    loss.zero_(), history["deep"].append(2), array.fill(7)
    service.is_open.set()
    finish([service])
    [(values, _)] = service.received
    assert values["loss"].item() == 1 and values["history"] == {"deep": [1]} and values["array"].tolist() == [1, 1]


def test_the_jsonl_log_knows_when_a_record_was_logged_not_written(tmp_path: Path) -> None:
    [tracker] = init_run_log("run", logging_dir=tmp_path)
    held = threading.Event()
    queue = tracker._background_queue
    assert queue is not None
    queue.put(held.wait, "hold")
    before = time.time()
    log([tracker], {"loss": 1}, 0, {})
    after = time.time()
    time.sleep(0.05)
    held.set()
    finish([tracker])
    [line] = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert before - 0.001 <= line["time"] <= after + 0.001


def test_a_service_that_exits_the_program_ends_a_call_only(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    queue = BackgroundQueue("service", limit_bytes=10_000)

    def leave() -> None:
        raise SystemExit(3)

    told: list[int] = []
    queue.put(leave, "log")
    queue.put(told.append, "log", 1)
    assert queue.wait(10)
    assert told == [1] and "SystemExit: 3" in caplog.text


def test_a_value_that_can_t_be_copied_costs_a_record(caplog: pytest.LogCaptureFixture) -> None:
    queue = BackgroundQueue("service", limit_bytes=10_000)
    queue.put(print, "log at step 1", torch.empty(2, device="meta"))
    assert queue.failed == 1 and "log at step 1" in caplog.text


def test_one_record_larger_than_the_limit_is_taken_when_it_is_alone() -> None:
    queue = BackgroundQueue("service", limit_bytes=2048)
    held = threading.Event()
    told: list[int] = []
    queue.put(lambda big: told.append(len(big)), "log", torch.zeros(10_000))
    assert queue.wait(10) and told == [10_000]
    queue.put(held.wait, "hold")
    queue.put(lambda big: told.append(len(big)), "log", torch.zeros(10_000))
    held.set()
    assert queue.wait(10) and told == [10_000] and queue.refused == 1


def test_sizes_count_tensors_arrays_and_texts() -> None:
    size = Size(0)
    copied({"a": torch.zeros(4), "b": [np.zeros(3), "text"], "c": (1, 2.0, None)}, size)
    assert size.bytes == 16 + 24 + 4


def test_built_in_trackers_keep_media_and_numbers_in_one_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accelerate.tracking.base import queued

    class Pictures(Service):
        @queued
        def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
            self.received.append((values, step))

    service = Pictures()
    init_trackers([service], "run")
    service.is_open.clear()
    log([service], {"loss": 1}, 1, {})
    service.log_images({"sample": "picture"}, step=2)
    log([service], {"loss": 1}, 3, {})
    service.is_open.set()
    finish([service])
    assert [step for _, step in service.received] == [1, 2, 3]
    service.log_images({"sample": "picture"}, step=4)  # after the end: at once, as without an Accelerator
    assert service.received[-1][1] == 4


PROGRAM = """
import sys, time
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
accelerator.init_trackers("run")
for step in range(300):
    accelerator.log({"loss": step}, step=step)
if len(sys.argv) > 2:
    raise RuntimeError("the training loop failed")
"""


@pytest.mark.parametrize("crash", [False, True])
def test_a_program_that_never_ends_training_loses_nothing(tmp_path: Path, crash: bool) -> None:
    ended = run_fresh(PROGRAM, str(tmp_path), *(["crash"] if crash else []))
    assert ended.returncode == int(crash), ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(300))


def test_logging_is_off_the_loop_s_clock(service: Service) -> None:
    """A service that takes 5 ms a record: 100 records are noted in far less than the 500 ms that it takes."""

    class Slow(Service):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            time.sleep(0.005)
            super().log(values, step)

    slow = Slow()
    init_trackers([slow], "run")
    begun = time.perf_counter()
    for step in range(100):
        log([slow], {"loss": step}, step, {})
    noted = time.perf_counter() - begun
    finish([slow])
    assert len(slow.received) == 100
    assert noted < 0.25
    logging.getLogger(__name__).info("100 records noted in %.1f ms", noted * 1e3)
