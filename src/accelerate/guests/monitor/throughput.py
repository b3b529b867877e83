"""The speed of a run, the fraction of its time spent waiting for data, and the utilization of a rank's device.

The timer reads only the host's clock and never waits for the device. So for single steps it measures when they were
queued. Over a report, which reads the loss at its end, it measures the duration of the updates.

Utilization is the fraction of time that the device computed since the last reading, if known. For the CPU, it is this
process's CPU time as a fraction of its threads' maximum. For a GPU, torch asks the driver, which needs the driver's
Python package (`nvidia-ml-py`, `amdsmi`). Only the thread that writes a rank's record reads it, never the training
loop.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final, final

import torch

from ...cores import num_cores
from ...devices.table import CPU, DeviceKind

#: The vendors' dense half-precision operations per second, by a part of the device's name; longer names come first.
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
    """Return the peak half-precision operations per second of the named device; None if the table lacks it."""
    return next((peak for part, peak in PEAK_FLOPS if part.lower() in device_name.lower()), None)


def host_memory_bytes() -> int:
    """Return the bytes of memory used by this process; 0 if unknown."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            return pages * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


@final
@dataclass
class StepTimer:
    """A timer of the updates since the last report, divided into waiting for data and other time.

    Time between passes over the data (evaluation, the next epoch's start) and time passed to :meth:`exclude` don't
    count. All numbers are this rank's.
    """

    seconds: float = 0.0
    wait_seconds: float | None = None
    updates: int = 0
    samples: float = 0.0
    total_wait: float = 0.0  # since the loop began; `reset` keeps it
    last_lap: float | None = None  # when the last micro-batch of the running pass ended
    _excluded: float = field(default=0.0, repr=False)
    _waited: float = field(default=0.0, repr=False)

    def lap(self, samples: float, is_update: bool, waited: float | None, ends_pass: bool) -> bool:
        """Count a micro-batch; return whether its duration is known and counted.

        Args:
            samples: the number of samples in it.
            is_update: whether it completed an update.
            waited: the seconds that the running pass has waited for data so far; None if unknown.
            ends_pass: whether it was the last one of the pass.
        """
        now = perf_counter()
        before = self._waited if waited is None or waited >= self._waited else 0.0
        self.total_wait += 0.0 if waited is None else waited - before
        is_counted = self.last_lap is not None
        if self.last_lap is not None:
            self.seconds += now - self.last_lap - self._excluded
            self.samples += samples
            self.updates += is_update
            if waited is not None:
                self.wait_seconds = (self.wait_seconds or 0.0) + waited - before
        self._waited = 0.0 if waited is None else waited
        self._excluded = 0.0
        self.last_lap = None if ends_pass else now
        if ends_pass:
            self._waited = 0.0
        return is_counted

    def exclude(self, seconds: float) -> None:
        """Exclude ``seconds`` of the running micro-batch, which were spent on other work such as saving."""
        self._excluded += seconds

    def reset(self) -> None:
        """Set all sums to zero for the next report."""
        self.seconds, self.wait_seconds, self.updates, self.samples = 0.0, None, 0, 0.0


# --------------------------------------------------------------------------------------------------
# The utilization of a device

#: The minimum time between readings, below which the resolution of the clocks distorts the result.
_FEWEST_SECONDS: Final = 0.05


@final
class DeviceMeter:
    """A meter of one device; create it in the training thread, whose number of threads it uses."""

    def __init__(self, kind: DeviceKind, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._num_threads = max(1, min(torch.get_num_threads(), num_cores()))
        self._time, self._used = time.perf_counter(), time.process_time()
        self._is_known = kind is CPU or bool(kind.busy)

    def read(self) -> float | None:
        """Return the fraction, 0 to 1; None if it is unknown, or the last reading was just now."""
        if not self._is_known:
            return None
        return self._read_cpu() if self._kind is CPU else self._read_driver()

    def _read_cpu(self) -> float | None:
        now, used = time.perf_counter(), time.process_time()
        seconds = now - self._time
        if seconds < _FEWEST_SECONDS:
            return None
        share = (used - self._used) / (seconds * self._num_threads)
        self._time, self._used = now, used
        return min(1.0, round(share, 3))

    def _read_driver(self) -> float | None:
        try:
            return self._kind.utilization(self._device)
        except Exception:  # a vendor's package may raise anything; then the value is unknown and not read again
            self._is_known = False
            return None
