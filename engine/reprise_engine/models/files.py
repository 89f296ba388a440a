"""Where a model's files are. Free of torch: the API process asks the same question for the tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reprise_engine.errors import ModelNotFound, UnsupportedModel

WeightFormat = Literal["safetensors", "bin", "gguf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A folder on disk and the format of the weights in it; `gguf_file` is a file name within `folder`."""

    name: str
    folder: Path
    weights: WeightFormat
    gguf_file: str | None = None

    def read_json(self, file_name: str) -> dict[str, Any] | None:
        """The JSON object in `file_name`, or None where the folder has no such file."""
        path = self.folder / file_name
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise UnsupportedModel(f"{path} holds a {type(content).__name__}; a JSON object is expected.")
        return content


def resolve_model(model: str, *, revision: str | None = None) -> ModelFiles:
    """Finds the files of `model`: a folder, a .gguf file, or the name of a model in the local Hugging Face cache.

    Nothing is downloaded. Raises ModelNotFound.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(
                f"--model is {model}, which is a file but not a .gguf file. Give the model's folder or a .gguf file."
            )
        return ModelFiles(name=model, folder=path.parent, weights="gguf", gguf_file=path.name)
    if path.is_dir():
        return _inspect_folder(model, path)
    if _looks_like_path(model):
        raise ModelNotFound(f"--model is {model}, and there is no such file or folder.")
    return _inspect_folder(model, _find_in_hub_cache(model, revision))


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or model.count("/") > 1


def _find_in_hub_cache(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        wanted = model if revision is None else f"{model} at revision {revision}"
        raise ModelNotFound(
            f"--model is {wanted}: it is neither a folder, nor a .gguf file, nor in the local Hugging Face cache. "
            f"Fetch it first (hf download {model}) or give a path."
        ) from error


def _inspect_folder(name: str, folder: Path) -> ModelFiles:
    file_names = {entry.name for entry in folder.iterdir()}
    if any(file_name.endswith(".safetensors") for file_name in file_names):
        return ModelFiles(name=name, folder=folder, weights="safetensors")
    if any(file_name.startswith("pytorch_model") and file_name.endswith(".bin") for file_name in file_names):
        return ModelFiles(name=name, folder=folder, weights="bin")
    gguf_files = sorted(file_name for file_name in file_names if file_name.endswith(".gguf"))
    if len(gguf_files) == 1:
        return ModelFiles(name=name, folder=folder, weights="gguf", gguf_file=gguf_files[0])
    if gguf_files:
        raise ModelNotFound(
            f"{folder} holds several .gguf files ({', '.join(gguf_files)}); name one of them as --model."
        )
    raise ModelNotFound(
        f"{folder} holds no weights: looked for *.safetensors, pytorch_model*.bin and *.gguf. Give the model's folder."
    )
