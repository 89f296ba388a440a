"""Names of blocks as gateways compute them.

The golden vectors are not ours. They were recorded by a gateway project (loxilb-inference-gateway, Apache-2.0,
cicd/common/kv_hash/fixtures/kv_hash_vectors.json) with vLLM 0.17.0's own functions, the last four of them on a server
that ran Qwen2.5-7B-Instruct with PYTHONHASHSEED=0. Any of them can be derived by hand:

    cbor   = 83                                 array of three
             5820 <32 bytes> or 50 <16 bytes>   the parent: a byte string of the digest's length
             90 1865 18ca 19012f …              array of 16 token ids
             f6                                 null: no extra keys
    digest = sha256(cbor), or XXH3-128(cbor)

and the parent of a first block is the digest of 61 30, the text "0".
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import product
from typing import Any, get_args

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.config import HashAlgorithm
from reprise_engine.kv.hash_algorithms import block_hasher
from reprise_engine.kv.hashing import (
    Adapter,
    ExtraKeys,
    TokenBytes,
    encode_blocks,
    encode_tokens,
    extra_keys,
    keys_of_block,
)
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.step import BlockHash

SIMPLE = [101 * i for i in range(1, 33)]
QWEN = [
    *(785, 3974, 13876, 38835, 34208, 916, 279, 15678, 5562, 13, 44801, 2266, 25, 8287, 1411, 27217),
    *(1161, 11567, 9477, 1687, 11756, 2252, 4640, 19120, 9500, 27711, 40538, 3891, 15045, 78, 4568, 64),
]
GOLDEN: list[tuple[HashAlgorithm, list[int], list[str]]] = [
    (
        "sha256_cbor",
        SIMPLE,
        [
            "d450abdaf2c9ebdd0e0cbfbc4e24a5c07ff71dcab37be7426d4fa0e5fdb93342",
            "0d95d2dc02f528b32afbd33ebffedd911ed1978087b0a01679b4ddd62261c5db",
        ],
    ),
    ("xxhash_cbor", SIMPLE, ["363a30eaa81cfc9f9992a6dfe619bda1", "60bf650ad0efa0dc7147140a2e85add6"]),
    (
        "sha256_cbor",
        QWEN,
        [
            "caba889d3604b3df8dcdd10e42088879dbda2a1da4d19650da393e3b3c4a3207",
            "2793adec91bdc57e9fb06c5b8271ecfbe933691c1d547990b48007a01bb9a609",
        ],
    ),
    ("xxhash_cbor", QWEN, ["56f372e4cb22425f4773cdca742d4779", "10a8fb9eaa665f0812676eb31a7adff9"]),
]
# The same tokens below the parent that the recorder used for "no seed": all zeros.
BELOW_ZEROS: list[tuple[HashAlgorithm, int, str]] = [
    ("sha256_cbor", 32, "8c0a1c7a0ea0f3ed0c543c28859440fae8821a38a9e83fb3c971ffe3d56197ea"),
    ("xxhash_cbor", 16, "23eb9b97b0e70381f7d1d4aa948e3d29"),
]
ALGORITHMS: tuple[HashAlgorithm, ...] = get_args(HashAlgorithm)


def chain(
    algorithm: HashAlgorithm,
    tokens: list[int],
    *,
    seed: str = "0",
    salt: str | None = None,
    adapter: str | None = None,
) -> list[str]:
    keys = extra_keys(adapter=adapter, cache_salt=salt)
    hasher = block_hasher(algorithm, {"PYTHONHASHSEED": seed})
    hashes: list[BlockHash] = []
    for block in encode_blocks(tokens, 16):
        first = not hashes
        hashes.append(hasher(None if first else hashes[-1], block, keys_of_block(keys, first=first)))
    return [one.hex() for one in hashes]


@pytest.mark.parametrize(("algorithm", "tokens", "expected"), GOLDEN)
def test_vllms_names_byte_for_byte(algorithm: HashAlgorithm, tokens: list[int], expected: list[str]) -> None:
    assert chain(algorithm, tokens) == expected


@pytest.mark.parametrize(("algorithm", "parent_bytes", "expected"), BELOW_ZEROS)
def test_vllms_names_below_a_given_parent(algorithm: HashAlgorithm, parent_bytes: int, expected: str) -> None:
    (block,) = encode_blocks(SIMPLE[:16], 16)
    assert block_hasher(algorithm)(BlockHash(bytes(parent_bytes)), block, ()).hex() == expected


def test_the_salt_is_the_extra_keys_of_the_first_block_only() -> None:
    """By hand: no recorded vector has one."""
    root = hashlib.sha256(b"\x61\x30").digest()
    assert root.hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"  # recorded as well
    ids = bytes.fromhex("90" + "".join(f"{i:02x}" for i in range(1, 17)))
    first = hashlib.sha256(b"\x83\x58\x20" + root + ids + b"\x81\x68salt-xyz").digest()
    ids = bytes.fromhex("90" + "".join(f"{i:02x}" if i < 24 else f"18{i:02x}" for i in range(17, 33)))
    second = hashlib.sha256(b"\x83\x58\x20" + first + ids + b"\xf6").digest()
    assert chain("sha256_cbor", list(range(1, 33)), salt="salt-xyz") == [first.hex(), second.hex()]


def test_the_adapter_is_in_the_extra_keys_of_every_block_before_the_salt() -> None:
    """By hand, after vLLM's `generate_block_hash_extra_keys`: lora_name, then (multimodal, then) cache_salt."""
    root = hashlib.sha256(b"\x61\x30").digest()
    ids = bytes.fromhex("90" + "".join(f"{i:02x}" for i in range(1, 17)))
    first = hashlib.sha256(b"\x83\x58\x20" + root + ids + b"\x82\x64lora\x68salt-xyz").digest()
    ids = bytes.fromhex("90" + "".join(f"{i:02x}" if i < 24 else f"18{i:02x}" for i in range(17, 33)))
    second = hashlib.sha256(b"\x83\x58\x20" + first + ids + b"\x81\x64lora").digest()
    assert chain("sha256_cbor", list(range(1, 33)), salt="salt-xyz", adapter="lora") == [first.hex(), second.hex()]
    assert [first.hex(), second.hex()] == [
        "4afdd3036d4b94b01732f707c90ae759ebc5ae43e8279e97057384ad57e18c20",
        "b98d8b7d013025da5e8c182e8ea8fd0d8fe50d0faec90209ef35830b01db88e8",
    ]


