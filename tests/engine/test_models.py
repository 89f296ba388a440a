"""Finding, checking and loading models; the refusals name what is wrong and what would be right."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.models.qwen3_moe import modeling_qwen3_moe

from reprise_engine.config import ModelConfig
from reprise_engine.errors import ConfigError, DamagedModel, ModelError, ModelNotFound, UnsupportedModel
from reprise_engine.messages import LoadProgress
from reprise_engine.models.files import find_weights
from reprise_engine.models.loader import choose_dtype, load_model
from reprise_engine.models.quiet import without_progress_bars
from reprise_engine.models.spec import read_spec
from reprise_engine.models.upcast import UpcastEmbedding, UpcastExperts, UpcastLinear
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model_path

CPU = torch.device("cpu")


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model whose config.json is changed; a key with value None is taken out."""

    def edit(family: str = "qwen3", **changes: Any) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(tiny_model_path(family), folder)
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads(family: str) -> None:
    seen: list[LoadProgress] = []
    model = load_model(ModelConfig(model=str(tiny_model_path(family))), device=CPU, progress=seen.append)
    assert type(model.module).__name__ == model.spec.architecture
    assert model.spec.vocab_size == VOCAB_SIZE
    assert model.files.weights == ("bin" if family == "opt" else "safetensors")
    assert model.eos_token_ids == (1, 2)  # generation_config.json goes before config.json, which says 1
    assert model.dtype == "float32"
    assert not model.module.training
    assert [progress.stage.split()[0] for progress in seen] == ["Reading", "Loading"]
    assert "float32" in seen[1].stage


def test_spec_reads_sizes_that_are_not_derived() -> None:
    spec = read_spec(find_weights(str(tiny_model_path("qwen3"))))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size) == (4, 2, 32, 64)
    assert spec.kv_bytes_per_token(bytes_per_element=2) == 2 * 3 * 2 * 32 * 2


