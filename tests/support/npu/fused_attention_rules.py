"""What `npu_fused_infer_attention_score` refuses on A2 and A3.

Which kernel runs, and so which checks, is decided first (`RouteToFia` and `IsUsingFAI` in CANN): TND with one head size
up to 256 goes to the *split-fuse* kernel, everything else to *FIA*'s. Where CANN's checks of July 2026 disagree with
op-plugin's page, the checks stand here:

- head sizes in TND: the page has 128 and 192; split fuse takes every size up to 256, equal for query, key and value;
- block sizes: the page has multiples of 128 up to 512 for more than one query, up to 1,024 in multiples of 16 for TND;
  split fuse takes multiples of 16 up to 512, FIA multiples of 16 up to 1,024;
- the page wants at least as many blocks in the cache as all sequences have together, which forbids sharing blocks; only
  the prompt kernel of older CANN checks it, and no half-precision call is sent there any more;
- sequences in one call: the page has 4,096, the checks 65,536;
- without softmax_lse_flag the page returns one zero, op-plugin's code and the wheel's meta function an empty tensor.
"""

from __future__ import annotations

from tests.support.npu.rules import OP_PLUGIN, OPS_TRANSFORMER, OPS_TRANSFORMER_910, Rule, Source

_PAGE = "docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md"
_CPP = "op_plugin/ops/opapi/FusedInferAttentionScoreKernelNpuOpApi.cpp"
_HOST = "attention/fused_infer_attention_score/op_host"
_KERNEL = "attention/fused_infer_attention_score/op_kernel"


def _page(*lines: int) -> Source:
    return OP_PLUGIN.at(_PAGE, *lines)


def _cpp(*lines: int) -> Source:
    return OP_PLUGIN.at(_CPP, *lines)


def _split_fuse(*lines: int) -> Source:
    return OPS_TRANSFORMER.at(f"{_HOST}/fused_infer_attention_score_tiling.cpp", *lines)


def _parser(*lines: int) -> Source:
    return OPS_TRANSFORMER.at(f"{_HOST}/fused_infer_attention_score_tiling_info_parser.cpp", *lines)


def _check(part: str, *lines: int) -> Source:
    return OPS_TRANSFORMER.at(f"{_HOST}/arch22/fused_infer_attention_score_tiling_check_{part}.cpp", *lines)


