"""The C library's heap, told to keep what a chunk has freed for the next one."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_KEPT_BYTES, _LARGE_BYTES = 32 * 2**20, 32 * 2**20


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB that is free, where it would give each chunk's vectors back to the system.

    Getting them anew, page by page, took as long as all the arithmetic. Elsewhere than on glibc nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
