"""Keeps freed memory in the process between steps."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # from <malloc.h>
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more


def retain_freed_memory(bytes_kept: int = 2**29) -> bool:
    """Asks the C library to keep up to `bytes_kept` of freed memory for the next step; True on success.

    Every training step frees and allocates the same tens of megabytes. By default glibc returns
    them to the system each time, and allocating every page again can cost a third of a step on a CPU.
    Threads that start later share the main thread's memory: with one store for each, what one worker frees would
    not serve another, and a round would hold up to a third more at its peak.
    The setting holds for the whole process and changes no result; on other C libraries it does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    wanted = {M_TRIM_THRESHOLD: bytes_kept, M_MMAP_THRESHOLD: LARGEST_MMAP_THRESHOLD, M_ARENA_MAX: 1}
    taken = [bool(mallopt(name, value)) for name, value in wanted.items()]  # each of them, also after a refusal
    return all(taken)
