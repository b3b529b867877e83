"""The arguments of one ``prepare`` call, sorted once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..errors import PreparationError
from ..optimizer import AcceleratedOptimizer
from ..plugins.deepspeed_data import DummyOptim, DummyScheduler
from ..plugins.megatron_data import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from ..scheduler import AcceleratedScheduler


class Role(Enum):
    """What an object is to ``prepare``."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "data loader"
    FOREIGN = "foreign"  # returned untouched


def role_of(obj: object) -> Role:
    """The role of ``obj``. The only ladder of type checks in the house."""
    if isinstance(obj, (DataLoader, MegatronLMDummyDataLoader)):
        return Role.LOADER
    if isinstance(obj, torch.nn.Module):
        return Role.MODEL
    if isinstance(obj, (torch.optim.Optimizer, DummyOptim)):
        return Role.OPTIMIZER
    if isinstance(obj, (LRScheduler, AcceleratedScheduler, DummyScheduler, MegatronLMDummyScheduler)):
        return Role.SCHEDULER
    return Role.FOREIGN


@final
@dataclass
class Slot:
    """One argument: what it is, where it should lie, and what it has become."""

    role: Role
    original: Any
    device_placement: bool
    current: Any


@final
class Bundle:
    """The arguments of one ``prepare`` call; strategies replace the contents of slots, never their order."""

    def __init__(self, slots: list[Slot], *, has_placements: bool = False) -> None:
        self.slots = slots
        #: Whether the caller said object by object what is moved.
        self.has_placements = has_placements

    @classmethod
    def sort(cls, objects: Sequence[Any], device_placement: Sequence[bool] | None, default_placement: bool) -> Bundle:
        """``objects`` with their roles.

        Raises:
            PreparationError: nothing was given, or the placements don't match the objects.
        """
        if not objects:
            raise PreparationError("prepare() was called with nothing to prepare. Give it the model, optimizer, ....")
        has_placements = device_placement is not None
        if device_placement is None:
            device_placement = [default_placement] * len(objects)
        elif len(device_placement) != len(objects):
            raise PreparationError(
                f"`device_placement` should be a list with {len(objects)} elements (the number of objects passed), but "
                f"prepare() got {list(device_placement)}. Give one per object, in the same order."
            )
        pairs = zip(objects, device_placement, strict=True)
        slots = [Slot(role_of(obj), obj, bool(placed), obj) for obj, placed in pairs]
        return cls(slots, has_placements=has_placements)

    def of(self, role: Role) -> Iterator[Slot]:
        """The slots of one role, in the order given."""
        return (slot for slot in self.slots if slot.role is role)

    def unsort(self) -> Any:
        """The prepared objects: as many as were given, in the same order; a single one bare."""
        objects = tuple(slot.current for slot in self.slots)
        return objects[0] if len(objects) == 1 else objects


def is_prepared_optimizer(obj: object) -> bool:
    """Whether ``obj`` is an optimizer that ``prepare`` returned."""
    return isinstance(obj, AcceleratedOptimizer)