def test_the_cache_names_and_keeps_apart_what_adapters_computed() -> None:
    hasher = block_hasher("sha256_cbor", {})
    kv = KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=True, hasher=hasher)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cases: list[dict[str, Any]] = [{}, {"adapter": "a"}, {"cache_salt": "a"}, {"adapter": "a", "cache_salt": "s"}]
    for keys in cases:
        sequence = kv.sequence(**keys)
        match = kv.lookup(sequence, tokens)
        assert match.num_tokens == 0
        kv.admit(sequence, match, len(tokens))
        kv.commit(sequence, tokens, 8)
        one, two = encode_blocks(tokens, 4)
        assert sequence.tip is not None
        first = hasher(None, one, extra_keys(**keys))
        assert sequence.tip.block_hash == hasher(first, two, keys_of_block(extra_keys(**keys), first=False))
        kv.release(sequence)
        assert kv.lookup(kv.sequence(**keys), tokens).num_tokens == 8


def test_integers_are_canonical_whatever_their_width() -> None:
    """RFC 8949: the shortest form; 2 to the 32 is above every vocabulary, and above what a token is stored in."""
    widths = {0: "00", 23: "17", 24: "1818", 255: "18ff", 256: "190100", 65535: "19ffff", 65536: "1a00010000"}
    widths[2**32 - 1] = "1affffffff"
    root = hashlib.sha256(b"\x61\x30").digest()
    array = bytes([0x80 + len(widths)]) + bytes.fromhex("".join(widths.values()))
    expected = hashlib.sha256(b"\x83\x58\x20" + root + array + b"\xf6").digest()
    assert block_hasher("sha256_cbor", {})(None, encode_tokens(list(widths)), ()) == expected


def test_the_seed_is_pythonhashseed_and_zero_without_one() -> None:
    assert chain("sha256_cbor", SIMPLE, seed="42") != chain("sha256_cbor", SIMPLE)
    (block,) = encode_blocks(SIMPLE[:16], 16)
    assert block_hasher("sha256_cbor", {})(None, block, ()).hex() == GOLDEN[0][2][0]
    root = xxhash.xxh3_128_digest(b"\x62\x34\x32")  # CBOR of "42"
    assert block_hasher("xxhash_cbor", {"PYTHONHASHSEED": "42"})(None, block, ()) == block_hasher("xxhash_cbor")(
        BlockHash(root), block, ()
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_chain_is_the_same_in_every_process(algorithm: str) -> None:
    program = f"""
from reprise_engine.kv.hash_algorithms import block_hasher
from reprise_engine.kv.hashing import encode_blocks
hasher = block_hasher({algorithm!r}, {{}})
one, two = encode_blocks([1, 2, 3, 4], 2)
first = hasher(None, one, ("tenant",))
print(first.hex(), hasher(first, two, ()).hex())
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_covers_parent_tokens_and_extra_keys(algorithm: HashAlgorithm) -> None:
    hasher = block_hasher(algorithm)
    blocks = encode_blocks([1, 2, 3, 4], 2)
    parents = [None, hasher(None, blocks[0], ()), hasher(None, blocks[1], ())]
    extras: list[ExtraKeys] = [(), ("",), ("a",), ("a", "b"), ("ab",), ("\ud800",), ("\ud801",)]
    cases: list[tuple[BlockHash | None, TokenBytes, ExtraKeys]] = list(product(parents, blocks, extras))
    assert len({hasher(*case) for case in cases}) == len(cases)
    if "cbor" not in algorithm:  # vLLM's own do not tell an adapter from a salt of the same text
        assert hasher(None, blocks[0], (Adapter("a"),)) not in {hasher(*case) for case in cases}
    assert {len(hasher(*case)) for case in cases} == {16 if algorithm.startswith("xxhash") else 32}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_matches_do_not_depend_on_the_algorithm(algorithm: HashAlgorithm, prompt: list[int]) -> None:
    kv = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=True, hasher=block_hasher(algorithm))
    stored = [0, 1, 2, 0, 1, 2, 0, 1]
    sequence = kv.sequence()
    assert kv.admit(sequence, kv.lookup(sequence, stored), len(stored)) == ()
    kv.commit(sequence, stored, len(stored))
    common = next((i for i, (a, b) in enumerate(zip(prompt, stored, strict=False)) if a != b), min(len(prompt), 8))
    assert kv.lookup(kv.sequence(), prompt).num_tokens == min(common, len(prompt) - 1)
