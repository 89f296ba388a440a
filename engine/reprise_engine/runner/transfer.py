"""Copies blocks between the pool and slots of host memory, and gives the disk's threads their bytes.

Layout of a slot: the block of layer 0, its keys (S, K, H) and then its values, layer 1, …, without gaps; where the
pool's layout is NZ, its (K·H/16, S, 16) as it is. Axis letters are those of `attention/base.py`; Q slots, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from reprise_engine.attention.base import LayerKV
from reprise_engine.runner.pages import populate_in_background
from reprise_engine.step import BlockLoad, BlockStore, SlotId


class KVTransfer(Protocol):
    """Owns the slots' memory. When store() and load() return, their operands may be used by anybody."""

    def store(self, stores: Sequence[BlockStore]) -> None:
        """Block → slot, in order."""
        ...

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Slot → block, in order."""
        ...

    def view(self, slot: SlotId) -> memoryview:
        """The bytes of a slot, writable. For the disk's threads, while nobody stores into it or loads it."""
        ...

    def expect(self, *, num_blocks: int, num_slots: int) -> None:
        """The first blocks of the pool and the first slots will be loaded into soon. Returns at once."""
        ...


class CPUTransfer:
    """The pool is host memory as well: numpy copies, several times as fast to start as torch's for pieces so small."""

    def __init__(self, kv: Sequence[LayerKV], *, num_slots: int, slots_QX: np.ndarray | None = None) -> None:
        """`slots_QX` is the slots' memory where it is given, dense along X. Otherwise it is made, and its pages are
        only taken from the machine when they are first written."""
        self._keys_BX = [_bytes_of_blocks(layer.key_BSKH) for layer in kv]
        self._values_BX = [_bytes_of_blocks(layer.value_BSKH) for layer in kv]
        shape = (num_slots, len(kv), 2, self._keys_BX[0].shape[1])
        self._slots_QL2X = np.zeros(shape, dtype=np.uint8) if slots_QX is None else slots_QX.reshape(shape)

    def store(self, stores: Sequence[BlockStore]) -> None:
        for store in stores:
            slot_L2X, block = self._slots_QL2X[store.slot], store.source
            for slot_2X, keys_BX, values_BX in zip(slot_L2X, self._keys_BX, self._values_BX, strict=True):
                slot_2X[0] = keys_BX[block]
                slot_2X[1] = values_BX[block]

    def load(self, loads: Sequence[BlockLoad]) -> None:
        for load in loads:
            slot_L2X, block = self._slots_QL2X[load.slot], load.target
            for slot_2X, keys_BX, values_BX in zip(slot_L2X, self._keys_BX, self._values_BX, strict=True):
                keys_BX[block] = slot_2X[0]
                values_BX[block] = slot_2X[1]

    def view(self, slot: SlotId) -> memoryview:
        return memoryview(self._slots_QL2X[slot].reshape(-1))

    def expect(self, *, num_blocks: int, num_slots: int) -> None:
        pools_BX = (*self._keys_BX, *self._values_BX)
        slots_QL2X = self._slots_QL2X[:num_slots]
        own = [slots_QL2X] if slots_QL2X.flags.c_contiguous else list(slots_QL2X)
        populate_in_background([*own, *(pool_BX[:num_blocks] for pool_BX in pools_BX)])


class DeviceTransfer:
    """Through pinned memory, by the device's own copies: they run in the order of its stream.

    Works on every device; on a CPU it is the slower one, and tested there.
    """

    def __init__(
        self, kv: Sequence[LayerKV], *, num_slots: int, pinned: bool, slots_QX: np.ndarray | None = None
    ) -> None:
        """`slots_QX` is the slots' memory where it is given, dense along X, and as it is; otherwise it is made."""
        keys_BSKH = kv[0].key_BSKH
        self._kv = [layer.copyable for layer in kv]
        self._device = keys_BSKH.device
        shape = (num_slots, len(kv), 2, *keys_BSKH.shape[1:])
        if slots_QX is None:
            self._slots_QL2SKH = torch.empty(shape, dtype=keys_BSKH.dtype, pin_memory=pinned)
            self._bytes_QX = self._slots_QL2SKH.view(torch.uint8).numpy().reshape(num_slots, -1)
        else:
            self._slots_QL2SKH = torch.from_numpy(slots_QX).view(keys_BSKH.dtype).view(shape)
            self._bytes_QX = slots_QX

    def store(self, stores: Sequence[BlockStore]) -> None:
        for store in stores:
            for layer, slot_2SKH in zip(self._kv, self._slots_QL2SKH[store.slot], strict=True):
                for pool_BSKH, slot_SKH in zip(layer, slot_2SKH, strict=True):
                    slot_SKH.copy_(pool_BSKH[store.source], non_blocking=True)
        self._wait(stores)

    def load(self, loads: Sequence[BlockLoad]) -> None:
        for load in loads:
            for layer, slot_2SKH in zip(self._kv, self._slots_QL2SKH[load.slot], strict=True):
                for pool_BSKH, slot_SKH in zip(layer, slot_2SKH, strict=True):
                    pool_BSKH[load.target].copy_(slot_SKH, non_blocking=True)
        self._wait(loads)

    def _wait(self, done: Sequence[object]) -> None:
        """The disk's threads may have the slots next, and they know of no stream."""
        if done and self._device.type == "npu":
            torch.npu.synchronize(self._device)  # type: ignore[attr-defined]  # of torch_npu

    def view(self, slot: SlotId) -> memoryview:
        return memoryview(self._bytes_QX[slot])

    def expect(self, *, num_blocks: int, num_slots: int) -> None:
        """Pinned memory and a device's have their pages from the start."""


def create_transfer(kv: Sequence[LayerKV], *, num_slots: int, slots_QX: np.ndarray | None = None) -> KVTransfer:
    """For the device that the pool is on; `slots_QX` is memory for the slots, where several processes share it."""
    if kv[0].key_BSKH.device.type == "cpu":
        return CPUTransfer(kv, num_slots=num_slots, slots_QX=slots_QX)
    return DeviceTransfer(kv, num_slots=num_slots, pinned=True, slots_QX=slots_QX)


def _bytes_of_blocks(pool_BSKH: torch.Tensor) -> np.ndarray:
    """The same memory as (B, X): X bytes a block."""
    return pool_BSKH.reshape(pool_BSKH.shape[0], -1).view(torch.uint8).numpy()
