"""The speed of a run, and how much of its time is spent waiting for data: a timer, and the numbers made of it.

The timer reads only the time of the host. It never waits for the device, so for single steps it measures when they were
queued; over the updates of a report, whose loss is read at the end, it is the time that they took.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Final, final

#: Dense operations a second in half precision, by a part of the device's name, as the vendors state them. The longer
#: names come first.
PEAK_FLOPS: Final[tuple[tuple[str, float], ...]] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("MI325X", 1.307e15),
    ("MI300X", 1.307e15),
    ("A100", 3.12e14),
    ("L40S", 3.62e14),
    ("L4", 1.21e14),
    ("A10G", 7.0e13),
    ("V100", 1.25e14),
    ("T4", 6.5e13),
    ("RTX 4090", 1.65e14),
)


def peak_flops_of(device_name: str) -> float | None:
    """Return the peak operations per second of the named device in half precision; None when it isn't in the table."""
    return next((peak for part, peak in PEAK_FLOPS if part.lower() in device_name.lower()), None)


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


def host_memory_bytes() -> int:
    """Return the bytes of memory used by this process; 0 if the system doesn't tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    with contextlib.suppress(ImportError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


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
@dataclass
class StepTimer:
    """A timer of the updates since the last report, split into waiting for data and the rest.

    Time between passes over the data (evaluation, the next epoch's start) and time given to :meth:`exclude` count as
    neither. All numbers are of this rank.
    """

    seconds: float = 0.0
    wait_seconds: float | None = None
    updates: int = 0
    samples: float = 0.0
    total_wait: float = 0.0  # since the loop began; `reset` keeps it
    _since: float | None = field(default=None, repr=False)
    _excluded: float = field(default=0.0, repr=False)
    _waited: float = field(default=0.0, repr=False)

    def lap(self, samples: float, is_update: bool, waited: float | None, ends_pass: bool) -> bool:
        """Count a micro-batch; return whether its time is known, and so counted.

        Args:
            samples: in it.
            is_update: whether it completed an update.
            waited: seconds that the running pass over the data has waited so far; None if unknown.
            ends_pass: whether it was the last one of the pass.
        """
        now = perf_counter()
        before = self._waited if waited is None or waited >= self._waited else 0.0
        self.total_wait += 0.0 if waited is None else waited - before
        is_counted = self._since is not None
        if self._since is not None:
            self.seconds += now - self._since - self._excluded
            self.samples += samples
            self.updates += is_update
            if waited is not None:
                self.wait_seconds = (self.wait_seconds or 0.0) + waited - before
        self._waited = 0.0 if waited is None else waited
        self._excluded = 0.0
        self._since = None if ends_pass else now
        if ends_pass:
            self._waited = 0.0
        return is_counted

    @property
    def last_lap(self) -> float | None:
        """When the last micro-batch of the running pass ended; None before the first one."""
        return self._since

    def exclude(self, seconds: float) -> None:
        """Leave ``seconds`` of the running micro-batch, spent on something else (saving), out of its time."""
        self._excluded += seconds

    def reset(self) -> None:
        """Set all sums to zero, for the next report."""
        self.seconds, self.wait_seconds, self.updates, self.samples = 0.0, None, 0, 0.0


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
