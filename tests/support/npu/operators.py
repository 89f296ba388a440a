"""Which operator is which function, and the context in which torch has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.npu import (
    activation,
    atb,
    atb_rules,
    atb_splitfuse,
    attention_update,
    fused_attention,
    fused_attention_rules,
    kv_cache,
    machine,
    norms,
    quantization,
    rotary,
)
from tests.support.npu.machine import Atb, Chip, Machine
from tests.support.npu.rules import Rule
from tests.support.npu.schemas import all_schemas

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_scatter_pa_kv_cache": kv_cache.scatter_pa_kv_cache,
    "npu_gather_pa_kv_cache": kv_cache.gather_pa_kv_cache,
    "npu_fused_infer_attention_score": fused_attention.fused_infer_attention_score,
    "npu_attention_update": attention_update.attention_update,
    "npu_rms_norm": norms.rms_norm,
    "npu_add_rms_norm": norms.add_rms_norm,
    "npu_swiglu": activation.swiglu,
    "npu_rotary_mul": rotary.rotary_mul,
    "npu_apply_rotary_pos_emb": rotary.apply_rotary_pos_emb,
    "npu_quantize": quantization.quantize,
    "npu_dynamic_quant": quantization.dynamic_quant,
    "npu_quant_matmul": quantization.quant_matmul,
    "npu_format_cast": machine.format_cast,
    "get_npu_format": machine.get_format,
    "empty_with_format": machine.empty_with_format,
    "_npu_reshape_and_cache": atb.reshape_and_cache,
    "_npu_paged_attention": atb.paged_attention,
    "_npu_paged_attention_splitfuse": atb_splitfuse.paged_attention_splitfuse,
    "_npu_paged_attention_splitfuse_v2": atb_splitfuse.paged_attention_splitfuse_v2,
}
_MODULES = (
    fused_attention_rules,
    attention_update,
    kv_cache,
    atb_rules,
    norms,
    activation,
    rotary,
    quantization,
    machine,
)
# Has no tensor among its arguments, so no tensor's kernel can be found for it.
_WITHOUT_TENSORS = ("empty_with_format",)


def all_rules() -> tuple[Rule, ...]:
    return tuple(rule for module in _MODULES for rule in module.RULES)


@contextmanager
def npu_operators(
    chip: str | Chip = Chip.ASCEND_910B, *, also_float32: bool = False, atb: Atb = Atb.CANN_9_1
) -> Iterator[Machine]:
    """Defines `torch.ops.npu.*` and `torch.ops.atb.*` for tensors of the CPU while the context lasts.

    Raises WheelMissing where the vendor's wheel cannot be had, and RuntimeError where torch_npu itself is loaded.
    """
    emulated = Machine(Chip(chip), also_float32, atb=atb)
    libraries: dict[str, Any] = {}
    schemas = all_schemas()
    try:
        for schema in schemas:
            if schema.namespace not in libraries:
                library: Any = torch.library.Library(schema.namespace, "DEF")  # type: ignore[no-untyped-call]
                libraries[schema.namespace] = library
            library = libraries[schema.namespace]
            library.define(schema.text)
            key = "CompositeExplicitAutograd" if schema.name in _WITHOUT_TENSORS else "CPU"
            library.impl(schema.name, functools.partial(IMPLEMENTATIONS[schema.name], emulated), key)
        yield emulated
    finally:
        for library in libraries.values():
            library._destroy()
