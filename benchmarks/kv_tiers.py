"""What it costs to move a block of KV between the pool, host memory and disk. No model: tensors of its shape.

    python benchmarks/kv_tiers.py [--layers 30] [--kv-heads 3] [--head-dim 64] [--block-size 16] [--folder DIR]

The defaults are SmolLM2-135M's, in bfloat16. In microseconds of CPU time of one thread a block, so other processes do
not matter much; "first touch" includes the pages that memory never written before takes from the machine:

    store        pool → host slot, by the engine's thread      disk write   host slot → record, by the tier's writer
    load         host slot → pool, by the engine's thread      disk read    record → host slot, verified, by its reader
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.transfer import CPUTransfer
from reprise_engine.step import BlockId, BlockLoad, BlockStore, SlotId
from reprise_engine.tiers.disk import DiskStore
from reprise_engine.tiers.identity import CacheIdentity
from reprise_engine.tiers.keys import BlockKey

BLOCKS = 128


def measure(name: str, move: Callable[[int], object], bytes_per_block: int) -> None:
    """`move` moves the block of that number, from 0 to BLOCKS - 1."""
    begun = time.thread_time()
    for number in range(BLOCKS):
        move(number)
    seconds = (time.thread_time() - begun) / BLOCKS
    print(f"{name:<20}{1e6 * seconds:>10.0f} µs{bytes_per_block / seconds / 2**30:>10.2f} GiB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the temporary folder)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    shape = {"num_layers": options.layers, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    kv = allocate_kv_cache(
        **shape,
        num_blocks=2 * BLOCKS,
        block_size=options.block_size,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for layer in kv:
        layer.key_BSKH[:BLOCKS] = torch.randn(layer.key_BSKH[:BLOCKS].shape)
        layer.value_BSKH[:BLOCKS] = torch.randn(layer.value_BSKH[:BLOCKS].shape)
    bytes_per_block = 2 * options.layers * options.block_size * options.kv_heads * options.head_dim * 2
    print(f"{BLOCKS} blocks of {bytes_per_block:,} bytes")

    transfer = CPUTransfer(kv, num_slots=BLOCKS)
    for name in ("store, first touch", "store"):
        measure(name, lambda i: transfer.store((BlockStore(BlockId(i), SlotId(i)),)), bytes_per_block)
    for name in ("load, first touch", "load"):
        measure(name, lambda i: transfer.load((BlockLoad(SlotId(i), BlockId(BLOCKS + i)),)), bytes_per_block)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        identity = CacheIdentity(
            **shape,
            weights="",
            config="",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            arithmetic="",
            layout="",
            block_size=options.block_size,
        )
        store = DiskStore(Path(folder), capacity_bytes=2**40, identity=identity, payload_bytes=bytes_per_block)
        keys = [BlockKey(hashlib.sha256(bytes([i])).digest()) for i in range(BLOCKS)]
        tokens = bytes(4 * options.block_size)

        def write(i: int) -> None:
            assert store.write(keys[i], parent=None, tokens=tokens, payload=transfer.view(SlotId(i)))

        def read(i: int) -> None:
            assert store.read(keys[i], parent=None, tokens=tokens, into=transfer.view(SlotId(i)))

        measure("disk write", write, bytes_per_block)
        measure("disk read", read, bytes_per_block)
        store.close()


if __name__ == "__main__":
    main()
