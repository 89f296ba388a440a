"""What ATB refuses of a 310P's paged attention, and what it computes wrongly without a word.

ATB checks a call three times: its parameters when the operator is made (at the call, `CreateOperation failed!`), then
dtypes, formats and shapes (`setup failed!`), then what the kernel's tiling needs; the last two may be raised later, by
the thread that launches operators. No check sees values on the device: lengths, block ids and slots are the caller's.
Where a page and these checks disagree, the checks win. A2's rules are kept to what a 310P's caller can mistake.
"""

from __future__ import annotations

from tests.support.npu.rules import ATB, FIELD_REPORT, OP_PLUGIN, WHEEL, Rule

_PAGE = "torch_npu/op_plugin/atb/_atb_api_docs.py"
_PLUGIN = "op_plugin/utils/custom_functions/atb/AtbCommon.cpp"
_V2 = "op_plugin/ops/atb/PagedAttentionSplitfuseV2.cpp"
_TABLE = "ops_configs/atb_ops_info.ini"
_BASE = "src/atb/operation/operation_base.cpp"
_OPERATION = "src/ops/ops_infer/paged_attention/paged_attention_operation.cpp"
_RUNNER = "src/ops/ops_infer/paged_attention/paged_attention_ops_runner_910a.cpp"
_WRITE_OPERATION = "src/ops/ops_infer/reshape_and_cache/reshape_and_cache_operation.cpp"
_ATTENTION = "src/kernels/mixkernels/pagedattention"
_CHECKS = f"{_ATTENTION}/paged_attention_operation.cpp"
_TILING = f"{_ATTENTION}/tiling/paged_attention_tiling.cpp"
_TILES = f"{_ATTENTION}/tiling/paged_attention_tiling_dependency.cpp"
_KERNEL = f"{_ATTENTION}/op_kernel/paged_attention_decoder_mask.cce"
_WRITE = "src/kernels/mixkernels/reshape_and_cache"
_WRITE_KERNEL = f"{_WRITE}/op_kernel/reshape_and_cache_nz.cpp"

# Every operator.
DTYPE = Rule(
    "ATB-DTYPE", "310P computes in float16, A2 and A3 in float16 or bfloat16", ATB.at(_BASE, 428, 431)
)  # int8 caches are not emulated
SAME_DTYPE = Rule("ATB-SAME-DTYPE", "query, caches and out have one dtype", ATB.at(_TABLE, 4209, 4233))
EMPTY = Rule("ATB-EMPTY", "no tensor is empty", ATB.at("src/atb/utils/tensor_check.cpp", 57, 64))
CONTIGUOUS = Rule(
    "ATB-CONTIGUOUS", "what is written to is contiguous (the rest is copied if not)", OP_PLUGIN.at(_PLUGIN, 34)
)
SAME_CACHES = Rule(
    "ATB-SAME-CACHES", "both caches have as many blocks, of one size", ATB.at(_OPERATION, 636, 651)
)  # of writing: _WRITE/reshape_and_cache_operation.cpp, 135 to 137
BLOCK_SIZE = Rule("ATB-BLOCK-SIZE", "on 310P block sizes are multiples of 16", ATB.at(_TILING, 357, 358))

# Writing.
WRITE_FORMAT = Rule("ATB-WRITE-FORMAT", "310P writes caches marked FRACTAL_NZ, A2 ND ones", ATB.at(_TABLE, 807, 828))
WRITE_SHAPE = Rule(
    "ATB-WRITE-SHAPE",
    "the cache is (blocks, heads·head size/16, block size, 16) on 310P, else (blocks, block size, heads, head size)",
    ATB.at(_WRITE_OPERATION, 321, 377),
)
WRITE_HEAD_SIZE = Rule(
    "ATB-WRITE-HEAD-SIZE",
    "on 310P head sizes are multiples of 32 bytes",
    ATB.at(f"{_WRITE}/tiling/reshape_and_cache_tiling.cpp", 203, 205),
)
SLOT_DTYPE = Rule(
    "ATB-SLOT-DTYPE",
    "slot_indices is int32, one-dimensional",
    ATB.at(f"{_WRITE}/reshape_and_cache_operation.cpp", 114, 120),
)
SLOT_ROWS = Rule(
    "ATB-SLOT-ROWS",
    "key, value and slot_indices have as many rows, key and value as many heads",
    ATB.at(f"{_WRITE}/reshape_and_cache_operation.cpp", 133, 170),
)
SLOT_RANGE = Rule(
    "ATB-SLOT-RANGE",
    "slots are below blocks·block size (negative ones are skipped)",
    ATB.at(_WRITE_KERNEL, 136, 144),
    unchecked=True,
)
SLOT_TWICE = Rule(
    "ATB-SLOT-TWICE",
    "no two tokens have one slot: cores write them in no order",
    ATB.at(_WRITE_KERNEL, 38, 51),
    unchecked=True,
)
SLOT_OFFSET = Rule(
    "ATB-SLOT-OFFSET",
    "of 1,000 tokens and more, or more than 128 KiB a token, blocks end before number 2³² of a cache: offsets of 32 "
    "bits",
    ATB.at(_WRITE_KERNEL, 78, 83),
    unchecked=True,
)  # which calls go that way: reshape_and_cache_tiling.cpp, 212 to 223

