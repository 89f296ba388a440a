"""The description of quantised weights → which layers are quantised, and how; what is not served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reprise_engine.errors import ConfigError, DamagedModel, UnsupportedModel
from reprise_engine.models.files import ModelFiles
from reprise_engine.models.quantization import plan_of, read_quantization

SOURCE = Path("/models/m/quant_model_description.json")
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
STATIC = dict.fromkeys(
    (f"{Q}.{t}" for t in ("weight", "quant_bias", "input_scale", "input_offset", "deq_scale")), "W8A8"
)
DYNAMIC = dict.fromkeys((f"{DOWN}.{tensor}" for tensor in ("weight", "weight_scale", "weight_offset")), "W8A8_DYNAMIC")
FLOATS = {"model.norm.weight": "FLOAT", "lm_head.weight": "FLOAT", f"{Q}.bias": "FLOAT"}
WHOLE: dict[str, Any] = {
    "model_quant_type": "W8A8",
    "version": "1.0.0",
    "group_size": 0,
    "metadata": {},
    "optional": {},
}
DESCRIPTION = {**STATIC, **DYNAMIC, **FLOATS, **WHOLE}


def test_layers_by_their_type_and_the_rest_as_it_is() -> None:
    plan = plan_of(DESCRIPTION, source=SOURCE)
    assert dict(plan.schemes) == {Q: "W8A8", DOWN: "W8A8_DYNAMIC"}
    assert plan.summary() == "1 layers W8A8, 1 layers W8A8_DYNAMIC"


def test_a_static_layer_of_the_older_writer_has_its_weight_scales_too() -> None:
    older = {**STATIC, f"{Q}.weight_scale": "W8A8", f"{Q}.weight_offset": "W8A8", "model_quant_type": "W8A8"}
    assert dict(plan_of(older, source=SOURCE).schemes) == {Q: "W8A8"}


def test_a_mixed_layer_is_served_as_the_dynamic_one() -> None:
    tensors = ("weight", "quant_bias", "input_scale", "input_offset", "deq_scale", "weight_scale", "weight_offset")
    mixed = {f"{Q}.{tensor}": "W8A8_MIX" for tensor in tensors}
    assert dict(plan_of(mixed, source=SOURCE).schemes) == {Q: "W8A8_DYNAMIC"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{DOWN}.weight": "W4A8_DYNAMIC"}, (f"{DOWN}.weight", "W4A8_DYNAMIC")),
        ({f"{DOWN}.weight": "W4A4_DYNAMIC"}, ("W4A4_DYNAMIC",)),
        ({f"{DOWN}.weight": "W8A16"}, ("W8A16",)),
        ({f"{DOWN}.weight": "W8A8S"}, ("W8A8S",)),
        ({f"{DOWN}.weight": "W8A8_FLATQUANT_DYNAMIC"}, ("W8A8_FLATQUANT_DYNAMIC",)),
        ({"model.layers.0.self_attn.k_proj.kv_cache_scale": "C8"}, ("k_proj.kv_cache_scale", "C8")),
        ({"model.layers.0.self_attn.quant_type": "K_INT8_DYNAMIC"}, ("self_attn.quant_type", "K_INT8_DYNAMIC")),
        ({f"{DOWN}.clip_ratio": "W8A8_DYNAMIC"}, (f"{DOWN}.clip_ratio", "clip_ratio")),
        ({"kv_cache_type": "C8"}, ("kv_cache_type", "'C8'", "KV cache")),
        ({"kv_quant_type": "KV8"}, ("kv_quant_type", "'KV8'")),
        ({"fa_quant_type": "FAKQuant"}, ("fa_quant_type", "'FAKQuant'")),
        ({"reduce_quant_type": "per_channel"}, ("reduce_quant_type", "'per_channel'")),
        ({"metadata": {"quarot": {"max_tp_size": 4}}}, ("metadata", "quarot")),
        ({"version": "2.0.0"}, ("version", "'2.0.0'")),
        ({"new_quant_type": "yes"}, ("new_quant_type", "'yes'")),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModel) as error:
        plan_of({**DESCRIPTION, **changes}, source=SOURCE)
    for word in (*words, str(SOURCE)):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (
            {**DESCRIPTION, f"{DOWN}.weight_scale": "W8A8"},
            f"gives the tensors of {DOWN} different types: W8A8, W8A8_DYNAMIC",
        ),
        (
            {k: v for k, v in DESCRIPTION.items() if k != f"{Q}.deq_scale"},
            f"{Q} in {SOURCE} is W8A8, but its deq_scale",
        ),
        ({k: v for k, v in DESCRIPTION.items() if k != f"{DOWN}.weight"}, "its weight is not listed"),
        (
            {**DESCRIPTION, "model.norm.module.weight": "W8A8"},
            f"model.norm.module in {SOURCE} is W8A8, but its deq_scale",
        ),
    ],
)
def test_a_description_that_contradicts_itself_is_damaged(description: dict[str, Any], words: str) -> None:
    with pytest.raises(DamagedModel) as error:
        plan_of(description, source=SOURCE)
    assert words in str(error.value)


# --- asked for, or not


def folder_of(folder: Path, *, config: dict[str, Any] | None = None, **descriptions: Any) -> ModelFiles:
    (folder / "config.json").write_text(json.dumps(config or {}))
    for name, content in descriptions.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelFiles(name="m", folder=folder, weights="safetensors")


@pytest.mark.parametrize("name", ["quant_model_description", "quant_model_description_w8a8"])
def test_quantised_weights_are_never_served_unasked(name: str, tmp_path: Path) -> None:
    files = folder_of(tmp_path, **{name: DESCRIPTION})
    with pytest.raises(ConfigError) as error:
        read_quantization(files, requested=None)
    for word in (f"{name}.json", "(W8A8)", "--quantization ascend"):
        assert word in str(error.value)
    plan = read_quantization(files, requested="ascend")
    assert plan is not None
    assert plan.source == tmp_path / f"{name}.json"


def test_a_description_in_the_configuration_counts_where_no_other_tool_is_named(tmp_path: Path) -> None:
    files = folder_of(tmp_path, config={"quantization_config": DESCRIPTION})
    plan = read_quantization(files, requested="ascend")
    assert plan is not None
    assert plan.schemes[Q] == "W8A8"
    with pytest.raises(ConfigError, match=r"config\.json says that the weights are quantised"):
        read_quantization(files, requested=None)
    other = folder_of(tmp_path, config={"quantization_config": {"quant_method": "fp8"}})
    assert read_quantization(other, requested=None) is None  # read_spec refuses it
    with pytest.raises(ConfigError, match="not written by msmodelslim"):
        read_quantization(other, requested="ascend")


def test_the_flag_on_float_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization is ascend, but .* Leave the flag out"):
        read_quantization(folder_of(tmp_path), requested="ascend")
    gguf = ModelFiles(name="m", folder=tmp_path, weights="gguf", gguf_file="m.gguf")
    with pytest.raises(ConfigError, match="--quantization is ascend"):
        read_quantization(gguf, requested="ascend")


def test_a_description_of_float_tensors_only_asks_for_nothing(tmp_path: Path) -> None:
    files = folder_of(tmp_path, quant_model_description={**FLOATS, **WHOLE})
    assert read_quantization(files, requested=None) is None


def test_two_descriptions_are_one_too_many(tmp_path: Path) -> None:
    files = folder_of(tmp_path, quant_model_description=DESCRIPTION, quant_model_description_w8a8=DESCRIPTION)
    with pytest.raises(UnsupportedModel, match="several descriptions"):
        read_quantization(files, requested="ascend")


def test_a_description_that_is_no_json_is_damaged(tmp_path: Path) -> None:
    files = folder_of(tmp_path)
    (tmp_path / "quant_model_description.json").write_text("{")
    with pytest.raises(DamagedModel, match=r"quant_model_description\.json"):
        read_quantization(files, requested="ascend")
