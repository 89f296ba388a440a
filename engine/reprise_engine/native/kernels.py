"""The kernels as functions of torch tensors on the CPU. Activations are float32 throughout; weights and KV are bfloat16
or float32.

Axis letters as in `attention/base.py`, and: I inputs and O outputs of a linear layer, D the size of a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from reprise_engine.native.layer import DescribedLayer, DescribedStep, SharedPrefixes

_STORE, _ADD, _SWIGLU = 0, 1, 2
# Rows of one piece of work in attention.cpp: the query heads of one key head must fit.
_MAX_GROUP = 128


class _Part(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("outputs", c_long))


class LinearWeights:
    """The matrices (O, I), and biases (O,) or None, of one or more linear layers that share their input.

    Dense, of one dtype, bfloat16 or float32; biases are float32. Nothing is copied: the tensors must stay where they
    are, and are kept alive.
    """

    __slots__ = ("inputs", "is_bf16", "num_parts", "outputs", "parts", "tensors")

    def __init__(self, *layers: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        first = layers[0][0]
        for weight, bias in layers:
            if weight.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != first.dtype:
                raise ValueError(f"weights are {weight.dtype} and {first.dtype}; all must be bfloat16 or all float32")
            if weight.dim() != 2 or weight.shape[1] != first.shape[1] or not weight.is_contiguous():
                raise ValueError(
                    f"weights {tuple(weight.shape)} and {tuple(first.shape)} must be dense with equal inputs"
                )
            if bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1]):
                raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; it must be float32 ({weight.shape[0]},)")
        self.tensors = layers
        self.inputs = first.shape[1]
        self.outputs = tuple(weight.shape[0] for weight, _ in layers)
        self.is_bf16 = int(first.dtype == torch.bfloat16)
        self.num_parts = len(layers)
        self.parts = (_Part * len(layers))(
            *(_Part(w.data_ptr(), None if b is None else b.data_ptr(), w.shape[0]) for w, b in layers)
        )


class Kernels:
    """One level of the library. Every function runs on torch's number of threads and gives up the GIL."""

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level

        def function(name: str, *arguments: type[Any]) -> Any:
            found = getattr(library, f"reprise_{name}_{level}")
            found.argtypes, found.restype = list(arguments), None
            return found

        p, n, i, f = c_void_p, c_long, c_int, c_float
        self._linear = function("linear", p, n, n, n, p, i, i, i, p, n, i)
        self._rms_norm = function("rms_norm", p, p, f, n, n, p, i)
        self._rotary = function("rotary", p, n, n, n, n, n, p, p, f, p, p, n, i)
        self._write_kv = function("write_kv", p, n, n, p, n, n, n, p, i, i)
        self._attention = function("attention", p, n, n, p, p, i, n, n, n, n, p, n, p, p, n, f, n, p, n, p, p, i)
        self._layer = function("layer", p, p, p, p, i, p, p, i)

    def linear(self, x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
        """x (..., I) → (..., sum of O): each layer's product and bias, side by side."""
        rows = _rows(x, weights.inputs)
        out = torch.empty((rows.shape[0], sum(weights.outputs)), dtype=torch.float32)
        self._run_linear(rows, weights, _STORE, out)
        return out.view(*x.shape[:-1], out.shape[1])

    def add_linear(self, x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
        """Adds the product and bias for x (..., I) to `out` (..., O), dense, in place."""
        rows = _rows(x, weights.inputs)
        if out.shape != (*x.shape[:-1], sum(weights.outputs)) or not out.is_contiguous() or out.dtype != torch.float32:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; dense float32 {tuple(x.shape[:-1])} rows needed")
        self._run_linear(rows, weights, _ADD, out.view(rows.shape[0], -1))

    def swiglu(self, x: torch.Tensor, gate_up: LinearWeights) -> torch.Tensor:
        """x (..., I) → (..., O): silu(gate) * up of two layers of equal size."""
        if gate_up.num_parts != 2 or gate_up.outputs[0] != gate_up.outputs[1]:
            raise ValueError(f"swiglu takes two layers of equal size, not {gate_up.outputs}")
        rows = _rows(x, gate_up.inputs)
        out = torch.empty((rows.shape[0], gate_up.outputs[0]), dtype=torch.float32)
        self._run_linear(rows, gate_up, _SWIGLU, out)
        return out.view(*x.shape[:-1], out.shape[1])

    def _run_linear(self, rows: torch.Tensor, weights: LinearWeights, epilogue: int, out: torch.Tensor) -> None:
        self._linear(
            rows.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            weights.inputs,
            weights.parts,
            weights.num_parts,
            weights.is_bf16,
            epilogue,
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x (..., D) → weight * x / sqrt(mean of squares + eps), row by row."""
        size = x.shape[-1]
        if x.dtype != torch.float32 or weight.dtype != torch.float32 or weight.shape != (size,):
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}")
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // size
        self._rms_norm(x.data_ptr(), weight.data_ptr(), eps, rows, size, out.data_ptr(), torch.get_num_threads())
        return out

    def rotary(
        self,
        rows: torch.Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Norms (where weights (H,) are given) and rotates the N query and K key heads that `rows` (T, …) begin with,
        in place. `cosine`, `sine` are (T, rotated part of a head)."""
        num_rows, rotary_dim = cosine.shape
        if rows.shape[0] != num_rows or rows.shape[1] < (num_heads + num_kv_heads) * head_dim or rows.stride(1) != 1:
            raise ValueError(f"rows are {tuple(rows.shape)} for {num_rows} positions and {num_heads} heads")
        cosine, sine = cosine.contiguous(), sine.contiguous()
        self._rotary(
            rows.data_ptr(),
            num_rows,
            rows.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            eps,
            cosine.data_ptr(),
            sine.data_ptr(),
            rotary_dim,
            torch.get_num_threads(),
        )

    def write_kv(self, x_TKH: torch.Tensor, slot_mapping_T: torch.Tensor, pool_BSKH: torch.Tensor) -> None:
        """Writes each token's heads to its slot, rounded to the pool's dtype."""
        tokens, heads, size = x_TKH.shape
        self._write_kv(
            x_TKH.data_ptr(),
            x_TKH.stride(0),
            x_TKH.stride(1),
            slot_mapping_T.data_ptr(),
            tokens,
            heads,
            size,
            pool_BSKH.data_ptr(),
            pool_BSKH.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )

    def attention(
        self,
        q_TNH: torch.Tensor,
        key_BSKH: torch.Tensor,
        value_BSKH: torch.Tensor,
        *,
        block_table_RM: torch.Tensor,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        scale: float,
        sliding_window: int | None,
        shared: SharedPrefixes | None = None,
    ) -> torch.Tensor:
        """Causal attention over the pool, which holds the new tokens already. Returns out_TNH, dense.

        Keys of `shared` prefixes are read once for all their requests; with a window they are read by each.
        """
        _, num_heads, head_dim = q_TNH.shape
        _, block_size, num_kv_heads, _ = key_BSKH.shape
        if num_heads // num_kv_heads > _MAX_GROUP:
            raise ValueError(f"{num_heads} query heads on {num_kv_heads} key heads; at most {_MAX_GROUP} may share one")
        out_TNH = torch.empty(q_TNH.shape, dtype=torch.float32)
        lengths = ctypes.c_int64 * len(query_lens)
        self._attention(
            q_TNH.data_ptr(),
            q_TNH.stride(0),
            q_TNH.stride(1),
            key_BSKH.data_ptr(),
            value_BSKH.data_ptr(),
            key_BSKH.dtype == torch.bfloat16,
            block_size,
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            block_table_RM.data_ptr(),
            block_table_RM.stride(0),
            lengths(*query_lens),
            lengths(*kv_lens),
            len(query_lens),
            scale,
            sliding_window or 0,
            None if shared is None else shared.prefixes,
            0 if shared is None or sliding_window else shared.count,
            None if shared is None else shared.members,
            out_TNH.data_ptr(),
            torch.get_num_threads(),
        )
        return out_TNH

    def decoder_layer(
        self,
        layer: DescribedLayer,
        step: DescribedStep,
        key_BSKH: torch.Tensor,
        value_BSKH: torch.Tensor,
        residual_TD: torch.Tensor,
    ) -> None:
        """Writes the layer's KV and adds its attention, and its MLP where it has a gated one, to `residual_TD`, dense
        float32, in place."""
        if residual_TD.shape != (step.tokens, layer.hidden) or not residual_TD.is_contiguous():
            raise ValueError(
                f"the residual is {tuple(residual_TD.shape)}; dense ({step.tokens}, {layer.hidden}) needed"
            )
        if residual_TD.dtype != torch.float32 or step.scratch.numel() < step.tokens * layer.scratch:
            raise ValueError(f"the residual is {residual_TD.dtype}, and there are {step.scratch.numel()} of scratch")
        if key_BSKH.shape[2] != layer.num_kv_heads:
            raise ValueError(f"the pool is {tuple(key_BSKH.shape)} for {layer.num_kv_heads} key heads")
        self._layer(
            layer.pointer,
            step.pointer,
            key_BSKH.data_ptr(),
            value_BSKH.data_ptr(),
            key_BSKH.dtype == torch.bfloat16,
            residual_TD.data_ptr(),
            step.scratch.data_ptr(),
            torch.get_num_threads(),
        )


def _rows(x: torch.Tensor, inputs: int) -> torch.Tensor:
    if x.dtype != torch.float32 or x.shape[-1] != inputs:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; float32 rows of {inputs} are needed")
    rows = x.reshape(-1, inputs)
    return rows if rows.stride(1) == 1 else rows.contiguous()
