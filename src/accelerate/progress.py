"""A progress bar that is shown once per host."""

from __future__ import annotations

from typing import Any

from .errors import SettingError
from .optional import require


def tqdm(*args: object, main_process_only: bool = True, **kwargs: object) -> Any:
    """Return a ``tqdm.auto.tqdm`` bar; with ``main_process_only``, shown on the first process of each host only.

    Raises:
        SettingError: the first positional argument is a bool (``main_process_only`` is given by keyword).
        MissingDependency: ``tqdm`` isn't installed.
    """
    from .distributed.world import current_world

    if args and isinstance(args[0], bool):
        raise SettingError(
            f"tqdm was called with {args[0]} as its first argument, where the iterable belongs. "
            f"Write `main_process_only={args[0]}`."
        )
    bar = require("tqdm.auto", "progress", purpose="`accelerate.utils.tqdm`").tqdm
    world = current_world()
    if main_process_only and world is not None and not world.is_local_main:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
