"""Attention over the paged KV cache: one Protocol (`base`), one file a backend."""

from __future__ import annotations

import torch

from reprise_engine.attention.base import AttentionBackend
from reprise_engine.attention.cpu import CPUAttention
from reprise_engine.attention.native import NativeAttention
from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_310p import NPU310PAttention
from reprise_engine.attention.npu_chip import Chip, chip_of
from reprise_engine.native import Kernels


def create_attention_backend(device: torch.device, kernels: Kernels | None = None) -> AttentionBackend:
    """The backend for tensors on `device`, which is of type "cpu" (with or without `kernels`) or "npu".

    Raises ConfigError for an NPU that no backend knows.
    """
    if device.type == "npu":
        return NPU310PAttention(device) if chip_of(device) is Chip.P310 else NPUAttention(device)
    return CPUAttention() if kernels is None else NativeAttention(kernels)
