"""The KV tensors of the pool, allocated once: keys and values of each layer, blocks first.

Axis letters are those of `attention/base.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from reprise_engine.attention.base import KVLayout, LayerKV
from reprise_engine.attention.npu_chip import chip_of

_NZ_COLUMN = 16
"""Elements of a column of the NZ layout, 32 bytes of float16."""
_ACL_FORMAT_FRACTAL_NZ = 29


def allocate_kv_cache(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: KVLayout | None = None,
) -> tuple[LayerKV, ...]:
    """All zeros, in `layout`, or in the one that the device wants. On a CPU the pages are only taken from the machine
    when they are first written. Raises ValueError for heads that NZ cannot hold."""
    if layout is None:
        layout = chip_of(device).kv_layout if device.type == "npu" else KVLayout.BSKH
    if layout is KVLayout.NZ:
        elements = num_kv_heads * head_dim
        if elements % _NZ_COLUMN:
            raise ValueError(f"{num_kv_heads} key heads of {head_dim} are no multiple of {_NZ_COLUMN} elements")
        shape = (num_blocks, elements // _NZ_COLUMN, block_size, _NZ_COLUMN)
        pairs = ((_zeros_nz(shape, dtype, device), _zeros_nz(shape, dtype, device)) for _ in range(num_layers))
        return tuple(LayerKV(key, value, layout, (keys, values)) for (key, keys), (value, values) in pairs)
    pools = (_zeros((2, num_blocks, block_size, num_kv_heads, head_dim), dtype, device) for _ in range(num_layers))
    return tuple(LayerKV(pool[0], pool[1]) for pool in pools)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # torch.zeros would touch every page at once; numpy's come zeroed from the kernel, as they are needed.
        raw = np.zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _zeros_nz(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values, as vllm-ascend allocates them on a 310P (_310p/model_runner_310p.py, 182b75e): the operators tell
    the layout by the tensor's format. And the same memory without it, for copies: with a last axis of 16 and a multiple
    of 16 slots no byte is elsewhere for the format.

    torch_npu's copies convert between formats by whole storages: from the host onto a block of an NZ pool they would
    write elsewhere, from it to the host they would copy the pool for every block, and an indexed write would leave it
    without its format (Ascend/pytorch aten/common/CopyKernel.cpp and FormatCastKernelNpu.cpp, 9e73e70; op-plugin
    ops/aclops/IndexPutKernelNpu.cpp, 517f2e7). DLPack makes a tensor of a storage of its own, without a format, and
    keeps the memory as long as either lives (aten/common/DLConvertor.cpp).
    """
    pool = torch.ops.npu.empty_with_format(list(shape), dtype=dtype, device=device, acl_format=_ACL_FORMAT_FRACTAL_NZ)
    dlpack: Any = torch.utils.dlpack  # where torch_npu puts functions of its own
    plain: torch.Tensor = dlpack.from_dlpack(dlpack.to_dlpack(pool))
    return pool, plain.zero_()
