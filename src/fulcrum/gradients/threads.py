"""Threads in which every operation of PyTorch runs on one core: pieces of work go side by side."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch


def make_single_threaded_pool(workers: int) -> ThreadPoolExecutor:
    """A pool of threads in which every operation of PyTorch runs on one core. It ends when it is let go of."""
    threads, everyone = torch.get_num_threads(), threading.Barrier(workers)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fulcrum")

    def begin(_: int) -> None:
        torch.get_num_threads()  # a thread that never asked takes up the process's number at its first operation
        torch.set_num_threads(1)
        limit_mkl_in_this_thread()
        everyone.wait()

    list(pool.map(begin, range(workers)))
    torch.set_num_threads(threads)  # threads that others start later have the usual number again
    return pool


def limit_mkl_in_this_thread() -> bool:
    """Has MKL run on one core in this thread; False where PyTorch comes without it.

    `torch.set_num_threads` sets MKL's number for the whole process, so that a later call elsewhere would undo it.
    """
    setter = getattr(_find_torch_library(), "MKL_Set_Num_Threads_Local", None)
    if setter is None:
        return False
    setter(1)
    return True


def _find_torch_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


def find_shared_pool(workers: int) -> ThreadPoolExecutor:
    """The process's pool for short work from one thread at a time; a forked process gets its own.

    PyTorch would split each operation of an ordinary thread over all cores again, and the helpers that it starts for
    that wait busily for the next operation: two such threads on two cores take twice the time.
    """
    return _keep_pool(workers, os.getpid())


@lru_cache(maxsize=4)
def _keep_pool(workers: int, process: int) -> ThreadPoolExecutor:
    return make_single_threaded_pool(workers)
