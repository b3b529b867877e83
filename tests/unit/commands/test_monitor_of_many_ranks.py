"""`accelerate monitor` of a run of many ranks: what is read of its files, and what is shown of its ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from accelerate.distributed.world import World
from accelerate.guests.monitor import reading
from accelerate.guests.monitor.reading import RunFiles, Tail
from accelerate.guests.monitor.run_monitor import _seconds_between
from accelerate.guests.monitor.snapshot import snapshot
from accelerate.guests.monitor.terminal import screen
from tests.monitor.many_ranks import BEGIN, write_large_run
from tests.slow import slow_for

REPORTS = 40
SIZES = [
    1000,
    pytest.param(
        16_384, marks=slow_for("16,384 files")
    ),
]  # fmt: skip


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were looked at."""
    paths: list[str] = []
    read = Tail._read

    def noted(tail: Tail, *args: Any, **options: Any) -> bytes:
        paths.append(tail.path)
        return read(tail, *args, **options)

    monkeypatch.setattr(Tail, "_read", noted)
    return paths


def write(folder: Path, rank: int, **line: object) -> None:
    with (folder / "monitor" / f"rank_{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **line}) + "\n")


@pytest.mark.parametrize("ranks", SIZES)
def test_a_large_run_is_opened_by_the_ends_of_its_files(tmp_path: Path, ranks: int) -> None:
    write_large_run(tmp_path, ranks, reports=REPORTS, slow=777, failed=900)
    run = RunFiles(tmp_path)
    run.refresh()
    found = snapshot(run, now=BEGIN + 60 * REPORTS)
    assert run.version < 4 * ranks + 80 * REPORTS  # lines; the files have 43 for each rank
    assert len(json.dumps(found)) < 60_000

    assert found["num_ranks"] == ranks and found["state"] == "failed"
    assert found["states"] == {"silent": ranks - 1, "failed": 1}
    assert found["skew"] == {"rank": 777, "share": pytest.approx(0.6)}
    spread = found["spread"]["step_seconds"]
    assert spread == {"smallest": 0.5, "middle": 0.5, "ninetieth": 0.5, "ninety_ninth": 0.5, "largest": 0.8}
    assert {rank["rank"]: rank["why"] for rank in found["ranks"] if rank["why"]} == {
        777: "+60% step time", 900: "failed"
    }  # fmt: skip
    assert len(found["ranks"]) < 20
    # What the slow rank did before is drawn too.
    lines = found["per_rank"]["step_seconds"]["lines"]
    assert lines["slowest or largest"]["values"] == [0.8] * REPORTS and lines["middle"]["values"] == [0.5] * REPORTS
    shown = {(event["event"], event["num_ranks"], len(event["ranks"])) for event in found["events"]}
    assert shown == {("start", ranks, 8), ("save", ranks, 8), ("warning", ranks, 8), ("error", 1, 1)}
    text = "\n".join(screen(found, 120))
    assert len(text.splitlines()) < 50
    assert f"{ranks:,} ranks: {ranks - 1:,} silent, 1 failed" in text and "+60% step time" in text


def test_a_large_run_is_followed_in_turns(tmp_path: Path, looked_at: list[str]) -> None:
    write_large_run(tmp_path, 1000, reports=2)
    run = RunFiles(tmp_path)
    run.refresh()
    for rank in range(1000):
        write(tmp_path, rank, step=180, step_seconds=0.5)
    run.refresh()  # all seemed silent
    assert all(rank.newest["step"] == 180 for rank in run.ranks.values())

    write(tmp_path, 501, event="error", text="RuntimeError: lost")
    write(tmp_path, 0, step=240, step_seconds=0.5)
    looked_at.clear()
    run.refresh()
    assert len(looked_at) < 1000 / 16 + 40 and run.ranks[0].newest["step"] == 240
    for _ in range(15):
        run.refresh()
    assert run.ranks[501].ending == "error" and snapshot(run)["state"] == "failed"
    assert len(set(looked_at)) == 1000 and len(looked_at) < 1000 + 16 * 40


def test_what_a_followed_rank_did_before_is_read_once(tmp_path: Path) -> None:
    write_large_run(tmp_path, 300, reports=REPORTS)
    run = RunFiles(tmp_path)
    run.refresh()
    assert 5 not in run.sample and not run.ranks[5].curves
    run.choose([5])
    assert len(run.ranks[5].curves["loss"].steps) == REPORTS
    before = run.version
    run.choose([5])
    assert run.version == before
    run.choose(range(300))
    assert sum(rank.is_followed for rank in run.ranks.values()) < 80


def test_a_run_that_grows_large_forgets_the_curves_of_most_ranks(tmp_path: Path) -> None:
    write_large_run(tmp_path, 200, reports=2)
    run = RunFiles(tmp_path)
    run.refresh()
    assert all(rank.is_followed for rank in run.ranks.values())
    for rank in range(200, 300):
        write(tmp_path, rank, step=60, step_seconds=0.5)
    run.refresh()
    assert {rank.number for rank in run.ranks.values() if rank.curves} == run.sample


@pytest.mark.parametrize(("rank", "size", "seconds"), [(9, 64, 0.1), (9, 65, 2.0), (0, 16_384, 2.0), (9, 16_384, 25.6)])
def test_more_ranks_write_their_numbers_less_often(rank: int, size: int, seconds: float) -> None:
    assert _seconds_between(World.pretend(rank, size)) == seconds


def test_a_long_line_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.jsonl"
    line = json.dumps({"step": 1, "long": "x" * 3 * reading._END_BYTES})
    path.write_text(f'{{"event": "start"}}\n{line}\n{line}\n')
    tail = Tail(path)
    assert [each.get("event", each.get("step")) for each in tail.lines(ends_only=True)] == ["start", 1]
    assert tail.offset == path.stat().st_size
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step":')
    assert list(tail.lines(ends_only=True)) == [{"step": 2}]
