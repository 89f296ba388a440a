"""What the attention operators of an NPU refuse of a model or of a flag: told before weights are loaded. Pure.

Sources. 910B and 910C: CANN ops-transformer, attention/fused_infer_attention_score/op_host,
fused_infer_attention_score_tiling.cpp (`IsUsingFAI`, `CheckFAISinglePara`, `CheckFAIQKV`) for grouped heads, and
arch32/fused_infer_attention_score_tiling_check_feature.cpp (`CheckFeatureHeadDim`, 7ab1fa1) for as many key heads as
query heads; numbers of heads and of requests: op-plugin docs torch_npu-npu_fused_infer_attention_score.md (517f2e7).
310P: op-plugin third_party/atb/inc/infer_op_params.h, `PagedAttentionParam`, torch-npu 2.13.0
torch_npu/op_plugin/atb/_atb_api_docs.py:279 (requests), and vllm-ascend
_310p/attention/attention_v1.py, `get_supported_kernel_block_sizes`, and _310p/model_runner_310p.py,
`_ATTENTION_BLOCK_SIZE_LIMIT` (182b75e); for the size of a row ascend-transformer-boost
src/kernels/mixkernels/pagedattention (ddcc8b6), tiling/paged_attention_tiling.cpp, `GetPaParallelCheck`, and for keys
op_kernel/paged_attention_decoder_mask.cce.
Where an older and a newer CANN differ, what both take is allowed.
"""

from __future__ import annotations

from reprise_engine.attention.npu_chip import Chip
from reprise_engine.config import NPU_BLOCK_SIZE, DType
from reprise_engine.errors import ConfigError, RepriseError, UnsupportedModel

_ALIGNMENT = 16
"""Elements of a head, and of a block: 32 bytes."""
_LARGEST_HEAD = 256
_HEADS_OF_MHA = (64, 128)
_MOST_HEADS = 256
_LARGEST_GROUP = 64
"""Query heads of one key head."""
_BLOCK_SIZES = {Chip.A2: (128, 256, 384, 512), Chip.P310: (128,)}
_LARGEST_HEAD_310P = 128
"""A block of 128 slots times the size of a head may be 128 · 128."""
_LARGEST_ROW_310P = 128 * 128
"""Elements of a row of queries."""
_MOST_KEYS_310P = 5119 * 128
"""Of a request: what the kernel keeps of a block table has room for so many blocks."""
_MOST_SUMMED_310P = 65504
"""The kernel rounds a row's sum of weights, each of 1 at most, to float16. Sine and cosine, of which rotary embeddings
are made, are specified as far (CANN ops-math, aclnnCos.md)."""
_MOST_REQUESTS = {Chip.A2: 4096, Chip.P310: 2048}
"""Entries of the operators' lists of lengths."""


def check_npu_model(chip: Chip, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
    """Raises UnsupportedModel for heads, and ConfigError for a dtype, that the chip's operators do not take."""
    allowed = ("float16",) if chip is Chip.P310 else ("bfloat16", "float16")
    if dtype not in allowed:
        raise ConfigError(
            f"--dtype is {dtype}, but the attention operators of an NPU {chip.value} take {' or '.join(allowed)}. "
            f"Use --dtype {allowed[0]} or auto."
        )
    heads = f"The model has {num_heads} query heads and {num_kv_heads} key heads of {head_dim}"
    if num_heads % num_kv_heads or num_heads // num_kv_heads > _LARGEST_GROUP or num_heads > _MOST_HEADS:
        raise UnsupportedModel(
            f"{heads}; on an NPU there may be {_MOST_HEADS} query heads, and each key head must serve equally many of "
            f"them, up to {_LARGEST_GROUP}. Serve it on a CPU (--device cpu)."
        )
    largest = _LARGEST_HEAD_310P if chip is Chip.P310 else _LARGEST_HEAD
    if head_dim % _ALIGNMENT or head_dim > largest:
        raise UnsupportedModel(
            f"{heads}; on an NPU {chip.value} the size of a head must be a multiple of {_ALIGNMENT}, up to {largest}. "
            "Serve it on a CPU (--device cpu)."
        )
    if chip is Chip.P310 and num_heads * head_dim > _LARGEST_ROW_310P:
        raise UnsupportedModel(
            f"{heads}; on an NPU {chip.value} all query heads together may have {_LARGEST_ROW_310P} elements, these "
            f"have {num_heads * head_dim}. Share them among more NPUs (--tensor-parallel-size)."
        )
    if chip is Chip.A2 and num_heads == num_kv_heads and head_dim not in _HEADS_OF_MHA:
        raise UnsupportedModel(
            f"{heads}; with as many key heads as query heads an NPU {chip.value} takes heads of "
            f"{' or '.join(map(str, _HEADS_OF_MHA))} only. Serve it on a CPU (--device cpu)."
        )


def check_npu_flags(chip: Chip, *, block_size: int, max_num_seqs: int) -> None:
    """Raises ConfigError for a block size or a number of requests that the chip's operators do not take."""
    sizes = _BLOCK_SIZES[chip]
    if block_size not in sizes:
        raise ConfigError(
            f"--block-size is {block_size}; on an NPU {chip.value} it must be {' or '.join(map(str, sizes))}. "
            f"Leave it out for {sizes[0]}."
        )
    most = _MOST_REQUESTS[chip]
    if max_num_seqs > most:
        raise ConfigError(
            f"--max-num-seqs is {max_num_seqs}; on an NPU {chip.value} at most {most} requests fit a step. Lower it."
        )


def check_npu_length(chip: Chip, *, max_model_len: int) -> str | None:
    """Raises ConfigError for more tokens than the chip's operators take of a request; returns what to warn of."""
    if chip is not Chip.P310:
        return None
    if max_model_len > _MOST_KEYS_310P:
        raise ConfigError(
            f"--max-model-len is {max_model_len}; on an NPU {chip.value} a request may have {_MOST_KEYS_310P} tokens. "
            "Lower it."
        )
    if max_model_len > _MOST_SUMMED_310P:
        return (
            f"--max-model-len is {max_model_len}: beyond {_MOST_SUMMED_310P} tokens an NPU {chip.value} may sum the "
            "weights of attention to more than float16 holds, sines of positions are not specified, and answers would "
            "be worse without an error. Compare answers to long prompts with those of another device, or lower it."
        )
    return None


def check_some_chip(
    *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: DType, block_size: int | None, max_num_seqs: int
) -> None:
    """For a check without an NPU, which cannot know the chip: raises what the first one refuses, where all of them
    refuse something. Flags as they were given."""
    refusals: list[RepriseError] = []
    for chip in Chip:
        try:
            check_npu_flags(chip, block_size=block_size or NPU_BLOCK_SIZE, max_num_seqs=max_num_seqs)
            check_npu_model(
                chip,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype="float16" if dtype == "auto" else dtype,
            )
        except RepriseError as refusal:
            refusals.append(refusal)
        else:
            return
    raise refusals[0]
