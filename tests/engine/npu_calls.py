"""Calls that an NPU takes, as keyword arguments, to be spoilt one argument at a time. All in float16 unless told."""

from __future__ import annotations

from typing import Any

import torch

Call = dict[str, Any]

HALF = torch.float16


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def triangle(dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=dtype).triu(1)


def paged(**changes: Any) -> Call:
    """Two sequences of 3 and 1 queries over 20 and 130 keys, blocks of 128, TND."""
    call: Call = {
        "query": half(4, 4, 16),
        "key": half(5, 128, 2 * 16, seed=1),
        "value": half(5, 128, 2 * 16, seed=2),
        "atten_mask": triangle(),
        "block_table": torch.tensor([[3, 0], [1, 4]], dtype=torch.int32),
        "actual_seq_lengths": [3, 4],
        "actual_seq_lengths_kv": [20, 130],
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 128,
    }
    return call | changes


def unpaged(**changes: Any) -> Call:
    """The same lengths, keys one after another."""
    call = paged(key=half(150, 2, 16, seed=1), value=half(150, 2, 16, seed=2), actual_seq_lengths_kv=[20, 150])
    return call | {"block_table": None, "block_size": 0} | changes


def rows(layout: str = "BNSD", **changes: Any) -> Call:
    """Two sequences of 5 queries and 7 keys, 4 and 2 heads of 64, in one of the padded layouts."""
    query, key, value = half(2, 4, 5, 64), half(2, 2, 7, 64, seed=1), half(2, 2, 7, 64, seed=2)
    if layout in ("BSH", "BSND"):
        query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    if layout == "BSH":
        query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
    call: Call = {
        "query": query,
        "key": key,
        "value": value,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.125,
        "input_layout": layout,
    }
    return call | changes


def scatter(**changes: Any) -> Call:
    call: Call = {
        "key": half(3, 2, 16),
        "value": half(3, 2, 16, seed=1),
        "key_cache": torch.zeros(4, 128, 2, 16, dtype=HALF),
        "value_cache": torch.zeros(4, 128, 2, 16, dtype=HALF),
        "slot_mapping": ints(5, 130, 511),
        "cache_mode": "Norm",
    }
    return call | changes


def scatter_nz(**changes: Any) -> Call:
    caches = {name: torch.zeros(4, 2, 128, 16, dtype=HALF) for name in ("key_cache", "value_cache")}
    return scatter(**caches, cache_mode="PA_NZ") | changes


def gather(**changes: Any) -> Call:
    call: Call = {
        "key_cache": half(4, 128, 2, 16),
        "value_cache": half(4, 128, 2, 16, seed=1),
        "block_tables": torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        "seq_lens": ints(130, 7),
        "key": torch.zeros(137, 2, 16, dtype=HALF),
        "value": torch.zeros(137, 2, 16, dtype=HALF),
    }
    return call | changes


def update(**changes: Any) -> Call:
    call: Call = {
        "lse": [torch.zeros(6), torch.ones(6)],
        "local_out": [half(6, 16), half(6, 16, seed=1)],
        "update_type": 1,
    }
    return call | changes


def norm(**changes: Any) -> Call:
    return {"input": half(3, 32), "gamma": half(32, seed=1)} | changes


def add_norm(**changes: Any) -> Call:
    return {"x1": half(3, 32), "x2": half(3, 32, seed=1), "gamma": half(32, seed=2)} | changes


def rotary(**changes: Any) -> Call:
    """(1, S, N, D) with cosines (1, S, 1, D)."""
    angles = torch.linspace(0, 3, 5 * 64).view(1, 5, 1, 64)
    return {"input": half(1, 5, 4, 64), "r1": angles.cos().to(HALF), "r2": angles.sin().to(HALF)} | changes


def apply_rotary(**changes: Any) -> Call:
    """Of 5 rows, 4 and 2 heads of 64."""
    angles = torch.linspace(0, 3, 5 * 64).view(1, 5, 1, 64)
    call: Call = {"query": half(1, 5, 4, 64), "key": half(1, 5, 2, 64, seed=1)}
    return call | {"cos": angles.cos().to(HALF), "sin": angles.sin().to(HALF)} | changes


def quantize(**changes: Any) -> Call:
    """As weights' tools have it: multiplied by the reciprocal of a scale."""
    call: Call = {
        "input": half(3, 32),
        "scales": torch.full((1,), 20.0, dtype=HALF),
        "zero_points": torch.full((1,), 3.0, dtype=HALF),
        "dtype": torch.qint8,
        "axis": -1,
        "div_mode": False,
    }
    return call | changes


