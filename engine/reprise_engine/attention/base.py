"""The attention Protocol: one packed batch of new tokens against the paged KV cache.

Shapes, by axis letter:
    T  tokens of the step, packed without padding     R  requests of the step
    N  query heads      K  key/value heads            H  head size
    B  blocks in the pool      S  slots in a block    M  blocks in the longest block table
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests of the step, by index, whose first `num_tokens` keys lie in the same blocks, whole ones, and were there
    before the step: every query of theirs sees all of them."""

    requests: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each token of the step lives, for every layer alike. Lengths are Python ints: NPU ops take host lists.

    slot_mapping_T   int64, block_id * block_size + slot: where each new token's KV is written
    block_table_RM   int32, rows padded with 0 (never read past kv_lens)
    query_lens       new tokens of each request, in packed order; sums to T
    kv_lens          tokens of each request whose KV exists after this step's write (start + new)
    shared_prefixes  prefixes whose keys a backend may read once for several requests; a request is in one at most
    """

    slot_mapping_T: torch.Tensor
    block_table_RM: torch.Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_size: int
    shared_prefixes: tuple[SharedPrefix, ...] = ()


class KVLayout(Enum):
    """How a pool lays out its blocks. Blocks come first in each, so whole blocks are copied alike."""

    BSKH = "(B, S, K, H)"
    NZ = "(B, K·H/16, S, 16)"
    """Of a 310P: columns of 16 elements, each over all slots."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV pool of one layer, keys and values each of shape (B, S, K, H), or of what `layout` says.

    `plain`: the same memory, shapes and values without the storage format that an NPU's operators tell the layout by,
    where the tensors bear one: torch's own operations are not for those.
    """

    key_BSKH: torch.Tensor
    value_BSKH: torch.Tensor
    layout: KVLayout = KVLayout.BSKH
    plain: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def copyable(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for torch's own operations, such as copies of whole blocks."""
        return (self.key_BSKH, self.value_BSKH) if self.plain is None else self.plain

    @property
    def num_blocks(self) -> int:
        return self.key_BSKH.shape[0]

    @property
    def block_size(self) -> int:
        return self.key_BSKH.shape[1 if self.layout is KVLayout.BSKH else 2]


class AttentionBackend(Protocol):
    """Writes the new KV, then attends causally: query i of a request sees keys [0, kv_len - query_len + i]."""

    name: str

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
        """Returns out_TNH. Writes k and v to `kv` at slot_mapping first (mutates kv, nothing else)."""
        ...

    def copy_blocks(self, kv: LayerKV, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks (source, target) along the block axis, as if in order."""
        ...
