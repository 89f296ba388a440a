"""The model that everybody serves: the shape of Qwen3-0.6B with random bfloat16 weights, always the same.

    python -m benchmarks.model [FOLDER]

Writes a folder as Hugging Face has them (config, safetensors, tokenizer) and, beside it, the same weights as a GGUF
file in bfloat16. Speed does not depend on what the weights say; a real checkpoint cannot be had everywhere.

The tokenizer is a small byte-level BPE, its vocabulary filled up with words of ASCII letters: nearly every token that
random weights choose is whole text, so a server has no reason to hold one back, and the first text is the first token.
"""

from __future__ import annotations

import itertools
import json
import os
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 1024, 28, 16, 8, 128, 3072
VOCAB_SIZE = 151_936
CONTEXT = 40_960
ROPE_THETA = 1_000_000.0
NORM_EPS = 1e-6
STANDARD_DEVIATION = 0.02
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, _, END_OF_TURN = range(len(SPECIAL))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A prefix cache keeps the keys and values of tokens it has seen, so "
    "that a system prompt shared by many requests is computed once. 0123456789 (){}[] +-*/= def return import print."
)
_DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "models" / "qwen3-0.6b-random"


def config() -> dict[str, Any]:
    """config.json: Qwen3-0.6B's own numbers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": STANDARD_DEVIATION,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": LAYERS,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TURN,
        "use_cache": True,
    }


def shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name in safetensors -> (name in GGUF, shape). Matrices are [out, in] in both."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm": ("attn_norm", (HIDDEN,)),
        "self_attn.q_proj": ("attn_q", (q, HIDDEN)),
        "self_attn.k_proj": ("attn_k", (kv, HIDDEN)),
        "self_attn.v_proj": ("attn_v", (kv, HIDDEN)),
        "self_attn.o_proj": ("attn_output", (HIDDEN, q)),
        "self_attn.q_norm": ("attn_q_norm", (HEAD_DIM,)),
        "self_attn.k_norm": ("attn_k_norm", (HEAD_DIM,)),
        "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
        "mlp.gate_proj": ("ffn_gate", (FFN, HIDDEN)),
        "mlp.up_proj": ("ffn_up", (FFN, HIDDEN)),
        "mlp.down_proj": ("ffn_down", (HIDDEN, FFN)),
    }
    named: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("token_embd.weight", (VOCAB_SIZE, HIDDEN))
    }
    for number in range(LAYERS):
        for name, (gguf_name, shape) in layer.items():
            named[f"model.layers.{number}.{name}.weight"] = (f"blk.{number}.{gguf_name}.weight", shape)
    named["model.norm.weight"] = ("output_norm.weight", (HIDDEN,))
    return named


def random_weights() -> dict[str, torch.Tensor]:
    """bfloat16; matrices normal, norms ones, as a model starts its training."""
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator).to(torch.bfloat16)
        for name, (_, shape) in shapes().items()
    }


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries; what is past the trained ones is never encoded to, only decoded from."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        [_TEXT],
        trainers.BpeTrainer(
            vocab_size=600,
            min_frequency=1,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    content = json.loads(trained.to_str())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    for word in _words():
        if len(vocabulary) == VOCAB_SIZE:
            break
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _words() -> Iterator[str]:
    """Ġaaaa, Ġaaab …: a blank and four letters in the alphabet of byte-level BPE."""
    return ("Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))


def write_tokenizer(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[END_OF_TURN],
        "pad_token": SPECIAL[END_OF_TEXT],
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")


def write_folder(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"eos_token_id": [END_OF_TURN, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    for name, content in (("config.json", config()), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(folder: Path, path: Path, weights: dict[str, torch.Tensor]) -> None:
    """The same weights for llama.cpp: matrices in bfloat16 as they are, norms in float32."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("qwen3-0.6b-random")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(END_OF_TURN)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, (gguf_name, shape) in shapes().items():
        tensor = weights[name]
        if len(shape) == 1:
            writer.add_tensor(gguf_name, tensor.float().numpy())
        else:  # numpy has no bfloat16: its bytes, and what they are
            raw = tensor.contiguous().view(torch.uint8).numpy().astype(np.uint8, copy=False)
            writer.add_tensor(gguf_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_path(folder: Path) -> Path:
    """Beside the folder: in it, a server might take it for the folder's weights."""
    return folder.with_name(f"{folder.name}-bf16.gguf")


def ensure_model(folder: Path = _DEFAULT_FOLDER) -> Path:
    """The folder, made where it is not there yet. Each of the two appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
        if not (folder / "model.safetensors").exists():
            made = Path(temporary) / "model"
            write_folder(made, random_weights())
            os.rename(made, folder)
        if not gguf_path(folder).exists():
            made = Path(temporary) / "model.gguf"
            write_gguf(folder, made, load_file(folder / "model.safetensors"))
            os.rename(made, gguf_path(folder))
    return folder


if __name__ == "__main__":
    print(ensure_model(*map(Path, sys.argv[1:2])))
