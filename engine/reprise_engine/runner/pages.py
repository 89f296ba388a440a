"""Takes memory's pages from the machine before somebody waits for them.

The pool and the slots cost nothing until they are written; then each page is a fault, and in a virtual machine that has
not used the memory before a gigabyte of them takes seconds. After a restart the first request that is loaded from the
disk would pay for both.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: as if every page were written, without changing one. Others refuse it, and nothing is lost but time."""
_PIECE_BYTES = 8 * 2**20
_NICE = 10


def populate(arrays: Iterable[np.ndarray]) -> bool:
    """Pages of contiguous `arrays`, whoever reads or writes them meanwhile; False where the system cannot."""
    libc = ctypes.CDLL(None)
    page = mmap.PAGESIZE
    for array in arrays:
        assert array.flags.c_contiguous, "pages of an array with gaps are not its own"
        start = array.ctypes.data
        first, end = -(-start // page) * page, (start + array.nbytes) // page * page
        for at in range(first, end, _PIECE_BYTES):
            size = min(_PIECE_BYTES, end - at)
            if libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return False
    return True


def populate_in_background(arrays: Iterable[np.ndarray]) -> threading.Thread:
    """The same, in a thread of low priority."""

    def work() -> None:
        with suppress(OSError):  # not allowed in some sandboxes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        populate(arrays)

    thread = threading.Thread(target=work, name="tier-pages", daemon=True)
    thread.start()
    return thread
