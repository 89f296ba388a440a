"""Makes a rank's instance of a model compute its part, and nothing else. No class is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reprise_engine.models.npu_w8a8 import NPUW8A8StaticLinear
from reprise_engine.models.w8a8 import W8A8StaticLinear
from reprise_engine.parallel.group import Group
from reprise_engine.parallel.shard import CUT_BY_INPUTS

HEAD = "lm_head"
_SUMMED = (*CUT_BY_INPUTS, "experts")
"""Modules of a layer whose output is this rank's part of a sum."""


class SummedOverRanks(nn.Module):
    """A module whose outputs add up to the whole's."""

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner = inner
        self._group = group

    def forward(self, *arguments: Any) -> torch.Tensor:
        return self._group.sum(self.inner(*arguments))


class NoHead(nn.Module):
    """In the place of the output embedding on ranks that only help the first to its hidden states."""

    def forward(self, _hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("logits are computed by rank 0 alone")


def drop_head(model: nn.Module) -> None:
    """Gives up the output embedding. Mutates this instance only."""
    setattr(model, HEAD, NoHead())


def connect_ranks(model: nn.Module, group: Group) -> None:
    """Has `model`, which holds this rank's weights, add up what the ranks compute. Mutates this instance only.

    Raises LostRank: of a quantised model the ranks share out biases here.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name not in _SUMMED:
                continue
            if isinstance(child, W8A8StaticLinear | NPUW8A8StaticLinear):
                _share_bias(child.quant_bias, group)
            if isinstance(child, W8A8StaticLinear):
                child.sum_over(group.sum)
            else:
                setattr(parent, name, SummedOverRanks(child, group))


def _share_bias(quant_bias_O: nn.Parameter, group: Group) -> None:
    """Ranks from 1 on hold what belongs to their own inputs (quantized_weights.py); the first, which has read what
    belongs to all, keeps the rest. The shares add up to what was read, in integers."""
    is_first = group.place.rank == 0
    others_O = group.sum(torch.zeros_like(quant_bias_O) if is_first else quant_bias_O.detach().clone())
    if is_first:
        quant_bias_O.data -= others_O
