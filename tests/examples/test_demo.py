"""`make demo`: it judges results and only reports speed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    return importlib.import_module("demo")


def history(samples_per_second: float, loss: float = 0.5) -> list[dict[str, float]]:
    return [
        {"epoch": epoch, "loss": loss / epoch, "accuracy": 90.0 + epoch, "samples_per_second": samples_per_second}
        for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("second", [10.0, 100.0, 140.0, 190.0])
def test_a_slow_second_run_is_explained_and_does_not_fail(
    demo: Any, second: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = iter([(history(100.0), 9.0), (history(second), 9.0)])
    monkeypatch.setattr(demo, "run", lambda *_, **__: next(runs))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output_dir", str(tmp_path)])
    assert demo.main() == 0 and (tmp_path / "curves.png").exists()
    out = capsys.readouterr().out
    assert f"{second / 100:.2f} times as many" in out
    assert ("need two free cores" in out) is (second < 150)


def test_results_that_differ_fail(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.compare(history(1.0), history(2.0, loss=0.5 + demo.LOSS_TOLERANCE / 2))
    assert not demo.compare(history(1.0), history(2.0, loss=0.5 + 2 * demo.LOSS_TOLERANCE))
    capsys.readouterr()
