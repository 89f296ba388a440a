"""Which block holds the KV of which prefix: a tree with one node a block, keyed by parent and by the stored tokens.

    root ("salt")  ──▶ [t0 … t15] ──▶ [t16 … t31] ──▶ …
                                  └─▶ [t16 … u31]

A lookup walks down by the tokens themselves: two prefixes whose hashes collide stay apart. Every prefix with other
extra keys (salt) hangs on a root of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from reprise_engine.kv.hashing import BlockHasher, ExtraKeys, TokenBytes, sha256_block_hash
from reprise_engine.step import BlockHash, BlockId


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A block in the index. Compared by identity; a node is valid while its block is referenced or stays cached."""

    parent: Node | None = field(repr=False)
    extra_keys: ExtraKeys
    tokens: TokenBytes
    block: BlockId
    block_hash: BlockHash
    children: dict[TokenBytes, Node] = field(default_factory=dict, repr=False)


class PrefixIndex:
    """The tree. It refers to blocks, it does not own them: the pool counts, the manager keeps the two in step."""

    def __init__(self, hasher: BlockHasher = sha256_block_hash) -> None:
        self._hasher = hasher
        self._roots: dict[ExtraKeys, dict[TokenBytes, Node]] = {}
        self._nodes: dict[BlockId, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def node(self, block: BlockId) -> Node | None:
        """The node whose content `block` holds."""
        return self._nodes.get(block)

    def match(self, extra_keys: ExtraKeys, keys: Iterable[TokenBytes]) -> list[Node]:
        """The longest chain from the root whose blocks hold exactly the tokens of `keys`, in order. Changes nothing."""
        path: list[Node] = []
        children = self._roots.get(extra_keys)
        if children is not None:
            for key in keys:
                node = children.get(key)
                if node is None:
                    break
                path.append(node)
                children = node.children
        return path

    def insert(self, parent: Node | None, extra_keys: ExtraKeys, tokens: TokenBytes, block: BlockId) -> Node:
        """Enters `block` below `parent` (None: as a first block) and returns its node.

        Where the same tokens are there already, their node is returned instead and nothing changes: `node.block` is
        then another block, and it is for the caller to give up its duplicate.
        Raises RuntimeError when `block` still stands for other tokens.
        """
        siblings = self._roots.setdefault(extra_keys, {}) if parent is None else parent.children
        present = siblings.get(tokens)
        if present is not None:
            return present
        if block in self._nodes:
            raise RuntimeError(f"block {block} is in the prefix index under other tokens; it must be removed first")
        if parent is None:
            block_hash = self._hasher(None, tokens, extra_keys)
        else:
            block_hash = self._hasher(parent.block_hash, tokens, ())
        node = Node(parent=parent, extra_keys=extra_keys, tokens=tokens, block=block, block_hash=block_hash)
        siblings[tokens] = node
        self._nodes[block] = node
        return node

    def remove(self, block: BlockId) -> None:
        """Takes a leaf out. Raises RuntimeError when blocks below it are still in the index."""
        node = self._nodes[block]
        if node.children:
            raise RuntimeError(f"block {block} has {len(node.children)} children in the prefix index; leaves go first")
        del self._nodes[block]
        if node.parent is not None:
            del node.parent.children[node.tokens]
            return
        root = self._roots[node.extra_keys]
        del root[node.tokens]
        if not root:
            # Salts come from clients: one that is no longer used must not stay behind.
            del self._roots[node.extra_keys]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tree and the table of blocks show the same nodes."""
        reached: dict[BlockId, Node] = {}
        for extra_keys, root in self._roots.items():
            assert root, f"an empty root is left for {extra_keys!r}"
            unvisited: list[tuple[Node | None, TokenBytes, Node]] = [(None, key, node) for key, node in root.items()]
            while unvisited:
                parent, key, node = unvisited.pop()
                assert node.parent is parent, f"block {node.block} hangs below another node than its parent"
                assert node.tokens == key, f"block {node.block} is filed under other tokens than its own"
                assert node.extra_keys == extra_keys, f"block {node.block} hangs on a foreign root"
                assert node.block not in reached, f"block {node.block} is in the tree twice"
                reached[node.block] = node
                unvisited.extend((node, key, child) for key, child in node.children.items())
        assert reached == self._nodes, "the tree and the table of blocks differ"
