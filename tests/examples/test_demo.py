"""`make demo`: it judges every bit of the results and only reports speed."""

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


def history(samples_per_second: float, loss: float = 0.5, fingerprint: str = "3f" * 32) -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch,
            "loss": loss / epoch,
            "accuracy": 90.0 + epoch,
            "samples_per_second": samples_per_second,
            "fingerprint": fingerprint,
        }
        for epoch in (1, 2, 3)
    ]


def runs_with(demo: Any, histories: list[list[dict[str, Any]]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    runs = iter(histories)
    monkeypatch.setattr(demo, "run", lambda *_, **__: (next(runs), 9.0))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output_dir", str(folder)])
    return demo.main()


@pytest.mark.parametrize("second", [10.0, 100.0, 140.0, 190.0])
def test_a_slow_second_run_is_explained_and_does_not_fail(
    demo: Any, second: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [history(100.0), history(second), history(second / 2)]
    assert runs_with(demo, found, tmp_path, monkeypatch) == 0 and (tmp_path / "curves.png").exists()
    out = capsys.readouterr().out
    assert f"{second / 100:.2f} times as many" in out
    assert ("need two free cores" in out) is (second < 150)
    assert out.count("3f" * 32) == 3 and "equal in every bit: yes" in out


@pytest.mark.parametrize("other", [{"loss": 0.5000000000000001}, {"fingerprint": "4f" * 32}], ids=str)
@pytest.mark.parametrize("place", [1, 2])
def test_one_other_bit_fails(
    demo: Any,
    other: dict[str, Any],
    place: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [history(100.0) for _ in range(3)]
    found[place] = history(100.0, **other)
    assert runs_with(demo, found, tmp_path, monkeypatch) == 1
    assert "equal in every bit: NO" in capsys.readouterr().out
