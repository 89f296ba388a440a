"""Layers that quantise each row of activations by slices, in one process: what ranks compute of a dynamic layer that
is cut by its inputs. Every rank has a scale of its own slice, and their results are added in the order of the ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from reprise_engine.models.w8a8 import W8A8DynamicLinear, W8A8Experts, W8A8Layer


class SlicedLinear(W8A8Layer):
    def __init__(self, layer: W8A8DynamicLinear, size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            W8A8DynamicLinear(
                weight_OI=weight_OI.contiguous(),
                weight_scale_O=layer.weight_scale,
                bias_O=layer.bias if index == 0 else None,
            )
            for index, weight_OI in enumerate(layer.weight.chunk(size, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slices = x.chunk(len(self.parts), -1)
        return _sum([part(slice_) for part, slice_ in zip(self.parts, slices, strict=True)])


class SlicedExperts(W8A8Layer):
    """An expert's gate and up have some inner rows each, and its down the same inputs."""

    def __init__(self, experts: W8A8Experts, size: int) -> None:
        super().__init__()
        gate_EMD, up_EMD = experts.gate_up_proj.chunk(2, 1)
        gate_scale_EM, up_scale_EM = experts.gate_up_scale.chunk(2, 1)
        pieces = (gate_EMD, up_EMD, gate_scale_EM, up_scale_EM)
        self.parts = nn.ModuleList(
            W8A8Experts(
                gate_up_EOD=torch.cat([gate, up], 1),
                gate_up_scale_EO=torch.cat([gate_scale, up_scale], 1),
                down_EDM=down_EDM.contiguous(),
                down_scale_ED=experts.down_scale,
                act_fn=experts.act_fn,
            )
            for gate, up, gate_scale, up_scale, down_EDM in zip(
                *(piece.chunk(size, 1) for piece in pieces), experts.down_proj.chunk(size, 2), strict=True
            )
        )

    def forward(self, x_TD: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        return _sum([part(x_TD, expert_TA, weight_TA) for part in self.parts])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def quantise_by_slices(model: nn.Module, size: int) -> int:
    """Replaces the dynamic layers of `model` that `size` ranks would cut by their inputs. Returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, W8A8Experts):
                setattr(parent, name, SlicedExperts(child, size))
            elif isinstance(child, W8A8DynamicLinear) and name in ("o_proj", "down_proj"):
                setattr(parent, name, SlicedLinear(child, size))
            else:
                continue
            count += 1
    return count
