"""Keep this process's memory in huge pages, where the kernel can: a process forked from it then costs half as much.

A test session holds some 500 MB of modules, and forks thousands of ranks and data workers: copying its page tables and
dropping them again was a tenth of what the whole suite computes.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # since Linux 6.1; other kernels refuse it, and nothing has happened


def use_huge_pages() -> int:
    """Gather private, writable memory without a file into huge pages; return how many there are more."""
    if sys.platform != "linux":
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    gathered = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_, last = line.split()
        is_heap = last == "[heap]" or last == "0"  # the last word is the inode where there is no name
        if access != "rw-p" or not is_heap:
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            gathered += advise(page, _HUGE_PAGE, _MADV_COLLAPSE) == 0
    return gathered
