"""Weights in their place in memory, and the files that are read ahead."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from reprise_engine.errors import ModelNotFound
from reprise_engine.models.files import find_weights
from reprise_engine.models.placement import place_weights
from reprise_engine.models.readahead import read_ahead
from tests.support.tiny_models import tiny_model_path


def _tied() -> nn.ModuleList:
    embedding = nn.Embedding(5, 3, dtype=torch.bfloat16)
    head = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
    head.weight = embedding.weight
    return nn.ModuleList([embedding, nn.Linear(3, 7), head]).requires_grad_(False)


def test_weights_keep_their_values_and_ties_and_begin_on_cache_lines() -> None:
    model = _tied()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    place_weights(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() == {"0.weight", "1.weight", "1.bias"}
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() % 64 == 0
    weights = [module.weight for module in model]
    assert isinstance(weights[0], nn.Parameter)
    assert weights[2] is weights[0]
    places = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in after.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))


def test_parameters_that_only_share_memory_stay_together() -> None:
    shared = torch.arange(6.0).view(2, 3)
    model = nn.ParameterList([nn.Parameter(shared, requires_grad=False), nn.Parameter(shared, requires_grad=False)])
    place_weights(model)
    assert model[0].data_ptr() == model[1].data_ptr() != shared.data_ptr()
    assert torch.equal(model[1], shared)


def test_progress_is_told_for_large_models_only_and_never_above_one() -> None:
    told: list[float] = []
    place_weights(_tied(), progress=told.append)
    assert told == []
    large = nn.ModuleList([nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    place_weights(large.requires_grad_(False), progress=told.append)
    assert told == [0.5, 1.0]


@pytest.mark.parametrize(("family", "suffix"), [("qwen3", ".safetensors"), ("opt", ".bin")])
def test_the_files_to_read_ahead_are_those_of_the_weights(family: str, suffix: str) -> None:
    folder = tiny_model_path(family)
    [path] = find_weights(str(folder)).weight_paths()
    assert path.is_file()
    assert path.suffix == suffix
    read_ahead(str(folder))


def test_reading_ahead_leaves_errors_to_the_loader(tmp_path: Path) -> None:
    read_ahead(str(tmp_path))
    read_ahead(str(tmp_path / "missing"))
    with pytest.raises(ModelNotFound, match="holds no weights"):
        find_weights(str(tmp_path))
