from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from accelerate.devices.table import CPU, DeviceKind
from accelerate.guests.monitor import throughput
from accelerate.guests.monitor.records import RankRecord
from accelerate.guests.monitor.throughput import DeviceMeter

HERE = torch.device("cpu")


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, and that this process has computed; a test sets both."""
    now = [100.0, 5.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(throughput.time, "process_time", lambda: now[1])
    monkeypatch.setattr(throughput, "num_cores", lambda: 8)
    monkeypatch.setattr(throughput.torch, "get_num_threads", lambda: 4)
    return now


def test_a_cpu_is_busy_as_long_as_its_threads_compute(clocks: list[float]) -> None:
    meter = DeviceMeter(CPU, HERE)
    clocks[:] = [110.0, 25.0]
    assert meter.read() == 0.5  # 20 seconds of CPU in 10 seconds of four threads
    clocks[:] = [110.01, 25.01]
    assert meter.read() is None  # too soon to say
    clocks[:] = [111.0, 35.0]
    assert meter.read() == 1.0  # other threads than those that compute don't make it more


def test_more_threads_than_cores_are_no_more_than_the_cores(
    clocks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "num_cores", lambda: 2)
    meter = DeviceMeter(CPU, HERE)
    clocks[:] = [110.0, 15.0]
    assert meter.read() == 0.5


def test_a_gpu_is_asked_by_its_row_and_once_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [37, ModuleNotFoundError("nvidia-ml-py isn't installed"), 50]

    def asked(kind: DeviceKind, call: str, *arguments: object, otherwise: object = None) -> object:
        assert (call, arguments) == ("utilization", (HERE,))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(DeviceKind, "_call", asked)
    meter = DeviceMeter(DeviceKind("cuda", "MULTI_GPU", "torch.cuda", busy="utilization"), HERE)
    assert [meter.read(), meter.read(), meter.read()] == [0.37, None, None]
    assert answers == [50]


def test_a_kind_that_cant_tell_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceKind, "_call", lambda *_, **__: pytest.fail("asked"))
    assert DeviceMeter(DeviceKind("npu", "MULTI_NPU", "torch.npu"), HERE).read() is None


def test_the_writer_asks_and_never_the_loop(tmp_path: Path) -> None:
    asked: list[int] = []

    def busy() -> float | None:
        asked.append(threading.get_ident())
        return 0.25 if len(asked) == 1 else None

    record = RankRecord(tmp_path, 0, seconds_between=0.0, utilization=busy)
    record.start()
    record.numbers({"step": 1})
    record.numbers({"step": 2})
    record.finish()
    lines = [json.loads(line) for line in (tmp_path / "rank_0.jsonl").read_text().splitlines()]
    assert [line.get("device_utilization") for line in lines] == [None, 0.25, None, None]
    assert len(asked) == 2 and threading.get_ident() not in asked
