from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from reprise_engine.kv.hashing import MAX_TOKEN_ID, encode_blocks, sha256_block_hash

CHAIN = """
from reprise_engine.kv.hashing import encode_blocks, sha256_block_hash
one, two = encode_blocks([1, 2, 3, 4], 2)
first = sha256_block_hash(None, one, ("tenant",))
print(first.hex(), sha256_block_hash(first, two, ()).hex())
"""


def chain(hash_seed: str) -> str:
    command = [sys.executable, "-c", CHAIN]
    return subprocess.run(
        command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_chain_is_the_same_in_every_process() -> None:
    first = "5a7cb42046449c4be0294761cc232a163bcc6ae97965564d37bc19c4f0db533d"
    second = "a178fdd58bd71e5d3e1488277e1ddd2161607518bdda5d7f7d4acd5719b3ab01"
    # Golden values: another implementation, or another release, must come to the same names.
    assert chain("1") == chain("2") == f"{first} {second}"


def test_the_hash_covers_parent_tokens_and_extra_keys() -> None:
    one, two = encode_blocks([1, 2, 3, 4], 2)
    first = sha256_block_hash(None, one, ())
    hashes = {
        first,
        sha256_block_hash(None, two, ()),
        sha256_block_hash(first, one, ()),
        sha256_block_hash(first, two, ()),
        sha256_block_hash(sha256_block_hash(None, two, ()), two, ()),
        sha256_block_hash(None, one, ("",)),
        sha256_block_hash(None, one, ("a",)),
        sha256_block_hash(None, one, ("a", "b")),
        sha256_block_hash(None, one, ("ab",)),
    }
    assert len(hashes) == 9


def test_a_salt_with_a_lone_surrogate_is_hashed_like_any_other() -> None:
    (block,) = encode_blocks([1, 2], 2)
    assert sha256_block_hash(None, block, ("\ud800",)) != sha256_block_hash(None, block, ("\ud801",))


def test_only_full_blocks_are_encoded_four_bytes_a_token() -> None:
    assert encode_blocks([1, 2, 3], 2) == [b"\x01\0\0\0\x02\0\0\0"]
    assert encode_blocks([MAX_TOKEN_ID], 1) == [b"\xff\xff\xff\xff"]
    assert encode_blocks([], 2) == []
    with pytest.raises(struct.error):
        encode_blocks([-1], 1)
