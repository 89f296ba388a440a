"""What the KVCacheManager keeps of a sequence, and what a lookup found for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprise_engine.kv.hashing import ExtraKeys, TokenBytes
from reprise_engine.kv.prefix_index import Node
from reprise_engine.step import BlockId


@dataclass(frozen=True, slots=True)
class Match:
    """What the index holds of a sequence.

    `shared` are whole blocks to refer to. `source`, where given, follows them: its first `source_tokens` tokens are
    used as well, through a copy, since the sequence writes into the rest of that block.
    """

    shared: tuple[Node, ...] = ()
    source: Node | None = None
    source_tokens: int = 0
    num_tokens: int = 0
    """Tokens whose KV need not be computed: the shared blocks' and `source_tokens`."""

    def without_copy(self) -> Match:
        return Match(shared=self.shared, num_tokens=self.num_tokens - self.source_tokens)


NO_MATCH = Match()

NextBlock = tuple[Node | None, ExtraKeys, TokenBytes]
"""A block that is not in the index yet, by its place there: (parent, extra keys, tokens)."""


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceBlocks:
    """One sequence's page table and its place in the index. Written by the KVCacheManager alone."""

    extra_keys: ExtraKeys
    reads_cache: bool
    """False: neither matches at admission, nor takes over another sequence's block later."""
    blocks: list[BlockId] = field(default_factory=list)
    keys: list[TokenBytes] = field(default_factory=list)
    """The encoded tokens of its first full blocks, as far as they were needed."""
    indexed: int = 0
    tip: Node | None = None
    """The node of block `indexed - 1`."""
    indexing: bool = True
    """False once a block of its own stays a duplicate: what follows cannot be entered below it."""
    copy_source: BlockId | None = None
    """Referenced until the step that copies it is committed."""
    table: tuple[BlockId, ...] = ()
    """`blocks`, frozen for Steps; made anew only where `blocks` changes."""