CHIP = Rule("FIA-CHIP", "only A2 and A3 have it", _page(5, 8))
LAYOUT = Rule("FIA-LAYOUT", "input_layout is one of the table", _cpp(80, 86))
QUERY_DIMS = Rule("FIA-QUERY-DIMS", "the query has the layout's dimensions", _cpp(77, 78))
CACHE_DIMS = Rule("FIA-CACHE-DIMS", "paged keys and values have 3, 4 or 5 dimensions", _cpp(164, 178))
KV_DIMS = Rule("FIA-KV-DIMS", "keys and values that are not paged have the query's dimensions", _cpp(181, 185))
DTYPE = Rule("FIA-DTYPE", "query, key and value are float16 or bfloat16", _split_fuse(1088, 1090))
SAME_DTYPE = Rule("FIA-SAME-DTYPE", "query, key and value have one dtype", _split_fuse(1085, 1087))
CONTIGUOUS = Rule("FIA-CONTIGUOUS", "query, key, value and mask are contiguous", _page(86, 98))
HEADS = Rule("FIA-HEADS", "num_heads is positive", _cpp(316, 321))
QUERY_HEADS = Rule("FIA-QUERY-HEADS", "the query has num_heads heads", _check("consistency", 65, 74))
GROUPS = Rule("FIA-GROUPS", "num_heads is a multiple of num_key_value_heads", _parser(1032, 1040))
KV_HEADS = Rule("FIA-KV-HEADS", "keys and values have num_key_value_heads heads", _check("consistency", 262, 276))
KV_HEADS_GIVEN = Rule(
    "FIA-KV-HEADS-GIVEN",
    "num_key_value_heads is given for a paged cache in TND: its width is divided by it, and 0 ends the process",
    OPS_TRANSFORMER.at(f"{_HOST}/arch22/fused_infer_attention_score_tiling_v3.cpp", 1174, 1175),
    unchecked=True,
)
HEAD_SIZES = Rule("FIA-HEAD-SIZES", "query, key and value have one head size", _split_fuse(1202, 1204))
HEAD_SIZE_TND = Rule(
    "FIA-HEAD-SIZE-TND",
    "TND takes head sizes up to 256 in split fuse, and 64, 128 or 192 elsewhere",
    _check("feature", 643, 646),
)
HEAD_SIZE_ALIGNED = Rule(
    "FIA-HEAD-SIZE-ALIGNED", "with more than one query, head sizes are multiples of 16", _check("feature", 619, 628)
)
HEAD_SIZE_LIMIT = Rule("FIA-HEAD-SIZE-LIMIT", "head sizes are at most 512", _check("feature", 756, 759))
TND_LENGTHS = Rule("FIA-TND-LENGTHS", "TND needs both lists of lengths, not empty", _split_fuse(1054, 1069))
TND_QUERIES = Rule(
    "FIA-TND-QUERIES", "the last of the cumulative query lengths is the number of rows", _split_fuse(951, 955)
)
TND_KEYS = Rule(
    "FIA-TND-KEYS",
    "without a block table the last of the cumulative key lengths is the number of keys",
    _split_fuse(957, 962),
)
CUMULATIVE = Rule(
    "FIA-CUMULATIVE",
    "cumulative lengths never fall (split fuse does not look, and reads elsewhere)",
    _check("feature", 942, 953),
    unchecked=True,
)
SAME_BATCH = Rule(
    "FIA-SAME-BATCH", "both lists of lengths have one entry a sequence", _check("consistency", 345, 389), unchecked=True
)
BATCH_LIMIT = Rule("FIA-BATCH-LIMIT", "at most 65,536 lengths", _check("feature", 665, 676))
QUERY_LENGTHS = Rule("FIA-QUERY-LENGTHS", "a query's length is within its row", _check("feature", 958, 963))
KEY_LENGTHS = Rule(
    "FIA-KEY-LENGTHS",
    "a sequence's keys are within its row: of the block table, or of the keys",
    _check("feature", 1017, 1020),
)
PAGED_LENGTHS = Rule("FIA-PAGED-LENGTHS", "a block table needs actual_seq_lengths_kv", _check("feature", 887, 890))
TABLE_DTYPE = Rule(
    "FIA-TABLE-DTYPE",
    "block_table is int32",
    OPS_TRANSFORMER.at(f"{_HOST}/fused_infer_attention_score_def.cpp", 281, 285),
)
TABLE_DIMS = Rule("FIA-TABLE-DIMS", "block_table has 2 dimensions", _page(128))
TABLE_ROWS = Rule("FIA-TABLE-ROWS", "block_table has one row a sequence", _check("consistency", 241, 246))
BLOCK_SIZE_GIVEN = Rule("FIA-BLOCK-SIZE-GIVEN", "block_size is the cache's", _split_fuse(1189, 1192))
BLOCK_SIZE_ALIGNED = Rule("FIA-BLOCK-SIZE-ALIGNED", "block_size is a multiple of 16", _split_fuse(1193, 1196))
BLOCK_SIZE_LIMIT = Rule(
    "FIA-BLOCK-SIZE-LIMIT", "block_size is at most 512 in split fuse and 1,024 elsewhere", _check("feature", 78, 82)
)
BLOCK_IDS = Rule("FIA-BLOCK-IDS", "block ids are in the cache: the caller's duty", _page(128), unchecked=True)
CACHE_SIZE = Rule(
    "FIA-CACHE-SIZE",
    "split fuse computes where a block lies by uint32, so keys and values have at most 2^32 elements (cured after CANN "
    "9.1.0 by commit 6f768e461)",
    OPS_TRANSFORMER_910.at(f"{_KERNEL}/attn_infra/gemm/block/fused_block_mmad_qk.hpp", 176, 184),
    unchecked=True,
)
CACHE_NZ = Rule("FIA-CACHE-NZ", "an NZ cache ends in (block size, 16)", _split_fuse(1007, 1014))
SAME_CACHE = Rule("FIA-SAME-CACHE", "keys and values have one shape", _page(265))
SPARSE_MODE = Rule("FIA-SPARSE-MODE", "sparse_mode is 0 to 4", _check("single_para", 631, 641))
MASK_GIVEN = Rule("FIA-MASK-GIVEN", "every sparse_mode but 0 needs a mask", _split_fuse(1316, 1319))
MASK_TND = Rule("FIA-MASK-TND", "a mask in TND needs sparse_mode 3 or 4", _split_fuse(1322, 1324))
MASK_SHAPE = Rule(
    "FIA-MASK-SHAPE", "the mask of sparse_mode 2, 3 and 4 is 2048 × 2048, with ones before it", _split_fuse(1289, 1301)
)
MASK_COVERS = Rule(
    "FIA-MASK-COVERS",
    "the mask of sparse_mode 0 and 1 covers all queries and keys",
    _check("consistency", 608, 619),
)
MASK_DTYPE = Rule("FIA-MASK-DTYPE", "the mask is bool, int8 or uint8", _check("single_para", 32))
MASK_TRIANGLE = Rule(
    "FIA-MASK-TRIANGLE",
    "the mask of sparse_mode 2, 3 and 4 is 1 above the diagonal and 0 elsewhere: the caller's duty",
    _page(98),
    unchecked=True,
)
BAND = Rule("FIA-BAND", "a band has a width: -next_tokens ≤ pre_tokens, not both negative", _split_fuse(984, 994))
INNER_PRECISE = Rule("FIA-INNER-PRECISE", "inner_precise is 0 to 3", _check("single_para", 561, 569))
PREFIX_LAYOUT = Rule("FIA-PREFIX-LAYOUT", "key_shared_prefix is not for TND", _check("feature", 708, 717))
PREFIX_PAGED = Rule("FIA-PREFIX-PAGED", "key_shared_prefix excludes a block table", _check("feature", 733, 736))