def test_weights_are_those_of_the_checkpoint_and_tied_ones_count_once() -> None:
    model = load_model(ModelConfig(model=str(tiny_model_path("qwen2"))), device=CPU)
    assert model.module.lm_head.weight.data_ptr() == model.module.model.embed_tokens.weight.data_ptr()
    assert model.weight_bytes == sum(p.numel() * 4 for p in model.module.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "multimodal model.*Qwen2VLForConditionalGeneration"),
        ({"architectures": ["GemmaForCausalLM"], "vision_config": {}}, "multimodal"),
        ({"architectures": None}, "`architectures`.*None"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            {
                "rope_parameters": None,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0] * 16,
                    "long_factor": [1.0] * 16,
                    "original_max_position_embeddings": 512,
                },
            },
            "longrope",
        ),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_cannot_be_served_is_refused(edited: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(ModelConfig(model=str(edited(**changes))), device=CPU)


def test_a_window_that_the_definition_would_drop_is_refused(edited: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        load_model(ModelConfig(model=str(edited("llama", sliding_window=128))), device=CPU)


def test_static_rope_scaling_is_served_and_extends_the_length(edited: Callable[..., Path]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
    spec = load_model(ModelConfig(model=str(edited(rope_parameters=rope))), device=CPU).spec
    assert spec.max_positions == 8192


@pytest.mark.parametrize("length", [0, 2049])
def test_a_length_the_model_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-model-len is {length}"):
        load_model(ModelConfig(model=str(tiny_model_path("llama")), max_model_len=length), device=CPU)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere.gguf", "somebody/not-in-the-cache"])
def test_a_model_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=name.strip(".")):
        load_model(ModelConfig(model=name), device=CPU)


def test_a_folder_without_weights_or_with_several(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no weights"):
        find_weights(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        find_weights(str(tmp_path))
    assert find_weights(str(tmp_path / "b.gguf")).gguf_file == "b.gguf"


@pytest.mark.parametrize("content", [b"", b"not a tensor file at all"])
def test_broken_weights_are_told_not_raised_raw(edited: Callable[..., Path], content: bytes) -> None:
    folder = edited()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedModel, match="cannot be loaded"):
        load_model(ModelConfig(model=str(folder)), device=CPU)


@pytest.mark.parametrize("content", ["", '{"architectures": ["Qwen3For', "[]"])
def test_a_broken_config_is_damage_not_an_architecture(edited: Callable[..., Path], content: str) -> None:
    folder = edited()
    (folder / "config.json").write_text(content)
    with pytest.raises(DamagedModel, match=r"config\.json"):
        load_model(ModelConfig(model=str(folder)), device=CPU)


def test_a_pickle_that_runs_code_is_refused(edited: Callable[..., Path], tmp_path: Path) -> None:
    folder = edited("opt")
    marker = tmp_path / "it-ran"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    torch.save({"model.decoder.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(ModelConfig(model=str(folder)), device=CPU)
    assert not marker.exists()


def test_a_missing_tensor_is_refused(edited: Callable[..., Path]) -> None:
    """transformers would fill it with random numbers and only warn."""
    folder = edited(num_hidden_layers=4, layer_types=None)
    with pytest.raises(DamagedModel, match=r"layers\.3"):
        load_model(ModelConfig(model=str(folder)), device=CPU)


def test_broken_gguf_and_foreign_gguf(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUX" + bytes(60))
    with pytest.raises(DamagedModel, match="cannot be read as a GGUF file"):
        load_model(ModelConfig(model=str(path)), device=CPU)


def test_loading_draws_no_bars_and_hides_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with without_progress_bars():
        for _ in tqdm(range(3), desc="what a GGUF file draws, unasked"):
            pass
        sys.stderr.write("a warning\n\n")
    assert capsys.readouterr().err == "a warning\n\n"


def test_remote_code_is_refused() -> None:
    with pytest.raises(ConfigError, match="trust-remote-code"):
        load_model(ModelConfig(model=str(tiny_model_path("llama")), trust_remote_code=True), device=CPU)


def test_dtype_choices() -> None:
    files = find_weights(str(tiny_model_path("qwen2")))
    half = read_spec(find_weights(str(tiny_model_path("qwen2", dtype=torch.float16))))
    brain = read_spec(find_weights(str(tiny_model_path("qwen2", dtype=torch.bfloat16))))
    full = read_spec(files)
    assert [choose_dtype("auto", spec, files, device="cpu") for spec in (full, half, brain)] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    assert [choose_dtype("auto", spec, files, device="npu") for spec in (full, half, brain)] == [
        "bfloat16",
        "float16",
        "bfloat16",
    ]
    assert choose_dtype("bfloat16", full, files, device="cpu") == "bfloat16"
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype("float16", half, files, device="cpu")


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "opt"])
def test_bfloat16_keeps_matrices_small_and_widens_the_rest(family: str) -> None:
    model = load_model(ModelConfig(model=str(tiny_model_path(family)), dtype="bfloat16"), device=CPU)
    assert model.kv_dtype == torch.bfloat16
    wide = {name for name, parameter in model.module.named_parameters() if parameter.dtype == torch.float32}
    narrow = {name for name, parameter in model.module.named_parameters() if parameter.dtype == torch.bfloat16}
    assert all(
        "norm" in name or name.endswith("bias") or "gate.weight" in name or "embed_positions" in name for name in wide
    )
    assert any("lm_head" in name or "embed_tokens" in name for name in narrow)
    assert not any(isinstance(module, nn.Linear) for module in model.module.modules())
    assert modeling_qwen3_moe.Qwen3MoeExperts.__module__.startswith("transformers"), "classes are never patched"


def test_upcast_linear_is_the_float32_product_of_bfloat16_weights() -> None:
    torch.manual_seed(0)
    # 3 tiles and a rest of rows of the weight.
    linear = nn.Linear(1024, 900, dtype=torch.bfloat16)
    module = UpcastLinear(linear)
    x = torch.randn(2, 5, 1024)
    expected = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(module(x).double(), expected, atol=1e-5, rtol=1e-5)
    assert module(x).dtype == torch.float32
    assert module.weight.data_ptr() == linear.weight.data_ptr(), "no copy of the weights"


def test_upcast_arithmetic_does_not_depend_on_the_number_of_rows() -> None:
    torch.manual_seed(0)
    module = UpcastLinear(nn.Linear(512, 700, bias=False, dtype=torch.bfloat16))
    x = torch.randn(300, 512)
    together = module(x)
    for rows in (1, 2, 17):
        torch.testing.assert_close(module(x[:rows]), together[:rows], atol=2e-6, rtol=2e-6)


def test_upcast_embedding_and_experts() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 8, dtype=torch.bfloat16)
    assert torch.equal(UpcastEmbedding(embedding)(torch.tensor([3, 3, 9])), embedding.weight[[3, 3, 9]].float())

    model = load_model(ModelConfig(model=str(tiny_model_path("qwen3-moe"))), device=CPU)
    experts = model.module.model.layers[0].mlp.experts
    x = torch.randn(6, 64)
    index = torch.tensor([[0, 1], [7, 3], [1, 0], [2, 2], [5, 6], [0, 4]])
    weight = torch.rand(6, 2)
    with torch.no_grad():
        experts.gate_up_proj.copy_(experts.gate_up_proj.bfloat16())  # so that both compute with the same numbers
        experts.down_proj.copy_(experts.down_proj.bfloat16())
        expected = experts(x, index, weight)
        experts.to(torch.bfloat16)
        torch.testing.assert_close(UpcastExperts(experts)(x, index, weight), expected, atol=1e-5, rtol=1e-5)
