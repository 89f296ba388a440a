"""Which block holds the KV of which prefix: a tree with one node a block, keyed by parent and by the stored tokens.

    root ("salt")  ──▶ [t0 … t15] ──▶ [t16 … t31] ──▶ …
                                  ├─▶ [t16 … u31]
                                  └─▶ [t16 … t20]      a tail: the computed part of a block that was never filled

A lookup walks down by the tokens themselves: two prefixes whose hashes collide stay apart. Every prefix with other
extra keys (adapter, salt) hangs on a root of its own.

Where the walk ends, `nearest` finds the sibling with the longest common beginning. Siblings are kept sorted, so it is
one of the two neighbours of the place where the wanted tokens would stand: a binary search, however many there are.
A tail is a leaf without a hash: it has no name outside. None is kept that another sibling begins with.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from reprise_engine.kv.hashing import (
    TOKEN_BYTES,
    BlockHasher,
    ExtraKeys,
    TokenBytes,
    keys_of_block,
    sha256_block_hash,
)
from reprise_engine.step import BlockHash, BlockId
from reprise_engine.tiers.keys import BlockKey


@dataclass(slots=True, eq=False, kw_only=True)
class Branch:
    """What goes on from one place: a root, or a node.

    Most have one child or none, so neither container is made before it is needed: they were half of a block's cost.
    """

    children: dict[TokenBytes, Node] | None = field(default=None, repr=False)
    order: list[TokenBytes] | None = field(default=None, repr=False)
    """The keys of `children`, sorted bytewise, since there were two of them."""

    def around(self, tokens: TokenBytes) -> Iterable[TokenBytes]:
        """Of the children's keys those that would stand beside `tokens`, the one before it first. O(log children)."""
        if self.order is None:
            return self.children or ()
        place = bisect_left(self.order, tokens)
        return self.order[max(place - 1, 0) : place + 1]


