"""The files of a model elsewhere: what is known of them, which of them an engine needs, and how each is verified."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from reprise_engine.errors import ModelNotFound, UnsupportedModel

Algorithm = Literal["sha256", "git-sha1", "md5"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The digest of a whole file, `value` in lower-case hex. git-sha1 is that of a git blob."""

    algorithm: Algorithm
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a listing."""

    path: str
    """Relative to the model's folder, with `/`."""
    size: int
    """Bytes."""
    identity: str
    """Changes with the content: a digest, an ETag. What was fetched under another identity is not resumed."""
    digest: Digest | None
    """None where the store keeps none: then only the size can be verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a model at one moment. `revision` is the commit, where there is one."""

    files: tuple[RemoteFile, ...]
    revision: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Hasher(Protocol):
    """The part of hashlib's objects that is used."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def hasher(file: RemoteFile) -> Hasher | None:
    """What computes the digest of `file` from its bytes; None where there is none to compare with."""
    match file.digest:
        case None:
            return None
        case Digest(algorithm="git-sha1"):
            blob = hashlib.sha1(usedforsecurity=False)
            blob.update(f"blob {file.size}\0".encode())
            return blob
        case Digest(algorithm=algorithm):
            return hashlib.new(algorithm, usedforsecurity=False)


# What engines read: weights, configuration, tokenizer, chat template. No *.py: code of a repository is never run.
_WANTED = (
    "*.safetensors",
    "pytorch_model*.bin",
    "*.gguf",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
_TEMPLATES = "additional_chat_templates/"
_SPLIT_GGUF = re.compile(r"-(?P<part>\d{5})-of-\d{5}\.gguf$")


def wanted(files: Sequence[RemoteFile], *, source: str) -> tuple[RemoteFile, ...]:
    """The files an engine needs, by path. Of several formats of the weights one is taken: safetensors, then .bin, then
    .gguf. `source` names the model in messages.

    Raises ModelNotFound where there are no weights, UnsupportedModel where it is unclear which are meant.
    """
    candidates = [file for file in files if _is_wanted(file.path)]
    names = [file.path for file in candidates]
    if any(name.endswith(".safetensors") for name in names):
        dropped = {name for name in names if name.endswith((".bin", ".gguf"))}
        if any(not name.startswith("consolidated") for name in names if name.endswith(".safetensors")):
            # Mistral's repositories hold the weights twice.
            dropped |= {name for name in names if fnmatch.fnmatchcase(name, "consolidated*.safetensors")}
    elif any(name.endswith(".bin") for name in names):
        dropped = {name for name in names if name.endswith(".gguf")}
    else:
        dropped = set()
        _check_gguf([name for name in names if name.endswith(".gguf")], source=source, files=len(files))
    return tuple(sorted((file for file in candidates if file.path not in dropped), key=lambda file: file.path))


def _check_gguf(names: Sequence[str], *, source: str, files: int) -> None:
    if not names:
        raise ModelNotFound(
            f"{source} holds {files} files but no weights that an engine reads: looked for *.safetensors, "
            "pytorch_model*.bin and *.gguf. Name another model, or the folder that holds them."
        )
    models = {_SPLIT_GGUF.sub("", name) for name in names}
    if len(models) > 1:
        raise UnsupportedModel(
            f"{source} holds {len(models)} .gguf models ({', '.join(sorted(names)[:4])} …); a hub's URI cannot name "
            "one of them; put the file into a bucket (s3://bucket/path/file.gguf) or on a volume (pvc://claim/file.gguf)."
        )


def _is_wanted(path: str) -> bool:
    if path.startswith(_TEMPLATES):
        path = path.removeprefix(_TEMPLATES)
    # Folders hold other formats (onnx, original checkpoints), which engines do not read.
    if "/" in path or path.startswith("."):
        return False
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in _WANTED)
