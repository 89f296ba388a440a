"""Quantises a float model into the layout of msmodelslim's AscendV1 format, for tests and measurements.

    python -m tests.support.w8a8 SOURCE TARGET [--dynamic PATTERN …] [--float PATTERN …]

The formulas are the writer's own (`msmodelslim/core/quant_service/modelslim_v1/save/ascendv1.py`): symmetric weights by
output channel; activations by layer with an offset, from the least and the greatest value of a calibration (`static`),
or by token (`dynamic`). Nothing is done about outliers, which the real tool smooths before: figures are pessimistic.

Axis letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from reprise_engine.models.quiet import without_progress_bars

DESCRIPTION = "quant_model_description.json"
WEIGHTS = "quant_model_weights.safetensors"
_COPIED = ("*.json", "*.jinja", "*.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What came into a layer: the least value and the greatest."""

    least: float
    greatest: float

    def scale_and_offset(self) -> tuple[float, float]:
        least, greatest = min(self.least, 0.0), max(self.greatest, 0.0)
        scale = max(greatest - least, 1e-6) / 255
        return scale, float(round(-128 - least / scale))


def quantize_weight(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 (O, I), scale (O,))."""
    scale_O = (weight_OI.float().abs().amax(1) / 127).clamp(min=1e-8)
    return (weight_OI.float() / scale_O[:, None]).round().clamp(-128, 127).to(torch.int8), scale_O


def static_tensors(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, seen: Range, *, is_bf16: bool
) -> dict[str, torch.Tensor]:
    """`on_w8a8_static`: without weight_scale, and deq_scale as int64 where the model is not bfloat16."""
    quantized_OI, weight_scale_O = quantize_weight(weight_OI)
    scale, offset = seen.scale_and_offset()
    deq_scale_O = torch.tensor(scale) * weight_scale_O
    bias = torch.zeros(len(weight_OI)) if bias_O is None else bias_O.float()
    correction_O = quantized_OI.float().sum(1) * offset
    return {
        "weight": quantized_OI,
        "quant_bias": torch.round(bias / deq_scale_O - correction_O).to(torch.int32),
        "input_scale": torch.tensor([scale]),
        "input_offset": torch.tensor([offset]),
        "deq_scale": deq_scale_O if is_bf16 else deq_scale_O.view(torch.int32).to(torch.int64),
    }


def dynamic_tensors(weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """`on_w8a8_dynamic_per_channel`."""
    quantized_OI, scale_O = quantize_weight(weight_OI)
    return {
        "weight": quantized_OI,
        "weight_scale": scale_O[:, None],
        "weight_offset": torch.zeros_like(scale_O)[:, None],
    }


def quantize_model(
    source: Path,
    target: Path,
    *,
    calibration: Sequence[Sequence[int]] = (),
    dynamic: Sequence[str] = (),
    floats: Sequence[str] = ("lm_head",),
    gguf_file: str | None = None,
) -> Path:
    """Writes the model of `source` to `target`, W8A8 but for the layers (patterns of module names) that are given;
    `calibration` is sequences of tokens. Returns `target`."""
    options: dict[str, Any] = {"dtype": "auto"}
    if gguf_file is not None:
        options = {"dtype": torch.bfloat16, "gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    with without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    model.eval()
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    seen = _calibrate(model, linears, calibration)
    tensors: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    is_bf16 = model.dtype == torch.bfloat16
    for name, parameter in _parameters(model).items():
        layer, _, leaf = name.rpartition(".")
        is_expert = ".experts." in layer
        if leaf != "weight" or (layer not in linears and not is_expert) or _matches(layer, floats):
            # In the exporter a bias goes with its layer, as float32; the value is the same.
            tensors[name], types[name] = parameter, "FLOAT"
            continue
        if is_expert or _matches(layer, dynamic):
            kind, made = "W8A8_DYNAMIC", dynamic_tensors(parameter)
        else:
            bias = linears[layer].bias
            kind, made = "W8A8", static_tensors(parameter, bias, seen[layer], is_bf16=is_bf16)
        for tensor, value in made.items():
            tensors[f"{layer}.{tensor}"], types[f"{layer}.{tensor}"] = value, kind
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, target / WEIGHTS)
    _write_json(target / DESCRIPTION, describe(types))
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, target)
    if gguf_file is not None:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(target)
    return target


def describe(types: Mapping[str, str]) -> dict[str, Any]:
    """The description, with the keys that stand for the whole model."""
    kinds = ("W8A8", "W8A8_DYNAMIC", "FLOAT")  # the first that there is, as QUANT_TYPE_PRIORITY has it
    whole = next(kind for kind in kinds if kind in types.values())
    return {**types, "version": "1.0.0", "model_quant_type": whole, "metadata": {}, "group_size": 0, "optional": {}}


def edit_description(folder: Path, **changes: Any) -> None:
    """Sets keys of the description; None removes one. Dots are written as they are: pass `**{"a.b": …}`."""
    path = folder / DESCRIPTION
    content = json.loads(path.read_text()) | changes
    _write_json(path, {key: value for key, value in content.items() if value is not None})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the names a checkpoint has: experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for index, matrix in enumerate(parameter):
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    found[f"{prefix}.{index}.{part}.weight"] = half
        elif leaf == "down_proj":
            found |= {f"{prefix}.{index}.down_proj.weight": matrix for index, matrix in enumerate(parameter)}
        else:
            found[name] = parameter
    return found


def _calibrate(
    model: nn.Module, linears: Mapping[str, nn.Module], calibration: Sequence[Sequence[int]]
) -> dict[str, Range]:
    seen: dict[str, Range] = {}

    def watch(name: str) -> Any:
        def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            old = seen.get(name, Range(least=0.0, greatest=0.0))
            [x] = inputs
            seen[name] = Range(least=min(old.least, x.min().item()), greatest=max(old.greatest, x.max().item()))

        return note

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in linears.items()]
    with torch.inference_mode():
        for token_ids in calibration:
            model(torch.tensor([list(token_ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--gguf", help="a file of SOURCE")
    parser.add_argument("--dynamic", nargs="*", default=[], metavar="PATTERN", help="layers that are W8A8_DYNAMIC")
    parser.add_argument("--float", nargs="*", default=["lm_head"], metavar="PATTERN", help="layers that stay (lm_head)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="text, in pieces of 512 tokens")
    parsed = parser.parse_args()
    calibration: list[list[int]] = []
    if parsed.calibration is not None:
        tokenizer = AutoTokenizer.from_pretrained(parsed.source)
        ids = tokenizer(parsed.calibration.read_text(encoding="utf-8")).input_ids
        calibration = [ids[start : start + 512] for start in range(0, len(ids), 512)]
    quantize_model(
        parsed.source,
        parsed.target,
        calibration=calibration,
        dynamic=parsed.dynamic,
        floats=parsed.float,
        gguf_file=parsed.gguf,
    )


if __name__ == "__main__":
    main()
