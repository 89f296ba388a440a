"""The emulated operators are the vendor's: its schemas, out of its wheel, and the shapes of its meta functions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import half
from tests.support.npu import NotSupportedByNpu, npu_operators
from tests.support.npu.fused_attention_call import Arguments
from tests.support.npu.meta import meta_functions
from tests.support.npu.operators import IMPLEMENTATIONS
from tests.support.npu.schemas import (
    ATB_LIBRARY,
    ATB_SCHEMAS,
    NPU_NAMES,
    TORCH_NPU_LIBRARY,
    Schema,
    all_schemas,
    atb_evidence,
    find_schemas,
    npu_schemas,
)
from tests.support.npu.wheel import read

pytestmark = pytest.mark.usefixtures("npu_wheel")


def test_the_kept_schemas_are_the_wheels() -> None:
    assert [schema.text for schema in npu_schemas()] == find_schemas(read(TORCH_NPU_LIBRARY), NPU_NAMES)


def test_the_wheel_bears_out_atbs_schemas_and_would_show_a_wrong_one() -> None:
    library = read(ATB_LIBRARY)
    assert [atb_evidence(schema, library) for schema in ATB_SCHEMAS] == [[], [], [], []]
    reshape = ATB_SCHEMAS[0]
    renamed = Schema(reshape.namespace, reshape.text.replace("slot_indices", "slot_mapping"), reshape.source)
    assert atb_evidence(renamed, library) == ["'ensor slot_mappi' is not among the library's constants"]


def test_a_schema_that_is_not_there_once_is_an_error() -> None:
    with pytest.raises(LookupError, match="has 0 schemas of npu_nothing, not one"):
        find_schemas(b"\0npu_something(Tensor x) -> Tensor\0", ["npu_nothing"])


@pytest.mark.parametrize("schema", [pytest.param(name, id=name) for name in IMPLEMENTATIONS])
def test_an_implementation_has_its_schemas_arguments(schema: str) -> None:
    """torch leaves out arguments that equal the schema's default, so ours must be the same."""
    (parsed,) = (found.parsed() for found in all_schemas() if found.name == schema)
    function = Arguments if schema == "npu_fused_infer_attention_score" else IMPLEMENTATIONS[schema]
    ours = [p for p in inspect.signature(function).parameters.values() if p.name != "machine"]
    assert len(ours) == len(parsed.arguments)
    for own, theirs in zip(ours, parsed.arguments, strict=True):
        default = inspect.Parameter.empty if not theirs.has_default_value() else theirs.default_value
        assert own.default == default, theirs.name
        if theirs.kwarg_only:
            assert own.name == theirs.name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kv_lens": [20, 130]}, id="unknown keyword"),
        pytest.param({"actual_seq_lengths_kv": torch.tensor([20.0, 130.0])}, id="float lengths"),
        pytest.param({"actual_seq_lengths_kv": 130}, id="one length, not a list"),
        pytest.param({"num_heads": 4.0}, id="float for int"),
        pytest.param({"input_layout": None}, id="None for str"),
        pytest.param({"atten_mask": [[0]]}, id="list for tensor"),
    ],
)
def test_a_call_that_the_schema_does_not_allow_fails(npu: Any, changes: dict[str, Any]) -> None:
    with pytest.raises((RuntimeError, TypeError), match="npu_fused_infer_attention_score"):
        npu.npu_fused_infer_attention_score(**calls.paged(**changes))


def test_a_keyword_only_argument_is_not_taken_by_position(npu: Any) -> None:
    call = calls.scatter()
    cache_mode = call.pop("cache_mode")
    with pytest.raises(RuntimeError, match="npu_scatter_pa_kv_cache"):
        npu.npu_scatter_pa_kv_cache(*call.values(), None, None, None, cache_mode)


def test_the_operators_are_gone_after_the_context() -> None:
    with npu_operators():
        assert hasattr(torch.ops.npu, "npu_swiglu")
    assert not hasattr(torch.ops.npu, "npu_swiglu")
    assert not hasattr(torch.ops.atb, "_npu_paged_attention")
    with npu_operators("310P"), pytest.raises(NotSupportedByNpu, match="FIA-CHIP"):
        torch.ops.npu.npu_fused_infer_attention_score(**calls.paged())


def test_what_is_not_emulated_says_so(npu: Any) -> None:
    with pytest.raises(NotImplementedError, match="not emulated: query_rope, input_layout TND"):
        npu.npu_fused_infer_attention_score(**calls.paged(query_rope=half(4, 4, 64)))


META_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("npu_fused_infer_attention_score", calls.paged(softmax_lse_flag=lse)) for lse in (False, True)),
    ("npu_fused_infer_attention_score", calls.unpaged(softmax_lse_flag=True)),
    *(
        ("npu_fused_infer_attention_score", calls.rows(layout, softmax_lse_flag=True))
        for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND")
    ),
    *(("npu_attention_update", calls.update(update_type=kind)) for kind in (0, 1)),
    ("npu_rms_norm", calls.norm()),
    ("npu_rms_norm", calls.norm(input=half(2, 3, 4, 8), gamma=half(4, 8))),
    ("npu_add_rms_norm", calls.add_norm()),
    ("npu_swiglu", {"input": half(3, 4, 64)}),
    ("npu_swiglu", {"input": half(3, 4, 64), "dim": 1}),
    ("npu_rotary_mul", calls.rotary()),
    ("npu_quantize", calls.quantize()),
    ("npu_quantize", calls.quantize(scales=torch.ones(1), zero_points=None, dtype=torch.quint8, div_mode=True)),
    ("npu_dynamic_quant", {"input": half(3, 4, 32)}),
    ("npu_quant_matmul", calls.matmul()),
    ("npu_quant_matmul", calls.matmul(x1=torch.ones(2, 5, 32, dtype=torch.int8), output_dtype=torch.float16)),
    ("npu_quant_matmul", calls.matmul(pertoken_scale=None, output_dtype=None)),
    ("npu_scatter_pa_kv_cache", calls.scatter()),
)
# Renamed between schema and meta function, where the call is by position.
_POSITIONAL = ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_quantize", "npu_dynamic_quant")


@pytest.mark.parametrize(("name", "call"), META_CALLS)
def test_shapes_and_dtypes_are_the_meta_functions(npu: Any, name: str, call: dict[str, Any]) -> None:
    ours = getattr(npu, name)(**call)
    call = {key: _on_meta(value) for key, value in call.items()}
    first = [call.pop("input")] if name in _POSITIONAL else []
    if name in ("npu_rotary_mul",):
        first += [call.pop("r1"), call.pop("r2")]
    theirs = meta_functions()[name](*first, **call)
    assert _shapes(ours) == _shapes(theirs)


def _on_meta(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [_on_meta(part) for part in value]
    if isinstance(value, torch.dtype):
        return {torch.float16: 5, torch.bfloat16: 15, torch.qint8: 12, torch.quint8: 13}[value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _shapes(results: Any) -> list[tuple[list[int], torch.dtype]]:
    if results is None:
        return []
    tensors = [results] if isinstance(results, torch.Tensor) else list(results)
    return [(list(tensor.shape), tensor.dtype) for tensor in tensors]
