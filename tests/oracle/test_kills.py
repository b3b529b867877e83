"""A run that is killed at random instants, over and over, is bit for bit the run that nobody disturbed.

A handful of kills in every test run; ``RUN_SLOW=1 pytest tests/oracle/test_kills.py`` makes 50.
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.killed_runs import Attempt, read_notes, train
from tests.slow import IS_SLOW

#: ranks, workers, kills: 50 in all
PLAN = [(1, 0, 9), (1, 2, 9), (2, 0, 8), (2, 2, 8), (4, 0, 8), (4, 2, 8)]
QUICK_PLAN = [(2, 2, 1)]
PATIENCE_SECONDS = 120.0


def undisturbed(folder: Path, num_ranks: int, num_workers: int) -> tuple[list[dict[str, Any]], float]:
    """What each rank notes at each step of a run that nobody kills, and how long the run takes."""
    notes = folder / "notes"
    attempt = Attempt(partial(train, str(folder), str(notes), num_workers), num_ranks, folder / "log")
    start = time.monotonic()
    assert attempt.wait(PATIENCE_SECONDS), attempt.kill() and attempt.failures()
    expected = [dict(one) for one in read_notes(notes, num_ranks)]
    assert all("end" in one for one in expected), attempt.failures()
    return expected, time.monotonic() - start


def killed(folder: Path, num_ranks: int, num_workers: int, seconds: float, chance: random.Random, most: int) -> int:
    """Runs to the end through at most ``most`` kills; returns how many there were."""
    num_kills = 0
    while True:
        attempt = Attempt(partial(train, str(folder), str(folder / "notes"), num_workers), num_ranks, folder / "log")
        wanted = num_kills < most
        is_over = attempt.wait(chance.uniform(0.0, seconds) if wanted else PATIENCE_SECONDS)
        if is_over:
            assert all(process.exitcode == 0 for process in attempt.processes), attempt.failures()
            return num_kills
        first = chance.randrange(num_ranks) if chance.random() < 0.5 else None
        attempt.kill(first, chance.uniform(0.0, 0.05))
        assert wanted, f"no end within {PATIENCE_SECONDS} s\n{attempt.failures()}"
        num_kills += 1


def differences(notes: Path, expected: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many notes were compared, and those that differ from the undisturbed run."""
    wrong, count = [], 0
    for rank, (found, right) in enumerate(zip(read_notes(notes, len(expected)), expected, strict=True)):
        for step, what in found:
            count += 1
            if right.get(step) != what:
                wrong.append(f"rank {rank}, step {step}: {what}, not {right.get(step)}")
        missing = set(right) - {step for step, _ in found}
        wrong += [f"rank {rank}: step {step} is missing" for step in sorted(missing)]
    return count, wrong


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_ranks", "num_workers", "num_kills"), PLAN if IS_SLOW else QUICK_PLAN)
def test_a_killed_run_is_the_undisturbed_one(
    num_ranks: int, num_workers: int, num_kills: int, tmp_path: Path, cells: Any
) -> None:
    chance = random.Random(1000 * num_ranks + num_workers)
    (tmp_path / "undisturbed").mkdir()
    expected, seconds = undisturbed(tmp_path / "undisturbed", num_ranks, num_workers)
    kills = compared = trial = 0
    while kills < num_kills:
        seconds *= 0.9  # a machine that is less busy than before would be done before it is killed
        folder = tmp_path / f"trial_{trial}"
        folder.mkdir()
        trial += 1
        kills += killed(folder, num_ranks, num_workers, seconds, chance, min(4, num_kills - kills))
        count, wrong = differences(folder / "notes", expected)
        compared += count
        assert not wrong, "\n".join(wrong[:20])
    cells(f"kills, {num_ranks} ranks, {num_workers} workers", kills, kills)
    cells(f"steps of those runs, {num_ranks} ranks, {num_workers} workers", compared, compared)
