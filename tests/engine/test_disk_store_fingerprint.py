"""The fingerprint follows the content of a model's files, not their place nor their times."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from reprise_engine.errors import ModelError
from reprise_engine.tiers import fingerprint
from reprise_engine.tiers.fingerprint import content_files, fingerprint_files
from reprise_engine.tiers.folder import FOLDER_NAME


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    for shard in (1, 2):
        (folder / f"model-0000{shard}-of-00002.safetensors").write_bytes(os.urandom(3_000_000))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 1_000_000)
    monkeypatch.setattr(fingerprint, "RACY_SECONDS", 0.0)


def of(folder: Path, cache: Path | None = None) -> str:
    return fingerprint_files(content_files(folder, weights="safetensors", gguf_file=None), cache_folder=cache)


def change(path: Path, at: int) -> None:
    """One bit, with size and mtime as before."""
    before = path.stat()
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_copy_elsewhere_is_equal_with_and_without_memory(model: Path, cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert of(model) == of(copy) == of(model, cache) == of(copy, cache) == of(model, cache)
    assert len(of(model)) == 32


def test_links_of_a_hub_cache_are_equal_to_files(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert of(snapshot) == of(model)


@pytest.mark.parametrize("at", [0, 1_499_983, 2_999_999])
def test_changed_weights_of_the_same_size_and_time(model: Path, cache: Path, at: int) -> None:
    before = of(model, cache)
    change(model / "model-00002-of-00002.safetensors", at)
    assert of(model, cache) == of(model) != before
    change(model / "model-00002-of-00002.safetensors", at)
    assert of(model, cache) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_the_configuration_and_the_index_count(model: Path, cache: Path, name: str) -> None:
    before = of(model, cache)
    (model / name).write_text('{"rope_theta": 20000}')
    assert of(model, cache) != before


def test_what_kv_does_not_depend_on_does_not_count(model: Path, cache: Path) -> None:
    before = of(model, cache)
    (model / "tokenizer.json").write_text('{"changed": true}')
    (model / "README.md").write_text("")
    assert of(model, cache) == before


def test_shards_that_change_places_count(model: Path) -> None:
    before = of(model)
    one, two = (model / f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2))
    os.replace(one, model / "aside")
    os.replace(two, one)
    os.replace(model / "aside", two)
    assert of(model) != before


def test_the_name_of_a_gguf_file_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").write_bytes(b"weights")
    one, two = (
        fingerprint_files(content_files(tmp_path, weights="gguf", gguf_file=name), cache_folder=None)
        for name in ("a.gguf", "b.gguf")
    )
    assert one == two


def test_only_pytorch_files_count_for_pytorch(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "config.json", "pytorch_model.bin.index.json"):
        (tmp_path / name).write_bytes(b"x")
    names = [path.name for path in content_files(tmp_path, weights="bin", gguf_file=None)]
    assert names == ["config.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]


def test_a_restart_does_not_read_the_weights_again(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(model, cache)
    monkeypatch.setattr(fingerprint, "_hash_contents", lambda *_: pytest.fail("the weights were read"))
    assert of(model, cache) == before


def test_what_has_just_been_changed_is_not_remembered(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change right after would have the same times on a coarse clock."""
    monkeypatch.setattr(fingerprint, "RACY_SECONDS", 3600.0)
    of(model, cache)
    assert not (cache / FOLDER_NAME / "digests.json").exists()


def test_damaged_memory_is_not_believed(model: Path, cache: Path) -> None:
    before = of(model, cache)
    path = cache / FOLDER_NAME / "digests.json"
    text = path.read_text()
    digests = list(json.loads(text)["digests"].values())
    flipped = text.replace(digests[0], digests[0][::-1])
    assert flipped != text
    assert path.stat().st_mode & 0o777 == 0o600
    nested = "[" * 100_000
    wrong = '{"check": "x", "digests": []}'
    for damage in (flipped, "", "{}", "[]", nested, wrong, text[:-5], text.replace("-", "+", 1)):
        path.write_text(damage)
        assert of(model, cache) == before


def test_a_file_that_changes_meanwhile_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fingerprint._hash_contents
    path = model / "model-00001-of-00002.safetensors"

    def hash_while_it_grows(*arguments: object) -> str:
        with path.open("ab") as file:
            file.write(b"more")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fingerprint, "_hash_contents", hash_while_it_grows)
    with pytest.raises(ModelError, match="is being changed while it is read"):
        fingerprint_files([path], cache_folder=None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read: No such file"):
        fingerprint_files([tmp_path / "model.gguf"], cache_folder=None)


def test_how_weights_are_quantised_counts(model: Path) -> None:
    before = of(model)
    description = model / "quant_model_description.json"
    description.write_text('{"a.weight": "W8A8_MIX"}')
    mixed = of(model)
    description.write_text('{"a.weight": "W8A8"}')
    assert len({before, mixed, of(model)}) == 3
