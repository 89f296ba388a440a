"""Calls that an emulated NPU refuses, one at least for each rule; `npu_calls` has what they were before.

ATB's are in `npu_refused_atb`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import HALF, half, ints, triangle
from tests.support.npu import (
    Atb,
    Rule,
    activation,
    attention_update,
    kv_cache,
    machine,
    norms,
    quantization,
    rotary,
)
from tests.support.npu import fused_attention_rules as fia

FIA = "npu.npu_fused_infer_attention_score"
SCATTER = "npu.npu_scatter_pa_kv_cache"
GATHER = "npu.npu_gather_pa_kv_cache"
UPDATE = "npu.npu_attention_update"
NORM = "npu.npu_rms_norm"
ADD_NORM = "npu.npu_add_rms_norm"
SWIGLU = "npu.npu_swiglu"
ROTARY = "npu.npu_rotary_mul"
APPLY_ROTARY = "npu.npu_apply_rotary_pos_emb"
QUANTIZE = "npu.npu_quantize"
DYNAMIC = "npu.npu_dynamic_quant"
MATMUL = "npu.npu_quant_matmul"
CAST = "npu.npu_format_cast"
RESHAPE = "atb._npu_reshape_and_cache"
PAGED = "atb._npu_paged_attention"
SPLITFUSE = "atb._npu_paged_attention_splitfuse"
SPLITFUSE_V2 = "atb._npu_paged_attention_splitfuse_v2"

A2, P310 = "910B", "310P"


@dataclass(frozen=True)
class Refused:
    rule: Rule
    operator: str
    make: Callable[[], dict[str, Any]]
    """The spoilt call; made while the operators are defined."""
    chip: str = A2
    atb: Atb = Atb.CANN_9_1


def skewed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


BFLOAT = torch.bfloat16
WIDE_512 = {"query": half(4, 4, 272), "key": half(5, 128, 544), "value": half(5, 128, 544)}
MHA = {"num_key_value_heads": 4, "key": half(5, 128, 64), "value": half(5, 128, 64)}

REFUSED = (
    # fused_infer_attention_score: what is asked for
    Refused(fia.CHIP, FIA, calls.paged, P310),
    Refused(fia.LAYOUT, FIA, lambda: calls.paged(input_layout="THD")),
    Refused(fia.QUERY_DIMS, FIA, lambda: calls.paged(query=half(4, 64))),
    Refused(fia.CACHE_DIMS, FIA, lambda: calls.paged(key=half(5 * 128, 32), value=half(5 * 128, 32))),
    Refused(fia.KV_DIMS, FIA, lambda: calls.unpaged(key=half(1, 150, 2, 16), value=half(1, 150, 2, 16))),
    Refused(
        fia.DTYPE,
        FIA,
        lambda: {k: v.float() if k in ("query", "key", "value") else v for k, v in calls.paged().items()},
    ),
    Refused(fia.SAME_DTYPE, FIA, lambda: calls.paged(query=half(4, 4, 16).to(BFLOAT))),
    Refused(fia.CONTIGUOUS, FIA, lambda: calls.paged(query=skewed(half(4, 4, 16)))),
    Refused(fia.HEADS, FIA, lambda: calls.paged(num_heads=0)),
    Refused(fia.QUERY_HEADS, FIA, lambda: calls.paged(num_heads=2)),
    Refused(fia.GROUPS, FIA, lambda: calls.paged(num_key_value_heads=3)),
    Refused(fia.KV_HEADS, FIA, lambda: calls.unpaged(num_key_value_heads=4)),
    Refused(
        fia.KV_HEADS_GIVEN,
        FIA,
        lambda: calls.paged(num_key_value_heads=0, key=half(5, 128, 64), value=half(5, 128, 64)),
    ),
    Refused(fia.HEAD_SIZES, FIA, lambda: calls.paged(query=half(4, 4, 32))),
    Refused(fia.HEAD_SIZE_TND, FIA, lambda: calls.paged(**WIDE_512)),
    Refused(fia.HEAD_SIZE_TND, FIA, lambda: calls.paged(inner_precise=1)),  # so not the split-fuse kernel, and size 16
    Refused(
        fia.HEAD_SIZE_ALIGNED,
        FIA,
        lambda: calls.rows(query=half(2, 4, 5, 24), key=half(2, 2, 7, 24), value=half(2, 2, 7, 24)),
    ),
    Refused(
        fia.HEAD_SIZE_LIMIT,
        FIA,
        lambda: calls.rows(query=half(2, 4, 5, 528), key=half(2, 2, 7, 528), value=half(2, 2, 7, 528)),
    ),
    Refused(fia.INNER_PRECISE, FIA, lambda: calls.paged(inner_precise=4)),
    # … lengths
    Refused(fia.TND_LENGTHS, FIA, lambda: calls.paged(actual_seq_lengths=None)),
    Refused(fia.TND_LENGTHS, FIA, lambda: calls.paged(actual_seq_lengths_kv=[])),
    Refused(fia.TND_QUERIES, FIA, lambda: calls.paged(actual_seq_lengths=[3, 5])),
    Refused(fia.TND_QUERIES, FIA, lambda: calls.paged(actual_seq_lengths=[3, 1])),  # lengths that are not cumulative
    Refused(fia.TND_KEYS, FIA, lambda: calls.unpaged(actual_seq_lengths_kv=[20, 130])),
    Refused(fia.CUMULATIVE, FIA, lambda: calls.paged(query=half(2, 4, 16), actual_seq_lengths=[3, 2])),
    Refused(fia.CUMULATIVE, FIA, lambda: calls.unpaged(actual_seq_lengths_kv=[160, 150])),
    Refused(fia.SAME_BATCH, FIA, lambda: calls.paged(actual_seq_lengths_kv=[20])),
    Refused(fia.BATCH_LIMIT, FIA, lambda: calls.paged(actual_seq_lengths=[0] * 65536 + [4])),
    Refused(fia.QUERY_LENGTHS, FIA, lambda: calls.rows(actual_seq_lengths=[5, 6])),
    Refused(fia.KEY_LENGTHS, FIA, lambda: calls.paged(actual_seq_lengths_kv=[20, 257])),
    Refused(fia.KEY_LENGTHS, FIA, lambda: calls.rows(actual_seq_lengths_kv=[8, 7])),
    Refused(
        fia.PAGED_LENGTHS,
        FIA,
        lambda: calls.paged(query=half(2, 1, 64), input_layout="BSH", actual_seq_lengths_kv=None),
    ),
    # … the paged cache
    Refused(fia.TABLE_DTYPE, FIA, lambda: calls.paged(block_table=torch.tensor([[3, 0], [1, 4]]))),
    Refused(fia.TABLE_DIMS, FIA, lambda: calls.paged(block_table=ints(3, 0, 1, 4))),
    Refused(fia.TABLE_ROWS, FIA, lambda: calls.paged(block_table=torch.zeros(3, 2, dtype=torch.int32))),
    Refused(fia.BLOCK_SIZE_GIVEN, FIA, lambda: calls.paged(block_size=64)),
    Refused(
        fia.BLOCK_SIZE_ALIGNED,
        FIA,
        lambda: calls.paged(query=half(4, 4, 64), key=half(9, 40, 128), value=half(9, 40, 128), block_size=40),
    ),
    Refused(
        fia.BLOCK_SIZE_LIMIT,
        FIA,
        lambda: calls.paged(query=half(4, 4, 64), key=half(5, 1040, 128), value=half(5, 1040, 128), block_size=1040),
    ),
    Refused(fia.BLOCK_IDS, FIA, lambda: calls.paged(block_table=torch.tensor([[5, 0], [1, 4]], dtype=torch.int32))),
    Refused(fia.BLOCK_IDS, FIA, lambda: calls.paged(block_table=torch.tensor([[3, 0], [1, -1]], dtype=torch.int32))),
    Refused(
        fia.CACHE_SIZE,
        FIA,
        # 2^32 elements and a block more, of which only one row is there.
        lambda: calls.paged(**dict.fromkeys(("key", "value"), half(1, 1, 32).expand(2**20 + 1, 128, 32))),
    ),
    Refused(fia.CACHE_NZ, FIA, lambda: calls.paged(key=half(5, 2, 2, 128, 8), value=half(5, 2, 2, 128, 8))),
    Refused(fia.SAME_CACHE, FIA, lambda: calls.paged(value=half(6, 128, 32))),
    # … masks
    Refused(fia.SPARSE_MODE, FIA, lambda: calls.paged(sparse_mode=5)),
    Refused(fia.MASK_GIVEN, FIA, lambda: calls.paged(atten_mask=None)),
    Refused(fia.MASK_TND, FIA, lambda: calls.paged(sparse_mode=0)),
    Refused(fia.MASK_SHAPE, FIA, lambda: calls.paged(atten_mask=triangle()[:1024, :1024].contiguous())),
    Refused(fia.MASK_COVERS, FIA, lambda: calls.rows(sparse_mode=1, atten_mask=torch.zeros(5, 6, dtype=torch.bool))),
    Refused(fia.MASK_DTYPE, FIA, lambda: calls.paged(atten_mask=triangle(HALF))),
    Refused(fia.MASK_TRIANGLE, FIA, lambda: calls.paged(atten_mask=triangle().T.contiguous())),
    Refused(fia.BAND, FIA, lambda: calls.paged(sparse_mode=4, pre_tokens=3, next_tokens=-4)),
    # … shared prefixes
    Refused(
        fia.PREFIX_LAYOUT,
        FIA,
        lambda: calls.paged(key_shared_prefix=half(1, 8, 32), value_shared_prefix=half(1, 8, 32)),
    ),
    Refused(
        fia.PREFIX_PAGED,
        FIA,
        lambda: calls.paged(
            query=half(2, 3, 64),
            input_layout="BSH",
            key_shared_prefix=half(1, 8, 32),
            value_shared_prefix=half(1, 8, 32),
        ),
    ),
    # the cache
    Refused(kv_cache.SCATTER_CHIP, SCATTER, calls.scatter, P310),
    Refused(kv_cache.SCATTER_MODE, SCATTER, lambda: calls.scatter(cache_mode="ND")),
    Refused(kv_cache.SCATTER_UNCOMPRESSED, SCATTER, lambda: calls.scatter(seq_lens=ints(3))),
    Refused(
        kv_cache.SCATTER_DTYPE,
        SCATTER,
        lambda: {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in calls.scatter().items()},
    ),
    Refused(kv_cache.SCATTER_SAME_DTYPE, SCATTER, lambda: calls.scatter(value=half(3, 2, 16).to(BFLOAT))),
    Refused(
        kv_cache.SCATTER_SLOT_DTYPE,
        SCATTER,
        lambda: calls.scatter(slot_mapping=torch.tensor([5, 6, 7], dtype=torch.int16)),
    ),
    Refused(kv_cache.SCATTER_DIMS, SCATTER, lambda: calls.scatter(key=half(3, 32))),
    Refused(kv_cache.SCATTER_DIMS, SCATTER, lambda: calls.scatter(key_cache=torch.zeros(4, 128, 32, dtype=HALF))),
    Refused(kv_cache.SCATTER_DIMS_NZ, SCATTER, lambda: calls.scatter_nz(key_cache=torch.zeros(8, 128, 16, dtype=HALF))),
    Refused(kv_cache.SCATTER_SHAPE, SCATTER, lambda: calls.scatter(key_cache=torch.zeros(4, 128, 4, 8, dtype=HALF))),
    Refused(kv_cache.SCATTER_SHAPE, SCATTER, lambda: calls.scatter(value_cache=torch.zeros(5, 128, 2, 16, dtype=HALF))),
    Refused(kv_cache.SCATTER_SHAPE_NZ, SCATTER, lambda: calls.scatter(cache_mode="PA_NZ")),  # an ND cache, taken for NZ
    Refused(kv_cache.SCATTER_TOKENS, SCATTER, lambda: calls.scatter(slot_mapping=ints(5, 6))),
    Refused(
        kv_cache.SCATTER_ROOM,
        SCATTER,
        lambda: calls.scatter(
            key_cache=torch.zeros(1, 2, 2, 16, dtype=HALF), value_cache=torch.zeros(1, 2, 2, 16, dtype=HALF)
        ),
    ),
    Refused(kv_cache.SCATTER_CONTIGUOUS, SCATTER, lambda: calls.scatter(key=skewed(half(3, 2, 16)))),
    Refused(kv_cache.SCATTER_SLOT_RANGE, SCATTER, lambda: calls.scatter(slot_mapping=ints(5, 6, 512))),
    Refused(kv_cache.SCATTER_SLOT_TWICE, SCATTER, lambda: calls.scatter(slot_mapping=ints(5, 6, 5))),
    Refused(kv_cache.GATHER_CHIP, GATHER, calls.gather, P310),
    Refused(kv_cache.GATHER_DIMS, GATHER, lambda: calls.gather(key_cache=half(4, 128, 32))),
    Refused(kv_cache.GATHER_DTYPE, GATHER, lambda: calls.gather(key=torch.zeros(137, 2, 16))),
    Refused(kv_cache.GATHER_INDEX_DTYPE, GATHER, lambda: calls.gather(seq_lens=torch.tensor([130, 7]))),
    Refused(kv_cache.GATHER_ROWS, GATHER, lambda: calls.gather(seq_lens=ints(130, 8))),
    Refused(
        kv_cache.GATHER_BLOCK_IDS,
        GATHER,
        lambda: calls.gather(block_tables=torch.tensor([[2, 4], [1, 3]], dtype=torch.int32)),
    ),
    Refused(
        kv_cache.GATHER_TABLE, GATHER, lambda: calls.gather(block_tables=torch.tensor([[2], [1]], dtype=torch.int32))
    ),
    # merging
    Refused(attention_update.CHIP, UPDATE, calls.update, P310),
    Refused(attention_update.PARTS, UPDATE, lambda: calls.update(lse=[torch.zeros(6)])),
    Refused(attention_update.LSE_DTYPE, UPDATE, lambda: calls.update(lse=[half(6), half(6)])),
    Refused(attention_update.OUT_DTYPE, UPDATE, lambda: calls.update(local_out=[half(6, 16).double()] * 2)),
    Refused(attention_update.DIMS, UPDATE, lambda: calls.update(lse=[torch.zeros(6, 1)] * 2)),
    Refused(attention_update.SAME_SHAPE, UPDATE, lambda: calls.update(local_out=[half(6, 16), half(6, 8)])),
    Refused(attention_update.HEAD_SIZE, UPDATE, lambda: calls.update(local_out=[half(6, 12)] * 2)),
    Refused(attention_update.KIND, UPDATE, lambda: calls.update(update_type=2)),
    # norms, activation, positions
    Refused(norms.DTYPES, NORM, lambda: calls.norm(gamma=half(32).to(BFLOAT))),
    Refused(norms.DTYPES, NORM, lambda: calls.norm(gamma=half(32).float()), P310),
    Refused(norms.SHAPE, NORM, lambda: calls.norm(gamma=half(16))),
    Refused(norms.NOT_EMPTY, NORM, lambda: calls.norm(input=half(0, 32))),
    Refused(norms.TAIL_310P, NORM, lambda: calls.norm(input=half(3, 8), gamma=half(8)), P310),
    Refused(norms.ADD_DTYPES, ADD_NORM, lambda: calls.add_norm(gamma=half(32).float())),
    Refused(norms.ADD_DTYPES_310P, ADD_NORM, lambda: {k: v.to(BFLOAT) for k, v in calls.add_norm().items()}, P310),
    Refused(norms.ADD_SHAPE, ADD_NORM, lambda: calls.add_norm(x2=half(1, 32))),
    Refused(activation.DTYPE, SWIGLU, lambda: {"input": half(3, 64).double()}),
    Refused(activation.DTYPE_310P, SWIGLU, lambda: {"input": half(3, 64).to(BFLOAT)}, P310),
    Refused(activation.AXIS, SWIGLU, lambda: {"input": half(3, 64), "dim": 2}),
    Refused(activation.EVEN, SWIGLU, lambda: {"input": half(3, 63)}),
    Refused(activation.CONTIGUOUS, SWIGLU, lambda: {"input": skewed(half(3, 64))}),
    Refused(activation.ALIGNED_310P, SWIGLU, lambda: {"input": half(3, 32)}, P310),
    Refused(rotary.MODE, ROTARY, lambda: calls.rotary(rotary_mode="quarter")),
    Refused(rotary.CHIP_310P, ROTARY, calls.rotary, P310),
    Refused(rotary.DTYPE, ROTARY, lambda: calls.rotary(r1=half(1, 5, 1, 64).double())),
    Refused(rotary.DIMS, ROTARY, lambda: calls.rotary(input=half(5, 4, 64))),
    Refused(
        rotary.HEAD_SIZE,
        ROTARY,
        lambda: calls.rotary(input=half(1, 5, 4, 898), r1=half(1, 5, 1, 898), r2=half(1, 5, 1, 898)),
    ),
    Refused(rotary.SAME_SHAPE, ROTARY, lambda: calls.rotary(r2=half(1, 1, 1, 64))),
    Refused(rotary.FULL_SIZE, ROTARY, lambda: calls.rotary(r1=half(1, 5, 1, 32), r2=half(1, 5, 1, 32))),
    Refused(
        rotary.FORM, ROTARY, lambda: calls.rotary(input=half(2, 5, 4, 64), r1=half(1, 5, 4, 64), r2=half(1, 5, 4, 64))
    ),
    Refused(rotary.FORM, ROTARY, lambda: calls.rotary(r1=half(1, 3, 1, 64), r2=half(1, 3, 1, 64))),
    Refused(
        rotary.HEADS_FIRST,
        ROTARY,
        lambda: calls.rotary(input=half(2, 16, 2, 64), r1=half(1, 1, 2, 64), r2=half(1, 1, 2, 64)),
    ),
    Refused(rotary.MATRIX, ROTARY, lambda: calls.rotary(rotate=half(64, 32))),
    Refused(rotary.APPLY_DIMS, APPLY_ROTARY, lambda: calls.apply_rotary(layout="TND"), P310),
    Refused(rotary.APPLY_ROWS, APPLY_ROTARY, lambda: calls.apply_rotary(key=half(1, 4, 2, 64)), P310),
    Refused(
        rotary.APPLY_SIZE,
        APPLY_ROTARY,
        lambda: {name: tensor[..., :32] for name, tensor in calls.apply_rotary().items()},
        P310,
    ),
    Refused(
        rotary.APPLY_ONE, APPLY_ROTARY, lambda: calls.apply_rotary(cos=half(1, 5, 4, 64), sin=half(1, 5, 4, 64)), P310
    ),
    Refused(rotary.APPLY_DTYPE, APPLY_ROTARY, lambda: calls.apply_rotary(cos=torch.ones(1, 5, 1, 64)), P310),
    Refused(
        rotary.APPLY_DTYPE_310P,
        APPLY_ROTARY,
        lambda: {name: tensor.to(BFLOAT) for name, tensor in calls.apply_rotary().items()},
        P310,
    ),
    Refused(rotary.APPLY_MODE, APPLY_ROTARY, lambda: calls.apply_rotary(rotary_mode="interleave"), P310),
    # int8
    Refused(quantization.QUANTIZE_DTYPE, QUANTIZE, lambda: calls.quantize(input=half(3, 32).to(BFLOAT)), P310),
    Refused(quantization.QUANTIZE_SCALES, QUANTIZE, lambda: calls.quantize(scales=torch.ones(1))),
    Refused(quantization.QUANTIZE_SHAPE, QUANTIZE, lambda: calls.quantize(scales=half(16), zero_points=None)),
    Refused(
        quantization.QUANTIZE_ZEROS, QUANTIZE, lambda: calls.quantize(zero_points=torch.zeros(1, dtype=torch.int8))
    ),
    Refused(quantization.QUANTIZE_TYPE, QUANTIZE, lambda: calls.quantize(dtype=torch.quint8)),
    Refused(quantization.DYNAMIC_CHIP, DYNAMIC, lambda: {"input": half(3, 32)}, P310),
    Refused(quantization.DYNAMIC_DTYPE, DYNAMIC, lambda: {"input": torch.ones(3, 32)}),
    Refused(quantization.DYNAMIC_DIMS, DYNAMIC, lambda: {"input": half(32)}),
    Refused(quantization.DYNAMIC_SMOOTH, DYNAMIC, lambda: {"input": half(3, 32), "smooth_scales": half(3)}),
    Refused(quantization.MATMUL_DTYPE, MATMUL, lambda: calls.matmul(x1=half(5, 32))),
    Refused(quantization.MATMUL_DIMS, MATMUL, lambda: calls.matmul(x1=torch.ones(32, dtype=torch.int8))),
    Refused(quantization.MATMUL_INNER, MATMUL, lambda: calls.matmul(x2=torch.ones(48, 32, dtype=torch.int8))),
    Refused(
        quantization.MATMUL_BATCH,
        MATMUL,
        lambda: calls.matmul(x1=torch.ones(2, 5, 32, dtype=torch.int8), x2=torch.ones(3, 32, 48, dtype=torch.int8)),
    ),
    Refused(
        quantization.MATMUL_LIMIT,
        MATMUL,
        lambda: calls.matmul(x1=torch.ones(5, 65536, dtype=torch.int8), x2=torch.ones(65536, 1, dtype=torch.int8)),
    ),
    Refused(quantization.MATMUL_SCALE, MATMUL, lambda: calls.matmul(scale=torch.ones(1, 48))),
    Refused(quantization.MATMUL_OFFSET, MATMUL, lambda: calls.matmul(offset=torch.ones(48))),
    Refused(quantization.MATMUL_TOKENS, MATMUL, lambda: calls.matmul(pertoken_scale=torch.ones(4))),
    Refused(quantization.MATMUL_TOKENS_310P, MATMUL, calls.matmul, P310),
    Refused(quantization.MATMUL_BIAS, MATMUL, lambda: calls.matmul(bias=torch.ones(5))),
    Refused(quantization.MATMUL_TYPES, MATMUL, lambda: calls.matmul(output_dtype=torch.float32)),
    Refused(quantization.MATMUL_TYPES, MATMUL, lambda: calls.matmul_310p(output_dtype=torch.bfloat16), P310),
    Refused(machine.FORMAT_KNOWN, CAST, lambda: {"input": half(3, 32), "acl_format": 3}),
)
