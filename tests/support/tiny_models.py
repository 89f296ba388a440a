"""Small random models of every supported family, as real folders with a real tokenizer; always the same.

python -m tests.support.tiny_models FOLDER [FAMILY …]
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 400
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
MAX_POSITIONS = 2048

_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models" / "tiny"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. A prefix cache keeps the keys and values of tokens it has seen, "
    "so that a system prompt shared by many requests is computed once. Paris is the capital of France; naïve café, "
    "user assistant system, 0123456789 (){}[] +-*/= def return import print hello world."
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    # Wide enough that logits differ by more than rounding errors, so greedy tokens are well defined.
    "initializer_range": 0.2,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 128}


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, **_GROUPED, tie_word_embeddings=True))


def _qwen2_sliding() -> PreTrainedModel:
    # The first layer attends to everything, the others to 24 tokens.
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, **_GROUPED, **window))


def _qwen3() -> PreTrainedModel:
    # A head size that is not hidden_size / heads, as in the real ones.
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, **_GROUPED, head_dim=32, tie_word_embeddings=True))


def _qwen3_moe() -> PreTrainedModel:
    experts: dict[str, Any] = {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_GROUPED, **experts))


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, **_GROUPED))


def _opt() -> PreTrainedModel:
    names: dict[str, Any] = {"init_std": 0.2, "ffn_dim": 128, "word_embed_proj_dim": 64}
    common = {key: value for key, value in _COMMON.items() if key != "initializer_range"}
    return OPTForCausalLM(OPTConfig(**common, **names))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": _qwen2,
    "qwen2-sliding": _qwen2_sliding,
    "qwen3": _qwen3,
    "qwen3-moe": _qwen3_moe,
    "llama": _llama,
    "opt": _opt,
}


def make_tiny_model(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 7) -> Path:
    """Writes model, tokenizer and generation config of `family` (a key of FAMILIES) into `folder`; returns it.

    OPT is written as pytorch_model.bin, as facebook/opt-125m ships, the others as safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family]()
        _scramble(model)
    model = model.to(dtype)  # type: ignore[arg-type]  # transformers types `to` for its own mixin
    if family == "opt":
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        _declare(folder, model.config, dtype)
    else:
        model.save_pretrained(folder)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, PAD_ID], "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder)
    return folder


def tiny_model_path(family: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a tiny model, made on first use and kept in .cache; safe in several processes at once."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = _CACHE / f"{family}-{str(dtype).removeprefix('torch.')}-{recipe}"
    if not folder.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
            made = make_tiny_model(family, Path(temporary) / "model", dtype=dtype)
            with suppress(OSError):  # another process was first: its folder is the same
                made.rename(folder)
    return folder


def _scramble(model: PreTrainedModel) -> None:
    """Norm weights and biases start as ones and zeros, which would hide a forgotten one."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)


def _declare(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["architectures"] = ["OPTForCausalLM"]
    content["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(content))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of VOCAB_SIZE entries, trained on a fixed text: it encodes any string, and decodes it again."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "pad_token": PAD,
                "model_max_length": MAX_POSITIONS,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


def main(arguments: list[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    folder = Path(arguments[0])
    for family in arguments[1:] or FAMILIES:
        print(make_tiny_model(family, folder / family))


if __name__ == "__main__":
    main(sys.argv[1:])
