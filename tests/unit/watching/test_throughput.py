from __future__ import annotations

import json
import math

import pytest
import torch

from accelerate.guests.monitor import throughput
from accelerate.guests.monitor.throughput import StepTimer, peak_flops_of
from accelerate.watching import Flops, StepReport, count_flops, format_duration


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the host, which stands still until it is moved."""
    time = [100.0]
    monkeypatch.setattr(throughput, "perf_counter", lambda: time[0])
    return time


def test_a_clock_begins_with_its_first_lap(now: list[float]) -> None:
    timer = StepTimer()
    for _ in range(4):
        now[0] += 2.0
        timer.lap(samples=8, is_update=True, waited=None, ends_pass=False)
    assert (timer.seconds, timer.updates, timer.samples, timer.wait_seconds) == (6.0, 3, 24, None)


def test_waiting_is_counted_over_passes(now: list[float]) -> None:
    timer = StepTimer()
    for waited, ends in ((0.5, False), (0.75, False), (1.5, True)):
        now[0] += 1.0
        timer.lap(1, True, waited, ends)
    now[0] += 50.0  # an evaluation
    for waited, ends in ((0.25, False), (0.5, False), (1.0, True)):
        now[0] += 1.0
        timer.lap(1, True, waited, ends)
    assert timer.wait_seconds == pytest.approx(0.25 + 0.75 + 0.25 + 0.5)
    assert (timer.seconds, timer.updates) == (4.0, 4)  # neither the evaluation nor the first batches of a pass


def test_what_is_set_aside_is_no_part_of_a_step(now: list[float]) -> None:
    timer = StepTimer()
    timer.lap(1, True, None, False)
    now[0] += 5.0
    timer.exclude(4.0)
    timer.lap(1, True, None, False)
    now[0] += 1.0
    timer.lap(1, False, None, False)
    assert (timer.seconds, timer.updates, timer.samples) == (2.0, 1, 2)
    timer.reset()
    now[0] += 3.0
    timer.lap(1, True, None, False)
    assert (timer.seconds, timer.updates) == (3.0, 1)


def test_utilization_is_the_share_of_all_devices() -> None:
    rates = {"tokens": 1e6, "samples": 1e3, "updates": 2.0, "ranks": 4}
    assert Flops(per_token=6e6, peak=3e12).utilization(**rates) == pytest.approx(0.5)
    assert Flops(per_sample=6e9, peak=3e12).utilization(**rates) == pytest.approx(0.5)
    assert Flops(per_update=3e12, peak=3e12).utilization(**rates) == pytest.approx(0.5)
    assert Flops(per_token=6e6).utilization(**rates) is None
    assert Flops(peak=1e12).utilization(**rates) is None
    assert Flops(per_token=6e6, peak=3e12).utilization(**{**rates, "tokens": None}) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA L40S", 3.62e14),
        ("AMD Instinct MI300X", 1.307e15),
        ("", None),
        ("a toaster", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(name: str, peak: float | None) -> None:
    assert peak_flops_of(name) == peak


def test_operations_are_counted_by_torch() -> None:
    model = torch.nn.Linear(8, 4, bias=False)
    inputs = torch.randn(16, 8)
    forward = 2 * 16 * 8 * 4
    assert count_flops(lambda: model(inputs)) == forward
    assert count_flops(lambda: model(inputs).sum().backward()) == 2 * forward  # inputs need no gradient


def test_a_report_is_json_even_when_the_loss_is_not_a_number() -> None:
    report = StepReport(step=3, loss=math.nan, step_seconds=0.123456789, values={"accuracy": 0.5, "step": 9.0})
    content = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert content == {"step": 3, "loss": "nan", "step_seconds": 0.123457, "accuracy": 0.5, "memory_bytes": 0}


def test_a_line_says_what_is_known() -> None:
    whole = StepReport(
        step=120, epoch=2, loss=0.43125, learning_rate=1e-3, step_seconds=0.021, wait_seconds=0.0021,
        samples_per_second=1523.4, memory_bytes=1_234_000_000, mfu=0.4123, eta_seconds=3725.0, total_steps=1000,
    )  # fmt: skip
    assert whole.line() == (
        "step 120/1000  epoch 2  loss 0.4313  lr 0.001  1523 samples/s  21 ms (10% data)  1.23 GB  MFU 41.2%  "
        "ETA 1:02:05"
    )
    assert StepReport(step=1).line() == "step 1"
    assert "56.8k tokens/s" in StepReport(step=1, tokens_per_second=56789.0, samples_per_second=3.0).line()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (86400, "24:00:00")])
def test_times(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_this_process_holds_memory() -> None:
    assert throughput.host_memory_bytes() > 10_000_000
