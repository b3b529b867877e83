"""How many of our Python functions a training step calls: exact, and the same on every machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "step.py"
LIMITS = {"plain": 5, "accumulating": 10, "bf16": 8, "scheduled": 7}  # docs/benchmarks.md names them


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with few steps."""
    spec = importlib.util.spec_from_file_location("benchmark_of_steps", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STEPS", 8)
    return module


def test_each_loop_of_the_benchmark_has_its_limit(benchmark: ModuleType) -> None:
    assert set(benchmark.LOOPS) == set(LIMITS)


@pytest.mark.parametrize("loop", LIMITS)
def test_a_step_calls_no_more_of_our_functions_than_documented(benchmark: ModuleType, loop: str) -> None:
    counted = benchmark.calls(loop)
    assert sum(counted.values()) <= LIMITS[loop], counted
    assert len(counted) >= 5, "the profiler saw nothing of ours"
