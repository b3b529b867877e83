from __future__ import annotations

import math

import pytest

from accelerate.guests.monitor.run_monitor import NEVER, LossJudge
from accelerate.watching import LossRules

NAN = math.nan


def test_the_first_loss_that_is_not_finite_is_found() -> None:
    judge = LossJudge(LossRules())
    assert judge.first_non_finite([1.0, 2.0]) is None
    assert judge.first_non_finite([1.0, math.inf, NAN]) == 1


def test_losses_that_are_not_finite_are_counted_over_reports() -> None:
    judge = LossJudge(LossRules(non_finite=3))
    assert judge.run_of_non_finite([1.0, NAN, NAN]) == 2
    assert not judge.is_lost(2)
    assert judge.run_of_non_finite([NAN, 1.0, NAN]) == 3
    assert judge.is_lost(3)
    assert judge.run_of_non_finite([1.0]) == 0


def test_without_rules_nothing_is_lost() -> None:
    assert not LossJudge(NEVER).is_lost(1000)
    assert LossJudge(LossRules(spike=None)).judge_spike(1e9) is None


def test_a_spike_is_many_times_the_usual_loss_for_some_time() -> None:
    judge = LossJudge(LossRules(spike=3.0, spike_patience=2))
    for loss in (1.0, 1.1, 0.9, 1.0, 1.2):
        assert judge.judge_spike(loss) is None
    assert judge.judge_spike(5.0) is None  # the first one
    assert judge.judge_spike(1.0) is None  # which passed
    assert judge.judge_spike(5.0) is None
    assert judge.judge_spike(5.0) == pytest.approx(1.0, abs=0.1)


def test_spikes_dont_become_the_usual_loss() -> None:
    judge = LossJudge(LossRules(spike=2.0, spike_patience=100, spike_reports=5))
    for loss in (1.0,) * 5 + (9.0,) * 50:
        judge.judge_spike(loss)
    assert set(judge.recent) == {1.0}


def test_a_loss_that_falls_or_is_negative_is_no_spike() -> None:
    judge = LossJudge(LossRules(spike=1.5, spike_patience=1))
    assert [judge.judge_spike(10.0 / step) for step in range(1, 100)] == [None] * 99
    judge = LossJudge(LossRules(spike=1.5, spike_patience=1))
    assert [judge.judge_spike(-1.0 if step % 2 else -5.0) for step in range(100)] == [None] * 100


@pytest.mark.parametrize(
    "values", [{"non_finite": -1}, {"spike": 1.0}, {"spike_reports": 2}, {"spike_patience": 0}], ids=str
)
def test_numbers_that_cant_be_meant_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="LossRules"):
        LossRules(**values)  # type: ignore[arg-type]
