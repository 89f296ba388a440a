"""Blocks go into slots and come back bit by bit, on both ways, and a slot's bytes are laid out the same on both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from reprise_engine.attention.base import LayerKV
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.pages import populate
from reprise_engine.runner.transfer import CPUTransfer, DeviceTransfer, KVTransfer
from reprise_engine.step import BlockId, BlockLoad, BlockStore, SlotId

LAYERS, BLOCKS, SLOTS = 3, 6, 4
Make = Callable[[tuple[LayerKV, ...]], KVTransfer]


def pool(dtype: torch.dtype) -> tuple[LayerKV, ...]:
    """Every number of it is another one."""
    kv = allocate_kv_cache(
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(0)
    for layer in kv:
        for tensor in (layer.key_BSKH, layer.value_BSKH):
            tensor.copy_(torch.randn(tensor.shape, generator=generator).to(dtype))
    return kv


@pytest.fixture(params=["cpu", "device"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "cpu":
        return lambda kv: CPUTransfer(kv, num_slots=SLOTS)
    return lambda kv: DeviceTransfer(kv, num_slots=SLOTS, pinned=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_comes_back_as_it_went(make: Make, dtype: torch.dtype) -> None:
    kv = pool(dtype)
    before = [(layer.key_BSKH.clone(), layer.value_BSKH.clone()) for layer in kv]
    transfer = make(kv)
    transfer.store([BlockStore(BlockId(4), SlotId(2)), BlockStore(BlockId(1), SlotId(0))])
    for layer in kv:
        layer.key_BSKH[4] = 0
        layer.value_BSKH[1] = 0
    transfer.load([BlockLoad(SlotId(2), BlockId(3)), BlockLoad(SlotId(0), BlockId(0))])
    for layer, (key, value) in zip(kv, before, strict=True):
        for target, source in ((3, 4), (0, 1)):
            assert torch.equal(layer.key_BSKH[target], key[source])
            assert torch.equal(layer.value_BSKH[target], value[source])
        assert torch.equal(layer.key_BSKH[5], key[5])
        assert torch.equal(layer.value_BSKH[2], value[2])


def test_a_slot_is_layer_by_layer_keys_then_values(make: Make) -> None:
    kv = pool(torch.bfloat16)
    transfer = make(kv)
    transfer.store([BlockStore(BlockId(5), SlotId(3))])
    expected = torch.cat([part[5].reshape(-1) for layer in kv for part in (layer.key_BSKH, layer.value_BSKH)])
    view = transfer.view(SlotId(3))
    assert view.nbytes == LAYERS * 2 * 4 * 2 * 8 * 2
    assert bytes(view) == expected.view(torch.uint8).numpy().tobytes()


def test_what_is_written_to_a_slot_is_loaded(make: Make) -> None:
    kv = pool(torch.float32)
    transfer = make(kv)
    view = transfer.view(SlotId(1))
    view[:] = bytes(view.nbytes)
    transfer.load([BlockLoad(SlotId(1), BlockId(2))])
    assert not any(layer.key_BSKH[2].any() or layer.value_BSKH[2].any() for layer in kv)
    assert all(layer.key_BSKH[3].any() for layer in kv)


def test_taking_pages_changes_nothing() -> None:
    array = np.arange(1_000_000, dtype=np.uint32)
    populate([array, array[:10]])
    assert array.tolist() == list(range(1_000_000))