def matmul(**changes: Any) -> Call:
    generator = torch.Generator().manual_seed(3)
    call: Call = {
        "x1": torch.randint(-128, 128, (5, 32), dtype=torch.int8, generator=generator),
        "x2": torch.randint(-128, 128, (32, 48), dtype=torch.int8, generator=generator),
        "scale": torch.rand(48, generator=generator) / 1000,
        "pertoken_scale": torch.rand(5, generator=generator),
        "output_dtype": torch.bfloat16,
    }
    return call | changes


def matmul_310p(**changes: Any) -> Call:
    return matmul(pertoken_scale=None, output_dtype=torch.float16) | changes


def nz(tensor: torch.Tensor) -> torch.Tensor:
    """Marked as FRACTAL_NZ; needs the operators to be defined."""
    marked: torch.Tensor = torch.ops.npu.npu_format_cast(tensor, 29)
    return marked


def nz_mask(dense_TL: torch.Tensor) -> torch.Tensor:
    """(T, L) → (1, L/16, T, 16), both padded to 16, as vLLM-Ascend makes it for 310P."""
    tokens, keys = (-(-size // 16) * 16 for size in dense_TL.shape)
    padded = torch.zeros(tokens, keys, dtype=dense_TL.dtype)
    padded[: dense_TL.shape[0], : dense_TL.shape[1]] = dense_TL
    return nz(padded.view(1, tokens, keys // 16, 16).permute(0, 2, 1, 3).contiguous())


def reshape_and_cache(**changes: Any) -> Call:
    """On 310P."""
    call: Call = {
        "key": half(3, 2, 16),
        "value": half(3, 2, 16, seed=1),
        "key_cache": nz(torch.zeros(4, 2, 128, 16, dtype=HALF)),
        "value_cache": nz(torch.zeros(4, 2, 128, 16, dtype=HALF)),
        "slot_indices": ints(5, 130, 511),
    }
    return call | changes


def paged_attention(**changes: Any) -> Call:
    """Two sequences of 20 and 130 keys on 310P."""
    call: Call = {
        "query": half(2, 4, 16),
        "key_cache": nz(half(5, 2, 128, 16, seed=1)),
        "value_cache": nz(half(5, 2, 128, 16, seed=2)),
        "num_kv_heads": 2,
        "num_heads": 4,
        "scale_value": 0.25,
        "block_table": torch.tensor([[3, 0], [1, 4]], dtype=torch.int32),
        "context_lens": ints(20, 130),
        "out": torch.zeros(2, 4, 16, dtype=HALF),
    }
    return call | changes


def causal_mask(queries: list[int], contexts: list[int]) -> torch.Tensor:
    """Splitfuse's, dense: (T, longest context), -inf where a query may not look."""
    parts = []
    for count, context in zip(queries, contexts, strict=True):
        ahead = torch.arange(max(contexts)) - torch.arange(context - count, context).unsqueeze(1)
        parts.append(torch.zeros(count, max(contexts), dtype=HALF).masked_fill(ahead > 0, float("-inf")))
    return torch.cat(parts)


def splitfuse(**changes: Any) -> Call:
    """3 and 1 queries over 20 and 130 keys on 310P."""
    call = paged_attention(
        query=half(4, 4, 16),
        out=torch.zeros(4, 4, 16, dtype=HALF),
        seq_len=ints(3, 1),
        mask=nz_mask(causal_mask([3, 1], [20, 130])),
    )
    return call | changes


def compressed_mask() -> torch.Tensor:
    """Splitfuse v2's triangle, with room after it for the rows that the kernel reads too many."""
    room = torch.zeros(2048 + 127, 2048, dtype=HALF)
    room[:2048] = triangle(HALF) * -10000
    return room[:2048]


def splitfuse_v2(**changes: Any) -> Call:
    return splitfuse(mask=compressed_mask()) | changes


def long_splitfuse_v2(queries: int, keys: int, **changes: Any) -> Call:
    """One sequence, of one head of 16."""
    blocks = -(-keys // 128)
    call = splitfuse_v2(
        query=half(queries, 1, 16),
        out=torch.zeros(queries, 1, 16, dtype=HALF),
        key_cache=nz(half(blocks, 1, 128, 16, seed=1)),
        value_cache=nz(half(blocks, 1, 128, 16, seed=2)),
        num_kv_heads=1,
        num_heads=1,
        block_table=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
        context_lens=ints(keys),
        seq_len=ints(queries),
    )
    return call | changes
