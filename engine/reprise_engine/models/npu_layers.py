"""The layers of the Qwen2, Qwen3, Qwen3-MoE and Llama definitions on the fused operators of an NPU.

They share one shape: norm, attention, norm, MLP, each half added to the residual stream. A layer of OUR loaded instance
is replaced by one that computes the same with fewer launches; no class is touched. What an operator does not take stays
plain torch. Between layers the stream and what is still to be added to it travel apart (`Residual`), so that each
addition is done by the norm that follows it.

`torch_npu` must have been imported: it registers `torch.ops.npu`. Sources: op-plugin docs torch_npu-npu_rms_norm.md,
-npu_add_rms_norm.md, -npu_swiglu.md, -npu_rotary_mul.md, -apply_rotary_pos_emb.md (517f2e7), vllm-ascend ops/ and
_310p/ops/ (182b75e). A 310P has no compiled npu_rotary_mul, but npu_apply_rotary_pos_emb (ops-transformer 3a280bc,
posembedding/*/op_host/config/ascend310p), which vllm-ascend uses there too.

Axis letters: T tokens, D hidden size, M inner size of the MLP, N query heads, K key heads, H head size, E experts,
A experts a token goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from reprise_engine.attention.bridge import PagedContext
from reprise_engine.attention.npu_chip import Chip
from reprise_engine.models.npu_saturation import SaturationWatch

_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer")
_MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")
_EXPERTS = ("Qwen3MoeExperts",)
_ROTARIES = ("LlamaRotaryEmbedding", "Qwen2RotaryEmbedding", "Qwen3RotaryEmbedding", "Qwen3MoeRotaryEmbedding")
_RMS_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")

_SHORTEST_ROW_310P = 32
"""Bytes of the last axis of npu_rms_norm on a 310P."""
_SWIGLU_ALIGNMENT_310P = 64
"""Elements of a row of npu_swiglu on a 310P: half of it, in float16, is a multiple of 64 bytes (CANN ops-nn,
activation/swi_glu/op_host/swi_glu_tiling.cpp, `CalcTiling`). vllm-ascend looks for 32 elements, which is too few."""
_ROWS_310P = 16
"""Of a product of matrices: of another number of rows a 310P converts the weights to another layout at every call
(ops-nn e5c3fa9, matmul/common/op_host/op_api/matmul_util.cpp, `IsFormatSupportNd`, `SetMmSupportFormat`)."""
_ROTARY_HEAD_310P = 128
"""Newer ones take 64 too (ops-transformer, posembedding/apply_rotary_pos_emb/op_host, before and after c29bc10)."""
_LARGEST_ROTARY_HEAD = 895
_MOST_ROTARY_HEADS = 999


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream (1, T, D) before `delta`, the output of the half layer before, is added to it."""

    stream: torch.Tensor
    delta: torch.Tensor


class NPURotary(nn.Module):
    """Cosines and sines of positions, of the static kinds. Some versions of transformers compute angles as products of
    float32 matrices, which a 310P has in float16 only (ops-nn, docs/aclnnBatchMatMul.md, e5c3fa9): wrong by whole
    turns."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        inv_freq = rotary.inv_freq
        assert isinstance(inv_freq, torch.Tensor)
        self.inv_freq = nn.Buffer(inv_freq.float(), persistent=False)
        self.attention_scaling = float(_number(rotary, "attention_scaling"))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (1, T) positions each (1, T, H), in x's dtype."""
        half_1TH = position_ids[..., None].float() * self.inv_freq
        angle_1TH = torch.cat((half_1TH, half_1TH), dim=-1)
        cosine_1TH, sine_1TH = angle_1TH.cos() * self.attention_scaling, angle_1TH.sin() * self.attention_scaling
        return cosine_1TH.to(x.dtype), sine_1TH.to(x.dtype)