# Reading.
CACHE_FORMATS = Rule(
    "ATB-CACHE-FORMATS",
    "310P's caches are both marked FRACTAL_NZ or both not, A2's are ND; an NZ mask goes with NZ caches",
    ATB.at(_TABLE, 4209, 4233),
)
CACHE_SHAPE = Rule(
    "ATB-CACHE-SHAPE",
    "the cache is (blocks, heads·head size/16, block size, 16) on 310P, else (blocks, block size, heads, head size)",
    ATB.at(_OPERATION, 527, 557),
)
HEAD_SIZE = Rule("ATB-HEAD-SIZE", "head sizes are at most 256, on 310P multiples of 16", ATB.at(_OPERATION, 542, 553))
BLOCK_AREA = Rule("ATB-BLOCK-AREA", "block size·head size is at most 128·128 on 310P", ATB.at(_OPERATION, 549, 553))
BLOCK_LIMIT = Rule("ATB-BLOCK-LIMIT", "block sizes are at most 128", WHEEL.at(_PAGE, 276))  # splitfuse: _TILING, 380
BATCH = Rule("ATB-BATCH", "at most 2,048 sequences on 310P", WHEEL.at(_PAGE, 279))
GROUPS = Rule("ATB-GROUPS", "num_heads is a multiple of num_kv_heads (0 for as many)", ATB.at(_OPERATION, 53, 70))
HEADS = Rule(
    "ATB-HEADS",
    "the query is (rows, num_heads, head size)",
    ATB.at(_TILING, 326),  # the head size is what is left, and only the number of dimensions is checked
    unchecked=True,
)
OUT = Rule("ATB-OUT", "out has the query's heads and head size", ATB.at(_OPERATION, 941, 949))
OUT_ROWS = Rule("ATB-OUT-ROWS", "out has a row a query", ATB.at(_RUNNER, 169, 178), unchecked=True)
TABLE = Rule("ATB-TABLE", "block_table is int32 (sequences, blocks)", ATB.at(_CHECKS, 692, 700))
TABLE_ROWS = Rule("ATB-TABLE-ROWS", "block_table has a row a sequence", ATB.at(_KERNEL, 3501), unchecked=True)
TABLE_COLUMNS = Rule(
    "ATB-TABLE-COLUMNS",
    "block_table has at most 5,119 columns: a row, and the 32 bytes read after it, go to 20 KiB",
    ATB.at(_KERNEL, 3483, 3503),
    unchecked=True,
)
LENS = Rule(
    "ATB-LENS",
    "context_lens and seq_len are int32, one-dimensional",
    ATB.at(_CHECKS, 695, 703),
)
"""And where they are: `seq_len` on the host, from where the tiling reads it (param.cpp, 96 to 109: a tensor of the
device fails), `context_lens` on the device, where the kernel reads it (_KERNEL, 3493; nothing copies one of the host
there). Here all tensors are on the CPU, so neither can be checked."""
DECODE_ROWS = Rule(
    "ATB-DECODE-ROWS", "_npu_paged_attention has one query a sequence", ATB.at(_TILING, 314, 316), unchecked=True
)
CONTEXT = Rule(
    "ATB-CONTEXT", "a sequence's tokens are in its row of block_table", ATB.at(_KERNEL, 3417, 3433), unchecked=True
)
BLOCK_IDS = Rule("ATB-BLOCK-IDS", "block ids are in the cache", ATB.at(_KERNEL, 3432, 3433), unchecked=True)
PRODUCT = Rule(
    "ATB-PRODUCT",
    "query·key is at most 65,504: 310P rounds it to float16 before it multiplies by the scale",
    ATB.at(_KERNEL, 1268, 1278),
    unchecked=True,
)
SUMS = Rule(
    "ATB-SUMS",
    "the sum of a row's weights, the greatest being 1, and the sum of values weighted so are at most 65,504: 310P "
    "rounds both to float16 before it divides",
    ATB.at(_KERNEL, 3275, 3311),
    unchecked=True,
)

