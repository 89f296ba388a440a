"""The layers of the Qwen2, Qwen3, Qwen3-MoE and Llama definitions on our CPU kernels.

They share one shape: norm, attention, norm, gated MLP, each half added to the residual stream. A layer of OUR loaded
instance is replaced by one that holds the same modules (so names and weights stay as they are) and computes the same
in one call; no class is touched. Other definitions (OPT) get their linear layers replaced only.

Axis letters: T tokens, D hidden size, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reprise_engine.attention.bridge import PagedContext
from reprise_engine.attention.native import NativeAttention
from reprise_engine.models.upcast import UpcastExperts, UpcastLinear
from reprise_engine.native import Kernels, LinearWeights
from reprise_engine.native.layer import DescribedLayer, LayerWeights

_GATED_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer")
_GATED_MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")
_QK_NORMS = ("q_norm", "k_norm")
_RMS_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")


class _Native(nn.Module):
    """Holds a description of its weights' memory, made at the first use, since taking it costs more than a call."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._described: tuple[Any, ...] = ()

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


class FusedDecoderLayer(_Native):
    """Takes what transformers' model passes to its layers and returns the hidden states (1, T, D)."""

    def __init__(self, layer: nn.Module, kernels: Kernels) -> None:
        super().__init__(kernels)
        attention, mlp = layer.self_attn, layer.mlp
        input_norm, post_attention_norm = layer.input_layernorm, layer.post_attention_layernorm
        assert isinstance(attention, nn.Module)
        assert isinstance(mlp, nn.Module)
        assert isinstance(input_norm, NativeRMSNorm)
        assert isinstance(post_attention_norm, NativeRMSNorm)
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = input_norm, post_attention_norm
        self.layer_idx = int(_number(self.self_attn, "layer_idx"))

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedContext,
        **_kwargs: Any,
    ) -> torch.Tensor:
        # A copy at the first layer only: what the embedding gave out is not ours to write to.
        residual = hidden_states.clone() if self.layer_idx == 0 else hidden_states
        if not self._described:
            self._described = (DescribedLayer(self._weights()),)
        [layer] = self._described
        cosine_1TH, sine_1TH = position_embeddings
        assert isinstance(paged.backend, NativeAttention)
        step = paged.backend.describe(paged.metadata, cosine_1TH[0], sine_1TH[0], scratch=layer.scratch)
        kv = paged.kv[self.layer_idx]
        self._kernels.decoder_layer(layer, step, kv.key_BSKH, kv.value_BSKH, residual[0])
        if not layer.inner:
            residual += self.mlp(self.post_attention_layernorm(residual))
        return residual

    def _weights(self) -> LayerWeights:
        attention, mlp = self.self_attn, self.mlp
        gated = _is_gated_mlp(mlp)
        norms: list[nn.Module] = [self.input_layernorm, self.post_attention_layernorm]
        norms += [norm for name in _QK_NORMS if (norm := getattr(attention, name, None)) is not None]
        eps = {float(_number(norm, "variance_epsilon")) for norm in norms}
        assert len(eps) == 1, f"a layer's norms have different epsilons: {eps}"
        weights = [_parameter(norm) for norm in norms]
        window = getattr(attention, "sliding_window", None)
        assert window is None or isinstance(window, int)
        return LayerWeights(
            input_norm=weights[0],
            post_attention_norm=weights[1],
            query_norm=weights[2] if len(weights) == 4 else None,
            key_norm=weights[3] if len(weights) == 4 else None,
            eps=eps.pop(),
            qkv=_weights_of(attention.q_proj, attention.k_proj, attention.v_proj),
            output=_weights_of(attention.o_proj),
            gate_up=_weights_of(mlp.gate_proj, mlp.up_proj) if gated else None,
            down=_weights_of(mlp.down_proj) if gated else None,
            head_dim=int(_number(attention, "head_dim")),
            scale=float(_number(attention, "scaling")),
            sliding_window=window,
        )


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


def fuse_layers(model: nn.Module, kernels: Kernels, *, whole_layers: bool = True) -> None:
    """Puts `model`, float32 or widened by `upcast_activations`, on the kernels. Mutates this instance only.

    Without `whole_layers` its linear layers, norms and experts only: a rank has to wait for others within a layer.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child, kernels)
            if replacement is not None:
                setattr(parent, name, replacement)
    if not whole_layers:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _GATED_LAYERS and _is_native(child):
                setattr(parent, name, FusedDecoderLayer(child, kernels))


def _is_native(layer: Any) -> bool:
    """Whether all that the kernels compute of `layer` is on them; a quantised layer (w8a8.py) stays as it is."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    if _is_gated_mlp(mlp):
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for name in _QK_NORMS if (norm := getattr(attention, name, None)) is not None]
    return all(isinstance(part, NativeLinear) for part in linears) and all(
        isinstance(norm, NativeRMSNorm) for norm in norms
    )


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
