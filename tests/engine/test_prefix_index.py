from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.kv.hashing import ExtraKeys, TokenBytes, encode_blocks, encode_tokens
from reprise_engine.kv.prefix_index import Node, PrefixIndex, common_tokens
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


# --- the common part of a block

TOKENS = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 256, 65536])


@given(one=st.lists(TOKENS, max_size=6), other=st.lists(TOKENS, max_size=6), same=st.lists(TOKENS, max_size=4))
def test_common_tokens_are_counted_whole(one: list[int], other: list[int], same: list[int]) -> None:
    expected = 0
    for mine, yours in zip(same + one, same + other, strict=False):
        if mine != yours:
            break
        expected += 1
    assert common_tokens(encode_tokens(same + one), encode_tokens(same + other)) == expected


def test_the_nearest_sibling_is_the_one_with_the_longest_common_part() -> None:
    index = PrefixIndex()
    insert_chain(index, encode_blocks([1, 2, 3, 4], 4), [0])
    insert_chain(index, encode_blocks([1, 2, 9, 9], 4), [1])
    tail = index.insert_tail(None, (), encode_tokens([1, 2, 3, 7]), BlockId(2))
    assert tail is not None

    def nearest(*tokens: int, extra: ExtraKeys = ()) -> tuple[int | None, int]:
        node, common = index.nearest(None, extra, encode_tokens(tokens))
        return (None if node is None else node.block), common

    assert nearest(1, 2, 3, 4) == (0, 4)
    assert nearest(1, 2, 3, 7, 8) == (2, 4)
    assert nearest(1, 2, 9) == (1, 3)
    assert nearest(1, 5)[1] == 1
    assert nearest(2, 2, 3, 4) == (None, 0)
    assert nearest() == (None, 0)
    assert nearest(1, 2, 3, 4, extra=("a",)) == (None, 0)
    index.check_invariants()
    assert len(index) == 3


@given(
    stored=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=30),
    wanted=st.lists(st.integers(0, 3), max_size=4),
)
def test_the_binary_search_finds_what_a_linear_one_would(stored: list[list[int]], wanted: list[int]) -> None:
    index = PrefixIndex()
    for block, tokens in enumerate(stored):
        index.insert(None, (), encode_tokens(tokens), BlockId(block))
    most = max(common_tokens(encode_tokens(tokens), encode_tokens(wanted)) for tokens in stored)
    node, common = index.nearest(None, (), encode_tokens(wanted))
    assert common == most
    assert (node is None) == (most == 0)
    assert node is None or common_tokens(node.tokens, encode_tokens(wanted)) == most


def test_a_tail_is_kept_only_where_no_sibling_begins_with_it() -> None:
    index = PrefixIndex()
    tail = index.insert_tail(None, (), encode_tokens([1, 2]), BlockId(0))
    assert tail is not None
    assert (tail.block_hash, tail.num_tokens) == (None, 2)
    assert index.insert_tail(None, (), encode_tokens([1]), BlockId(1)) is None
    assert index.insert_tail(None, (), encode_tokens([1, 2]), BlockId(1)) is None
    longer = index.insert_tail(None, (), encode_tokens([1, 2, 3]), BlockId(1))
    assert longer is not None
    assert index.superseded(longer) is tail
    index.remove(tail.block)
    full = index.insert(None, (), encode_tokens([1, 2, 3, 4]), BlockId(2))
    assert index.superseded(full) is longer
    index.remove(longer.block)
    assert index.superseded(full) is None
    assert matched(index, encode_blocks([1, 2, 3, 4], 4)) == [2]
    index.check_invariants()


def test_many_are_removed_at_once() -> None:
    index = PrefixIndex()
    insert_chain(index, keys(1, 2, 3, 4), [0, 1])
    insert_chain(index, keys(1, 2, 5, 6), [0, 2])
    insert_chain(index, keys(7, 8), [3], ("a",))
    with pytest.raises(RuntimeError, match="block 0 has children"):
        PrefixIndex.remove_all(index, [BlockId(0)])
    index = PrefixIndex()
    insert_chain(index, keys(1, 2, 3, 4), [0, 1])
    insert_chain(index, keys(1, 2, 5, 6), [0, 2])
    insert_chain(index, keys(7, 8), [3], ("a",))
    index.remove_all([BlockId(1), BlockId(3)])
    index.check_invariants()
    assert matched(index, keys(1, 2, 5, 6)) == [0, 2]
    assert matched(index, keys(7, 8), ("a",)) == []
