"""A call of `npu_fused_infer_attention_score`: its arguments, and what is computed from them in more than one place.

Shapes: B sequences, T rows of all sequences, S positions of each, N query heads, K key-value heads, D head size,
H = N·D, P blocks of W slots. A TND query is (T, N, D); a paged cache (P, W, K·D), (P, K, W, D) or, in NZ,
(P, K, D/16, W, 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

UNLIMITED = 2147483647
"""As a number of tokens, which is how the schema says it."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The schema's, with its defaults; a test holds them to it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pse_shift: torch.Tensor | None = None
    atten_mask: torch.Tensor | None = None
    actual_seq_lengths: Sequence[int] | None = None
    actual_seq_lengths_kv: Sequence[int] | None = None
    dequant_scale1: torch.Tensor | None = None
    quant_scale1: torch.Tensor | None = None
    dequant_scale2: torch.Tensor | None = None
    quant_scale2: torch.Tensor | None = None
    quant_offset2: torch.Tensor | None = None
    antiquant_scale: torch.Tensor | None = None
    antiquant_offset: torch.Tensor | None = None
    key_antiquant_scale: torch.Tensor | None = None
    key_antiquant_offset: torch.Tensor | None = None
    value_antiquant_scale: torch.Tensor | None = None
    value_antiquant_offset: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    query_padding_size: torch.Tensor | None = None
    kv_padding_size: torch.Tensor | None = None
    key_shared_prefix: torch.Tensor | None = None
    value_shared_prefix: torch.Tensor | None = None
    actual_shared_prefix_len: Sequence[int] | None = None
    query_rope: torch.Tensor | None = None
    key_rope: torch.Tensor | None = None
    key_rope_antiquant_scale: torch.Tensor | None = None
    num_heads: int = 1
    scale: float = 1.0
    pre_tokens: int = UNLIMITED
    next_tokens: int = UNLIMITED
    input_layout: str = "BSH"
    num_key_value_heads: int = 0
    sparse_mode: int = 0
    inner_precise: int = 0
    block_size: int = 0
    antiquant_mode: int = 0
    key_antiquant_mode: int = 0
    value_antiquant_mode: int = 0
    softmax_lse_flag: bool = False

    @property
    def tnd(self) -> bool:
        return self.input_layout == "TND"

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def kv_nz(self) -> bool:
        return self.key.dim() == 5


@dataclass(frozen=True)
class Geometry:
    """Sizes that all checks agree on."""

    batch: int
    queries: int
    """Positions a sequence may have, 1 only if no sequence has more."""
    head_size: int
    block_size: int
    """Of the cache; 0 without a block table."""
    split_fuse: bool


def key_length(call: Arguments, sequence: int) -> int:
    lengths = call.actual_seq_lengths_kv
    if lengths is None:
        return call.key.shape[1 if call.input_layout in ("BSH", "BSND") else 2]
    if call.tnd and call.block_table is None:
        return lengths[sequence] - (lengths[sequence - 1] if sequence else 0)
    return lengths[0] if len(lengths) == 1 else lengths[sequence]
