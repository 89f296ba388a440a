"""A tokenizer without tokenizer.json (a .gguf file, vocab.json and merges.txt, sentencepiece) is converted by
transformers, in a process of its own: the server stays free of transformers and torch. Run as
`python -m reprise_engine.text.convert SOURCE TARGET`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from reprise_engine.errors import ModelError, ModelNotFound

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 300.0


def converted_folder(path: Path) -> Path:
    """A folder with the converted tokenizer.json of a model folder or .gguf file; kept from start to start.

    Raises ModelNotFound when there is nothing to convert, ModelError when transformers cannot.
    """
    source = _gguf_of(path)
    target = _cache_root() / "tokenizers" / _identity(source)
    if (target / "tokenizer.json").is_file():
        return target
    logger.info("converting the tokenizer of %s (once; kept in %s)", source, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed: two servers that start together never see half a folder.
    work = Path(tempfile.mkdtemp(prefix="converting-", dir=target.parent))
    try:
        _convert_in_subprocess(source, work)
        try:
            work.rename(target)
        except OSError:
            if not (target / "tokenizer.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _gguf_of(path: Path) -> Path:
    """The file to convert: a folder that holds nothing but one .gguf stands for that file."""
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 and not (path / "tokenizer_config.json").is_file():
        return files[0]
    known = ("tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
    if not any((path / name).is_file() for name in known):
        raise ModelNotFound(f"{path} holds no tokenizer (tokenizer.json is missing); name one with --tokenizer.")
    return path


def _identity(source: Path) -> str:
    """Of the content as far as it is cheap to tell: path, sizes, times, and the converter's version."""
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.is_file())
    digest = hashlib.sha256(version("transformers").encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _cache_root() -> Path:
    """The first of $REPRISE_CACHE_DIR, $XDG_CACHE_HOME/reprise and ~/.cache/reprise that can be written, else a
    temporary folder of this user (a container with a read-only root has only that)."""
    candidates = [
        os.environ.get("REPRISE_CACHE_DIR"),
        os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "reprise"),
    ]
    for candidate in filter(None, candidates):
        root = Path(candidate)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root, os.W_OK):
            return root
    return Path(tempfile.mkdtemp(prefix="reprise-cache-"))


def _convert_in_subprocess(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "reprise_engine.text.convert", str(source), str(target)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"converting the tokenizer of {source} took more than {_TIMEOUT_SECONDS:.0f} s.") from None
    if done.returncode != 0 or not (target / "tokenizer.json").is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        cause = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"the tokenizer of {source} cannot be converted: {cause}. Name a folder with tokenizer.json by --tokenizer."
        )


def convert(source: Path, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of `source` into `target`."""
    from transformers import AutoTokenizer

    if source.is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
    tokenizer.save_pretrained(str(target))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
