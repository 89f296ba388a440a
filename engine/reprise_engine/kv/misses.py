"""Why a match ended where it did. Asked once a request, at its admission; a few dictionary look-ups."""

from __future__ import annotations

from collections import OrderedDict

from reprise_engine.cache_report import MissReason
from reprise_engine.kv.hashing import TOKEN_BYTES, ExtraKeys, TokenBytes
from reprise_engine.kv.prefix_index import Node, PrefixIndex
from reprise_engine.step import BlockHash

Place = tuple[BlockHash | ExtraKeys, TokenBytes]
"""A block by its place in the tree, whether it is there or not: what it hangs below, and its tokens."""


def place(parent: Node | None, extra_keys: ExtraKeys, tokens: TokenBytes) -> Place:
    if parent is None:
        return extra_keys, tokens
    assert parent.block_hash is not None, "nothing goes on behind a tail"
    return parent.block_hash, tokens


class EvictedBlocks:
    """Remembers the last `capacity` blocks that were evicted, by their places."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: OrderedDict[Place, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, wanted: Place) -> bool:
        return wanted in self._places

    def add(self, node: Node) -> None:
        self._places[place(node.parent, node.extra_keys, node.tokens)] = None
        if len(self._places) > self._capacity:
            self._places.popitem(last=False)

    def clear(self) -> None:
        self._places.clear()


def why_it_ended(
    index: PrefixIndex,
    evicted: EvictedBlocks,
    *,
    extra_keys: ExtraKeys,
    tip: Node | None,
    source: Node | None,
    source_tokens: int,
    rest: TokenBytes,
    block_bytes: int,
    other_salts: bool,
) -> MissReason:
    """The reason that a lookup got no further.

    `tip` is the last whole block that matched, `rest` what the prompt has behind it, up to a block; `source_tokens` of
    it matched in `source`. What is cached under other salts is looked at only with `other_salts`: another word in the
    place of OTHER_SALT would tell of it as well, since it stands where something else would.
    """
    # What could have matched more: the whole block, or a tail that ends somewhere in the rest.
    lengths = range(len(rest), source_tokens * TOKEN_BYTES, -TOKEN_BYTES)
    missed = [TokenBytes(rest[:length]) for length in lengths]
    if any(place(tip, extra_keys, tokens) in evicted for tokens in missed):
        return MissReason.EVICTED
    if other_salts and tip is None and any(index.is_a_beginning(tokens) for tokens in missed):
        return MissReason.OTHER_SALT
    if tip is None and source is None:
        return MissReason.SHORTER_THAN_BLOCK if len(rest) < block_bytes else MissReason.NOT_SEEN
    if source is None:
        assert tip is not None
        return MissReason.DIVERGED if tip.children else MissReason.NOT_SEEN
    # A tail that matched whole ended where its sequence did: that is no fork.
    ended = source.block_hash is None and source.num_tokens == source_tokens
    return MissReason.NOT_SEEN if ended else MissReason.DIVERGED
