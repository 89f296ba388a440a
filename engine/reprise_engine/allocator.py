"""glibc's allocator, told to give large tensors back to the system as soon as they are freed.

By itself it raises its threshold for separate mappings to the size of each mapping that is freed, up to 32 MiB. From
then on activations come from a heap, where tensors of many sizes leave holes between them: after some steps it holds
up to twice what lives at once, how much depends on the order of sizes and so on the machine's libraries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Parameters of mallopt (malloc.h). Setting either ends the raising of both.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 512 * 1024
"""From this size on a block is a mapping of its own, which costs a page fault for each 4 KiB of it. Smaller ones are
what a step of few tokens is made of, and stay in the heap."""
_TRIMMED_BYTES = 2 * MAPPED_BYTES
"""The heap gives back what is free at its end above this."""
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def return_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """For the whole process, from now on. Does nothing, and says so, where `environment` (this process's) sets these
    thresholds itself, or where the C library is another."""
    environment = os.environ if environment is None else environment
    tunables = {setting.partition("=")[0] for setting in environment.get("GLIBC_TUNABLES", "").split(":")}
    if any(name in environment for name in _VARIABLES) or not tunables.isdisjoint(_TUNABLES) or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES))


def _is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, ValueError, OSError):  # another system, or another C library
        return False
