"""A rank's part of a checkpoint, read from its files piece by piece: no more than the part is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

from reprise_engine.errors import DamagedModel
from reprise_engine.models.files import ModelFiles
from reprise_engine.models.spec import ModelSpec
from reprise_engine.parallel.shard import Cut, Place, cut_of, is_zero


class Piece:
    """A part of a tensor that is read when transformers asks for it, by `piece[...]`, and let go when it is copied to
    where it belongs. `source` is a tensor or a slice of safetensors."""

    def __init__(self, source: Any, cut: Cut | None, *, zero: bool) -> None:
        self._source, self._cut, self._zero = source, cut, zero

    def __getitem__(self, _all: EllipsisType) -> torch.Tensor:
        if self._cut is None:
            whole: torch.Tensor = self._source[...]
            return torch.zeros_like(whole) if self._zero else whole
        before = (slice(None),) * self._cut.axis
        parts = [self._source[(*before, slice(first, last))] for first, last in self._cut.intervals]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self._cut.axis)


def piece_of(name: str, source: Any, shape: tuple[int, ...], spec: ModelSpec, place: Place) -> Piece:
    """The rank's part of the tensor `name`, of which `shape` is all. `spec` is the whole model's.

    Raises DamagedModel where the parts of all ranks are not the whole tensor.
    """
    cut = cut_of(name, shape, spec, place)
    last = cut_of(name, shape, spec, Place(rank=place.size - 1, size=place.size))
    if cut is not None and last is not None:
        end = last.intervals[-1][1]
        if cut.axis >= len(shape) or shape[cut.axis] != end:
            raise DamagedModel(
                f"{name} is {list(shape)}, of which the ranks have parts up to {end} along axis {cut.axis}: it is not "
                "as large as config.json says, or cannot be divided."
            )
    return Piece(source, cut, zero=is_zero(name, place))


@contextmanager
def rank_weights(
    files: ModelFiles, spec: ModelSpec, place: Place, *, unpack: Callable[[], Mapping[str, torch.Tensor]]
) -> Iterator[dict[str, Piece]]:
    """The rank's part of every tensor of the checkpoint, by name. `spec` is the whole model's. The files stay open
    inside the block. `unpack` gives the tensors of a GGUF file, which can only be unpacked as a whole.

    Raises DamagedModel."""
    with ExitStack() as open_files:
        yield {
            name: piece_of(name, source, shape, spec, place)
            for name, source, shape in _tensors(files, open_files, unpack)
        }


def _tensors(
    files: ModelFiles, open_files: ExitStack, unpack: Callable[[], Mapping[str, torch.Tensor]]
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """(name, source, shape) of all tensors of the checkpoint."""
    match files.weights:
        case "safetensors":
            for path in files.weight_paths():
                opened = open_files.enter_context(safe_open(path, framework="pt"))
                for name in opened.keys():  # noqa: SIM118  (it is no dictionary)
                    source = opened.get_slice(name)
                    yield name, source, tuple(source.get_shape())
        case "bin":
            for path in files.weight_paths():
                loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                yield from ((name, tensor, tuple(tensor.shape)) for name, tensor in loaded.items())
        case "gguf":
            yield from ((name, tensor, tuple(tensor.shape)) for name, tensor in unpack().items())
