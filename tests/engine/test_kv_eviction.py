"""What evicting costs, counted and not timed: the same work however much else is cached."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import reprise_engine
from reprise_engine.kv.hashing import TokenBytes, encode_tokens
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.prefix_index import PrefixIndex
from reprise_engine.step import BlockId
from reprise_engine.tiers.host import HostSlots, TierBlock
from reprise_engine.tiers.keys import BlockKey

FEW, MANY = 64, 16_384
ENGINE = str(Path(reprise_engine.__file__).parent)
COPY_OF_MANY = MANY * 8
"""Bytes of a list, a tuple or the table of a dict that holds as many."""


@dataclass(frozen=True, slots=True)
class Work:
    instructions: int
    """Bytecode instructions in the engine's own functions: each turn of a loop counts."""
    peak_bytes: int
    """The most memory taken on the way: a copy of what is cached counts, where C makes it without an instruction."""


def work(run: Callable[[], object]) -> Work:
    """What a call does. It is made once: everything it needs must be prepared."""
    instructions = 0

    def count(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal instructions
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return count

    before = sys.gettrace()  # a debugger's, or a coverage's
    tracemalloc.start()
    try:
        sys.settrace(count)
        run()
    finally:
        sys.settrace(before)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Work(instructions, peak)


def compute(kv: KVCacheManager, tokens: list[int]) -> None:
    """A sequence that comes, is computed and goes; its blocks stay, cached."""
    sequence = kv.sequence()
    assert kv.admit(sequence, kv.lookup(sequence, tokens), len(tokens)) is not None
    kv.commit(sequence, tokens, len(tokens))
    kv.release(sequence, tokens, len(tokens))


def many_short(kv: KVCacheManager) -> None:
    for number in range(kv.num_blocks // 2):
        compute(kv, [1_000 + number] * 8)


def one_long(kv: KVCacheManager) -> None:
    compute(kv, list(range(1_000, 1_000 + 4 * kv.num_blocks)))


def one_beginning(kv: KVCacheManager) -> None:
    for number in range(kv.num_blocks - 1):
        compute(kv, [1_000, 1_001, 1_002, 1_003, *[2_000 + number] * 4])


@pytest.mark.parametrize("cached", [many_short, one_long, one_beginning], ids=lambda cached: cached.__name__)
def test_eviction_from_a_large_cache_is_no_more_work_than_from_a_small_one(
    cached: Callable[[KVCacheManager], None],
) -> None:
    def evicting(num_blocks: int) -> Work:
        kv = KVCacheManager(num_blocks=num_blocks, block_size=4, enable_prefix_caching=True)
        cached(kv)
        assert len(kv.index) == num_blocks, "the cache is not full"
        sequence, prompt = kv.sequence(), list(range(12))
        match = kv.lookup(sequence, prompt)
        done = work(lambda: kv.admit(sequence, match, len(prompt)))
        assert (len(sequence.blocks), kv.num_evicted_blocks, len(kv.index)) == (3, 3, num_blocks - 3)
        return done

    few, many = evicting(FEW), evicting(MANY)
    assert few.instructions > 100, "the counter counts nothing"
    assert many.instructions == few.instructions
    assert many.peak_bytes < COPY_OF_MANY // 4


def test_a_full_host_tier_gives_a_slot_away_with_no_more_work_than_a_small_one() -> None:
    def block(number: int) -> TierBlock:
        return TierBlock(BlockKey(number.to_bytes(32, "big")), None, number.to_bytes(4, "little"))

    def evicting(num_slots: int) -> Work:
        host = HostSlots(num_slots)
        for number in range(num_slots):
            slot = host.take(block(number))
            assert slot is not None
            host.filled(slot, good=True)
        new = block(num_slots)
        done = work(lambda: host.take(new))
        assert (host.evictions, host.find(block(0)), host.find(new)) == (1, None, 0)
        return done

    few, many = evicting(FEW), evicting(MANY)
    assert few.instructions > 30, "the counter counts nothing"
    assert many.instructions == few.instructions
    assert many.peak_bytes < COPY_OF_MANY // 4


class CountedTokens(bytes):
    """A block's tokens that say how often they were looked at: what a search in C does, no instruction tells."""

    looks = 0

    def __lt__(self, other: bytes) -> bool:
        CountedTokens.looks += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        CountedTokens.looks += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        CountedTokens.looks += 1
        return super().__hash__()


def test_a_leaf_is_found_among_its_siblings_by_a_binary_search() -> None:
    def removing(siblings: int) -> int:
        index = PrefixIndex()
        for number in range(siblings):
            tokens = TokenBytes(CountedTokens(encode_tokens([number])))
            index.insert(None, (), tokens, BlockId(number))
        CountedTokens.looks = 0
        index.remove(BlockId(siblings // 3))
        looks = CountedTokens.looks
        index.check_invariants()
        return looks

    few, many = removing(FEW), removing(MANY)
    assert few > 6, "the counter counts nothing"
    assert many - few <= 8 + 2  # 64 * 2**8 siblings: a step more each time they are twice as many
