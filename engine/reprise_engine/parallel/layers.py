"""Makes a rank's instance of a model compute its part, and nothing else. No class is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reprise_engine.parallel.group import Group

_CUT_BY_INPUTS = ("o_proj", "down_proj", "experts")
"""Modules of a layer whose output is this rank's part of a sum."""
_HEAD = "lm_head"


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
    setattr(model, _HEAD, NoHead())


def connect_ranks(model: nn.Module, group: Group) -> None:
    """Has `model`, which holds this rank's weights, add up what the ranks compute. Mutates this instance only."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in _CUT_BY_INPUTS:
                setattr(parent, name, SummedOverRanks(child, group))
