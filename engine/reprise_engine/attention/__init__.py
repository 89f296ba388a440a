"""Attention over the paged KV cache: one Protocol (`base`), one file a backend."""

from __future__ import annotations

import torch

from reprise_engine.attention.base import AttentionBackend
from reprise_engine.attention.cpu import CPUAttention
from reprise_engine.attention.native import NativeAttention
from reprise_engine.attention.npu import NPUAttention
from reprise_engine.native import Kernels


def create_attention_backend(device: torch.device, kernels: Kernels | None = None) -> AttentionBackend:
    """The backend for tensors on `device`, which is of type "cpu" (with or without `kernels`) or "npu"."""
    if device.type == "npu":
        return NPUAttention(device)
    return CPUAttention() if kernels is None else NativeAttention(kernels)
