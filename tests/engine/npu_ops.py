"""The two operators of torch_npu that `attention/npu.py` calls, defined without an NPU.

The schemas are the vendor's, word for word: strings of `torch_npu/lib/libtorch_npu.so` in the PyPI wheel
torch-npu 2.13.0. The dispatcher checks every call against them. The implementations are plain torch, written from the
operator's documentation, and as strict as the hardware: what it would refuse or misread raises here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SCATTER_SCHEMA = (
    "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
    "str? cache_mode='PA_NZ') -> ()"
)
ATTENTION_SCHEMA = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
)


def _scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    assert cache_mode == "Norm", "an ND cache needs cache_mode 'Norm'"
    assert slot_mapping.dtype in (torch.int32, torch.int64)
    assert key.is_contiguous()
    assert key.dtype == key_cache.dtype
    block_size = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block_size, slot % block_size] = key[row]
        value_cache[slot // block_size, slot % block_size] = value[row]


def _fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert input_layout == "TND"
    assert block_table is not None, "a cold prefill without a table would be misread on a cache hit"
    assert block_table.dtype == torch.int32
    assert actual_seq_lengths is not None
    assert actual_seq_lengths_kv is not None
    assert actual_seq_lengths[-1] == query.shape[0], "TND needs sum(q) == rows"
    assert atten_mask is not None
    assert atten_mask.shape == (2048, 2048)
    assert atten_mask.dtype == torch.int8
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.int8).triu(1))
    assert key.dim() == 3, "paged keys are viewed as (blocks, block size, heads × head size)"
    assert key.shape[1] == block_size

    head_dim = query.shape[2]
    groups = num_heads // num_key_value_heads
    out = torch.empty_like(query)
    starts = [0, *actual_seq_lengths[:-1]]
    for request, (start, end, kv_len) in enumerate(zip(starts, actual_seq_lengths, actual_seq_lengths_kv, strict=True)):
        block_ids = block_table[request, : -(-kv_len // block_size)].long()
        keys = key[block_ids].reshape(-1, num_key_value_heads, head_dim)[:kv_len].repeat_interleave(groups, dim=1)
        values = value[block_ids].reshape(-1, num_key_value_heads, head_dim)[:kv_len].repeat_interleave(groups, dim=1)
        scores = torch.einsum("tnh,lnh->ntl", query[start:end].float(), keys.float()) * scale
        # Distance from a query's own position, right-down aligned: positive is the future.
        offset = torch.arange(kv_len).unsqueeze(0) - torch.arange(kv_len - (end - start), kv_len).unsqueeze(1)
        match sparse_mode:
            case 3:
                hidden = offset > 0
            case 4:
                hidden = (offset > next_tokens) | (offset < -pre_tokens)
            case _:
                raise AssertionError(f"sparse_mode {sparse_mode} is not causal")
        scores.masked_fill_(hidden, float("-inf"))
        out[start:end] = torch.einsum("ntl,lnh->tnh", scores.softmax(-1), values.float()).to(query.dtype)
    return out, query.new_empty(0, dtype=torch.float32)


@contextmanager
def npu_operators() -> Iterator[None]:
    """Defines `torch.ops.npu.*` while the context lasts."""
    library: Any = torch.library.Library("npu", "DEF")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    try:
        for schema, implementation in (
            (SCATTER_SCHEMA, _scatter_pa_kv_cache),
            (ATTENTION_SCHEMA, _fused_infer_attention_score),
        ):
            name = library.define(schema)
            library.impl(name, implementation, "CPU")
        yield
    finally:
        library._destroy()
