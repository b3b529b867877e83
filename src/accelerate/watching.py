"""Import path kept for compatibility: the metrics, rules and callbacks of a run.

The guest `monitor` implements it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, final

from .errors import SettingError

if TYPE_CHECKING:
    import torch

__all__ = ["Flops", "LossRules", "RunCallback", "RunWatch", "StepReport", "count_flops"]

#: A spike is judged against at least so many reports.
NUM_FEWEST_REPORTS: Final = 5


def count_flops(step: Callable[[], object]) -> int:
    """Count the floating-point operations of one call of ``step``, as torch's counter adds them up.

    Give it forward and backward of one batch; only operations that torch has a formula for are counted (matrix
    products, convolutions, attention).
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return int(counter.get_total_flops())


@final
@dataclass(frozen=True)
class Flops:
    """The floating-point operations that a run takes, as far as its author says.

    Each number covers forward and backward; for a dense transformer, ``per_token`` is about six times the number of
    parameters. ``peak`` is what one device can do in a second.
    """

    per_token: float | None = None
    per_sample: float | None = None
    per_update: float | None = None
    peak: float | None = None

    def utilization(self, *, tokens: float | None, samples: float | None, updates: float, ranks: int) -> float | None:
        """Return the fraction of ``ranks`` devices' peak that these rates (per second, over all ranks) use; None if
        unknown.
        """
        if not self.peak:
            return None
        for each, rate in ((self.per_token, tokens), (self.per_sample, samples), (self.per_update, updates)):
            if each is not None and rate is not None:
                return each * rate / (self.peak * ranks)
        return None


@final
@dataclass(frozen=True)
class StepReport:
    """The numbers of the updates since the last report; rates and the loss are those of all ranks together."""

    step: int
    epoch: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    step_seconds: float | None = None
    wait_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int = 0
    mfu: float | None = None
    eta_seconds: float | None = None
    total_steps: int | None = None
    values: dict[str, float] = field(default_factory=dict[str, float])
    gradient_norm: float | None = None  # before the last clipping

    def as_json(self) -> dict[str, float | str]:
        """Return the known values by name, the user's own among them."""
        known = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "values"}
        found = {**self.values, **{name: value for name, value in known.items() if value is not None}}
        return {name: _rounded(value) for name, value in found.items()}

    def line(self) -> str:
        """Return the report as one line for people."""
        total = "" if self.total_steps is None else f"/{self.total_steps}"
        words = [f"step {self.step}{total}"]
        if self.epoch is not None:
            words.append(f"epoch {self.epoch}")
        if self.loss is not None:
            words.append(f"loss {self.loss:.4g}")
        words += [f"{name} {value:.4g}" for name, value in self.values.items()]
        if self.learning_rate is not None:
            words.append(f"lr {self.learning_rate:.3g}")
        if self.tokens_per_second is not None:
            words.append(f"{_count(self.tokens_per_second)} tokens/s")
        elif self.samples_per_second is not None:
            words.append(f"{_count(self.samples_per_second)} samples/s")
        if self.step_seconds is not None:
            wait = self.wait_seconds
            fraction = "" if wait is None or not self.step_seconds else f" ({wait / self.step_seconds:.0%} data)"
            words.append(f"{1000 * self.step_seconds:.3g} ms{fraction}")
        if self.memory_bytes:
            words.append(f"{self.memory_bytes / 1e9:.2f} GB")
        if self.mfu is not None:
            words.append(f"MFU {self.mfu:.1%}")
        if self.eta_seconds is not None:
            words.append(f"ETA {format_duration(self.eta_seconds)}")
        return "  ".join(words)


def format_duration(seconds: float) -> str:
    """Format seconds: ``3725`` as ``1:02:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _count(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 10 * size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _rounded(value: float) -> float | str:
    """Round to six significant digits, which keeps files small; JSON has no NaN and no infinity, so they become
    strings.
    """
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


@final
@dataclass(frozen=True)
class LossRules:
    """The rules by which losses end a run.

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
        if self.non_finite < 0 or self.spike_reports < NUM_FEWEST_REPORTS or self.spike_patience < 1:
            raise SettingError(
                f"{self}: non_finite is at least 0, spike_reports at least {NUM_FEWEST_REPORTS}, spike_patience at "
                "least 1."
            )
        if self.spike is not None and self.spike <= 1:
            raise SettingError(f"LossRules(spike={self.spike}): a spike is more than 1 times the usual loss.")


class RunWatch(ABC):
    """The monitor of one training loop, as ``Accelerator.watch_run`` makes it.

    ``step(loss)`` follows each micro-batch, after the optimizer; every rank calls it equally often.

    Attributes:
        updates: optimizer updates done, those before a resumed checkpoint included.
        total_steps: updates that the run will take, if known.
        last_report: the newest report.
        callbacks: what else happens at the moments of the run.
        samples_per_batch: of this rank, by the prepared loader that is read; 0 before one is.
    """

    updates: int
    total_steps: int | None
    last_report: StepReport | None
    callbacks: list[RunCallback]
    samples_per_batch: float

    @abstractmethod
    def step(
        self,
        loss: torch.Tensor | None = None,
        *,
        samples: float | None = None,
        tokens: int | torch.Tensor | None = None,
        **values: Any,
    ) -> None:
        """Count a micro-batch, and make a report if it completes the last update of one.

        Args:
            loss: the mean over the micro-batch, on the device; it is read only at a report.
            samples: in this rank's micro-batch; by default those of the prepared loader's batch.
            tokens: in this rank's micro-batch: an int, or a tensor on the device.
            values: the user's own numbers, of which a report shows the newest.

        Raises:
            RunStopped: on every rank: a rule, or some rank's :meth:`stop`, ended the run.
        """

    @property
    @abstractmethod
    def epoch(self) -> int | None:
        """The pass over the training loader that is running (or was last), counted from 0; None without one."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ask all ranks to stop at the next report, because of ``reason``. One rank is enough to ask for it."""

    @abstractmethod
    def report(self) -> StepReport | None:
        """Return the numbers since the last report; None when there was no update. A collective, made by every rank.

        Raises:
            RunStopped: on every rank, when the run is to end.
        """

    @abstractmethod
    def note(self, text: str) -> None:
        """Record ``text`` as an event of this rank, in its file and on the page of ``accelerate monitor``."""

    @abstractmethod
    def finish(self) -> None:
        """Complete and close the files; check the losses since the last report on this rank alone."""


class RunCallback:
    """The base class of callbacks of a run; its methods do nothing unless a subclass overrides them.

    Called on every rank. An exception in one ends the run, as anywhere in the loop.
    """

    def on_step(self, run: RunWatch) -> None:
        """Run after an optimizer update; ``run.updates`` counts it. Reading a tensor here waits for the device."""

    def on_report(self, run: RunWatch, report: StepReport) -> None:
        """Run at a report, with the numbers of the last updates, the same on every rank but for times and memory."""

    def on_epoch(self, run: RunWatch, epoch: int) -> None:
        """Run after a pass over the training loader; ``epoch`` counts from 0."""

    def on_save(self, run: RunWatch, folder: str) -> None:
        """Run after ``save_state`` has returned; an asynchronous one may still be writing."""

    def on_stop(self, run: RunWatch, reason: str) -> None:
        """Run when all ranks have agreed to stop; `RunStopped` is raised next."""
