"""What a rule of the emulated NPU joins: calls that fail in one of its conditions alone, and that no other sees."""

from __future__ import annotations

import torch

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import HALF, half, ints, triangle
from tests.engine.npu_refusals import (
    ADD_NORM,
    BFLOAT,
    FIA,
    GATHER,
    MATMUL,
    NORM,
    QUANTIZE,
    ROTARY,
    SCATTER,
    SWIGLU,
    UPDATE,
    Refused,
)
from tests.support.npu import activation, attention_update, kv_cache, machine, norms, quantization, rotary
from tests.support.npu import fused_attention_rules as fia

EMPTY = "npu.empty_with_format"
FULL = torch.zeros(5, 7, dtype=torch.bool)
"""A mask of every query and key of `calls.rows`."""

PARTS = (
    # attention
    Refused(fia.QUERY_HEADS, FIA, lambda: calls.rows("BSH", query=half(2, 5, 255))),
    Refused(fia.SAME_BATCH, FIA, lambda: calls.rows(query=half(3, 4, 5, 64), actual_seq_lengths=[5, 4])),
    Refused(fia.MASK_SHAPE, FIA, lambda: calls.paged(atten_mask=triangle().expand(2, -1, -1).contiguous())),
    Refused(fia.MASK_COVERS, FIA, lambda: calls.rows(sparse_mode=1, atten_mask=FULL.expand(3, 1, -1, -1).contiguous())),
    Refused(
        fia.MASK_COVERS,
        FIA,
        lambda: calls.rows(query=half(2, 4, 1, 64), atten_mask=torch.zeros(3, 7, dtype=torch.bool)),
    ),
    # the cache
    Refused(kv_cache.SCATTER_UNCOMPRESSED, SCATTER, lambda: calls.scatter(compress_lens=ints(3))),
    Refused(kv_cache.SCATTER_UNCOMPRESSED, SCATTER, lambda: calls.scatter(compress_seq_offsets=ints(3))),
    Refused(
        kv_cache.SCATTER_TOKENS,
        SCATTER,
        lambda: calls.scatter(value=half(3, 4, 16), value_cache=torch.zeros(4, 128, 4, 16, dtype=HALF)),
    ),
    Refused(
        kv_cache.SCATTER_SHAPE_NZ,
        SCATTER,
        lambda: calls.scatter_nz(key_cache=torch.zeros(4, 2, 128, 8, dtype=HALF)),
    ),
    Refused(kv_cache.GATHER_DIMS, GATHER, lambda: calls.gather(key=torch.zeros(137, dtype=HALF))),
    Refused(kv_cache.GATHER_DTYPE, GATHER, lambda: calls.gather(value=torch.zeros(137, 2, 16))),
    Refused(kv_cache.GATHER_TABLE, GATHER, lambda: calls.gather(block_tables=torch.zeros(3, 2, dtype=torch.int32))),
    # merging
    Refused(
        attention_update.PARTS, UPDATE, lambda: calls.update(lse=[torch.zeros(6)] * 129, local_out=[half(6, 16)] * 129)
    ),
    Refused(attention_update.DIMS, UPDATE, lambda: calls.update(local_out=[half(6, 16, 1)] * 2)),
    Refused(attention_update.DIMS, UPDATE, lambda: calls.update(local_out=[half(5, 16)] * 2)),
    Refused(attention_update.SAME_SHAPE, UPDATE, lambda: calls.update(lse=[torch.zeros(6), torch.zeros(1)])),
    Refused(attention_update.HEAD_SIZE, UPDATE, lambda: calls.update(local_out=[half(6, 520)] * 2)),
    # norms, activation, positions
    Refused(norms.DTYPES, NORM, lambda: calls.norm(input=half(3, 32).double(), gamma=half(32).double())),
    Refused(norms.ADD_DTYPES, ADD_NORM, lambda: {k: v.double() for k, v in calls.add_norm().items()}),
    Refused(norms.SHAPE, NORM, lambda: calls.norm(gamma=half(1, 3, 32))),
    Refused(activation.CONTIGUOUS, SWIGLU, lambda: {"input": half(0, 64)}),
    Refused(
        rotary.HEAD_SIZE,
        ROTARY,
        lambda: calls.rotary(input=half(1, 5, 4, 63), r1=half(1, 5, 1, 63), r2=half(1, 5, 1, 63)),
    ),
    # int8
    Refused(quantization.QUANTIZE_TYPE, QUANTIZE, lambda: calls.quantize(dtype=torch.float16)),
    Refused(quantization.QUANTIZE_SHAPE, QUANTIZE, lambda: calls.quantize(scales=half(1, 1), zero_points=None)),
    Refused(quantization.QUANTIZE_ZEROS, QUANTIZE, lambda: calls.quantize(zero_points=torch.zeros(32, dtype=HALF))),
    Refused(quantization.MATMUL_DIMS, MATMUL, lambda: calls.matmul(x2=torch.ones(32, dtype=torch.int8))),
    Refused(
        quantization.MATMUL_LIMIT,
        MATMUL,
        lambda: calls.matmul(x2=torch.ones(32, 65536, dtype=torch.int8), scale=torch.ones(1)),
    ),
    Refused(quantization.MATMUL_SCALE, MATMUL, lambda: calls.matmul(scale=torch.ones(47))),
    Refused(quantization.MATMUL_TOKENS, MATMUL, lambda: calls.matmul(pertoken_scale=half(5))),
    Refused(quantization.MATMUL_TYPES, MATMUL, lambda: calls.matmul(scale=half(48))),
    Refused(quantization.MATMUL_TYPES, MATMUL, lambda: calls.matmul(output_dtype=torch.int32)),
    Refused(quantization.MATMUL_TYPES, MATMUL, lambda: calls.matmul(bias=half(48))),
    Refused(
        machine.FORMAT_KNOWN,
        EMPTY,
        lambda: {"size": [2, 16], "dtype": HALF, "acl_format": 3, "device": torch.device("cpu")},
    ),
)

GOOD_ON_A2 = (
    # What only a 310P refuses.
    (SWIGLU, lambda: {"input": half(3, 64).to(BFLOAT)}),
    (SWIGLU, lambda: {"input": half(3, 32)}),
    (NORM, lambda: calls.norm(input=half(3, 8), gamma=half(8))),
    (ADD_NORM, lambda: {name: tensor.to(BFLOAT) for name, tensor in calls.add_norm().items()}),
    (ROTARY, lambda: calls.rotary(rotary_mode="interleave")),
    (ROTARY, lambda: {name: tensor.to(BFLOAT) for name, tensor in calls.rotary().items()}),
    (ROTARY, lambda: calls.rotary(input=half(1, 5, 4, 80), r1=half(1, 5, 1, 80), r2=half(1, 5, 1, 80))),
    # The largest that is taken.
    (
        FIA,
        lambda: calls.paged(key=half(5, 512, 32), value=half(5, 512, 32), block_size=512),
    ),
    (
        SCATTER,
        lambda: calls.scatter(
            key_cache=torch.zeros(1, 3, 2, 16, dtype=HALF),
            value_cache=torch.zeros(1, 3, 2, 16, dtype=HALF),
            slot_mapping=ints(0, 1, 2),
        ),
    ),
    (UPDATE, lambda: calls.update(local_out=[half(6, 512)] * 2)),
)
