"""A warning at the first update of a run that hasn't loaded any checkpoint of its project.

Some programs open ``optimizer.bin`` in a checkpoint themselves, and many continue silently if it is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch

from ..errors import CheckpointError
from .dcp import is_distributed_checkpoint
from .layout import OPTIMIZER
from .series import list_committed
from .sharded import optimizer_folder
from .storage import LocalStorage, storage_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_log = logging.getLogger(__name__)
_waiting: Final[WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]] = WeakKeyDictionary()


def watch_first_step(optimizer: torch.optim.Optimizer, project_dir: str | None) -> None:
    """Warn at the first step of ``optimizer`` if ``project_dir`` has a checkpoint and none has been loaded.

    Later steps have no overhead.
    """
    folder = None if project_dir is None else _newest(project_dir)
    if folder is None:
        return

    def warn(*_: object) -> None:
        forget(list(_waiting))
        _log.warning(
            "This run makes its first update without load_state(), although %s is there: optimizers, schedulers and "
            "loaders start anew. A program that opens optimizer.bin itself finds none there: call load_state() or "
            "resume(), or save with ProjectConfiguration(checkpoint_format='classic').",
            folder,
        )

    with suppress(AttributeError):  # not torch's class, or its __init__ wasn't run
        _waiting[optimizer] = optimizer.register_step_pre_hook(warn)


def forget(optimizers: Iterable[object]) -> None:
    """Remove the warning at the first step of these optimizers, because a checkpoint has been loaded."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        handle = _waiting.pop(inner, None) if isinstance(inner, torch.optim.Optimizer) else None
        if handle is not None:
            handle.remove()


def _newest(project_dir: str) -> str | None:
    """Return the newest checkpoint in ``project_dir`` with the state of an optimizer that isn't ``optimizer.bin``."""
    storage = storage_of(project_dir)
    if not isinstance(storage, LocalStorage):
        return None  # no program opens files there by their names
    with suppress(OSError, CheckpointError):
        for _, one in reversed(list_committed(storage)):
            if isinstance(one, LocalStorage):
                has_json = (one.path / f"{OPTIMIZER.name()}.json").is_file()
                return str(one.path) if has_json or is_distributed_checkpoint(optimizer_folder(one.path)) else None
    return None
