"""The time that a rank computes per row, without the time that it waits for other ranks.

In wall-clock time all ranks are equally fast, because a fast one waits for the slowest in the gradient reduction. So
only the time before it counts: from the loader's batch to the start of the backward pass. Replicas don't communicate in
between. CPU time would miss a rank that is stopped by a control group or that waits for a slow disk.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any, Final, final

import torch

#: The first batches of a pass aren't measured, because they compile, allocate and fill caches.
NUM_SKIPPED: Final = 3
#: The newest intervals that count. A control group stops a process for up to a tenth of a second at a time, so they
#: have to last much longer than that.
NUM_INTERVALS: Final = 2048


@final
class Clock:
    """The measured intervals of one pass over a loader.

    On the CPU they are wall-clock times. Other devices compute after the call has returned, so they record events on
    the device's stream, which are read only when the pass has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.reset()

    def reset(self) -> None:
        """Forget all intervals, because a pass begins."""
        #: The start, the end and the number of rows that were computed when it ended.
        self._intervals: deque[tuple[Any, Any, int]] = deque(maxlen=NUM_INTERVALS)
        self._num_batches, self._start, self._is_paused = 0, None, False

    def begin_batch(self) -> None:
        """Begin to measure, unless the pass has just begun."""
        self._num_batches += 1
        if self._num_batches > NUM_SKIPPED:
            self._start = self._now()

    def end_batch(self, num_rows: int) -> None:
        """End the measurement of a batch; do nothing if it has ended."""
        if self._start is not None:
            self._intervals.append((self._start, self._now(), num_rows))
            self._start = None

    def pause(self) -> None:
        """Leave out the time until :meth:`resume`."""
        self._is_paused = self._start is not None
        self.end_batch(0)

    def resume(self) -> None:
        """End :meth:`pause`."""
        if self._is_paused:
            self._is_paused, self._start = False, self._now()

    @property
    def has_measured(self) -> bool:
        """Whether there is an interval; the same on all ranks of a loop."""
        return bool(self._intervals)

    def seconds_per_row(self) -> float:
        """Return the mean time per row; 0 if nothing was measured. This waits for the device."""
        kept = list(self._intervals)
        if len(kept) == NUM_INTERVALS:  # the first batch may have lost some of its intervals
            ends = [number for number, (_, _, num_rows) in enumerate(kept) if num_rows]
            kept = kept[ends[0] + 1 :] if ends else []
        num_rows = sum(rows for _, _, rows in kept)
        if not num_rows:
            return 0.0
        if self._module is None:
            return sum(end - start for start, end, _ in kept) / num_rows
        kept[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end, _ in kept) / 1000 / num_rows

    def _now(self) -> Any:
        if self._module is None:
            return perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event
