from __future__ import annotations

from reprise_engine.kv.block_pool import BlockState
from reprise_engine.kv.hashing import ExtraKeys, TokenBytes
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import SequenceBlocks
from reprise_engine.step import BlockCopy, BlockHash, BlockId

PROMPT = list(range(8))  # two blocks of four


def manager(num_blocks: int = 6) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, enable_prefix_caching=True)


def admit(kv: KVCacheManager, tokens: list[int]) -> tuple[SequenceBlocks, tuple[BlockCopy, ...] | None]:
    sequence = kv.sequence()
    return sequence, kv.admit(sequence, kv.lookup(sequence, tokens), len(tokens))


def compute(kv: KVCacheManager, tokens: list[int]) -> SequenceBlocks:
    sequence, copies = admit(kv, tokens)
    assert copies is not None
    kv.commit(sequence, tokens, len(tokens))
    return sequence


def test_a_block_is_found_only_once_it_is_computed() -> None:
    kv = manager()
    sequence, _ = admit(kv, PROMPT)
    for computed, found in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8)):
        kv.commit(sequence, PROMPT, computed)
        assert kv.lookup(kv.sequence(), [*PROMPT, 9]).num_tokens == found
        kv.check_invariants([sequence])


def test_a_refused_admission_changes_nothing() -> None:
    kv = manager(num_blocks=4)
    kv.release(compute(kv, PROMPT))
    order = kv.pool.eviction_order()
    # Three blocks more than the two that match: one too many, as the matching ones cannot be evicted.
    sequence, copies = admit(kv, [*PROMPT, *range(20, 32)])
    assert copies is None
    assert sequence.blocks == []
    assert kv.pool.eviction_order() == order
    kv.check_invariants([sequence])


def test_the_source_of_a_copy_cannot_be_evicted_for_its_target() -> None:
    kv = manager(num_blocks=2)
    kv.release(compute(kv, PROMPT))
    sequence, copies = admit(kv, PROMPT)  # needs block 0, the source 1, and a target
    assert copies is None
    kv.check_invariants([sequence])


def test_a_sequence_released_before_its_copy_is_committed_leaves_nothing_behind() -> None:
    kv = manager()
    kv.release(compute(kv, PROMPT))
    sequence, copies = admit(kv, PROMPT)
    assert copies == (BlockCopy(source=BlockId(1), target=BlockId(2)),)
    kv.release(sequence)
    kv.check_invariants([sequence])
    assert kv.usage == 0.0
    assert kv.lookup(kv.sequence(), [*PROMPT, 9]).num_tokens == 8


def test_extend_grows_by_what_is_missing_or_not_at_all() -> None:
    kv = manager(num_blocks=3)
    sequence, _ = admit(kv, [1, 2])
    table = sequence.table
    assert kv.extend(sequence, 4)
    assert sequence.table is table
    assert not kv.extend(sequence, 13)
    assert sequence.table is table
    assert kv.extend(sequence, 12)
    assert sequence.table == (0, 1, 2)


def test_a_released_sequence_is_as_new() -> None:
    kv = manager()
    first = compute(kv, PROMPT)
    skipping = kv.sequence(skip_reading=True)
    assert kv.admit(skipping, kv.lookup(skipping, PROMPT), len(PROMPT)) == ()
    kv.commit(skipping, PROMPT, len(PROMPT))  # its blocks stay duplicates
    assert skipping.indexed == 0
    kv.release(skipping)
    kv.release(first)
    assert kv.reset() == (True, 2)
    assert kv.admit(skipping, kv.lookup(skipping, PROMPT), len(PROMPT)) == ()
    kv.commit(skipping, PROMPT, len(PROMPT))
    assert skipping.indexed == 2


