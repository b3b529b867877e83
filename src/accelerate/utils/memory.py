"""Import path kept for compatibility: memory."""

from __future__ import annotations

from ..devices.memory import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]
