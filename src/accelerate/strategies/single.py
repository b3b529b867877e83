"""One process, one device."""

from __future__ import annotations

from typing import final

from ..settings.labels import DistributedType
from .base import Strategy


@final
class SingleDevice(Strategy):
    """The model lies on one device; nothing is wrapped."""

    is_replicated = holds_gradients = True

    @property
    def label(self) -> DistributedType:
        """NO."""
        return DistributedType.NO
