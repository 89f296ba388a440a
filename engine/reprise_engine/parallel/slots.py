"""The slots of host memory that several ranks share: in each the ranks' parts of one block, in order, without gaps.

So a slot is one payload for the disk, and rank 0 alone has threads that read and write it. Q slots, N ranks, X bytes of
a rank's part of a block.
"""

from __future__ import annotations

import mmap
import os

import numpy as np


def create_file() -> int:
    """A descriptor of memory without a name, to be inherited and mapped by every rank; empty until `resize`."""
    return os.memfd_create("reprise-slots")


def resize(file: int, *, num_slots: int, size: int, part_bytes: int) -> None:
    """Room for the slots of `size` ranks. Pages are only taken from the machine when they are first written."""
    os.ftruncate(file, num_slots * size * part_bytes)


class SharedSlots:
    """The file, mapped."""

    def __init__(self, file: int, *, num_slots: int, size: int, part_bytes: int) -> None:
        mapped = mmap.mmap(file, num_slots * size * part_bytes)
        self._bytes_QNX = np.frombuffer(mapped, dtype=np.uint8).reshape(num_slots, size, part_bytes)

    def part(self, rank: int) -> np.ndarray:
        """A rank's part of every slot, (Q, X), with gaps between them."""
        return self._bytes_QNX[:, rank]

    def view(self, slot: int) -> memoryview:
        """The bytes of all parts of a slot, writable."""
        return memoryview(self._bytes_QNX[slot].reshape(-1))
