"""Where the text files of a model are: a folder, a .gguf file, or the name of a model in the local hub cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reprise_engine.errors import ModelError, ModelNotFound


def resolve_model(model: str, *, revision: str | None = None) -> Path:
    """The local folder or .gguf file that `model` names.

    Raises ModelNotFound. Nothing is downloaded: a pod that serves must not depend on a hub being reachable.
    """
    path = Path(model).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelNotFound(
                f"model {model!r} is a file, but not a .gguf file; give the folder that holds config.json, "
                "or a .gguf file."
            )
        return path
    if model.count("/") <= 1 and not model.startswith((".", "/", "~")):
        cached = _in_hub_cache(model, revision)
        if cached is not None:
            return cached
        raise ModelNotFound(
            f"model {model!r} is neither a path that exists nor a model in the local hub cache; give a folder, "
            f"a .gguf file, or download it first (hf download {model})."
        )
    raise ModelNotFound(f"model path {model!r} does not exist; give a folder with config.json, or a .gguf file.")


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download  # only for a name: its import takes half a second
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def model_folder(path: Path) -> Path:
    """The folder that holds the text files: the path itself, or the parent of a .gguf file."""
    return path.parent if path.is_file() else path


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where the file does not exist. Raises ModelError for what is no JSON object."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value