class NPURMSNorm(nn.Module):
    """The root-mean-square norm of the Llama and Qwen definitions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        weight, eps = norm.weight, norm.variance_epsilon
        assert isinstance(weight, nn.Parameter)
        assert isinstance(eps, float)
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor | Residual) -> torch.Tensor:
        """Of a `Residual` the norm of its sum: the stream ends here."""
        if isinstance(x, Residual):
            return self.add(x)[0]
        normed: torch.Tensor
        normed, _ = torch.ops.npu.npu_rms_norm(x, self.weight, self.variance_epsilon)
        return normed

    def add(self, x: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum)."""
        normed: torch.Tensor
        stream: torch.Tensor
        normed, _, stream = torch.ops.npu.npu_add_rms_norm(x.delta, x.stream, self.weight, self.variance_epsilon)
        return normed, stream


class NPUMLP(nn.Module):
    """A gated MLP with silu: gate and up as one product, then one operator for silu(gate) * up."""

    def __init__(self, mlp: nn.Module, *, chip: Chip) -> None:
        super().__init__()
        gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        assert gate_up is not None
        self.gate_up_proj = gate_up
        self.down_proj = mlp.down_proj
        self._fused = _can_swiglu(gate_up.out_features, chip)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(_swiglu(self.gate_up_proj(x), fused=self._fused))  # type: ignore[operator]
        return out


