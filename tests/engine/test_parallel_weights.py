"""What a rank loads: its part of every weight, from each format of files, and nothing else."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reprise_engine.config import ModelConfig
from reprise_engine.errors import DamagedModel
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.parallel.layers import NoHead
from reprise_engine.parallel.shard import Cut, Place, cut_of
from tests.support.tiny_models import tiny_model_path

CPU = torch.device("cpu")
FAMILIES = ("qwen2", "qwen3", "qwen3-moe", "llama")


def load(folder: Path, rank: int | None = None, size: int = 2) -> LoadedModel:
    place = None if rank is None else Place(rank=rank, size=size)
    return load_model(ModelConfig(model=str(folder), dtype="float32"), device=CPU, place=place)


@cache
def whole(family: str) -> LoadedModel:
    return load(tiny_model_path(family))


def keep(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        return tensor
    return torch.cat([tensor.narrow(cut.axis, first, last - first) for first, last in cut.intervals], dim=cut.axis)


def check(part: LoadedModel, family: str, place: Place) -> None:
    """Every weight is the cut of the whole one, the head apart."""
    expected = whole(family).module.state_dict()
    if place.rank > 0:
        expected.pop("lm_head.weight")
    found = part.module.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        cut = cut_of(name, tensor.shape, whole(family).spec, place)
        torch.testing.assert_close(found[name], keep(tensor, cut), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_has_its_part_of_every_weight(family: str) -> None:
    for rank in range(2):
        part = load(tiny_model_path(family), rank)
        check(part, family, Place(rank=rank, size=2))
        assert part.spec.num_heads * 2 == whole(family).spec.num_heads
        assert part.weight_bytes < 0.75 * whole(family).weight_bytes
        assert isinstance(part.module.lm_head, NoHead) is (rank > 0)


def test_weights_in_torchs_own_format_are_cut_as_well(tmp_path: Path) -> None:
    source = tiny_model_path("qwen2")
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    check(load(tmp_path, 1), "qwen2", Place(rank=1, size=2))


def test_a_checkpoint_that_lacks_a_weight_is_damaged_for_a_rank_too(tmp_path: Path) -> None:
    source = tiny_model_path("qwen2")
    for path in source.iterdir():
        shutil.copy(path, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DamagedModel, match="cannot be loaded"):
        load(tmp_path, 1)
