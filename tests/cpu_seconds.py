"""Tell which tests take the most CPU time, that of their processes included: ``pytest -p tests.cpu_seconds``.

`make costs` runs all of them so, in two processes as `make test` does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

_BEGAN: Final = pytest.StashKey[float]()
_NAME: Final = "cpu_seconds"


def _descendants(process: str) -> Iterator[str]:
    """Yield the numbers of the processes that this one started, and of theirs, as far as they live."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                yield child
                yield from _descendants(child)


def spent() -> float:
    """Return the CPU seconds of this process, of those that ended, and of those that live."""
    own = os.times()
    ticks = 0
    for process in _descendants("self"):
        with suppress(OSError):  # it has ended meanwhile
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return own.user + own.system + own.children_user + own.children_system + ticks / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what was spent before the test."""
    item.stash[_BEGAN] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the test's CPU seconds, its fixtures included, to its last report."""
    report = yield
    if report.when == "teardown" and _BEGAN in item.stash:
        report.user_properties.append((_NAME, spent() - item.stash[_BEGAN]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the folders, files, functions and tests that took the most."""
    reports: list[Any] = [report for kind in terminalreporter.stats.values() for report in kind]
    seconds = {
        report.nodeid: value
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _NAME
    }
    groups: dict[str, tuple[int, Callable[[str], str]]] = {
        "folders": (40, lambda test: test.partition("::")[0].rpartition("/")[0]),
        "files": (60, lambda test: test.partition("::")[0]),
        "functions": (100, lambda test: test.partition("[")[0]),
        "tests": (100, lambda test: test),
    }
    for title, (most, name_of) in groups.items():
        sums: defaultdict[str, list[float]] = defaultdict(list)
        for test, value in seconds.items():
            sums[name_of(test)].append(value)
        terminalreporter.section(f"CPU seconds of {title}: {sum(seconds.values()):.0f} in all, {len(seconds)} tests")
        for name, values in sorted(sums.items(), key=lambda one: -sum(one[1]))[:most]:
            terminalreporter.line(f"{sum(values):8.1f} s {len(values):6d}  {name}")
