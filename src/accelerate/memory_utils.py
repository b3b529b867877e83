"""Import path kept for compatibility: `accelerate.utils.memory`."""

from __future__ import annotations

from .callers import warn_of_old_spelling
from .devices.memory import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

warn_of_old_spelling(
    "`accelerate.memory_utils` is an old address; import `find_executable_batch_size` from `accelerate`, "
    "and the rest from `accelerate.utils.memory`."
)
