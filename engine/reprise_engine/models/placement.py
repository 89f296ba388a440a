"""Weights of a CPU model in memory made for reading them: one region, huge pages, each tensor on its own cache lines.

A mapped safetensors file starts its tensors at any byte and has pages of 4 KiB; a decoded token reads all of it, and
reads it faster from here (`docs/cpu-performance.md`). The file's pages stay in the page cache, which goes first.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import nn

_CACHE_LINE = 64
_HUGE_PAGE = 2 * 1024**2
_REPORTED_BYTES = 64 * 1024**2


def place_weights(model: nn.Module, *, progress: Callable[[float], None] = lambda _fraction: None) -> None:
    """Moves all parameters of `model`, shared ones once, into one region of memory; values, names and ties stay.

    Each source is given up as soon as it is copied, so no more than the largest exists twice. `progress` is told the
    share that is done, from 0 to 1.
    """
    sharing: dict[tuple[int, torch.Size, torch.dtype], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        sharing.setdefault((parameter.data_ptr(), parameter.shape, parameter.dtype), []).append(parameter)
    sizes = [_padded(parameters[0].nbytes) for parameters in sharing.values()]
    region = _region(sum(sizes))
    start = reported = 0
    while sharing:
        parameters = sharing.pop(next(iter(sharing)))
        source = parameters[0].detach().contiguous()
        place = region[start : start + source.nbytes].view(source.dtype).view(source.shape)
        # By one thread: torch's would wait for each other at every tensor, for seconds where the cores are shared.
        ctypes.memmove(place.data_ptr(), source.data_ptr(), source.nbytes)
        for parameter in parameters:
            parameter.data = place
        start += _padded(source.nbytes)
        if start - reported >= _REPORTED_BYTES:
            reported = start
            progress(start / len(region))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _CACHE_LINE) * _CACHE_LINE


def _region(num_bytes: int) -> torch.Tensor:
    """Bytes that begin on a huge page and are not taken from the machine before they are written."""
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]
