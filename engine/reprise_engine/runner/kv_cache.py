"""The KV tensors of the pool: one (2, B, S, K, H) tensor a layer, allocated once."""

from __future__ import annotations

import numpy as np
import torch

from reprise_engine.attention.base import LayerKV


def allocate_kv_cache(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerKV, ...]:
    """All zeros. On a CPU the pages are only taken from the machine when they are first written."""
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    layers: list[LayerKV] = []
    for _ in range(num_layers):
        if device.type == "cpu":
            # torch.zeros would touch every page at once; numpy's come zeroed from the kernel, as they are needed.
            raw = np.zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, dtype=np.uint8)
            pool = torch.from_numpy(raw).view(dtype).view(shape)
        else:
            pool = torch.zeros(shape, dtype=dtype, device=device)
        layers.append(LayerKV(pool[0], pool[1]))
    return tuple(layers)
