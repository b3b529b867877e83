from __future__ import annotations

import io

import pytest

from accelerate.checkpointing import manifest as manifest_module
from accelerate.checkpointing.manifest import ByteProgress, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(manifest_module, "_REDRAW_SECONDS", 0.0)


def test_a_terminal_sees_bytes_and_rate_and_a_clean_line_in_the_end() -> None:
    output = Terminal()
    with ByteProgress("Saving checkpoint_3", 4_000_000, output=output) as progress:
        progress.advance(1_000_000)
    drawn = output.getvalue()
    assert "Saving checkpoint_3: 25% 1.0 MB of 4.0 MB, " in drawn
    assert "B/s" in drawn
    assert drawn.endswith(" \r")


@pytest.mark.parametrize(("output", "shown"), [(io.StringIO(), True), (Terminal(), False)])
def test_files_and_other_ranks_see_nothing(output: io.StringIO, shown: bool) -> None:
    with ByteProgress("Saving", 10, output=output, shown=shown) as progress:
        progress.advance(10)
    assert output.getvalue() == ""


def test_what_is_done_soon_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "QUIET_SECONDS", 60.0)
    output = Terminal()
    with ByteProgress("Saving", 10, output=output) as progress:
        progress.advance(10)
    assert output.getvalue() == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (2.5e9, "2.5 GB")]
)
def test_sizes_are_readable(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