RULES = (
    CHIP,
    LAYOUT,
    QUERY_DIMS,
    CACHE_DIMS,
    KV_DIMS,
    DTYPE,
    SAME_DTYPE,
    CONTIGUOUS,
    HEADS,
    QUERY_HEADS,
    GROUPS,
    KV_HEADS,
    KV_HEADS_GIVEN,
    HEAD_SIZES,
    HEAD_SIZE_TND,
    HEAD_SIZE_ALIGNED,
    HEAD_SIZE_LIMIT,
    TND_LENGTHS,
    TND_QUERIES,
    TND_KEYS,
    CUMULATIVE,
    SAME_BATCH,
    BATCH_LIMIT,
    QUERY_LENGTHS,
    KEY_LENGTHS,
    PAGED_LENGTHS,
    TABLE_DTYPE,
    TABLE_DIMS,
    TABLE_ROWS,
    BLOCK_SIZE_GIVEN,
    BLOCK_SIZE_ALIGNED,
    BLOCK_SIZE_LIMIT,
    BLOCK_IDS,
    CACHE_SIZE,
    CACHE_NZ,
    SAME_CACHE,
    SPARSE_MODE,
    MASK_GIVEN,
    MASK_TND,
    MASK_SHAPE,
    MASK_COVERS,
    MASK_DTYPE,
    MASK_TRIANGLE,
    BAND,
    INNER_PRECISE,
    PREFIX_LAYOUT,
    PREFIX_PAGED,
)
