"""From a model's name to a module that is ready to run on our attention."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from reprise_engine.attention.bridge import ATTENTION_NAME, register_paged_attention
from reprise_engine.attention.npu_chip import Chip, chip_of
from reprise_engine.attention.npu_limits import check_npu_length, check_npu_model
from reprise_engine.config import DType, ModelConfig
from reprise_engine.errors import ConfigError, DamagedModel, UnsupportedModel
from reprise_engine.messages import LoadProgress
from reprise_engine.models.files import ModelFiles, find_weights
from reprise_engine.models.fused import fuse_layers
from reprise_engine.models.npu_layers import fuse_npu_layers
from reprise_engine.models.npu_w8a8 import check_npu_plan, use_npu_operators
from reprise_engine.models.placement import place_weights
from reprise_engine.models.quantization import read_quantization
from reprise_engine.models.quantized_weights import load_quantized
from reprise_engine.models.quiet import without_progress_bars
from reprise_engine.models.spec import ModelSpec, read_spec
from reprise_engine.models.upcast import upcast_activations
from reprise_engine.native import Kernels
from reprise_engine.out_of_memory import memory_of
from reprise_engine.parallel.layers import drop_head
from reprise_engine.parallel.shard import Place, check_size, rank_spec
from reprise_engine.parallel.weights import rank_weights

logger = logging.getLogger(__name__)

Progress = Callable[[LoadProgress], None]

_UNREADABLE_WEIGHTS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    EOFError,
    pickle.UnpicklingError,
    SafetensorError,
)
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, in evaluation mode. `kv_dtype` is the dtype of its KV cache."""

    module: PreTrainedModel
    spec: ModelSpec
    files: ModelFiles
    dtype: str
    kv_dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    quantization: str | None = None
    """Of which layers, in words; None for a float model."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        return sum({parameter.data_ptr(): parameter.nbytes for parameter in self.module.parameters()}.values())


def choose_dtype(
    requested: DType,
    spec: ModelSpec,
    files: ModelFiles,
    *,
    device: Literal["cpu", "npu"],
    chip: Chip | None = None,
) -> str:
    """The dtype of the weights. Raises ConfigError.

    On a CPU "auto" is bfloat16 for a bfloat16 checkpoint and float32 for all others, GGUF included; float16 has no
    arithmetic there worth having and is refused. On an NPU "auto" is the checkpoint's 16-bit type, else bfloat16, and
    float16 on a 310P; what its operators refuse is told by `check_npu_model`.
    """
    if device == "cpu":
        if requested == "float16":
            raise ConfigError("--dtype is float16, which is not supported on a CPU. Use auto, bfloat16 or float32.")
        if requested != "auto":
            return requested
        return "bfloat16" if spec.checkpoint_dtype == "bfloat16" and files.gguf_file is None else "float32"
    if requested != "auto":
        return requested
    return "float16" if spec.checkpoint_dtype == "float16" or chip is Chip.P310 else "bfloat16"


def load_model(
    config: ModelConfig,
    *,
    device: torch.device,
    kernels: Kernels | None = None,
    place: Place | None = None,
    progress: Progress = lambda _progress: None,
) -> LoadedModel:
    """Finds, checks and loads the model; on a CPU it runs on `kernels` where they are given, else on plain torch.

    With a `place` it is that rank's part of it, and so is the `spec` of what is returned; `connect_ranks` makes it
    whole. Raises ModelNotFound, DamagedModel, UnsupportedModel or ConfigError.
    """
    if config.trust_remote_code:
        raise ConfigError("--trust-remote-code is not supported: model code from a checkpoint is never run.")
    progress(LoadProgress("Reading the model's configuration"))
    files = find_weights(config.model, revision=config.revision)
    plan = read_quantization(files, requested=config.quantization)
    spec = read_spec(files, quantized=plan is not None)
    # Before minutes are spent on weights: a limit that cannot be met is told at once.
    max_model_len = spec.choose_max_model_len(config.max_model_len)
    if place is not None:
        check_size(spec, place.size)
    chip = chip_of(device) if device.type == "npu" else None
    dtype = choose_dtype(config.dtype, spec, files, device="cpu" if chip is None else "npu", chip=chip)
    if chip is not None:
        if warning := check_npu_length(chip, max_model_len=max_model_len):
            logger.warning("%s", warning)
        seen = spec if place is None else rank_spec(spec, place.size)  # by the operators
        check_npu_model(
            chip,
            num_heads=seen.num_heads,
            num_kv_heads=seen.num_kv_heads,
            head_dim=seen.head_dim,
            dtype=dtype,
        )
        if plan is not None:
            check_npu_plan(plan, chip)

    stage = f"Loading weights ({files.weights}, {dtype})"
    progress(LoadProgress(stage))
    if plan is not None:
        logger.info("%s: %s", plan.source.name, plan.summary())
        module = load_quantized(files, spec, plan, _TORCH_DTYPES[dtype], place=place)
        if chip is not None:
            use_npu_operators(module, _TORCH_DTYPES[dtype])
    elif place is not None:
        module = _load_part(files, spec, _TORCH_DTYPES[dtype], place)
    else:
        module = _load_weights(files, spec, _TORCH_DTYPES[dtype])
    if place is not None:
        spec = rank_spec(spec, place.size)
    if device.type == "cpu" and dtype == "bfloat16":
        upcast_activations(module)
    module = module.to(device)  # type: ignore[arg-type]  # transformers types `to` for its own mixin
    module.eval()
    module.requires_grad_(False)
    if device.type == "cpu":
        place_weights(module, progress=lambda fraction: progress(LoadProgress(stage, fraction)))
        if kernels is not None:
            fuse_layers(module, kernels, whole_layers=place is None)
    if chip is not None:
        fuse_npu_layers(module, chip=chip)
    return LoadedModel(
        module=module,
        spec=spec,
        files=files,
        dtype=dtype,
        kv_dtype=_TORCH_DTYPES[dtype],
        device=device,
        eos_token_ids=_eos_token_ids(files, module),
        quantization=None if plan is None else plan.summary(),
    )


def _load_part(files: ModelFiles, spec: ModelSpec, dtype: torch.dtype, place: Place) -> PreTrainedModel:
    """A rank's part of the weights. `spec` is the whole model's."""

    def unpack() -> Mapping[str, torch.Tensor]:
        unpacked: Mapping[str, torch.Tensor] = _load_weights(files, spec, dtype).state_dict()
        return unpacked

    with _telling_damage(files), rank_weights(files, spec, place, unpack=unpack) as weights:
        module = _load_weights(files, rank_spec(spec, place.size), dtype, weights=weights)
    if place.rank > 0:
        drop_head(module)
    return module


def _load_weights(
    files: ModelFiles, spec: ModelSpec, dtype: torch.dtype, *, weights: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """From the files, or from `weights`, by their names there."""
    register_paged_attention()
    options: dict[str, Any] = {
        "config": spec.config,
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "local_files_only": True,
        "trust_remote_code": False,
        "weights_only": True,
        "use_safetensors": files.weights == "safetensors",
        "output_loading_info": True,
    }
    if files.gguf_file is not None:
        from transformers import GgufConfig

        options |= {"gguf_file": files.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        del options["use_safetensors"]
    if spec.expert_size:
        # One expert after the other: the sum of a row does not depend on which other rows share the batch.
        options["experts_implementation"] = "eager"
    source: Path | None = files.folder
    if weights is not None:
        source, options["state_dict"] = None, weights
        for name in ("use_safetensors", "weights_only", "gguf_file", "quantization_config"):
            options.pop(name, None)
    with without_progress_bars(), _telling_damage(files):
        # By the class: without a folder there is nothing that Auto classes could find it by.
        definition: Any = AutoModelForCausalLM if weights is None else getattr(transformers, spec.architecture)
        loaded: Any = definition.from_pretrained(source, **options)
    module, loading = loaded
    assert isinstance(module, PreTrainedModel)
    if type(module).__name__ != spec.architecture:
        raise UnsupportedModel(
            f"{files.folder} was loaded as {type(module).__name__}, but its config.json says {spec.architecture}."
        )
    _check_complete(files, loading)
    return module


@contextmanager
def _telling_damage(files: ModelFiles) -> Iterator[None]:
    """Raises DamagedModel where reading the weights fails, for whatever reason but a lack of memory."""
    try:
        yield
    except _UNREADABLE_WEIGHTS as error:
        if memory_of(error) is not None:
            raise  # the files may be sound
        # Only the first line: torch adds advice on loading files that run code.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DamagedModel(f"The weights in {files.folder} cannot be loaded: {reason}") from error


def _check_complete(files: ModelFiles, loading: Mapping[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers, and only warns."""
    missing = sorted(str(key) for key in loading.get("missing_keys") or ())
    if missing:
        raise DamagedModel(
            f"The weights in {files.folder} lack {len(missing)} tensors that config.json asks for, among them "
            f"{', '.join(missing[:3])}. The checkpoint is incomplete or config.json is another model's."
        )


def _eos_token_ids(files: ModelFiles, module: PreTrainedModel) -> tuple[int, ...]:
    """generation_config.json's end-of-sequence tokens, else those of the configuration."""
    generation_config = files.read_json("generation_config.json") or {}
    for value in (generation_config.get("eos_token_id"), getattr(module.config, "eos_token_id", None)):
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()
