"""`npu_attention_update`: attention over parts of the keys, merged by their log-sum-exps.

Shapes: R rows (of all queries and heads), D head size.
"""

from __future__ import annotations

import torch

from tests.support.npu.machine import Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, OPS_TRANSFORMER, Rule

_ACLNN = "attention/attention_update/op_host/op_api/aclnn_attention_update.cpp"
_PAGE = "docs/zh/custom_APIs/torch_npu/torch_npu-npu_attention_update.md"

CHIP = Rule("UPDATE-CHIP", "only A2 and A3 have it", OP_PLUGIN.at(_PAGE, 5, 9))
PARTS = Rule(
    "UPDATE-PARTS", "1 to 128 parts, each with its sum (the page has 16)", OPS_TRANSFORMER.at(_ACLNN, 120, 125)
)
LSE_DTYPE = Rule("UPDATE-LSE-DTYPE", "sums are float32", OPS_TRANSFORMER.at(_ACLNN, 50, 73))
OUT_DTYPE = Rule("UPDATE-OUT-DTYPE", "parts are float32, float16 or bfloat16", OPS_TRANSFORMER.at(_ACLNN, 52, 78))
DIMS = Rule("UPDATE-DIMS", "sums are (rows), parts (rows, head size)", OPS_TRANSFORMER.at(_ACLNN, 130, 160))
SAME_SHAPE = Rule("UPDATE-SAME-SHAPE", "all sums have one shape, all parts too", OPS_TRANSFORMER.at(_ACLNN, 138, 145))
HEAD_SIZE = Rule(
    "UPDATE-HEAD-SIZE", "the head size is a multiple of 8, at most 512", OPS_TRANSFORMER.at(_ACLNN, 154, 156)
)
KIND = Rule("UPDATE-KIND", "update_type is 0 or 1", OPS_TRANSFORMER.at(_ACLNN, 162, 197))

RULES = (CHIP, PARTS, LSE_DTYPE, OUT_DTYPE, DIMS, SAME_SHAPE, HEAD_SIZE, KIND)


def attention_update(
    machine: Machine, lse: list[torch.Tensor], local_out: list[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the merged attention (R, D) and the merged sums (R), which are NaN for update_type 0: undefined there.

    A sum of +inf is a part without keys and counts nothing (op_kernel/decode_update.h, ProcessLseInfReplacement).
    """
    CHIP.require(machine.chip is Chip.ASCEND_910B, f"chip {machine.chip.value}")
    PARTS.require(1 <= len(lse) <= 128 and len(lse) == len(local_out), f"{len(lse)} sums, {len(local_out)} parts")
    LSE_DTYPE.require(all(part.dtype == torch.float32 for part in lse), f"{[part.dtype for part in lse]}")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    OUT_DTYPE.require(all(part.dtype in dtypes for part in local_out), f"{[part.dtype for part in local_out]}")
    DIMS.require(
        lse[0].dim() == 1 and local_out[0].dim() == 2 and lse[0].shape[0] == local_out[0].shape[0],
        f"{list(lse[0].shape)} and {list(local_out[0].shape)}",
    )
    SAME_SHAPE.require(
        len({part.shape for part in lse}) == 1 and len({part.shape for part in local_out}) == 1, "they differ"
    )
    size = local_out[0].shape[1]
    HEAD_SIZE.require(size % 8 == 0 and 0 < size <= 512, f"{size}")
    KIND.require(update_type in (0, 1), f"{update_type}")
    sums_PR = torch.stack(lse)
    sums_PR = sums_PR.masked_fill(sums_PR == float("inf"), float("-inf"))
    merged_R = sums_PR.logsumexp(0)
    weights_PR = (sums_PR - merged_R).exp().nan_to_num(nan=0.0)
    out_RD = torch.einsum("pr,prd->rd", weights_PR, torch.stack([part.float() for part in local_out]))
    return out_RD.to(local_out[0].dtype), merged_R if update_type == 1 else torch.full_like(merged_R, float("nan"))
