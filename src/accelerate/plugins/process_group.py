"""How the process group is made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ..settings.ddp import ProcessGroupOptions
from .base import KwargsHandler

_DEFAULT_BACKEND = "nccl"
_TIMEOUT = timedelta(seconds=1800)
_TIMEOUT_OF_DEFAULT_BACKEND = timedelta(seconds=600)


@dataclass
class InitProcessGroupKwargs(ProcessGroupOptions, KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Without a ``timeout`` a collective may take 600 s on the default backend and 1800 s on any other:
    torch's own rule.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout is None:
            self.timeout = _TIMEOUT_OF_DEFAULT_BACKEND if self.backend == _DEFAULT_BACKEND else _TIMEOUT
