"""Attention over the paged KV cache: one Protocol (`base`), one file a backend."""

from __future__ import annotations

import torch

from reprise_engine.attention.base import AttentionBackend
from reprise_engine.attention.cpu import CPUAttention
from reprise_engine.attention.npu import NPUAttention


def create_attention_backend(device: torch.device) -> AttentionBackend:
    """The backend for tensors on `device`, which is of type "cpu" or "npu"."""
    if device.type == "npu":
        return NPUAttention(device)
    return CPUAttention()
