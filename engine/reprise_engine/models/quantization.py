"""Which layers of a checkpoint are quantised, and how: the description that msmodelslim writes → a frozen plan.

    {"model_quant_type": "W8A8", "version": "1.0.0", …,
     "model.layers.0.self_attn.q_proj.weight": "W8A8", "model.layers.0.self_attn.q_proj.deq_scale": "W8A8", …,
     "model.layers.0.mlp.down_proj.weight": "FLOAT", …}

Each tensor of the weights has its type in there. Read as msmodelslim writes it (AscendV1 format, its
`save/ascendv1.py` and the older `complex_quantifier.py`) and as vllm-ascend understands it
(`quantization/modelslim_config.py`). What is not served is refused by name, never skipped. Free of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from reprise_engine.config import Quantization
from reprise_engine.errors import ConfigError, DamagedModel, UnsupportedModel
from reprise_engine.models.files import ModelFiles

Scheme = Literal["W8A8", "W8A8_DYNAMIC"]
"""Weights int8 by output channel, activations int8 with a scale of the layer (W8A8) or of each token (DYNAMIC)."""

DESCRIPTION_PATTERN = "quant_model_description*.json"
_FLOAT = "FLOAT"
_SERVED = "W8A8, W8A8_DYNAMIC, W8A8_MIX (as W8A8_DYNAMIC) and FLOAT"
# W8A8_MIX has the tensors of both: where prompts and answers are computed by one engine it is the dynamic one
# (vllm-ascend's w8a8_pdmix.py).
_SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {"W8A8": "W8A8", "W8A8_DYNAMIC": "W8A8_DYNAMIC", "W8A8_MIX": "W8A8_DYNAMIC"}
)
_STATIC = frozenset({"weight", "quant_bias", "input_scale", "input_offset", "deq_scale"})
_DYNAMIC = frozenset({"weight", "weight_scale"})
_REQUIRED: Mapping[Scheme, frozenset[str]] = MappingProxyType({"W8A8": _STATIC, "W8A8_DYNAMIC": _DYNAMIC})
KNOWN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "W8A8": _STATIC | {"weight_scale", "weight_offset"},
        "W8A8_DYNAMIC": _DYNAMIC | {"weight_offset"},
        "W8A8_MIX": _STATIC | _DYNAMIC | {"weight_offset"},
    }
)
# Of the whole model. `group_size` says nothing where scales are by channel, which is checked where they are read;
# `optional` names files that a model runs without.
_NEUTRAL = ("model_quant_type", "group_size", "optional")
NOT_SERVED: Mapping[str, str] = MappingProxyType(
    {
        "kv_cache_type": "a quantised KV cache",
        "kv_quant_type": "a quantised KV cache",
        "fa_quant_type": "quantised attention",
        "indexer_quant_type": "quantised attention",
        "reduce_quant_type": "quantised communication",
        "metadata": "what it describes (rotations of activations)",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPlan:
    """Layers by the name of their module; all other tensors stay what they are."""

    source: Path
    """The file that says so, for messages."""
    schemes: Mapping[str, Scheme]

    def summary(self) -> str:
        """Such as "84 layers W8A8, 2 layers W8A8_DYNAMIC"."""
        counts = sorted(Counter(self.schemes.values()).items())
        return ", ".join(f"{count} layers {scheme}" for scheme, count in counts) or "no layer quantised"


def read_quantization(files: ModelFiles, *, requested: Quantization | None) -> QuantizationPlan | None:
    """The plan of a checkpoint that is to be served quantised; None for all others.

    Raises ConfigError where `requested` and the files disagree: quantised weights are never served unasked.
    Raises UnsupportedModel or DamagedModel for a description that cannot be honoured.
    """
    found = _find_description(files)
    if found is None:
        if requested is not None:
            raise ConfigError(
                f"--quantization is {requested}, but {files.folder} has neither {DESCRIPTION_PATTERN} nor a "
                "quantization_config in its config.json: its weights were not written by msmodelslim. Leave the flag "
                "out, or name the folder with the quantised weights."
            )
        return None
    source, description = found
    if requested is None:
        if all(value == _FLOAT for key, value in description.items() if _is_tensor(key, value)):
            return None
        raise ConfigError(
            f"{source} says that the weights are quantised ({description.get('model_quant_type', 'type not told')}). "
            "Give --quantization ascend to serve them so, or name the folder of the float model."
        )
    return plan_of(description, source=source)


def _find_description(files: ModelFiles) -> tuple[Path, Mapping[str, Any]] | None:
    if files.gguf_file is not None:
        return None
    paths = sorted(files.folder.glob(DESCRIPTION_PATTERN))
    if len(paths) > 1:
        raise UnsupportedModel(
            f"{files.folder} has several descriptions of quantised weights ({', '.join(path.name for path in paths)}); "
            "leave the one of these weights there."
        )
    if paths:
        description = files.read_json(paths[0].name)
        assert description is not None
        return paths[0], description
    embedded = (files.read_json("config.json") or {}).get("quantization_config")
    # Whose method is named is another tool's; vllm-ascend tells them apart like this.
    if isinstance(embedded, dict) and not embedded.get("quant_method"):
        return files.folder / "config.json", embedded
    return None


def _is_tensor(key: str, value: object) -> bool:
    return isinstance(value, str) and "." in key


def plan_of(description: Mapping[str, Any], *, source: Path) -> QuantizationPlan:
    """Raises UnsupportedModel, naming key, value and what is served, or DamagedModel for what contradicts itself."""
    types: dict[str, dict[str, str]] = {}
    for key, value in description.items():
        if _is_tensor(key, value):
            layer, _, tensor = key.rpartition(".")
            if value != _FLOAT:
                _check_tensor(key, value, tensor, source)
                types.setdefault(layer, {})[tensor] = value
        else:
            _check_model_key(key, value, source)
    return QuantizationPlan(
        source=source,
        schemes=MappingProxyType({layer: _scheme_of(layer, tensors, source) for layer, tensors in types.items()}),
    )


def _check_tensor(key: str, value: str, tensor: str, source: Path) -> None:
    if value not in _SCHEMES:
        raise UnsupportedModel(f"{key} in {source} is {value}, which is not served. Served: {_SERVED}.")
    if tensor not in KNOWN[value]:
        raise UnsupportedModel(
            f"{key} in {source} is {value}, but a layer of that type is served without a tensor {tensor!r}. "
            f"Its tensors: {', '.join(sorted(KNOWN[value]))}."
        )


def _check_model_key(key: str, value: object, source: Path) -> None:
    if key == "version":
        if not isinstance(value, str) or value.split(".")[0] != "1":
            raise UnsupportedModel(f"version in {source} is {value!r}; version 1 of the format is read.")
    elif key in NOT_SERVED:
        if value and value != _FLOAT:
            raise UnsupportedModel(
                f"{key} in {source} is {value!r}, but {NOT_SERVED[key]} is not served. Quantise without it; layers "
                f"may be {_SERVED}."
            )
    elif key not in _NEUTRAL:
        raise UnsupportedModel(f"{key} in {source} is {value!r}, which is not known. Served layers: {_SERVED}.")


def _scheme_of(layer: str, tensors: Mapping[str, str], source: Path) -> Scheme:
    kinds = set(tensors.values())
    if len(kinds) > 1:
        raise DamagedModel(f"{source} gives the tensors of {layer} different types: {', '.join(sorted(kinds))}.")
    [kind] = kinds
    scheme = _SCHEMES[kind]
    missing = _REQUIRED[scheme] - tensors.keys()
    if missing:
        raise DamagedModel(
            f"{layer} in {source} is {kind}, but its {', '.join(sorted(missing))} is not listed. The description is "
            "incomplete or of other weights."
        )
    return scheme
