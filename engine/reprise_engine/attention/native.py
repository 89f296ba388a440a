"""Paged attention on a CPU by our own kernels: the blocks are read where they lie. Axis letters as in `base.py`."""

from __future__ import annotations

import torch

from reprise_engine.attention.base import AttentionMetadata, LayerKV
from reprise_engine.native import Kernels
from reprise_engine.native.layer import DescribedStep, SharedPrefixes


class NativeAttention:
    """Keys are read back from the pool, also those of this very step: a token's KV is rounded once for all readers."""

    name = "cpu-native"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._step: tuple[AttentionMetadata, DescribedStep] | None = None

    def describe(
        self, metadata: AttentionMetadata, cosine_TH: torch.Tensor, sine_TH: torch.Tensor, *, scratch: int
    ) -> DescribedStep:
        """The step for the whole-layer kernel, described at its first layer. `scratch` is in floats a token."""
        if self._step is None or self._step[0] is not metadata:
            self._step = None  # the step before gives up its memory first
            self._step = metadata, DescribedStep(metadata, cosine_TH, sine_TH, scratch=scratch)
        return self._step[1]

    def forward(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        kv: LayerKV,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self._kernels.write_kv(_dense_heads(k_TKH), metadata.slot_mapping_T, kv.key_BSKH)
        self._kernels.write_kv(_dense_heads(v_TKH), metadata.slot_mapping_T, kv.value_BSKH)
        return self._kernels.attention(
            _dense_heads(q_TNH),
            kv.key_BSKH,
            kv.value_BSKH,
            block_table_RM=metadata.block_table_RM,
            query_lens=metadata.query_lens,
            kv_lens=metadata.kv_lens,
            scale=scale,
            sliding_window=sliding_window,
            shared=SharedPrefixes(metadata.shared_prefixes) if metadata.shared_prefixes else None,
        )

    def copy_blocks(self, kv: LayerKV, copies: tuple[tuple[int, int], ...]) -> None:
        for source, target in copies:
            kv.key_BSKH[target].copy_(kv.key_BSKH[source])
            kv.value_BSKH[target].copy_(kv.value_BSKH[source])


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Float32 with stride 1 along a head; the other strides may be any."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
