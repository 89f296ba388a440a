"""Why a match ended where it did. Asked once a request, at its admission; a few dictionary look-ups."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict

from reprise_engine.cache_report import MissReason
from reprise_engine.kv.hashing import TOKEN_BYTES, ExtraKeys, TokenBytes
from reprise_engine.kv.prefix_index import Node, PrefixIndex, common_tokens
from reprise_engine.step import BlockHash

Parent = BlockHash | ExtraKeys
"""What a block hangs below, whether it is there or not."""
Place = tuple[Parent, TokenBytes]
"""A block by its place in the tree: what it hangs below, and its tokens."""


def _parent(node: Node | None, extra_keys: ExtraKeys) -> Parent:
    if node is None:
        return extra_keys
    assert node.block_hash is not None, "nothing goes on behind a tail"
    return node.block_hash


class EvictedBlocks:
    """Remembers the last `capacity` blocks that were evicted, by their places."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: OrderedDict[Place, None] = OrderedDict()
        self._below: dict[Parent, list[TokenBytes]] = {}
        """The same, sorted: of the blocks below one parent the most like another one is beside its place."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, wanted: Place) -> bool:
        return wanted in self._places

    def add(self, node: Node) -> None:
        """O(log siblings), but for moving them on in a list."""
        place = _parent(node.parent, node.extra_keys), node.tokens
        if place not in self._places:
            self._places[place] = None
            insort(self._below.setdefault(place[0], []), place[1])
        if len(self._places) > self._capacity:
            (parent, tokens), _ = self._places.popitem(last=False)
            siblings = self._below[parent]
            del siblings[bisect_left(siblings, tokens)]
            if not siblings:
                del self._below[parent]

    def most_in_common(self, parent: Parent, tokens: TokenBytes) -> int:
        """How many of `tokens` one of them, below `parent`, began with."""
        siblings = self._below.get(parent, [])
        place = bisect_left(siblings, tokens)
        return max((common_tokens(one, tokens) for one in siblings[max(place - 1, 0) : place + 1]), default=0)

    def clear(self) -> None:
        self._places.clear()
        self._below.clear()


def why_it_ended(
    index: PrefixIndex,
    evicted: EvictedBlocks,
    *,
    extra_keys: ExtraKeys,
    tip: Node | None,
    source: Node | None,
    source_tokens: int,
    rest: TokenBytes,
    reusable_tokens: int,
    block_bytes: int,
    other_salts: bool,
) -> MissReason:
    """The reason that a lookup got no further.

    `tip` is the last whole block that matched, `rest` what the prompt has behind it, up to a block; `source_tokens` of
    it matched in `source`, `reusable_tokens` could have: all, but for the prompt's last one.
    What is cached under other salts is looked at only with `other_salts`: another word in the place of OTHER_SALT would
    tell of it as well, since it stands where something else would.
    """
    # What could have matched more: the whole block, or a tail that ends somewhere in the rest.
    lengths = range(len(rest), source_tokens * TOKEN_BYTES, -TOKEN_BYTES)
    missed = [TokenBytes(rest[:length]) for length in lengths]
    parent = _parent(tip, extra_keys)
    if any((parent, tokens) in evicted for tokens in missed):
        return MissReason.EVICTED
    # Or a block that goes another way further on, or goes on where the prompt ends. A few tokens are no matter: many
    # prompts have their first words in common with one of thousands.
    reusable = TokenBytes(rest[: reusable_tokens * TOKEN_BYTES])
    once = evicted.most_in_common(parent, reusable)
    if once > source_tokens and (once == reusable_tokens or 2 * (once - source_tokens) * TOKEN_BYTES >= block_bytes):
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
