"""One decoder layer as one call: what it reads of its weights, and of the step, described in C for the kernels.

A call of a kernel costs Python 3 to 10 µs; ten a layer are a quarter of a decoded token's time. Axis letters as in
`attention/base.py`; D is the hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reprise_engine.native.kernels import LinearWeights

if TYPE_CHECKING:
    from reprise_engine.attention.base import AttentionMetadata, SharedPrefix


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_attention_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_long) for name in ("hidden", "heads", "kv_heads", "head_size", "inner", "window")),
        *((name, c_float) for name in ("eps", "scale")),
        ("is_bf16", c_int),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("slots", "query_lens", "kv_lens", "members", "table", "shared")),
        *((name, c_void_p) for name in ("cosine", "sine")),
        *((name, c_long) for name in ("tokens", "requests", "table_stride", "num_shared", "rotary_size", "block_size")),
    )


class _Shared(ctypes.Structure):
    _fields_ = (("first", c_int64), ("count", c_int64), ("keys", c_int64))


class SharedPrefixes:
    """The shared prefixes of a step, as the attention kernel takes them."""

    def __init__(self, prefixes: Sequence[SharedPrefix]) -> None:
        members = [request for prefix in prefixes for request in prefix.requests]
        self.count = len(prefixes)
        self.members = (c_int64 * max(1, len(members)))(*members)
        self.prefixes = (_Shared * max(1, len(prefixes)))()
        first = 0
        for place, prefix in zip(self.prefixes, prefixes, strict=False):
            place.first, place.count, place.keys = first, len(prefix.requests), prefix.num_tokens
            first += len(prefix.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer, float32 for norms, and its sizes. `gate_up` and `down` are None where the MLP is not
    a gated one: then the layer ends with its attention. Biases of the qk norms are not known to these definitions."""

    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    eps: float
    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights | None
    down: LinearWeights | None
    head_dim: int
    scale: float
    sliding_window: int | None


class DescribedLayer:
    """`LayerWeights` in C. Holds pointers: to be made again when a weight moves."""

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights  # keeps alive what is pointed to
        query, key, value = weights.qkv.outputs
        if key != value or query % weights.head_dim or key % weights.head_dim or (query // key) * key != query:
            raise ValueError(f"outputs of the queries, keys and values are {weights.qkv.outputs}")
        self.hidden = weights.qkv.inputs
        self.inner = 0 if weights.down is None else weights.down.inputs
        self.num_kv_heads = key // weights.head_dim
        # Floats of scratch a token: see layer.cpp.
        self.scratch = self.hidden + max(self.inner, 2 * query + key + value)
        norms = (weights.input_norm, weights.post_attention_norm, weights.query_norm, weights.key_norm)
        for norm in norms:
            if norm is not None and (norm.dtype != torch.float32 or not norm.is_contiguous()):
                raise ValueError(f"a norm's weight is {norm.dtype}; it must be dense float32")
        self.pointer = ctypes.pointer(
            _Layer(
                *(None if norm is None else norm.data_ptr() for norm in norms),
                *(
                    None if linear is None else ctypes.addressof(linear.parts)
                    for linear in (weights.qkv, weights.output, weights.gate_up, weights.down)
                ),
                self.hidden,
                query // weights.head_dim,
                self.num_kv_heads,
                weights.head_dim,
                self.inner,
                weights.sliding_window or 0,
                weights.eps,
                weights.scale,
                weights.qkv.is_bf16,
            )
        )


class DescribedStep:
    """What all layers of one step share, in C, and the memory they compute in."""

    def __init__(
        self, metadata: AttentionMetadata, cosine_TH: torch.Tensor, sine_TH: torch.Tensor, *, scratch: int
    ) -> None:
        tokens, requests = cosine_TH.shape[0], len(metadata.query_lens)
        if cosine_TH.dtype != torch.float32 or sine_TH.dtype != torch.float32 or sum(metadata.query_lens) != tokens:
            raise ValueError(f"cosines are {cosine_TH.dtype} {tuple(cosine_TH.shape)} for {metadata.query_lens}")
        lengths = c_int64 * requests
        query_lens, kv_lens = lengths(*metadata.query_lens), lengths(*metadata.kv_lens)
        shared = SharedPrefixes(metadata.shared_prefixes)
        cosine_TH, sine_TH = cosine_TH.contiguous(), sine_TH.contiguous()
        self._alive = (metadata, query_lens, kv_lens, shared, cosine_TH, sine_TH)
        self.tokens = tokens
        self.scratch = torch.empty(tokens * scratch, dtype=torch.float32)
        self.pointer = ctypes.pointer(
            _Step(
                metadata.slot_mapping_T.data_ptr(),
                ctypes.addressof(query_lens),
                ctypes.addressof(kv_lens),
                ctypes.addressof(shared.members),
                metadata.block_table_RM.data_ptr(),
                ctypes.addressof(shared.prefixes),
                cosine_TH.data_ptr(),
                sine_TH.data_ptr(),
                tokens,
                requests,
                metadata.block_table_RM.stride(0),
                shared.count,
                cosine_TH.shape[1],
                metadata.block_size,
            )
        )
