"""The layers of the Qwen2, Qwen3, Qwen3-MoE and Llama definitions on our CPU kernels.

They share one shape: norm, attention, norm, gated MLP, each half added to the residual stream. A layer of OUR loaded
instance is replaced by one that holds the same modules (so names and weights stay as they are) and computes the same
in seven calls; no class is touched. Other definitions (OPT) get their linear layers replaced only.

Axis letters: T tokens, D hidden size, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reprise_engine.attention.bridge import PagedContext
from reprise_engine.models.upcast import UpcastExperts, UpcastLinear
from reprise_engine.native import Kernels, LinearWeights

_GATED_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer")
_GATED_MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")
_RMS_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")


class _Native(nn.Module):
    """Holds descriptions of its weights' memory, made at the first use, since taking them costs more than a call."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._described: tuple[LinearWeights, ...] = ()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> _Native:
        # `to`, `float` and the like end here: the weights move.
        self._described = ()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self


class NativeLinear(_Native):
    """A linear layer (weight bfloat16 or float32) with float32 input, output, bias and sums."""

    def __init__(self, linear: nn.Linear | UpcastLinear, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._described:
            self._described = (LinearWeights((self.weight, self.bias)),)
        return self._kernels.linear(x, self._described[0])


class NativeRMSNorm(nn.Module):
    """The root-mean-square norm of the Llama and Qwen definitions."""

    def __init__(self, norm: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        weight, eps = norm.weight, norm.variance_epsilon
        assert isinstance(weight, nn.Parameter)
        assert isinstance(eps, float)
        self.weight = weight
        self.variance_epsilon = eps
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self.weight, self.variance_epsilon)


class FusedGatedMLP(_Native):
    """down(silu(gate(x)) * up(x)) in two calls; the gate and up products never leave the processor's registers."""

    def __init__(self, mlp: nn.Module, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def add_to(self, residual_1TD: torch.Tensor, x_1TD: torch.Tensor) -> None:
        if not self._described:
            self._described = (_weights_of(self.gate_proj, self.up_proj), _weights_of(self.down_proj))
        gate_up, down = self._described
        self._kernels.add_linear(self._kernels.swiglu(x_1TD, gate_up), down, residual_1TD)


class FusedAttention(_Native):
    """Queries, keys and values from one product; norm and rotation in place; the output added to the residual."""

    def __init__(self, attention: nn.Module, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.q_norm: nn.Module | None = getattr(attention, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(attention, "k_norm", None)
        self.layer_idx = int(_number(attention, "layer_idx"))
        self.head_dim = int(_number(attention, "head_dim"))
        self.scaling = float(_number(attention, "scaling"))
        window = getattr(attention, "sliding_window", None)
        assert window is None or isinstance(window, int)
        self.sliding_window = window

    def add_to(
        self,
        residual_1TD: torch.Tensor,
        x_1TD: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedContext,
    ) -> None:
        if not self._described:
            self._described = (_weights_of(self.q_proj, self.k_proj, self.v_proj), _weights_of(self.o_proj))
        qkv, output = self._described
        rows = self._kernels.linear(x_1TD[0], qkv)
        num_heads, num_kv_heads = (outputs // self.head_dim for outputs in qkv.outputs[:2])
        cosine_1TH, sine_1TH = position_embeddings
        self._kernels.rotary(
            rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            cosine=cosine_1TH[0],
            sine=sine_1TH[0],
            query_norm=None if self.q_norm is None else _parameter(self.q_norm),
            key_norm=None if self.k_norm is None else _parameter(self.k_norm),
            eps=0.0 if self.q_norm is None else float(_number(self.q_norm, "variance_epsilon")),
        )
        heads = rows.view(rows.shape[0], -1, self.head_dim)
        q_TNH, k_TKH, v_TKH = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        out_TNH = paged.backend.forward(
            q_TNH,
            k_TKH,
            v_TKH,
            paged.kv[self.layer_idx],
            paged.metadata,
            scale=self.scaling,
            sliding_window=self.sliding_window,
        )
        self._kernels.add_linear(out_TNH.flatten(1).unsqueeze(0), output, residual_1TD)


class FusedDecoderLayer(nn.Module):
    """Takes what transformers' model passes to its layers and returns the hidden states (1, T, D)."""

    def __init__(self, layer: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        input_norm, post_attention_norm = layer.input_layernorm, layer.post_attention_layernorm
        assert isinstance(attention, nn.Module)
        assert isinstance(mlp, nn.Module)
        assert isinstance(input_norm, NativeRMSNorm)
        assert isinstance(post_attention_norm, NativeRMSNorm)
        self.self_attn = FusedAttention(attention, kernels)
        self.mlp = FusedGatedMLP(mlp, kernels) if _is_gated_mlp(mlp) else mlp
        self.input_layernorm = input_norm
        self.post_attention_layernorm = post_attention_norm

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedContext,
        **_kwargs: Any,
    ) -> torch.Tensor:
        # A copy at the first layer only: what the embedding gave out is not ours to write to.
        residual = hidden_states.clone() if self.self_attn.layer_idx == 0 else hidden_states
        self.self_attn.add_to(residual, self.input_layernorm(residual), position_embeddings, paged)
        normed = self.post_attention_layernorm(residual)
        if isinstance(self.mlp, FusedGatedMLP):
            self.mlp.add_to(residual, normed)
        else:
            residual += self.mlp(normed)
        return residual


class NativeExperts(nn.Module):
    """The experts of a mixture, (E, 2·M, D) gate and up, (E, D, M) down, on the kernels.

    Replaces the `experts` module of transformers' Qwen3-MoE block and takes the same arguments.
    """

    def __init__(self, experts: UpcastExperts, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self._kernels = kernels

    def forward(self, x_TD: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        out_TD = torch.zeros_like(x_TD)
        for expert in torch.unique(expert_TA).tolist():
            token, choice = torch.where(expert_TA == expert)
            gate, up = self.gate_up_proj[expert].chunk(2)
            hidden = self._kernels.swiglu(x_TD[token], LinearWeights((gate, None), (up, None)))
            out = self._kernels.linear(hidden, LinearWeights((self.down_proj[expert], None)))
            out_TD.index_add_(0, token, out * weight_TA[token, choice, None])
        return out_TD


def fuse_layers(model: nn.Module, kernels: Kernels) -> None:
    """Puts `model`, float32 or widened by `upcast_activations`, on the kernels. Mutates this instance only."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child, kernels)
            if replacement is not None:
                setattr(parent, name, replacement)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _GATED_LAYERS:
                setattr(parent, name, FusedDecoderLayer(child, kernels))


def _replacement(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    if type(module) in (nn.Linear, UpcastLinear):
        assert isinstance(module, nn.Linear | UpcastLinear)
        return NativeLinear(module, kernels)
    if type(module).__name__ in _RMS_NORMS:
        return NativeRMSNorm(module, kernels)
    if isinstance(module, UpcastExperts) and _is_silu(module.act_fn):
        return NativeExperts(module, kernels)
    return None


def _is_gated_mlp(mlp: nn.Module) -> bool:
    return type(mlp).__name__ in _GATED_MLPS and _is_silu(mlp.act_fn)


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _weights_of(*layers: nn.Module | torch.Tensor) -> LinearWeights:
    weights: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for layer in layers:
        assert isinstance(layer, NativeLinear)
        weights.append((layer.weight, layer.bias))
    return LinearWeights(*weights)


def _parameter(norm: nn.Module) -> torch.Tensor:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _number(module: nn.Module, name: str) -> int | float:
    value: Any = getattr(module, name)
    assert isinstance(value, int | float)
    return value