@dataclass(slots=True, eq=False, init=False)
class Node(Branch):
    """A block in the index. Compared by identity; a node is valid while its block is referenced or stays cached.

    Made by position: a long prompt enters hundreds, and names of arguments would be a tenth of a block's cost.
    """

    parent: Node | None = field(repr=False)
    extra_keys: ExtraKeys
    tokens: TokenBytes
    block: BlockId
    block_hash: BlockHash | None
    """None of a tail."""
    tier_key: BlockKey | None = None
    """The tiers' name of it, where that is another one and was needed."""

    def __init__(
        self,
        parent: Node | None,
        extra_keys: ExtraKeys,
        tokens: TokenBytes,
        block: BlockId,
        block_hash: BlockHash | None,
    ) -> None:
        self.children = None
        self.order = None
        self.parent = parent
        self.extra_keys = extra_keys
        self.tokens = tokens
        self.block = block
        self.block_hash = block_hash
        self.tier_key = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two encoded sequences have in common at their beginning."""
    length = min(len(one), len(other))
    # The lowest bit in which two little-endian numbers differ is in the first byte in which the texts differ.
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not difference:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixIndex:
    """The tree. It refers to blocks, it does not own them: the pool counts, the manager keeps the two in step."""

    def __init__(self, hasher: BlockHasher = sha256_block_hash) -> None:
        self._hasher = hasher
        self._roots: dict[ExtraKeys, Branch] = {}
        self._nodes: dict[BlockId, Node] = {}
        self._beginnings: dict[TokenBytes, int] = {}
        """Of the children of all roots: how many roots have one with these tokens."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def node(self, block: BlockId) -> Node | None:
        """The node whose content `block` holds."""
        return self._nodes.get(block)

    @property
    def num_tails(self) -> int:
        return sum(1 for node in self._nodes.values() if node.block_hash is None)

    @property
    def num_roots(self) -> int:
        return len(self._roots)

    def is_a_beginning(self, tokens: TokenBytes) -> bool:
        """Whether a prefix of any salt has exactly these tokens as its first block, or as all it has."""
        return tokens in self._beginnings

    def match(self, extra_keys: ExtraKeys, keys: Iterable[TokenBytes]) -> list[Node]:
        """The longest chain from the root whose blocks hold exactly the tokens of `keys`, in order. Changes nothing."""
        path: list[Node] = []
        root = self._roots.get(extra_keys)
        if root is not None:
            children = root.children
            for key in keys:
                if children is None or (node := children.get(key)) is None:
                    break
                path.append(node)
                children = node.children
        return path

    def nearest(self, parent: Node | None, extra_keys: ExtraKeys, tokens: TokenBytes) -> tuple[Node | None, int]:
        """The child of `parent`, whole block or tail, that has the most tokens in common with the first of `tokens`.

        Returns (node, number of common tokens), or (None, 0). O(log siblings). Changes nothing.
        """
        branch = parent if parent is not None else self._roots.get(extra_keys)
        found, most = None, 0
        if branch is not None and branch.children:
            for key in branch.around(tokens):
                common = common_tokens(key, tokens)
                if common > most:
                    found, most = branch.children[key], common
        return found, most

    def insert(self, parent: Node | None, extra_keys: ExtraKeys, tokens: TokenBytes, block: BlockId) -> Node:
        """Enters the full `block` below `parent` (None: as a first block) and returns its node.

        Where the same tokens are there already, their node is returned instead and nothing changes: `node.block` is
        then another block, and it is for the caller to give up its duplicate.
        Raises RuntimeError when `block` still stands for other tokens.
        """
        branch = parent if parent is not None else self._branch(None, extra_keys)
        if branch.children and (present := branch.children.get(tokens)) is not None:
            return present
        if parent is None:
            block_hash = self._hasher(None, tokens, extra_keys)
        else:
            assert parent.block_hash is not None, "nothing goes on behind a tail"
            names = keys_of_block(extra_keys, first=False) if extra_keys else ()
            block_hash = self._hasher(parent.block_hash, tokens, names)
            if parent.children is None and block not in self._nodes:
                # Nearly every block of a new prompt: all of `_enter` that applies, without its call.
                node = self._nodes[block] = Node(parent, extra_keys, tokens, block, block_hash)
                parent.children = {tokens: node}
                return node
        return self._enter(branch, parent, extra_keys, tokens, block, block_hash)

    def insert_tail(
        self, parent: Node | None, extra_keys: ExtraKeys, tokens: TokenBytes, block: BlockId
    ) -> Node | None:
        """Enters a block of which only `tokens`, its first ones, are computed.

        None, and nothing changes, where a sibling begins with the same tokens: it serves whatever the tail would.
        Raises RuntimeError when `block` still stands for other tokens.
        """
        branch = self._branch(parent, extra_keys)
        if any(key.startswith(tokens) for key in branch.around(tokens)):
            return None
        return self._enter(branch, parent, extra_keys, tokens, block, None)

    def superseded(self, node: Node) -> Node | None:
        """The tail beside `node` that `node` begins with: it serves nothing any more that `node` does not."""
        branch = self._branch(node.parent, node.extra_keys)
        if branch.order is None or branch.children is None:
            return None
        # Every key between a beginning of this one and this one has that beginning too: only the neighbour can be it.
        before = next(iter(branch.around(node.tokens)))
        if before == node.tokens or not node.tokens.startswith(before):
            return None
        return branch.children[before]

    def remove(self, block: BlockId) -> None:
        """Takes a leaf out. Raises RuntimeError when blocks below it are still in the index."""
        node = self._nodes[block]
        if node.children:
            raise RuntimeError(f"block {block} has {len(node.children)} children in the prefix index; leaves go first")
        branch = self._branch(node.parent, node.extra_keys)
        del self._nodes[block]
        self._leave(branch, node)
        if branch.order is not None:
            del branch.order[bisect_left(branch.order, node.tokens)]
        if node.parent is None and not branch.children:
            # Salts come from clients: one that is no longer used must not stay behind.
            del self._roots[node.extra_keys]

    def remove_all(self, blocks: Iterable[BlockId]) -> None:
        """Takes many out, leaves first, each branch's order being made anew once, and not once a block."""
        touched: dict[int, Branch] = {}
        for block in blocks:
            node = self._nodes.pop(block)
            if node.children:
                raise RuntimeError(f"block {block} has children in the prefix index; leaves go first")
            branch = self._branch(node.parent, node.extra_keys)
            self._leave(branch, node)
            touched[id(branch)] = branch
        for branch in touched.values():
            if branch.order is not None:
                branch.order = [key for key in branch.order if key in (branch.children or ())]
        for extra_keys in [keys for keys, root in self._roots.items() if not root.children]:
            del self._roots[extra_keys]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tree and the table of blocks show the same nodes."""
        reached: dict[BlockId, Node] = {}
        for extra_keys, root in self._roots.items():
            assert root.children, f"an empty root is left for {extra_keys!r}"
            unvisited: list[tuple[Node | None, Branch]] = [(None, root)]
            while unvisited:
                parent, branch = unvisited.pop()
                children = branch.children or {}
                assert branch.order == sorted(children) if branch.order is not None else len(children) < 2, (
                    "the siblings are not in order"
                )
                for key, node in children.items():
                    assert node.parent is parent, f"block {node.block} hangs below another node than its parent"
                    assert node.tokens == key, f"block {node.block} is filed under other tokens than its own"
                    assert node.extra_keys == extra_keys, f"block {node.block} hangs on a foreign root"
                    assert node.block not in reached, f"block {node.block} is in the tree twice"
                    assert node.block_hash is not None or not node.children, f"tail {node.block} has children"
                    reached[node.block] = node
                    unvisited.append((node, node))
        assert reached == self._nodes, "the tree and the table of blocks differ"
        beginnings: dict[TokenBytes, int] = {}
        for root in self._roots.values():
            for key in root.children or ():
                beginnings[key] = beginnings.get(key, 0) + 1
        assert beginnings == self._beginnings, "the beginnings are miscounted"

    def _branch(self, parent: Node | None, extra_keys: ExtraKeys) -> Branch:
        if parent is not None:
            return parent
        branch = self._roots.get(extra_keys)
        if branch is None:
            branch = self._roots[extra_keys] = Branch()
        return branch

    def _enter(
        self,
        branch: Branch,
        parent: Node | None,
        extra_keys: ExtraKeys,
        tokens: TokenBytes,
        block: BlockId,
        block_hash: BlockHash | None,
    ) -> Node:
        if block in self._nodes:
            raise RuntimeError(f"block {block} is in the prefix index under other tokens; it must be removed first")
        node = Node(parent, extra_keys, tokens, block, block_hash)
        if branch.children is None:
            branch.children = {tokens: node}
        else:
            branch.children[tokens] = node
            if branch.order is not None:
                insort(branch.order, tokens)
            elif len(branch.children) > 1:
                branch.order = sorted(branch.children)
        self._nodes[block] = node
        if parent is None:
            self._beginnings[tokens] = self._beginnings.get(tokens, 0) + 1
        return node

    def _leave(self, branch: Branch, node: Node) -> None:
        assert branch.children is not None
        del branch.children[node.tokens]
        if node.parent is None:
            self._beginnings[node.tokens] -= 1
            if not self._beginnings[node.tokens]:
                del self._beginnings[node.tokens]
