"""When a loss says that a run is lost: not a number for too long, or far above what it was."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from ..errors import SettingError

#: A spike is judged against at least so many reports.
_NUM_FEWEST = 5


@final
@dataclass(frozen=True)
class LossRules:
    """What ends a run.

    Attributes:
        non_finite: so many updates in a row whose loss is NaN or infinite, on any rank; 0 never ends a run. With an
            fp16 gradient scaler, which skips updates on its own, take a larger number.
        spike: a mean loss over a report that is so many times the median of the reports before; None never ends one.
            Losses that aren't positive have no such ratio and are left alone.
        spike_reports: how many reports the median is over.
        spike_patience: so many such reports in a row.

    Raises:
        SettingError: a number that can't be meant.
    """

    non_finite: int = 1
    spike: float | None = None
    spike_reports: int = 50
    spike_patience: int = 2

    def __post_init__(self) -> None:
        if self.non_finite < 0 or self.spike_reports < _NUM_FEWEST or self.spike_patience < 1:
            raise SettingError(
                f"{self}: non_finite is at least 0, spike_reports at least {_NUM_FEWEST}, spike_patience at least 1."
            )
        if self.spike is not None and self.spike <= 1:
            raise SettingError(f"LossRules(spike={self.spike}): a spike is more than 1 times the usual loss.")


#: Nothing ends a run; what is seen is still recorded.
NEVER = LossRules(non_finite=0)


@final
@dataclass
class LossJudge:
    """The losses of one run so far, under some rules. Every rank that is told the same says the same."""

    rules: LossRules
    num_non_finite: int = 0
    num_spikes: int = 0
    recent: deque[float] = field(default_factory=deque[float])

    def first_non_finite(self, losses: Sequence[float]) -> int | None:
        """The index of the first of these updates whose loss, on this rank, isn't a number."""
        return next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)

    def run_of_non_finite(self, losses: Sequence[float]) -> int:
        """How many updates in a row, the last ones before included, had no finite loss on this rank, at most."""
        longest = 0
        for loss in losses:
            self.num_non_finite = 0 if math.isfinite(loss) else self.num_non_finite + 1
            longest = max(longest, self.num_non_finite)
        return longest

    def is_lost(self, longest: float) -> bool:
        """Whether so many updates in a row without a finite loss end the run."""
        return 0 < self.rules.non_finite <= longest

    def judge_spike(self, loss: float) -> float | None:
        """What the usual loss is, when ``loss`` (the mean of all ranks over a report) is one spike too many."""
        if self.rules.spike is None or not math.isfinite(loss):
            return None
        usual = statistics.median(self.recent) if len(self.recent) >= _NUM_FEWEST else None
        if usual is not None and usual > 0 and loss > self.rules.spike * usual:
            self.num_spikes += 1
            return usual if self.num_spikes >= self.rules.spike_patience else None
        self.num_spikes = 0
        self.recent.append(loss)
        while len(self.recent) > self.rules.spike_reports:
            self.recent.popleft()
        return None
