"""The random streams of a part: a function of the seed, the epoch, the update and the part.

While a loop works with a batch, all of the process's random streams belong to its part. Outside of loops the streams
continue where they were before, so what all ranks draw there is equal on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from ...data_loader.loader import PreparedLoader
from ...data_loader.random_streams import derived_seed
from ...devices.table import DeviceKind
from ...distributed.random import (
    HOST_STREAMS,
    capture_host_streams,
    capture_rng_states,
    restore_rng_states,
    seed_host_streams,
)

#: Makes the seeds of parts other numbers than those of samples, which follow from the same seed.
_OF_PARTS: Final = 0x7061727473
#: The same for those of updates.
_OF_UPDATES: Final = 0x75706474


@final
class PartStreams:
    """The streams of the parts that this rank computes, and the saved streams of the running loops."""

    def __init__(self, kind: DeviceKind) -> None:
        self._seed_device: Callable[[int], object] | None = None if kind.name == "cpu" else kind.manual_seed
        self._left: dict[str, Any] | None = None  # those of the part, while others are shown
        self._saved: list[tuple[PreparedLoader, dict[str, Any]]] = []  # before each running loop, the innermost last

    @property
    def shared(self) -> dict[str, Any]:
        """The states of the host's streams outside of loops."""
        states = self._saved[0][1] if self._saved else capture_host_streams()
        return {name: state for name, state in states.items() if name in HOST_STREAMS}

    def begin_part(self, loader: PreparedLoader, number: int) -> None:
        """Set the streams for the part with ``number`` in the epoch of ``loader``."""
        if not any(running is loader for running, _ in self._saved):
            self._saved.append((loader, capture_rng_states()))
        self._seed(loader, _OF_PARTS, number)

    def begin_step(self, number: int) -> None:
        """Set the streams for the step of the update with ``number`` in the epoch: the same on all ranks."""
        if self._saved:
            self._seed(self._saved[-1][0], _OF_UPDATES, number)

    def _seed(self, loader: PreparedLoader, kind: int, number: int) -> None:
        assert loader.sample_seed is not None, "the loader got one when it was divided"
        value = derived_seed(loader.sample_seed.value ^ kind, loader.progress.epoch, number)
        seed_host_streams(value)
        if self._seed_device is not None:
            self._seed_device(value)

    def leave_part(self) -> None:
        """Let the streams be those outside of loops, until :meth:`return_to_part`."""
        self._left = capture_rng_states() if self._saved else None
        if self._saved:
            restore_rng_states(self._saved[0][1])

    def return_to_part(self) -> None:
        """Let the streams continue where they were before :meth:`leave_part`."""
        if self._left is not None:
            restore_rng_states(self._left)
            self._left = None

    def end_pass(self, loader: PreparedLoader) -> None:
        """Let the streams continue where they were before the loop over ``loader``."""
        for place, (running, states) in enumerate(self._saved):
            if running is loader:
                del self._saved[place]
                if place < len(self._saved):  # a loop that began later runs on, such as the other one of a zip()
                    self._saved[place] = (self._saved[place][0], states)
                else:
                    restore_rng_states(states)
                return
