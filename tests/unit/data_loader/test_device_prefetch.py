"""Device prefetch, with a fake device kind whose streams only record calls. No accelerator takes part."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate.data_loader import prepare_data_loader
from accelerate.devices import memory
from accelerate.devices import table as devices

CPU = torch.device("cpu")


class FakeStream:
    """Notes what was queued, in order."""

    log: list[str] = []

    def __init__(self, device: Any = None, name: str = "side") -> None:
        self.name = name

    def record_event(self) -> str:
        event = f"arrival {sum(line.startswith('record') for line in self.log)}"
        self.log.append(f"record {event}")
        return event

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@contextmanager
def scope(stream: FakeStream):
    FakeStream.log.append(f"enter {stream.name}")
    yield
    FakeStream.log.append(f"leave {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device with streams, as one more row of the table; the log of what they were told."""
    module = ModuleType("fake_streams")
    vars(module).update(Stream=FakeStream, stream=scope, current_stream=lambda device: FakeStream(device, "current"))
    monkeypatch.setitem(sys.modules, "fake_streams", module)
    row = replace(
        devices.CPU,
        stream="fake_streams:Stream",
        stream_scope="fake_streams:stream",
        stream_now="fake_streams:current_stream",
    )
    monkeypatch.setattr(devices, "kind_of", lambda device: row)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: FakeStream.log.append("kept"))
    FakeStream.log = []
    return FakeStream.log


def loader(depth: int, num_workers: int = 0, dataset: Any = None) -> Any:
    source = DataLoader(range(11) if dataset is None else dataset, batch_size=3, num_workers=num_workers)
    return prepare_data_loader(source, CPU, 1, 0, put_on_device=True, prefetch_to_device=depth)


def test_each_batch_is_copied_on_the_side_and_waited_for_by_the_current_stream(streams: list[str]) -> None:
    batches = iter(loader(2))
    assert next(batches).tolist() == [0, 1, 2]
    assert streams == ["enter side", "record arrival 0", "leave side", "current waits for arrival 0", "kept"]


@pytest.mark.parametrize("depth", [1, 2, 10])
def test_no_more_than_so_many_batches_are_ahead_of_the_one_in_use(streams: list[str], depth: int) -> None:
    for number, _ in enumerate(loader(depth, num_workers=1)):
        num_sent = sum(line.startswith("record") for line in streams)
        assert num_sent == min(number + 1 + depth, 4)


def test_a_process_that_reads_by_itself_reads_when_it_is_asked(streams: list[str]) -> None:
    for number, _ in enumerate(loader(3)):
        assert sum(line.startswith("record") for line in streams) == number + 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_coverage_and_the_last_one_are_those_without_prefetch(streams: list[str], num_workers: int) -> None:
    def trace(depth: int) -> list[Any]:
        prepared = loader(depth, num_workers)
        return [
            (batch.tolist(), prepared.end_of_dataloader, prepared.coverage, prepared.state_dict()["samples"])
            for batch in prepared
        ]

    assert trace(2) == trace(0)
    assert streams


def test_a_position_saved_while_batches_are_ahead_is_that_of_the_current_batch(streams: list[str]) -> None:
    batches = iter(prepared := loader(2, num_workers=1))
    next(batches)
    continued = loader(2, num_workers=1)
    continued.load_state_dict(prepared.state_dict())
    assert [batch.tolist() for batch in continued] == [[3, 4, 5], [6, 7, 8], [9, 10]]


def test_a_device_without_streams_has_no_prefetch() -> None:
    prepared = loader(2)
    assert [len(batch) for batch in prepared] == [3, 3, 3, 2]
    assert memory.copy_stream(CPU) is None


class Slow(Dataset):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.004)
        return index

    def __len__(self) -> int:
        return 6


def test_the_time_that_the_loop_waits_for_data_is_known() -> None:
    prepared = loader(0, dataset=Slow())
    started, busy_seconds = time.perf_counter(), 0.0
    for _ in prepared:
        drawn = time.perf_counter()
        time.sleep(0.05)
        busy_seconds += time.perf_counter() - drawn
    assert 0.024 <= prepared.data_wait_seconds <= time.perf_counter() - started - busy_seconds
