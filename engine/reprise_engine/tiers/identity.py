"""What a record's KV depends on besides its tokens: records of another identity are never served."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from reprise_engine.tiers.records import FORMAT_VERSION

# Of a configuration read by transformers: where it came from, and what only says how text is generated.
_IRRELEVANT_CONFIG = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "use_cache", "output_attentions", "output_hidden_states"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Equal where KV can be exchanged: same weights and configuration, same arithmetic, same shape, same layout.

    Paths, names and the machine are not part of it: a copy of the model elsewhere has the same identity.
    """

    weights: str
    """Content of the model's files (`fingerprint.fingerprint_files`)."""
    config: str
    """The model's configuration, RoPE included (`canonical_config`)."""
    dtype: str
    """Of the weights as loaded: float32, bfloat16 or float16."""
    kv_dtype: str
    arithmetic: str
    """Which kernels compute KV, such as "cpu-native", "cpu-torch" or "npu": they round differently."""
    layout: str
    """The order of the axes within a payload, by whoever fills it, such as "layer,kv,slot,head,dim"."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    hash_scheme: str = "reprise-sha256-1"
    """How a BlockKey is made from parent, tokens and extra keys (`kv/hashing.sha256_block_hash`)."""
    byte_order: str = sys.byteorder
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """16 bytes of the SHA-256 over all fields."""
        return hashlib.sha256(_canonical_json(asdict(self)).encode()).digest()[:16]


def canonical_config(config: Mapping[str, object]) -> str:
    """A model's configuration as text that does not depend on the order of its keys, nor on where it was read from.

    All of it but a few fields that cannot matter: one that is new to us rather costs a cold cache than a wrong one.
    """
    return _canonical_json({key: value for key, value in config.items() if key not in _IRRELEVANT_CONFIG})


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
