"""Run the whole suite many times, every second time beside a load, and list every test that failed: `make flakes N=10`.

The load is four processes that compute without end, as another job of the machine would. Each run leaves a line in
.flakes/summary.txt; a run that failed also leaves its report and its output there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.versions import counts

ROOT = Path(__file__).resolve().parent.parent
NUM_BUSY = 4
#: Ends by itself if this program is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextlib.contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Keep so many processes computing."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def failed_tests(report: Path) -> list[str]:
    """Return the tests of a JUnit report that failed, or couldn't be set up or taken down."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return [f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in failed]


def run(number: int, folder: Path, select: list[str], num_workers: int, is_loaded: bool) -> tuple[str, list[str]]:
    """Run the tests once; return a summary and what failed."""
    report, log = folder / f"run_{number}.xml", folder / f"run_{number}.log"
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(num_workers), "--dist", "worksteal"]
    begin = time.monotonic()
    with load(NUM_BUSY if is_loaded else 0), log.open("wb") as output:
        status = subprocess.run(
            [*command, f"--junit-xml={report}", *select], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = time.monotonic() - begin
    has_report = report.exists()
    counted = counts(report) if has_report else "no report"
    failed = failed_tests(report) if has_report else []
    if status != 0 and not failed:
        failed = [f"pytest itself: exit status {status}"]
    if status == 0:
        for path in (report, log):
            path.unlink()
    return f"run {number:2d} {'beside a load' if is_loaded else 'alone':13s} {counted}, in {seconds:.0f} s", failed


def main() -> int:
    """Run the suite; return 0 when no run had a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_runs", type=int, default=10, help="every second one beside a load")
    parser.add_argument("--select", nargs="+", default=["tests"], help="files, folders or tests instead of the suite")
    parser.add_argument("--num_workers", type=int, default=2, help="tests at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / ".flakes", help="for the summary and what failed")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in (*options.folder.glob("run_*.xml"), *options.folder.glob("run_*.log")):
        path.unlink()
    is_green = True
    with (options.folder / "summary.txt").open("w", encoding="utf-8") as summary:
        for number in range(1, options.num_runs + 1):
            line, failed = run(number, options.folder, options.select, options.num_workers, number % 2 == 0)
            is_green = is_green and not failed
            for text in (line, *(f"  FAILED {name}" for name in failed)):
                print(text, flush=True)
                print(text, file=summary, flush=True)
    print(f"Summary: {os.path.relpath(options.folder)}/summary.txt")
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
