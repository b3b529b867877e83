"""One process, one device."""

from __future__ import annotations

from typing import Any, final

from ..settings.labels import DistributedType
from ..world import World
from .base import Strategy


@final
class SingleDevice(Strategy):
    """The model lies on one device; nothing is wrapped."""

    @classmethod
    def suits(cls, settings: Any, world: World) -> bool:
        """True for a world of one."""
        return world.size == 1

    @property
    def label(self) -> DistributedType:
        """NO."""
        return DistributedType.NO
