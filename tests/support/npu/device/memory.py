"""How much of an emulated device is taken: by tensors, by their storages; and what torch_npu says when it is full."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

GIB = 1024**3


@dataclass
class DeviceMemory:
    """Bytes. Storages count once, however many tensors view them."""

    total: int
    taken_by_others: int = 0
    """Of other processes, and of the runtime outside torch."""
    allocated: int = 0
    peak: int = 0
    _viewers: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.total - self.taken_by_others - self.allocated

    def check(self, size: int) -> None:
        """Raises torch.OutOfMemoryError unless `size` more bytes fit."""
        if size <= self.free:
            return
        total, taken, free = (f"{b / GIB:.2f} GiB" for b in (self.total, self.allocated, max(self.free, 0)))
        raise torch.OutOfMemoryError(
            f"NPU out of memory. Tried to allocate {size / GIB:.2f} GiB (NPU 0; {total} total capacity; "
            f"{taken} already allocated; {taken} current active; {free} free; {taken} reserved in total by PyTorch) "
            "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
        )

    def hold(self, owner: torch.Tensor, raw: torch.Tensor) -> None:
        """Counts raw's storage for as long as `owner` lives; raises torch.OutOfMemoryError."""
        storage = raw.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()  # DLPack makes several storages of one memory
        if address not in self._viewers:
            self.check(size)
            self._viewers[address] = 0
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        self._viewers[address] += 1
        weakref.finalize(owner, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._viewers[address] -= 1
        if self._viewers[address] == 0:
            del self._viewers[address]
            self.allocated -= size
