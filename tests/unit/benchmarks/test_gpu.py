"""`make gpu` can be tried on a machine with a GPU only; its dry run, small and on the CPU, is what runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import page, workers
from benchmarks.gpu.__main__ import FOUND, LIMITS, PARTS
from benchmarks.gpu.sheet import Sheet, figure_of
from tests.python_path import python_path
from tests.slow import IS_SLOW

ROOT = Path(__file__).resolve().parents[3]
FIELDS = {"part", "title", "state", "error", "dry", "device", "versions", "date", "rows"}
ROW_FIELDS = {"what", "state", "figure", "unit", "goal", "met", "note", "date"}
FAILING = "c"
#: All of them take half a minute of a processor.
RUN = [*PARTS] if IS_SLOW else ["c", "d"]


@pytest.mark.timeout(300)
def test_a_dry_run_fills_each_json_and_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PEER_PYTHON"}
    environment["PYTHONPATH"] = python_path()
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--part", *RUN, "--out", str(tmp_path)]
    command += ["--fail", FAILING]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output  # a part failed
    for part in RUN:
        found = json.loads((tmp_path / f"{part}.json").read_text())
        assert found.keys() == FIELDS, output
        assert found["part"] == part and found["dry"] and found["versions"]["torch"]
        assert found["state"] == ("failed" if part == FAILING else "done"), output
        assert ("asked to fail" in found["error"]) == (part == FAILING)
        assert all(row.keys() == ROW_FIELDS for row in found["rows"])
        # Small, but really run: whatever has a goal on the CPU meets it, and what was left out says why.
        assert any(row["state"] == "measured" for row in found["rows"]), output
        assert not [row for row in found["rows"] if row["state"] == "failed" or row["met"] is False], output
        assert all(row["note"] for row in found["rows"] if row["state"] == "skipped")
    text = page.text(tmp_path)
    for part in RUN:
        for row in json.loads((tmp_path / f"{part}.json").read_text())["rows"]:
            assert f"| {row['what']} | {figure_of(row)} | {row['goal']} |" in text
    assert "**Failed**: RuntimeError: this part was asked to fail" in text
    assert text.count("A dry run") == len(RUN) and text.count("Not run yet") == len(PARTS) - len(RUN)


def test_a_part_in_a_process_of_its_own_says_why_it_failed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "d", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["state"] == "failed" and "no CUDA device" in found["error"]


def test_all_parts_fit_into_25_minutes() -> None:
    assert sum(LIMITS.values()) <= 25 * 60 and max(LIMITS.values()) <= 8 * 60


def test_the_page_of_nothing_says_how_to_run_it(tmp_path: Path) -> None:
    text = page.text(tmp_path)
    assert text.count("Not run yet.") == len(PARTS) and "make gpu" in text


def test_a_row_is_judged_by_its_goal(tmp_path: Path) -> None:
    sheet = Sheet("b", tmp_path / "b.json", False, {"device": "a", "versions": {}, "date": ""})
    sheet.add("low enough", 1.0, "x", at_most=1.01)
    sheet.add("too low", 0.44, at_least=0.45)
    sheet.attempt("broken", lambda: print(1 / 0))
    sheet.skip("absent", "a reason")
    met: list[Any] = [row["met"] for row in json.loads((tmp_path / "b.json").read_text())["rows"]]
    assert met == [True, False, False, None]
    text = page.text(tmp_path)
    assert "| too low | 0.44 | >= 0.45 | not met |" in text
    assert "| broken | failed |  | not met | ZeroDivisionError: division by zero |" in text
    assert "**Running**: it was ended before its end" in text


def test_what_a_part_found_before_it_was_ended_stays(tmp_path: Path) -> None:
    sheet = Sheet("d", tmp_path / "d.json", False, {"device": "a", "versions": {}, "date": ""})
    sheet.add("found", 2.0)
    page.mark_failed(tmp_path / "d.json", "d", "took more than 210 s")
    page.mark_failed(tmp_path / "e.json", "e", "the process ended with 1")
    text = page.text(tmp_path)
    assert "| found | 2 |" in text and "**Failed**: took more than 210 s" in text and "the process ended with 1" in text
    assert not page.all_done(tmp_path, ["d"])


def test_a_worker_with_the_wrong_library_is_refused() -> None:
    workers.check_import("ours")
    with pytest.raises(RuntimeError, match="was to measure another installation's accelerate"):
        workers.check_import("peer")


def test_the_peers_worker_gets_no_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert "PYTHONPATH" not in workers.environment_of("peer")
    assert workers.environment_of("ours")["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "src")


def test_the_page_is_what_the_parts_found() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == page.text(FOUND)


def test_rows_that_are_not_asked_for_stay(tmp_path: Path) -> None:
    before = [{"what": "loading", "date": "a day"}, {"what": "copied", "date": "a day"}]
    machine = {"device": "a", "versions": {}, "date": "today"}
    sheet = Sheet("d", tmp_path / "d.json", False, machine, before, ("loading",))
    sheet.attempt("generation", lambda: sheet.add("generated", 1.0))
    sheet.attempt("loading", lambda: sheet.add("loaded", 2.0))
    assert [(row["what"], row["date"]) for row in sheet.rows] == [("copied", "a day"), ("loaded", "today")]