# Splitfuse.
MANY_BATCH = Rule("ATB-MANY-BATCH", "of several queries: at most 2,000 sequences", ATB.at(_TILING, 374, 376))
MANY_HEADS = Rule("ATB-MANY-HEADS", "of several queries: at most 256 heads", ATB.at(_TILING, 377, 379))
MANY_SIZE = Rule("ATB-MANY-SIZE", "of several queries: heads·head size at most 128·128", ATB.at(_TILING, 384, 388))
QUERY_LENGTH = Rule("ATB-QUERY-LENGTH", "each sequence has a query", ATB.at(_TILING, 282, 294))
QUERY_ROWS = Rule(
    "ATB-QUERY-ROWS",
    "seq_len sums to the query's rows, and has a number a sequence",
    ATB.at(_TILING, 314, 319),
    unchecked=True,
)
QUERY_CONTEXT = Rule(
    "ATB-QUERY-CONTEXT",
    "no sequence has more queries than context",
    ATB.at(_KERNEL, 3553, 3554),
    unchecked=True,
)
BLOCK_OFFSET = Rule(
    "ATB-BLOCK-OFFSET",
    "splitfuse reads blocks that begin before number 2³² of a cache: block id·block size·heads·head size in 32 bits",
    ATB.at(_KERNEL, 3520, 3521),
    unchecked=True,
)  # _npu_paged_attention has 64 (3432 to 3433)
MASK_DTYPE = Rule("ATB-MASK-DTYPE", "the mask has the query's dtype", ATB.at(_CHECKS, 717, 726))
MASK = Rule(
    "ATB-MASK",
    "splitfuse's mask is (rows, keys), on 310P (1, keys/16, rows, 16) marked FRACTAL_NZ",
    ATB.at(_CHECKS, 528, 538),
)  # as ND 310P would lay it out in NZ once more (_RUNNER, 78 to 84): not emulated
MASK_ROWS = Rule(
    "ATB-MASK-ROWS", "the mask has a row a query, on 310P padded to 16", ATB.at(_TILES, 815, 875), unchecked=True
)
MASK_COVERS = Rule("ATB-MASK-COVERS", "the mask has a column for each key", ATB.at(_CHECKS, 528, 538), unchecked=True)
MASK_FIRST = Rule(
    "ATB-MASK-FIRST",
    "a query sees one of its first block of keys, or a finite number hides them: -inf less a largest of -inf is "
    "nothing that a softmax could go on with",
    ATB.at(_KERNEL, 1374, 1399),
    unchecked=True,
)
"""By IEEE it is NaN. A 310P knows saturation only, where 'the calculation result of Inf' is 'a maximum value' and that
of NaN 0 (aclrtFloatOverflowMode): the block would count, until the next with a visible key scales it away. That is not
said of operands that are infinite."""
SPLITFUSE_ROWS = Rule(
    "ATB-SPLITFUSE-ROWS",
    "splitfuse takes at most 1,024 queries a call: with 2,048 its answers were wrong, with no error",
    FIELD_REPORT.at("section 3, why max_num_batched_tokens cannot be raised", 98, 103),
    unchecked=True,
)
"""Nothing in the kernel explains it: strides, offsets and repeats of 2,048 rows fit their fields."""

# Splitfuse v2.
V2_MASK_TYPE = Rule("ATB-V2-MASK-TYPE", "mask_type is 5, or None", OP_PLUGIN.at(_V2, 58, 62))
V2_ATB = Rule("ATB-V2-ATB", "ATB has MASK_TYPE_NORM_COMPRESS from CANN 9.1 on", ATB.at(_OPERATION, 237, 243))
V2_CHIP = Rule("ATB-V2-CHIP", "MASK_TYPE_NORM_COMPRESS is 310P's", ATB.at(_OPERATION, 147, 151))
V2_MASK = Rule(
    "ATB-V2-MASK",
    "the mask is (2048, 2048) in ND, with or without leading 1s",
    ATB.at(_CHECKS, 575, 593),
)
V2_MASK_ROOM = Rule(
    "ATB-V2-MASK-ROOM",
    "memory after the mask is the caller's: with more than 2,048 keys up to 127 rows after the last are read (and not "
    "used), with 2,048 keys and one query up to a row",
    ATB.at(_KERNEL, 3716, 3723),
    unchecked=True,
)
V2_TILES = Rule(
    "ATB-V2-TILES",
    "with more than 2,048 keys no tile of queries stands on both sides of the end of a block: keys of the second "
    "block are hidden by rows of the mask that are too low, and up to 22 later keys are seen",
    ATB.at(_KERNEL, 3716, 3721),
    unchecked=True,
)
"""Tiles of min(128, 16384 // max(head size, block size) rounded down to 16) queries, from place keys - queries on. With
at most 2,048 keys, or within one block, every row is right."""

RULES = tuple(rule for rule in globals().values() if isinstance(rule, Rule))
