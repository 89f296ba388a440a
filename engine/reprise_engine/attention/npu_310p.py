"""Paged attention on an Ascend 310P: another layout of the pool, and ATB's operators instead of the fused one.

`torch_npu` must have been imported by the caller, and the NNAL package installed: together they register
`torch.ops.atb`. Axis letters are those of `attention/base.py`; C is K·H/16, L the keys of the longest request.

The pool is in layout NZ, (B, C, S, 16), float16. Steps of one new token a request go through `_npu_paged_attention`,
all others, a cold prefill included, through splitfuse attention, which reads every key from the pool and is told the
length of queries and keys apart. So nothing can mistake a cache hit for a cold prefill. The second version of splitfuse
attention, where ATB has it, takes a fixed causal mask; the first takes one with a row a query, windows included. Block
ids are validated by `runner/batch.py`. There is no log-sum-exp to be had: each request reads a shared prefix itself.

Sources: vllm-ascend _310p/attention/attention_v1.py and attention_mask.py (182b75e: layout, which operator when, masks,
`seq_len` on the host and `context_lens` on the device); op-plugin ops/atb/PagedAttention*.cpp and
ReshapeAndCachAtb.cpp (517f2e7: schemas).
"""

from __future__ import annotations

import torch

from reprise_engine.attention.base import AttentionMetadata, KVLayout, LayerKV
from reprise_engine.attention.block_copies import BlockCopier, Copies
from reprise_engine.errors import ConfigError

_MASK_SIZE = 2048
_HIDDEN = -10000.0
"""What the compressed mask adds to a hidden score."""
_MASK_TYPE_NORM_COMPRESS = 5
_ACL_FORMAT_FRACTAL_NZ = 29
_OPERATORS = ("_npu_reshape_and_cache", "_npu_paged_attention", "_npu_paged_attention_splitfuse")
_COMPRESSED = "_npu_paged_attention_splitfuse_v2"


class _Plan:
    """What all layers of a step share, on the device but for `query_lens_R`."""

    def __init__(self, metadata: AttentionMetadata, device: torch.device) -> None:
        self.metadata = metadata
        self.slots_T = metadata.slot_mapping_T.to(torch.int32)
        self.query_lens_R = torch.tensor(metadata.query_lens, dtype=torch.int32)
        self.kv_lens_R = torch.tensor(metadata.kv_lens, dtype=torch.int32, device=device)
        self.decodes_only = max(metadata.query_lens) == 1
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, sliding_window: int | None) -> torch.Tensor:
        if sliding_window not in self._masks:
            self._masks[sliding_window] = _rows_of_mask(self.metadata, sliding_window, self.slots_T.device)
        return self._masks[sliding_window]


class NPU310PAttention:
    """Takes pools of layout NZ only."""

    name = "npu-310p"

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where ATB's operators are not there."""
        missing = [name for name in _OPERATORS if not hasattr(torch.ops.atb, name)]
        if missing:
            raise ConfigError(
                f"An NPU 310P needs {', '.join(missing)} of CANN's NNAL package (ATB), which is not loaded. "
                "Install NNAL and source its set_env.sh, or use --device cpu."
            )
        self._compressed_mask: torch.Tensor | None = None
        if hasattr(torch.ops.atb, _COMPRESSED):
            mask = torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.float16, device=device)
            self._compressed_mask = torch.triu(mask, diagonal=1).mul_(_HIDDEN)
        self._copier = BlockCopier(device)
        self._device = device
        self._plan: _Plan | None = None

    def forward(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        kv: LayerKV,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        assert kv.layout is KVLayout.NZ, f"the pool's layout is {kv.layout}"
        if self._plan is None or self._plan.metadata is not metadata:
            self._plan = _Plan(metadata, self._device)
        plan = self._plan
        key_BCS16, value_BCS16 = kv.key_BSKH, kv.value_BSKH
        torch.ops.atb._npu_reshape_and_cache(
            k_TKH.contiguous(), v_TKH.contiguous(), key_BCS16, value_BCS16, plan.slots_T
        )
        q_TNH = q_TNH.contiguous()
        out_TNH = torch.empty_like(q_TNH)
        heads = {"num_kv_heads": k_TKH.shape[1], "num_heads": q_TNH.shape[1], "scale_value": scale}
        if sliding_window is None and plan.decodes_only:
            torch.ops.atb._npu_paged_attention(
                q_TNH,
                key_BCS16,
                value_BCS16,
                **heads,
                block_table=metadata.block_table_RM,
                context_lens=plan.kv_lens_R,
                out=out_TNH,
            )
        elif sliding_window is None and self._compressed_mask is not None:
            torch.ops.atb._npu_paged_attention_splitfuse_v2(
                q_TNH,
                key_BCS16,
                value_BCS16,
                block_table=metadata.block_table_RM,
                context_lens=plan.kv_lens_R,
                mask=self._compressed_mask,
                seq_len=plan.query_lens_R,
                **heads,
                mask_type=_MASK_TYPE_NORM_COMPRESS,
                out=out_TNH,
            )
        else:
            torch.ops.atb._npu_paged_attention_splitfuse(
                q_TNH,
                key_BCS16,
                value_BCS16,
                block_table=metadata.block_table_RM,
                context_lens=plan.kv_lens_R,
                mask=plan.mask(sliding_window),
                seq_len=plan.query_lens_R,
                **heads,
                out=out_TNH,
            )
        return out_TNH

    def copy_blocks(self, kv: LayerKV, copies: Copies) -> None:
        self._copier.copy(kv, copies)


def _rows_of_mask(metadata: AttentionMetadata, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """What is added to the scores of each row of the step, as (1, L/16, T, 16) of format NZ, L and T padded to 16."""
    positions = [
        position
        for query_len, kv_len in zip(metadata.query_lens, metadata.kv_lens, strict=True)
        for position in range(kv_len - query_len, kv_len)
    ]
    rows, columns = _round_up(len(positions)), _round_up(max(metadata.kv_lens))
    query_position = torch.tensor(positions, device=device).unsqueeze(1)
    key_position = torch.arange(columns, device=device).unsqueeze(0)
    hidden_TL = key_position > query_position
    if sliding_window is not None:
        hidden_TL |= key_position <= query_position - sliding_window
    mask_TL = torch.zeros((rows, columns), dtype=torch.float16, device=device)
    mask_TL[: len(positions)].masked_fill_(hidden_TL, float("-inf"))
    mask_NZ = mask_TL.view(1, rows, columns // 16, 16).transpose(1, 2).contiguous()
    cast: torch.Tensor = torch.ops.npu.npu_format_cast(mask_NZ, _ACL_FORMAT_FRACTAL_NZ)
    return cast


def _round_up(count: int) -> int:
    return -(-count // 16) * 16
