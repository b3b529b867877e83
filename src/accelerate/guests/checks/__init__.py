"""Checks of a run against silent faults: ranks that hold other values than their replicas, hardware that errs. Internal.

- `replica_check`: parameters and optimizer states of replicas, compared bit by bit.
- `hardware_check`: an update that is computed again, and compared.
- `recorded_pass`: the passes of a model, recorded so that they can be computed again.
- `python_state`: what modules keep in Python, put back after that.
"""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest()