def test_a_reset_leaves_the_chains_in_use() -> None:
    kv = manager()
    kv.release(compute(kv, [*range(20, 24), 1]))
    sequence = compute(kv, PROMPT)
    assert kv.reset() == (False, 1)
    assert kv.lookup(kv.sequence(), [*PROMPT, 9]).num_tokens == 8
    assert kv.lookup(kv.sequence(), [*range(20, 24), 1]).num_tokens == 0
    kv.check_invariants([sequence])


def test_colliding_hashes_do_not_mix_prefixes_up() -> None:
    def colliding(parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
        return BlockHash(bytes(32))

    kv = KVCacheManager(num_blocks=6, block_size=4, enable_prefix_caching=True, hasher=colliding)
    first, second = compute(kv, PROMPT), compute(kv, [9, *PROMPT[1:]])
    assert not set(first.blocks) & set(second.blocks)
    assert kv.lookup(kv.sequence(), [7, *PROMPT[1:], 1]).num_tokens == 0
    assert [node.block for node in kv.lookup(kv.sequence(), [9, *PROMPT[1:], 1]).shared] == second.blocks


def test_usage_is_the_share_of_referenced_blocks() -> None:
    kv = manager(num_blocks=8)
    first, second = compute(kv, PROMPT), compute(kv, [*PROMPT, 9])
    assert kv.usage == 3 / 8
    kv.release(first)
    assert kv.usage == 3 / 8
    kv.release(second)
    assert kv.usage == 0.0


# --- inside a block


def test_a_copy_that_has_no_room_is_given_up_and_the_sequence_is_not() -> None:
    kv = manager(num_blocks=2)
    kv.release(compute(kv, PROMPT))
    sequence = kv.sequence()
    match = kv.lookup(sequence, PROMPT)
    assert (match.num_tokens, match.source_tokens) == (7, 3)
    fitting = kv.fitting(match, len(PROMPT))
    assert fitting is not None
    assert (fitting.num_tokens, fitting.source) == (4, None)
    assert kv.admit(sequence, fitting, len(PROMPT)) == ()
    kv.check_invariants([sequence])
    assert kv.fitting(match, 9) is None


def test_an_unfinished_block_is_found_after_its_sequence_ended() -> None:
    kv = manager()
    sequence = compute(kv, PROMPT[:6])
    assert kv.lookup(kv.sequence(), PROMPT).num_tokens == 4
    kv.release(sequence, PROMPT[:6], 6)
    kv.check_invariants([])
    match = kv.lookup(kv.sequence(), PROMPT)
    assert (match.num_tokens, match.source_tokens) == (6, 2)
    assert kv.lookup(kv.sequence(), PROMPT[:6]).num_tokens == 5  # one is always left to compute
    assert kv.lookup(kv.sequence(), [*PROMPT[:5], 9, 9]).num_tokens == 5
    assert kv.lookup(kv.sequence(cache_salt="other"), PROMPT).num_tokens == 0


def test_of_a_copy_that_was_never_committed_nothing_is_kept() -> None:
    kv = manager()
    kv.release(compute(kv, [1, 2, 3]), [1, 2, 3], 3)
    sequence, copies = admit(kv, [1, 2, 3, 9])
    assert copies is not None
    assert len(copies) == 1
    kv.release(sequence, [1, 2, 3, 9], 3)
    kv.check_invariants([])
    assert len(kv.index) == 1


def test_a_tail_may_be_superseded_while_it_is_copied() -> None:
    kv = manager()
    kv.release(compute(kv, [1, 2]), [1, 2], 2)
    first, copies = admit(kv, [1, 2, 3, 4])
    second, more = admit(kv, [1, 2, 5, 6])
    assert copies is not None
    assert more is not None
    assert copies[0].source == more[0].source
    kv.commit(first, [1, 2, 3, 4], 4)
    kv.check_invariants([first, second])
    kv.commit(second, [1, 2, 5, 6], 4)
    kv.check_invariants([first, second])
    assert len(kv.index) == 2
    assert kv.pool.state(copies[0].source) is BlockState.FREE
