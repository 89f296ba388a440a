from __future__ import annotations

import pytest

from reprise_engine.kv.hashing import ExtraKeys, TokenBytes, encode_blocks
from reprise_engine.kv.prefix_index import Node, PrefixIndex
from reprise_engine.step import BlockHash, BlockId


def keys(*tokens: int) -> list[TokenBytes]:
    return encode_blocks(tokens, 2)


def insert_chain(index: PrefixIndex, tokens: list[TokenBytes], blocks: list[int], extra: ExtraKeys = ()) -> list[Node]:
    nodes: list[Node] = []
    for key, block in zip(tokens, blocks, strict=True):
        nodes.append(index.insert(nodes[-1] if nodes else None, extra, key, BlockId(block)))
    return nodes


def matched(index: PrefixIndex, tokens: list[TokenBytes], extra: ExtraKeys = ()) -> list[int]:
    return [node.block for node in index.match(extra, tokens)]


def test_a_match_is_the_longest_common_chain() -> None:
    index = PrefixIndex()
    insert_chain(index, keys(1, 2, 3, 4, 5, 6), [0, 1, 2])
    insert_chain(index, keys(1, 2, 9, 9), [0, 3])
    assert matched(index, keys(1, 2, 3, 4, 7, 7)) == [0, 1]
    assert matched(index, keys(1, 2, 9, 9, 5, 6)) == [0, 3]
    assert matched(index, keys(3, 4)) == []  # the same tokens below another parent
    assert matched(index, []) == []
    index.check_invariants()


def test_salts_share_nothing() -> None:
    index = PrefixIndex()
    insert_chain(index, keys(1, 2), [0])
    insert_chain(index, keys(1, 2), [1], ("a",))
    insert_chain(index, keys(1, 2), [2], ("",))
    assert [matched(index, keys(1, 2), extra) for extra in ((), ("a",), ("",), ("b",))] == [[0], [1], [2], []]


def test_a_collision_of_hashes_matches_nothing_foreign() -> None:
    def colliding(parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
        return BlockHash(b"same")

    index = PrefixIndex(colliding)
    insert_chain(index, keys(1, 2, 3, 4), [0, 1])
    insert_chain(index, keys(5, 6, 3, 4), [2, 3])
    assert matched(index, keys(1, 2, 3, 4)) == [0, 1]
    assert matched(index, keys(5, 6, 3, 4)) == [2, 3]
    assert matched(index, keys(7, 8, 3, 4)) == []
    index.check_invariants()


def test_inserting_what_is_there_returns_the_first_and_changes_nothing() -> None:
    index = PrefixIndex()
    (first,) = insert_chain(index, keys(1, 2), [0])
    assert index.insert(None, (), keys(1, 2)[0], BlockId(5)) is first
    assert index.node(BlockId(5)) is None
    assert len(index) == 1


def test_a_block_cannot_stand_for_two_prefixes() -> None:
    index = PrefixIndex()
    insert_chain(index, keys(1, 2), [0])
    with pytest.raises(RuntimeError, match="block 0 is in the prefix index under other tokens"):
        index.insert(None, (), keys(3, 4)[0], BlockId(0))


def test_leaves_go_first() -> None:
    index = PrefixIndex()
    insert_chain(index, keys(1, 2, 3, 4), [0, 1])
    with pytest.raises(RuntimeError, match="block 0 has 1 children"):
        index.remove(BlockId(0))
    index.remove(BlockId(1))
    assert matched(index, keys(1, 2, 3, 4)) == [0]
    index.remove(BlockId(0))
    assert matched(index, keys(1, 2, 3, 4)) == []
    assert list(index) == []
    index.check_invariants()  # and no empty root stays behind for a salt that is gone


def test_a_node_names_its_block_by_the_chain_of_hashes() -> None:
    index = PrefixIndex()
    plain = insert_chain(index, keys(1, 2, 3, 4), [0, 1])
    salted = insert_chain(index, keys(1, 2, 3, 4), [2, 3], ("a",))
    other = insert_chain(index, keys(5, 6, 3, 4), [4, 5])
    assert len({node.block_hash for node in [*plain, *salted, *other]}) == 6
    again = insert_chain(PrefixIndex(), keys(1, 2, 3, 4), [7, 9])
    assert [node.block_hash for node in again] == [node.block_hash for node in plain]
