"""`reprise check`: what `reprise serve` would end with is told without weights, an NPU or a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reprise_engine.entrypoints.cli import main
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model("qwen3", folder)
    return folder


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("TERMINATION_LOG_PATH", str(path))
    return path


def test_a_sound_model_passes_though_its_npu_is_absent(
    model: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model), "--device", "npu", "--port", "8000", "--served-model-name", "m"]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    assert words.read_text() == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--block-size", "16"], "ConfigError: --block-size is 16; on an NPU 910B or 910C it must be 128 or 256"),
        (["--dtype", "float32"], "ConfigError: --dtype is float32, but the attention operators of an NPU"),
        (["--max-num-seqs", "5000"], "ConfigError: --max-num-seqs is 5000; on an NPU"),
    ],
)
def test_what_every_npu_refuses_is_told_though_none_is_there(
    flags: list[str], told: str, model: Path, words: Path
) -> None:
    """Else a rollout would take the serving pod before it is found out."""
    assert main(["check", str(model), *flags]) == 0, "no NPU is asked for"
    assert main(["check", str(model), "--device", "npu", *flags]) == 2
    assert words.read_text().startswith(told)


def test_what_some_npu_takes_is_not_judged(model: Path) -> None:
    """A 910B takes these, a 310P does not."""
    assert main(["check", str(model), "--device", "npu", "--block-size", "256", "--dtype", "bfloat16"]) == 0


def test_heads_that_no_npu_takes_are_told(model: Path, words: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"head_dim": 40}))
    assert main(["check", str(model), "--device", "npu"]) == 2
    assert words.read_text().startswith("UnsupportedModel: The model has 4 query heads and 2 key heads of 40;")


def test_a_number_of_ranks_that_does_not_divide_the_model_is_told(
    model: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(model), "--tensor-parallel-size", "4"]) == 0
    assert words.read_text() == ""
    assert main(["check", str(model), "--tensor-parallel-size", "3"]) == 2
    told = "ConfigError: --tensor-parallel-size is 3, but the model has 4 attention heads, which 3 does not divide."
    assert words.read_text().startswith(told)
    assert "Use one of 1, 2, 4." in capsys.readouterr().err


def spoil_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlavaForConditionalGeneration"]}))


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def take_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def empty_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")


def lose_a_shard(folder: Path) -> None:
    """As a copy that broke off leaves it: the index and the first shard."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": "cut o')


@pytest.mark.parametrize(
    ("spoil", "reason", "told"),
    [
        (spoil_architecture, "UnsupportedModel", "LlavaForConditionalGeneration"),
        (spoil_config, "DamagedModel", "config.json"),
        (take_weights, "ModelNotFound", "no weights"),
        (empty_weights, "DamagedModel", "has empty model.safetensors"),
        (lose_a_shard, "DamagedModel", "lacks model-00002-of-00002.safetensors"),
        (spoil_tokenizer, "ModelError", "tokenizer.json"),
    ],
)
def test_what_is_wrong_with_a_model_exits_2_with_one_line_and_tells_the_kubelet(
    model: Path, words: Path, capsys: pytest.CaptureFixture[str], spoil: object, reason: str, told: str
) -> None:
    assert callable(spoil)
    spoil(model)
    assert main(["check", str(model)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"reprise check: {reason}: ")
    assert error.count("\n") == 1
    assert told in error
    assert words.read_text().startswith(f"{reason}: ")


def test_a_context_beyond_the_models_is_told(model: Path, words: Path) -> None:
    assert main(["check", str(model), "--max-model-len", "16m"]) == 2
    assert words.read_text().startswith("ConfigError: --max-model-len is ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-num-seqs=many"], "--max-num-seqs"),
        (["--load-format=awq"], "the format is told by the model's files"),
    ],
)
def test_a_flag_that_serve_refuses_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", "/nowhere", *arguments])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_a_wrong_value_is_told_before_any_file_is_read(words: Path) -> None:
    assert main(["check", "/nowhere", "--gpu-memory-utilization", "7"]) == 2
    assert words.read_text().startswith("ConfigError: --gpu-memory-utilization is 7.0")


def test_the_arguments_alone_need_no_model() -> None:
    assert main(["check", "/nowhere"]) == 2
    assert main(["check", "/nowhere", "--arguments-only"]) == 0
