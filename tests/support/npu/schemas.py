"""The vendor's operator schemas, read out of its wheel and parsed by torch's own parser.

Operators of torch_npu: whole strings in `torch_npu/lib/libtorch_npu.so`.

Operators of ATB (310P): `libop_plugin_atb.so` keeps them only in pieces, since the compiler turned long literals into
sixteen-byte constants. Their text is taken from op-plugin's source instead, and `atb_evidence` holds it to the wheel:
each piece of the text must be among those constants, and the C++ types in the symbol's name must be the schema's.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.npu.rules import OP_PLUGIN, WHEEL, Source
from tests.support.npu.wheel import FOLDER, WHEEL_SHA256, read

TORCH_NPU_LIBRARY = "torch_npu/lib/libtorch_npu.so"
ATB_LIBRARY = "torch_npu/lib/libop_plugin_atb.so"

NPU_NAMES = (
    "npu_scatter_pa_kv_cache",
    "npu_gather_pa_kv_cache",
    "npu_fused_infer_attention_score",
    "npu_attention_update",
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_apply_rotary_pos_emb",
    "npu_quant_matmul",
    "npu_dynamic_quant",
    "npu_quantize",
    "npu_format_cast",
    "get_npu_format",
    "empty_with_format",
)


@dataclass(frozen=True)
class Schema:
    namespace: str
    """`npu` or `atb`: the ATB operators are `torch.ops.atb.*`, which torch_npu re-exports as `torch_npu._npu_*`."""
    text: str
    """As registered: name, arguments and results."""
    source: Source

    @property
    def name(self) -> str:
        return self.text.split("(", 1)[0]

    def parsed(self) -> torch.FunctionSchema:
        return torch._C.parse_schema(f"{self.namespace}::{self.text}")


ATB_SCHEMAS = (
    Schema(
        "atb",
        "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()",
        OP_PLUGIN.at("op_plugin/ops/atb/ReshapeAndCachAtb.cpp", 60),
    ),
    Schema(
        "atb",
        "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
        "float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, *,Tensor? workspace=None) -> ()",
        OP_PLUGIN.at("op_plugin/ops/atb/PagedAttentionAtb.cpp", 106),
    ),
    Schema(
        "atb",
        "_npu_paged_attention_splitfuse(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
        "Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, int num_heads, float scale_value, "
        "Tensor(a!) out) -> ()",
        OP_PLUGIN.at("op_plugin/ops/atb/PagedAttentionSplitfuse.cpp", 68),
    ),
    Schema(
        "atb",
        "_npu_paged_attention_splitfuse_v2(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
        "Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, int num_heads, float scale_value, *, "
        "int ? mask_type = 5, Tensor(a!) out) -> ()",
        OP_PLUGIN.at("op_plugin/ops/atb/PagedAttentionSplitfuseV2.cpp", 97),
    ),
)

# How the C++ argument types of a registered function are mangled after `at::Tensor const&` has been seen once.
_MANGLED_ARGUMENTS = {
    "_npu_reshape_and_cache": "RKN2at6TensorES3_RS1_S4_S3_",
    "_npu_paged_attention": "RKN2at6TensorES3_S3_lldS3_S3_RS1_RKSt8optionalIS1_E",
    "_npu_paged_attention_splitfuse": "RKN2at6TensorES3_S3_S3_S3_S3_S3_lldRS1_",
    "_npu_paged_attention_splitfuse_v2": "RKN2at6TensorES3_S3_S3_S3_S3_S3_lldSt8optionalIlERS1_",
}


@functools.cache
def npu_schemas() -> tuple[Schema, ...]:
    """The schemas of NPU_NAMES, out of the wheel; raises WheelMissing. Read once, then kept beside the wheel."""
    kept = FOLDER / f"schemas-{WHEEL_SHA256[:16]}.json"
    if kept.is_file():
        texts = json.loads(kept.read_text())
        if set(texts) >= set(NPU_NAMES):
            return _schemas([texts[name] for name in NPU_NAMES])
    texts = dict(zip(NPU_NAMES, find_schemas(read(TORCH_NPU_LIBRARY), NPU_NAMES), strict=True))
    with tempfile.NamedTemporaryFile("w", dir=FOLDER, delete=False) as file:
        json.dump(texts, file, indent=1)
    os.replace(file.name, kept)
    return _schemas([texts[name] for name in NPU_NAMES])


def all_schemas() -> tuple[Schema, ...]:
    return (*npu_schemas(), *ATB_SCHEMAS)


def find_schemas(library: bytes, names: Sequence[str]) -> list[str]:
    """The registration string of each name; raises LookupError unless there is exactly one."""
    texts = []
    for name in names:
        pattern = rb"\x00(" + re.escape(name.encode()) + rb"\([^\x00]*\) -> [^\x00]*)\x00"
        found = sorted({match.group(1).decode() for match in re.finditer(pattern, library)})
        if len(found) != 1:
            raise LookupError(f"{TORCH_NPU_LIBRARY} of torch-npu has {len(found)} schemas of {name}, not one")
        texts.append(found[0])
    return texts


def atb_evidence(schema: Schema, library: bytes) -> list[str]:
    """What speaks against `schema` in the wheel's ATB library: nothing, if the schema is the vendor's."""
    objections = []
    text = schema.text.encode()
    for start in range(0, len(text) - 15, 16):
        piece = text[start : start + 16]
        if piece not in library:
            objections.append(f"{piece.decode()!r} is not among the library's constants")
    name = schema.name
    symbol = f"_ZN3atb{len(name)}{name}E{_MANGLED_ARGUMENTS[name]}".encode()
    if symbol not in library:
        objections.append(f"no function {symbol.decode()}")
    return objections


def _schemas(texts: Sequence[str]) -> tuple[Schema, ...]:
    return tuple(Schema("npu", text, WHEEL.at(TORCH_NPU_LIBRARY)) for text in texts)