class NPUExperts(nn.Module):
    """The experts of a mixture, (E, 2·M, D) gate and up, (E, D, M) down, one after the other, as transformers' eager
    ones: the sum of a token does not depend on which others share the batch."""

    def __init__(self, experts: nn.Module, *, chip: Chip) -> None:
        super().__init__()
        gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
        assert isinstance(gate_up_proj, nn.Parameter)
        assert isinstance(down_proj, nn.Parameter)
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._fused = _can_swiglu(gate_up_proj.shape[1], chip)

    def forward(self, x_TD: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        out_TD = torch.zeros_like(x_TD)
        experts_TA = expert_TA.cpu()  # one wait for the device a layer, not one an expert
        for expert in torch.unique(experts_TA).tolist():
            token, choice = (index.to(x_TD.device) for index in torch.where(experts_TA == expert))
            hidden = _swiglu(F.linear(x_TD[token], self.gate_up_proj[expert]), fused=self._fused)
            out = F.linear(hidden, self.down_proj[expert])
            out_TD.index_add_(0, token, (out * weight_TA[token, choice, None]).to(out_TD.dtype))
        return out_TD


class NPUHead(nn.Module):
    """The output embedding on rows that are padded as the stream is."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(_padded(x_TD[None])[0], self.weight, self.bias)[: x_TD.shape[0]]


class NPUDecoderLayer(nn.Module):
    """Takes what transformers' model passes to its layers, and a `Residual` for the states from the second layer on,
    which is also what it returns."""

    def __init__(
        self, layer: nn.Module, *, chip: Chip, rotates_by_operator: bool, pads: bool, watch: SaturationWatch | None
    ) -> None:
        """`pads`: the stream gets rows of zeros behind it, up to a multiple of `_ROWS_310P`; attention knows no more
        rows than there are positions."""
        super().__init__()
        self._pads, self._watch = pads, watch
        attention, mlp = layer.self_attn, layer.mlp
        input_norm, post_attention_norm = layer.input_layernorm, layer.post_attention_layernorm
        assert isinstance(attention, nn.Module)
        assert isinstance(mlp, nn.Module)
        assert isinstance(input_norm, NPURMSNorm)
        assert isinstance(post_attention_norm, NPURMSNorm)
        self.input_layernorm, self.post_attention_layernorm, self.mlp = input_norm, post_attention_norm, mlp
        self.self_attn = NPUSelfAttention(attention, chip=chip, rotates_by_operator=rotates_by_operator)

    def forward(
        self,
        hidden_states: torch.Tensor | Residual,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedContext,
        **_kwargs: Any,
    ) -> Residual:
        if isinstance(hidden_states, Residual):
            normed, stream = self.input_layernorm.add(hidden_states)
        else:  # the first layer
            stream = _padded(hidden_states) if self._pads else hidden_states
            normed = self.input_layernorm(stream)
            if self._watch is not None:
                self._watch.begin_step()
        attended = self.self_attn(normed, position_embeddings, paged)
        normed, stream = self.post_attention_layernorm.add(Residual(stream, attended))
        if self._watch is not None:
            self._watch.look(stream, decodes=len(paged.metadata.query_lens) == position_embeddings[0].shape[1])
        return Residual(stream, self.mlp(normed))


class NPUSelfAttention(nn.Module):
    """Queries, keys and values by one product, where these are plain linear layers; norms of heads; rotation; the
    backend."""

    def __init__(self, attention: nn.Module, *, chip: Chip, rotates_by_operator: bool) -> None:
        super().__init__()
        self.head_dim = int(_number(attention, "head_dim"))
        self.scaling = float(_number(attention, "scaling"))
        self.layer_idx = int(_number(attention, "layer_idx"))
        window = getattr(attention, "sliding_window", None)
        assert window is None or isinstance(window, int)
        self.sliding_window = window
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.o_proj = attention.o_proj
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv_proj = _joined(*projections)
        if self.qkv_proj is None:
            self.q_proj, self.k_proj, self.v_proj = projections
            self._sizes = []
        else:
            self._sizes = [int(_number(projection, "out_features")) for projection in projections]
        can_rotate = rotates_by_operator and _can_rotate(self.head_dim, chip)
        self._rotates_both = can_rotate and chip is Chip.P310
        self._rotates_by_operator = can_rotate and chip is not Chip.P310

    def forward(
        self, x_1TD: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], paged: PagedContext
    ) -> torch.Tensor:
        if self.qkv_proj is None:
            projected = [projection(x_1TD[0]) for projection in (self.q_proj, self.k_proj, self.v_proj)]  # type: ignore[operator]
        else:
            projected = list(self.qkv_proj(x_1TD[0]).split(self._sizes, dim=-1))
        rows = position_embeddings[0].shape[1]  # without those that pad
        q_TNH, k_TKH, v_TKH = (part[:rows].unflatten(-1, (-1, self.head_dim)) for part in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        cosine_1TH, sine_1TH = position_embeddings
        if self._rotates_both:
            q_1TNH, k_1TKH = torch.ops.npu.npu_apply_rotary_pos_emb(
                q_TNH.contiguous().unsqueeze(0),
                k_TKH.contiguous().unsqueeze(0),
                cosine_1TH.unsqueeze(2),
                sine_1TH.unsqueeze(2),
            )
            q_TNH, k_TKH = q_1TNH[0], k_1TKH[0]
        else:
            q_TNH, k_TKH = (self._rotate(heads, cosine_1TH, sine_1TH) for heads in (q_TNH, k_TKH))
        out_TNH = paged.backend.forward(
            q_TNH,
            k_TKH,
            v_TKH,
            paged.kv[self.layer_idx],
            paged.metadata,
            scale=self.scaling,
            sliding_window=self.sliding_window,
        )
        attended_1TD = out_TNH.flatten(1).unsqueeze(0)
        if rows < x_1TD.shape[1]:
            attended_1TD = _padded(attended_1TD)
        out: torch.Tensor = self.o_proj(attended_1TD)  # type: ignore[operator]
        return out

    def _rotate(self, x_TNH: torch.Tensor, cosine_1TH: torch.Tensor, sine_1TH: torch.Tensor) -> torch.Tensor:
        if self._rotates_by_operator and x_TNH.shape[1] <= _MOST_ROTARY_HEADS:
            # Layout BSND with a batch of one.
            rotated: torch.Tensor = torch.ops.npu.npu_rotary_mul(
                x_TNH.contiguous().unsqueeze(0), cosine_1TH.unsqueeze(2), sine_1TH.unsqueeze(2), "half"
            )
            return rotated[0]
        first, second = x_TNH.chunk(2, dim=-1)
        return x_TNH * cosine_1TH[0].unsqueeze(1) + torch.cat((-second, first), dim=-1) * sine_1TH[0].unsqueeze(1)


def fuse_npu_layers(model: nn.Module, *, chip: Chip) -> None:
    """Puts `model`, on its device and ready, on the fused operators. Mutates this instance only.

    Weights of joined products are copied once, a layer at a time; the originals are given up.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child, chip)
            if replacement is not None:
                setattr(parent, name, replacement)
    # Cosines beyond 1, as YaRN scales them, are outside what the operator is specified for.
    scalings = [
        _number(module, "attention_scaling") for module in model.modules() if hasattr(module, "attention_scaling")
    ]
    rotates_by_operator = all(scaling <= 1.0 for scaling in scalings)
    layers = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if type(child).__name__ in _LAYERS
    ]
    # All or none: what passes between two of these layers is nothing that another could take.
    if all(
        isinstance(norm, NPURMSNorm)
        for *_, layer in layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ):
        watch = SaturationWatch() if chip is Chip.P310 else None
        # A mixture would ask experts what to make of padding.
        pads = chip is Chip.P310 and not any(isinstance(module, NPUExperts) for module in model.modules())
        for parent, name, layer in layers:
            made = NPUDecoderLayer(layer, chip=chip, rotates_by_operator=rotates_by_operator, pads=pads, watch=watch)
            setattr(parent, name, made)
    head = getattr(model, "lm_head", None)
    if chip is Chip.P310 and type(head) is nn.Linear:
        model.lm_head = NPUHead(head)


