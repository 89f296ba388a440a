"""bfloat16 on a CPU: weights stay bfloat16, activations and sums are float32, whatever the number of rows.

The modules of OUR loaded instance are replaced; no class is touched. Matrices are widened a tile at a time, so the
tile stays in the processor's cache and memory is read at two bytes a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# Elements of a float32 tile: 1 MiB, about one core's L2 cache.
_TILE_ELEMENTS = 256 * 1024


def _widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., I) times weight (O, I) in bfloat16, transposed; float32 arithmetic. Returns (..., O)."""
    rows = x.reshape(-1, weight.shape[1])
    tile = max(1, _TILE_ELEMENTS // weight.shape[1])
    if tile >= weight.shape[0]:
        out = F.linear(rows, weight.float())
    else:
        out = rows.new_empty((rows.shape[0], weight.shape[0]))
        for start in range(0, weight.shape[0], tile):
            out[:, start : start + tile] = F.linear(rows, weight[start : start + tile].float())
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


class UpcastLinear(nn.Module):
    """nn.Linear with a bfloat16 weight and float32 input, output, bias and sums."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _widened_linear(x, self.weight, self.bias)


class UpcastEmbedding(nn.Module):
    """nn.Embedding with a bfloat16 table (shared with a tied head) and float32 output."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight).float()


class UpcastExperts(nn.Module):
    """The experts of a mixture with bfloat16 matrices: (E, 2·M, D) gate and up, (E, D, M) down; float32 arithmetic.

    Replaces the `experts` module of transformers' Qwen3-MoE block and takes the same arguments.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
        act_fn = experts.act_fn
        assert isinstance(gate_up_proj, nn.Parameter)
        assert isinstance(down_proj, nn.Parameter)
        assert isinstance(act_fn, nn.Module)
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn

    def forward(self, x_TD: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        out_TD = torch.zeros_like(x_TD)
        for expert in torch.unique(expert_TA).tolist():
            token, choice = torch.where(expert_TA == expert)
            gate, up = _widened_linear(x_TD[token], self.gate_up_proj[expert], None).chunk(2, dim=-1)
            hidden = _widened_linear(self.act_fn(gate) * up, self.down_proj[expert], None)
            out_TD.index_add_(0, token, hidden * weight_TA[token, choice, None])
        return out_TD


def upcast_activations(model: nn.Module) -> None:
    """Rewires a bfloat16 model so that it computes in float32. Large matrices keep bfloat16, the rest is widened.

    Mutates this instance only.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child)
            if replacement is not None:
                setattr(parent, name, replacement)
    kept = (UpcastLinear, UpcastEmbedding, UpcastExperts)
    for module in model.modules():
        if isinstance(module, kept):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()


def _replacement(module: nn.Module) -> nn.Module | None:
    # Exact types: a subclass may compute something else (OPT's positions add an offset).
    if type(module) is nn.Linear:
        return UpcastLinear(module)
    if type(module) is nn.Embedding:
        return UpcastEmbedding(module)
    if type(module).__name__ == "Qwen3MoeExperts":
        return UpcastExperts(module)
    return None
