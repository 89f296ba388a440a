"""What the engine must know of a model before it loads it, and the refusal of what it cannot serve."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from reprise_engine.errors import ConfigError, DamagedModel, UnsupportedModel
from reprise_engine.models.files import ModelFiles

logger = logging.getLogger(__name__)

# Architectures whose definition in transformers runs on packed tokens with our attention (equality-tested).
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
# Frequencies that do not depend on the batch or on the length: KV of the same tokens is the same everywhere.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a model. `max_positions` is the longest sequence, in tokens, that its positions cover.

    `expert_size` and `experts_per_token` are 0 for a dense model.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    expert_size: int
    experts_per_token: int
    vocab_size: int
    max_positions: int
    checkpoint_dtype: str | None
    config: PretrainedConfig

    def kv_bytes_per_token(self, *, bytes_per_element: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element

    def choose_max_model_len(self, requested: int | None) -> int:
        """`requested`, checked against the model's own limit, or that limit. Raises ConfigError."""
        if requested is None:
            return self.max_positions
        if requested < 1:
            raise ConfigError(f"--max-model-len is {requested}; it must be at least 1.")
        if requested > self.max_positions:
            raise ConfigError(
                f"--max-model-len is {requested}, but the model's positions end at {self.max_positions} "
                f"(max_position_embeddings and rope_scaling of its config.json). Lower --max-model-len."
            )
        return requested


def read_spec(files: ModelFiles, *, quantized: bool = False) -> ModelSpec:
    """Reads and checks the configuration; `quantized` says that `read_quantization` has a plan.

    Raises UnsupportedModel, naming what is not supported, or DamagedModel.
    """
    raw = files.read_json("config.json")
    if files.gguf_file is not None and raw is None:
        _check_gguf_architecture(files)
        config = _read_config(files)
        architecture = _architecture_of_gguf_config(config)
    elif raw is None:
        raise UnsupportedModel(f"{files.folder} has no config.json. Give a model folder in Hugging Face's layout.")
    else:
        architecture = _architecture_of(raw, files)
        config = _read_config(files)
    _check_positions(config)
    _check_attention(config, architecture)
    if not quantized and getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "quantization_config is set in the model's config.json; quantised checkpoints are supported as GGUF, or as "
            "msmodelslim writes them (--quantization ascend)."
        )
    return _spec_of(config, architecture)


def _read_config(files: ModelFiles) -> PretrainedConfig:
    gguf = {} if files.gguf_file is None or (files.folder / "config.json").is_file() else {"gguf_file": files.gguf_file}
    try:
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True, **gguf)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UnsupportedModel(f"The configuration in {files.folder} is not valid: {error}") from error
    assert isinstance(config, PretrainedConfig)
    return config


def _architecture_of(raw: dict[str, Any], files: ModelFiles) -> str:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise UnsupportedModel(
            f"`architectures` in {files.folder / 'config.json'} is {architectures!r}; it must name one architecture "
            f"out of {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    architecture = architectures[0]
    if architecture in SUPPORTED_ARCHITECTURES:
        return architecture
    multimodal = any(key in raw for key in ("vision_config", "audio_config", "thinker_config"))
    kind = "a multimodal model" if multimodal or "ForConditionalGeneration" in architecture else "an architecture"
    raise UnsupportedModel(
        f"{files.name} is {kind} ({architecture}) that is not supported. Supported, text only: "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _check_gguf_architecture(files: ModelFiles) -> None:
    from gguf import GGUFReader

    assert files.gguf_file is not None
    path = files.folder / files.gguf_file
    try:
        field = GGUFReader(path).get_field("general.architecture")
        name = None if field is None else field.contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DamagedModel(f"{path} cannot be read as a GGUF file: {error}") from error
    if name not in _GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"general.architecture of {path} is {name!r}, which is not supported. Supported as GGUF: "
            f"{', '.join(_GGUF_ARCHITECTURES)}."
        )


def _architecture_of_gguf_config(config: PretrainedConfig) -> str:
    architecture = _GGUF_ARCHITECTURES.get(config.model_type.replace("_", ""))
    if architecture is None:
        raise UnsupportedModel(f"The GGUF file was read as model type {config.model_type!r}, which is not supported.")
    return architecture


def _check_positions(config: PretrainedConfig) -> None:
    rope = _rope_parameters(config)
    if rope is None:
        return
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _STATIC_ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_scaling of the model's config.json has rope_type {rope_type!r}: its frequencies depend on the "
            f"length of the sequence, so the KV cache of a shared prefix would be wrong. Supported: "
            f"{', '.join(_STATIC_ROPE_TYPES)}."
        )


def _rope_parameters(config: PretrainedConfig) -> dict[str, Any] | None:
    rope = getattr(config, "rope_parameters", None)
    return rope if isinstance(rope, dict) else None


def _check_attention(config: PretrainedConfig, architecture: str) -> None:
    # Llama's definition does not pass a window to its attention, so one in its config would be silently dropped.
    if architecture == "LlamaForCausalLM" and getattr(config, "sliding_window", None) is not None:
        raise UnsupportedModel(
            f"sliding_window in config.json is {config.sliding_window}, which {architecture} does not honour."
        )
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel("is_causal of the model's config.json is false; only causal models can be served.")


def _spec_of(config: PretrainedConfig, architecture: str) -> ModelSpec:
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    dtype = getattr(config, "dtype", None)
    return ModelSpec(
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_dim if architecture == "OPTForCausalLM" else config.intermediate_size,
        expert_size=getattr(config, "moe_intermediate_size", 0) if "Moe" in architecture else 0,
        experts_per_token=getattr(config, "num_experts_per_tok", 0) if "Moe" in architecture else 0,
        vocab_size=config.vocab_size,
        max_positions=_max_positions(config),
        checkpoint_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        config=config,
    )


def _max_positions(config: PretrainedConfig) -> int:
    limit = int(config.max_position_embeddings)
    rope = _rope_parameters(config) or {}
    factor = float(rope.get("factor", 1.0))
    match rope.get("rope_type", "default"):
        case "yarn":
            original = int(rope.get("original_max_position_embeddings") or limit)
            return max(limit, int(original * factor))
        case "linear":
            return int(limit * factor)
        case _:  # llama3 states the extended limit itself
            return limit
