"""The sizes that ranks agree on, from the seconds that each takes per row."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.guests.balance import clock as clocks
from accelerate.guests.balance.clock import Clock
from accelerate.guests.balance.sizes import choose_sizes
from accelerate.settings.run import collect
from accelerate.settings.tree import encode_settings
from accelerate.utils import DataLoaderConfiguration


def longest(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    return max(size * one for size, one in zip(sizes, seconds, strict=True))


def test_a_rank_of_half_the_speed_reads_half_as_many_rows() -> None:
    assert choose_sizes((12, 12), (1.0, 2.0)) == (16, 8)
    assert choose_sizes((8, 8, 8, 8), (0.1, 0.1, 0.2, 0.1)) == (10, 9, 4, 9)
    assert choose_sizes((16, 8), (1.0, 1.0)) == (12, 12)  # it has recovered


@pytest.mark.parametrize("seconds", list(product((0.5, 1.0, 1.3, 8.0), repeat=3)))
def test_no_other_sizes_are_faster(seconds: tuple[float, ...]) -> None:
    equal, num_rows = (3, 3, 3), 9
    found = choose_sizes(equal, seconds)
    others = [one for one in product(range(1, num_rows), repeat=3) if sum(one) == num_rows]
    best = min(longest(one, seconds) for one in others)
    assert sum(found) == num_rows and min(found) >= 1
    if found != equal:
        assert longest(found, seconds) == best <= 0.9 * longest(equal, seconds)
    else:
        assert best > 0.9 * longest(equal, seconds)


def test_noise_does_not_change_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    for current in ((32, 32, 32, 32), (37, 37, 17, 37)):
        true = [1 / size for size in current]
        for _ in range(200):
            noise = 1 + 0.05 * (2 * torch.rand(4, generator=generator) - 1)
            seconds = [one * float(factor) for one, factor in zip(true, noise, strict=True)]
            assert choose_sizes(current, seconds) == current


def test_no_rank_is_left_without_rows() -> None:
    assert choose_sizes((2, 2), (1.0, 1e6)) == (3, 1)
    assert choose_sizes((1, 1), (1.0, 1e6)) == (1, 1)


def test_a_fixed_time_per_batch_is_approached_step_by_step() -> None:
    """The time per row depends on the size then; repeated choices end where both ranks take as long."""
    sizes: tuple[int, ...] = (32, 32)
    for _ in range(20):
        sizes = choose_sizes(sizes, [(10 + speed * size) / size for speed, size in zip((1, 3), sizes, strict=True)])
    times = [10 + speed * size for speed, size in zip((1, 3), sizes, strict=True)]
    assert sum(sizes) == 64 and max(times) / min(times) < 1.15


class Ticks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clocks, "perf_counter", lambda: self.now)


def test_a_clock_counts_from_the_batch_to_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, clock = Ticks(monkeypatch), Clock(torch.device("cpu"))
    for batch in range(clocks.NUM_SKIPPED + 10):
        clock.begin_batch()
        ticks.now += 99 if batch < clocks.NUM_SKIPPED else 2  # the first ones compile
        clock.pause()
        ticks.now += 1000  # waits for the other ranks
        clock.resume()
        ticks.now += 1
        clock.end_batch(4)
        ticks.now += 500  # backward and step
        clock.end_batch(4)  # another backward of the same batch
    assert clock.seconds_per_row() == 3 / 4
    clock.reset()
    assert not clock.has_measured and clock.seconds_per_row() == 0


def test_a_clock_keeps_the_newest_batches_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "NUM_INTERVALS", 5)
    ticks, clock = Ticks(monkeypatch), Clock(torch.device("cpu"))
    for batch in range(20):
        clock.begin_batch()
        ticks.now += batch
        clock.pause()
        clock.resume()
        ticks.now += batch
        clock.end_batch(1)
    assert clock.seconds_per_row() == 2 * (18 + 19) / 2  # of the one before, only the end is left


class Event:
    """A device's event in the terms of :class:`Ticks`, in milliseconds."""

    log: list[str] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = clocks.perf_counter()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    module = type("module", (), {"Event": Event})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    clock = Clock(torch.device("cuda", 0))
    for _ in range(10):
        clock.begin_batch()
        ticks.now += 2
        clock.end_batch(4)
    assert Event.log == []
    assert clock.seconds_per_row() == 0.5 and Event.log == ["synchronize"]


def test_the_launcher_hands_the_option_to_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("balance: true\n")
    for asked in (collect({}, {}, flags={"balance": True}), collect({}, {}, file=file)):
        variables = encode_settings(asked)
        assert variables["ACCELERATE_BALANCE"] == "true" and collect({}, variables).data.balance is True
    assert "ACCELERATE_BALANCE" not in encode_settings(collect({}, {}, flags={}))


def test_the_variable_reaches_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Accelerator(cpu=True).dataloader_config.balance
    monkeypatch.setenv("ACCELERATE_BALANCE", "true")
    for given in (None, DataLoaderConfiguration(split_batches=True)):
        assert Accelerator(cpu=True, dataloader_config=given).dataloader_config.balance
