"""What ATB's 310P kernel computes: its tiles of a compressed mask, and its softmax in float16.

Shapes: Q queries of one sequence, L its keys, N heads, K key-value heads, D head size.

Written from paged_attention_decoder_mask.cce and the tiling beside it; line numbers are those of rules.ATB's commit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.npu.atb_rules import PRODUCT, SUMS
from tests.support.npu.rules import Rule

MASK_LENGTH = 2048
"""Rows and columns of a compressed mask (LONG_COMPRESS_LEN)."""
_ABOVE = -60000.0
_LARGEST = 65504.0


@dataclass(frozen=True)
class Tiling:
    """Which queries are a tile, and which of the kernel's ways a call goes (tiling_dependency.cpp, 803 to 879)."""

    block_size: int
    head_size: int
    query_lens: Sequence[int]

    def tile(self, queries: int) -> int:
        """Queries in a tile of a sequence that has so many."""
        room = 128 * 128 // max(self.head_size, self.block_size) // 16 * 16
        return min(128, room, _padded(queries))

    @property
    def prefill(self) -> bool:
        """Whether a sequence has several tiles: then all are read tile by tile (RunPrefill), else RunParallel."""
        return max(map(_padded, self.query_lens)) > max(map(self.tile, self.query_lens))

    def tiles(self, queries: int, keys: int) -> list[range]:
        """Places of the queries of each tile; the last query stands at the last key."""
        first, size = keys - queries, self.tile(queries)
        return [range(start, min(start + size, keys)) for start in range(first, keys, size)]

    def crosses(self, queries: int, keys: int) -> bool:
        """Whether a tile has queries in two blocks, as ATB-V2-TILES forbids."""
        return any(
            tile.start // self.block_size != (tile.stop - 1) // self.block_size for tile in self.tiles(queries, keys)
        )


@dataclass(frozen=True)
class CompressedBias:
    bias_QL: torch.Tensor
    """What is added to the scores of one sequence, in float16."""
    end: int
    """One more than the last number of the mask that was read, also of those that were not used."""


def compressed_bias(mask: torch.Tensor, queries: int, keys: int, tiling: Tiling) -> CompressedBias:
    """Reads a (2048, 2048) mask as RunParallel (3545 to 3598) and RunPrefill (3697 to 3781) do."""
    width = tiling.block_size
    alone = queries == 1 and not tiling.prefill
    few = 1 < queries <= 16 and not tiling.prefill
    bias_QL = torch.zeros(queries, keys, dtype=mask.dtype)
    first, end = keys - queries, 0
    for tile in tiling.tiles(queries, keys):
        for block, left in enumerate(range(0, keys, width)):
            columns = min(width, keys - left)
            row, column = tile.start, left
            if keys > MASK_LENGTH:  # the triangle is the same along its diagonal
                row, column = min(max(tile.start - left, 0), MASK_LENGTH - 1), 0
                pair = block - block % 2  # two blocks are loaded together
                if alone and first - pair * width >= MASK_LENGTH:
                    continue
                if few and pair + 1 < first // width:
                    continue
            # Of two blocks the first is loaded with a whole row's length, if for one query (189).
            loaded = MASK_LENGTH if alone and block % 2 == 0 else _padded(columns)
            end = max(end, (row + len(tile) - 1) * MASK_LENGTH + column + loaded)
            read = mask[row : row + len(tile), column : column + columns]
            if not alone:
                read = _by_areas(read, rows=len(tile), above=tile.start - left)
            bias_QL[tile.start - first : tile.stop - first, left : left + columns] = read
    return CompressedBias(bias_QL, end)


def _by_areas(read: torch.Tensor, *, rows: int, above: int) -> torch.Tensor:
    """Areas of 8 rows and 16 columns: nothing below the diagonal, -60000 above it, else the mask's (66 to 105).

    The first row stands `above` places after the first column.
    """
    found = read.new_zeros(rows, read.shape[1])
    found[: read.shape[0]] = read  # the mask may end before the tile does: those areas are below the diagonal
    row_lo = (above + torch.arange(rows) // 8 * 8).unsqueeze(1)
    column_lo = torch.arange(read.shape[1]) // 16 * 16
    found = found.masked_fill(column_lo + 15 <= row_lo, 0.0)
    return found.masked_fill(column_lo > row_lo + 7, _ABOVE)


def attend_in_float16(
    query_QND: torch.Tensor,
    keys_LKD: torch.Tensor,
    values_LKD: torch.Tensor,
    *,
    scale: float,
    bias_QL: torch.Tensor | None = None,
) -> torch.Tensor:
    """(Q, N, D), rounded to float16 where the kernel rounds; its sums over blocks are one here.

    Raises by ATB-PRODUCT and ATB-SUMS where float16 overflows: a 310P saturates, and goes on.
    """
    groups = query_QND.shape[1] // keys_LKD.shape[1]
    keys_LND = keys_LKD.float().repeat_interleave(groups, dim=1)
    values_LND = values_LKD.float().repeat_interleave(groups, dim=1)
    products_NQL = torch.einsum("qnd,lnd->nql", query_QND.float(), keys_LND)
    _require_range(PRODUCT, products_NQL)
    scores_NQL = products_NQL.half() * torch.tensor(scale, dtype=torch.half)
    if bias_QL is not None:
        scores_NQL = scores_NQL + bias_QL
    weights_NQL = (scores_NQL - scores_NQL.amax(-1, keepdim=True)).float().exp()
    sums_NQ1 = weights_NQL.sum(-1, keepdim=True)
    weighted_NQD = torch.einsum("nql,lnd->nqd", weights_NQL.half().float(), values_LND)
    _require_range(SUMS, sums_NQ1)
    _require_range(SUMS, weighted_NQD)
    return (weighted_NQD.half() / sums_NQ1.half()).transpose(0, 1)


def _require_range(rule: Rule, values: torch.Tensor) -> None:
    largest = float(values.abs().max()) if values.numel() else 0.0
    rule.require(math.isnan(largest) or largest < _LARGEST + 16, f"{largest:,.0f}")


def _padded(count: int) -> int:
    return -(-count // 16) * 16
