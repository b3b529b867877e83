from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.devices import table as devices
from accelerate.devices.memory import (
    CopyStream,
    clear_device_cache,
    convert_bytes,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)


class FitsUpTo:
    """A function to decorate that records the sizes it was called with."""

    def __init__(self, largest: int, message: str = "CUDA out of memory. Tried to allocate 20 MiB") -> None:
        self.largest, self.message, self.sizes = largest, message, list[int]()

    def run(self, batch_size: int) -> int:
        self.sizes.append(batch_size)
        if batch_size > self.largest:
            raise RuntimeError(self.message)
        return batch_size


def test_the_batch_size_shrinks_by_a_tenth_until_it_fits() -> None:
    attempt = FitsUpTo(100)
    assert find_executable_batch_size(attempt.run, starting_batch_size=128)() == 92
    assert attempt.sizes == [128, 115, 103, 92]


def test_the_size_that_worked_is_where_the_next_call_begins() -> None:
    attempt = FitsUpTo(8)
    run = find_executable_batch_size(attempt.run, starting_batch_size=10)
    run()
    attempt.sizes.clear()
    assert run() == 8
    assert attempt.sizes == [8]


def test_arguments_follow_the_batch_size() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, model: str, *, epochs: int) -> tuple[int, str, int]:
        return batch_size, model, epochs

    assert train("a model", epochs=3) == (4, "a model", 3)
    assert train.__name__ == "train"


def test_a_function_that_never_fits_ends_at_zero() -> None:
    attempt = FitsUpTo(0)
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        find_executable_batch_size(attempt.run, starting_batch_size=3)()
    assert attempt.sizes == [3, 2, 1]


def test_a_custom_reduction_is_used_with_and_without_an_argument() -> None:
    halved = FitsUpTo(5)
    decorate = find_executable_batch_size(starting_batch_size=32, reduce_batch_size_fn=lambda size: size // 2)
    assert decorate(halved.run)() == 4
    sizes = iter([7, 5])
    stepped = FitsUpTo(5)
    decorate = find_executable_batch_size(starting_batch_size=9, reduce_batch_size_fn=lambda: next(sizes))
    assert decorate(stepped.run)() == 5
    assert stepped.sizes == [9, 7, 5]


def test_a_caller_who_passes_a_batch_size_is_told_not_to() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"Batch size was passed into `train`.*`train\(model='m'\)`"):
        train(16, "m")


def test_other_errors_are_raised_at_once() -> None:
    attempt = FitsUpTo(0, "shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        find_executable_batch_size(attempt.run, starting_batch_size=3)()
    assert attempt.sizes == [3]


def test_tensors_of_a_failed_attempt_are_gone_before_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> None:
        if held:
            assert held[0]() is None
            return
        activations = torch.zeros(batch_size)
        held.append(weakref.ref(activations))
        raise RuntimeError("CUDA out of memory. Tried")

    train()
    assert held


def test_each_smaller_attempt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="accelerate.devices.memory"):
        find_executable_batch_size(FitsUpTo(9).run, starting_batch_size=10)()
    assert "run ran out of memory with batch size 10; trying 9." in caplog.text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::2099249152"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA out of memory."), False),
        (RuntimeError(), False),
    ],
)
def test_what_counts_as_running_out_of_memory(error: Exception, expected: bool) -> None:
    assert should_reduce_batch_size(error) is expected


def test_released_objects_are_free_once_the_names_are_gone() -> None:
    first, second = torch.zeros(3), torch.zeros(3)
    watched = weakref.ref(first)
    first, second = release_memory(first, second)
    assert first is None and second is None
    assert watched() is None


def test_the_device_cache_is_emptied_and_garbage_collected_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(devices, "empty_caches", lambda: emptied.append("cache"))
    monkeypatch.setattr(gc, "collect", lambda: emptied.append("garbage"))
    clear_device_cache()
    assert emptied == ["cache"]
    clear_device_cache(garbage_collection=True)
    assert emptied == ["cache", "garbage", "cache"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(10, "10 bytes"), (1536, "1.5 KB"), (1024.5 * 1024, "1.0 MB"), (3 * 2**30, "3.0 GB"), (2**60, "1024.0 PB")],
)
def test_sizes_are_shown_in_their_largest_unit(size: float, text: str) -> None:
    assert convert_bytes(size) == text


# ------------------------------------------------------------------------------------------ copy streams


class RecordingStream:
    """A stream that records what was queued on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} marks")
        return f"mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: RecordingStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"all wait for {self.name}")


def test_copies_wait_for_computation_and_computation_not_for_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    side, current = RecordingStream("side", log), RecordingStream("current", log)
    kind: Any = SimpleNamespace(current_stream=lambda _: current, in_stream=lambda _: contextlib.nullcontext())
    copy, to_device = torch.Tensor.copy_, torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *a, **k: log.append("to the device") or to_device(*a, **k))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda one, other, **k: log.append("to the host") or one)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: log.append(f"kept for {stream.name}"))
    stream = CopyStream(kind, torch.device("meta"), side)
    sent: Any = stream.send([torch.ones(2), torch.ones(3)])
    assert [one.device.type for one in stream.receive(sent)] == ["meta", "meta"]
    assert log == [
        "to the device", "to the device", "side marks", "current waits for mark of side", *["kept for current"] * 2,
    ]  # fmt: skip
    log.clear()
    on_host = torch.ones(2)
    assert stream.to_host(sent[0][0], on_host) is on_host
    stream.synchronize()
    assert log == ["side waits for current", "to the host", "kept for side", "all wait for side"]
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    assert stream.to_host(torch.zeros(2), on_host).tolist() == [0, 0], "as it was loaded: at once"