def _padded(x_1TD: torch.Tensor) -> torch.Tensor:
    """With rows of zeros, up to a multiple of `_ROWS_310P`."""
    _, rows, size = x_1TD.shape
    if rows % _ROWS_310P == 0:
        return x_1TD
    padded = x_1TD.new_zeros((1, -(-rows // _ROWS_310P) * _ROWS_310P, size))
    padded[:, :rows].copy_(x_1TD)
    return padded


def _replacement(module: nn.Module, chip: Chip) -> nn.Module | None:
    kind = type(module).__name__
    if kind in _RMS_NORMS:
        return NPURMSNorm(module) if _can_norm(module.weight, chip) else None
    if kind in _MLPS and _is_silu(module.act_fn) and _are_plain(module.gate_proj, module.up_proj):
        return NPUMLP(module, chip=chip)
    if kind in _ROTARIES:
        return NPURotary(module)
    if kind in _EXPERTS and _is_silu(module.act_fn):
        return NPUExperts(module, chip=chip)
    return None


def _joined(*layers: object) -> nn.Linear | None:
    """One linear layer with the outputs of all side by side, or None where they are not plain linear layers, all with
    a bias or none (a quantised one, or a part of one on another NPU, computes something of its own)."""
    if not _are_plain(*layers):
        return None
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    first = linears[0]
    outputs = sum(layer.out_features for layer in linears)
    joined = nn.Linear(first.in_features, outputs, bias=first.bias is not None, device="meta", dtype=first.weight.dtype)
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in linears]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias for layer in linears]), requires_grad=False)
    return joined


def _are_plain(*layers: object) -> bool:
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    return len(linears) == len(layers) and len({layer.bias is None for layer in linears}) == 1


def _swiglu(gate_up: torch.Tensor, *, fused: bool) -> torch.Tensor:
    if fused:
        out: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up, dim=-1)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _can_norm(weight: object, chip: Chip) -> bool:
    assert isinstance(weight, torch.Tensor)
    return chip is not Chip.P310 or (weight.nbytes >= _SHORTEST_ROW_310P and weight.dtype != torch.bfloat16)


def _can_swiglu(row: int, chip: Chip) -> bool:
    return chip is not Chip.P310 or row % _SWIGLU_ALIGNMENT_310P == 0


def _can_rotate(head_dim: int, chip: Chip) -> bool:
    if chip is Chip.P310:
        return head_dim == _ROTARY_HEAD_310P
    return head_dim % 2 == 0 and head_dim <= _LARGEST_ROTARY_HEAD


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _number(module: object, name: str) -> int | float:
    value: Any = getattr(module, name)
    assert isinstance(value, int | float)
    return value
