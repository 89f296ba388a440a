"""Copies of whole blocks inside the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from reprise_engine.attention.base import LayerKV

Copies = tuple[tuple[int, int], ...]


def original_sources(copies: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Target → the block that its content is in before any of the copies (source, target), which run in order.

    So all sources may be read first and all targets written then: a chain 0 → 1 → 2 reads block 0 twice, and of
    several copies onto one block the last one counts.
    """
    found: dict[int, int] = {}
    for source, target in copies:
        found[target] = found.get(source, source)
    return {target: source for target, source in found.items() if source != target}


class BlockCopier:
    """One indexed operation a tensor. Runs the same copies for layer after layer: their indices are brought to the
    device once a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[Copies, torch.Tensor, torch.Tensor] | None = None

    def copy(self, kv: LayerKV, copies: Copies) -> None:
        """Valid for every layout, since blocks come first in each. Mutates `kv`."""
        if self._known is None or self._known[0] is not copies:
            sources = original_sources(copies)
            self._known = (copies, self._indices(sources.values()), self._indices(sources))
        _, source_blocks, target_blocks = self._known
        if not len(source_blocks):
            return
        for pool in kv.copyable:
            pool[target_blocks] = pool[source_blocks]

    def _indices(self, blocks: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64, device=self._device)


def copy_one_by_one(kv: LayerKV, copies: Copies) -> None:
    """In order, each as one piece of memory. Mutates `kv`. For a chip that has no operator for indexed writes."""
    for pool in kv.copyable:
        for source, target in copies:
            pool[target].copy_(pool[source])
