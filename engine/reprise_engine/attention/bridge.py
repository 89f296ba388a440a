"""How a model definition of transformers reaches our attention: a registered function, no patched class.

The runner passes a `PagedContext` as the keyword argument `paged` of the model's forward; transformers hands unknown
keyword arguments down to the attention function of every layer. Axis letters are those of `attention/base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from reprise_engine.attention.base import AttentionBackend, AttentionMetadata, LayerKV

ATTENTION_NAME = "reprise_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedContext:
    """What every layer of one forward pass shares; `kv` is indexed by layer."""

    backend: AttentionBackend
    kv: tuple[LayerKV, ...]
    metadata: AttentionMetadata


def paged_attention(
    module: torch.nn.Module,
    query_1NTH: torch.Tensor,
    key_1KTH: torch.Tensor,
    value_1KTH: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedContext,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls; returns the output as (1, T, N, H) and no weights.

    The mask is ignored on purpose: causality and the window follow from the metadata.
    """
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    out_TNH = paged.backend.forward(
        query_1NTH[0].transpose(0, 1),
        key_1KTH[0].transpose(0, 1),
        value_1KTH[0].transpose(0, 1),
        paged.kv[layer_index],
        paged.metadata,
        scale=scaling,
        sliding_window=sliding_window,
    )
    return out_TNH.unsqueeze(0), None


def register_paged_attention() -> None:
    """Makes `attn_implementation="reprise_paged"` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
