"""Which files of a model hold its weights, and in which format. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reprise_engine.errors import DamagedModel, ModelError, ModelNotFound
from reprise_engine.text.files import read_json, resolve_model

WeightFormat = Literal["safetensors", "bin", "gguf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A folder on disk and the format of the weights in it; `gguf_file` is a file name within `folder`."""

    name: str
    folder: Path
    weights: WeightFormat
    gguf_file: str | None = None

    def weight_paths(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        if self.gguf_file is not None:
            return (self.folder / self.gguf_file,)
        pattern = "*.safetensors" if self.weights == "safetensors" else "pytorch_model*.bin"
        return tuple(sorted(self.folder.glob(pattern)))

    def read_json(self, file_name: str) -> dict[str, Any] | None:
        """The JSON object in `file_name`, or None where the folder has no such file. Raises DamagedModel."""
        try:
            return read_json(self.folder / file_name)
        except ModelError as error:
            raise DamagedModel(str(error)) from error


def find_weights(model: str, *, revision: str | None = None) -> ModelFiles:
    """Finds the weights of `model`: a folder, a .gguf file, or the name of a model in the local hub cache.

    Nothing is downloaded. Raises ModelNotFound.
    """
    path = resolve_model(model, revision=revision)
    if path.is_file():
        return ModelFiles(name=model, folder=path.parent, weights="gguf", gguf_file=path.name)
    file_names = {entry.name for entry in path.iterdir()}
    if any(file_name.endswith(".safetensors") for file_name in file_names):
        return ModelFiles(name=model, folder=path, weights="safetensors")
    if any(file_name.startswith("pytorch_model") and file_name.endswith(".bin") for file_name in file_names):
        return ModelFiles(name=model, folder=path, weights="bin")
    gguf_files = sorted(file_name for file_name in file_names if file_name.endswith(".gguf"))
    if len(gguf_files) == 1:
        return ModelFiles(name=model, folder=path, weights="gguf", gguf_file=gguf_files[0])
    if gguf_files:
        raise ModelNotFound(
            f"{path} holds several .gguf files ({', '.join(gguf_files)}); name one of them as the model."
        )
    raise ModelNotFound(
        f"{path} holds no weights: looked for *.safetensors, pytorch_model*.bin and *.gguf. Give the model's folder."
    )


def weight_file_bytes(model: str, *, revision: str | None = None) -> int:
    """Bytes of the files that hold the weights, about what they take in memory. Raises ModelNotFound."""
    return sum(path.stat().st_size for path in find_weights(model, revision=revision).weight_paths())
