"""Utilization of a rank's device: the fraction of time it computed since the last reading, if known.

For the CPU, it is this process's CPU time as a fraction of its threads' maximum. For a GPU, torch asks the driver,
which needs the driver's Python package (`nvidia-ml-py`, `amdsmi`). Only the thread that writes a rank's record reads
it, never the training loop.
"""

from __future__ import annotations

import time
from typing import Final, final

import torch

from ...cores import num_cores
from ...devices.table import CPU, DeviceKind

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
