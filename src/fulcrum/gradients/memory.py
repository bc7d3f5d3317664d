"""Memory that stays with the process between steps."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more


def retain_freed_memory(bytes_kept: int = 2**29) -> bool:
    """Asks the C library to keep up to `bytes_kept` of freed memory for the next step; True if it agreed.

    A training step frees and takes the same tens of megabytes again and again. By default glibc hands
    them back to the system each time, and getting every page anew can cost a third of a step on a CPU.
    It is a setting of the whole process and changes no result; on other C libraries nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, bytes_kept)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD))
