"""The CPU kernels at every instruction set this processor runs, against plain torch in double precision."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reprise_engine.attention.native import NativeAttention
from reprise_engine.config import ModelConfig
from reprise_engine.models.fused import FusedDecoderLayer, NativeExperts, NativeLinear, NativeRMSNorm
from reprise_engine.models.loader import load_model
from reprise_engine.models.upcast import UpcastExperts
from reprise_engine.native import Kernels, LinearWeights, available_levels, load_kernels, open_kernels
from reprise_engine.native import build as native_build
from reprise_engine.native.build import library_path
from reprise_engine.native.library import load_kernels as uncached_load
from tests.engine.test_attention import CASES, Case, make_scene
from tests.support.tiny_models import tiny_model_path

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the CPU kernels are not built (make venv)")
LEVELS = available_levels() if library_path().exists() else ()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(params=LEVELS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return open_kernels(request.param)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within rounding of sums of float32."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.double(), atol=3e-5, rtol=1e-5)


# --- linear layers


@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 150),
    outputs=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    dtype=DTYPES,
    bias=st.booleans(),
)
def test_linear(
    kernels: Kernels, rows: int, inputs: int, outputs: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    x = random(rows, inputs)
    weights = [random(size, inputs, seed=size, dtype=dtype) for size in outputs]
    biases = [random(size, seed=9) if bias else None for size in outputs]
    expected = torch.cat(
        [
            F.linear(x.double(), weight.double(), None if b is None else b.double())
            for weight, b in zip(weights, biases, strict=True)
        ],
        dim=1,
    )
    layers = LinearWeights(*zip(weights, biases, strict=True))
    close(kernels.linear(x, layers), expected)
    total = random(rows, sum(outputs), seed=3)
    before = total.clone()
    one = LinearWeights(
        (torch.cat(weights), None if biases[0] is None else torch.cat([b for b in biases if b is not None]))
    )
    kernels.add_linear(x, one, total)
    close(total, before.double() + expected)


@given(
    rows=st.integers(1, 20), inputs=st.integers(1, 100), outputs=st.integers(1, 70), dtype=DTYPES, bias=st.booleans()
)
def test_swiglu(kernels: Kernels, rows: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> None:
    x = random(rows, inputs)
    gate, up = (random(outputs, inputs, seed=seed, dtype=dtype) for seed in (1, 2))
    b_gate, b_up = (random(outputs, seed=seed) if bias else None for seed in (3, 4))
    expected = F.silu(F.linear(x.double(), gate.double(), None if b_gate is None else b_gate.double()))
    expected = expected * F.linear(x.double(), up.double(), None if b_up is None else b_up.double())
    actual = kernels.swiglu(x, LinearWeights((gate, b_gate), (up, b_up)))
    torch.testing.assert_close(actual.double(), expected, atol=2e-4, rtol=2e-5)


def test_swiglu_of_extreme_gates(kernels: Kernels) -> None:
    x = torch.eye(4)
    gate = torch.diag(torch.tensor([-200.0, -88.5, 88.5, 3e38])).contiguous()
    out = kernels.swiglu(x, LinearWeights((gate, None), (torch.ones(4, 4), None)))
    close(out.diagonal(), torch.tensor([0.0, 0.0, 88.5, 3e38]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch_bit_for_bit(kernels: Kernels, dtype: torch.dtype) -> None:
    """Also where the rows are so many that they are worked on in blocks."""
    x = random(300, 1500)
    layer = LinearWeights((random(70, 1500, seed=1, dtype=dtype), None))
    together = kernels.linear(x, layer)
    for rows in (1, 2, 3, 5, 6, 7, 64, 299):
        assert torch.equal(kernels.linear(x[:rows], layer), together[:rows])


def test_linear_reads_strided_rows_and_refuses_what_it_cannot(kernels: Kernels) -> None:
    wide = random(5, 80)
    layer = LinearWeights((random(7, 40, seed=1), None))
    assert torch.equal(kernels.linear(wide[:, 40:], layer), kernels.linear(wide[:, 40:].contiguous(), layer))
    with pytest.raises(ValueError, match="float32 rows of 40"):
        kernels.linear(random(5, 41), layer)
    with pytest.raises(ValueError, match="float32 rows of 40"):
        kernels.linear(random(5, 40, dtype=torch.bfloat16), layer)
    with pytest.raises(ValueError, match="bfloat16"):
        LinearWeights((random(4, 4), None), (random(4, 4, dtype=torch.bfloat16), None))
    with pytest.raises(ValueError, match="dense"):
        LinearWeights((random(4, 8).t(), None), (random(4, 4), None))


# --- norm and rotation


@given(rows=st.integers(1, 30), size=st.integers(1, 130))
def test_rms_norm(kernels: Kernels, rows: int, size: int) -> None:
    x, weight = random(rows, size), random(size, seed=1)
    x64 = x.double()
    expected = weight.double() * x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    close(kernels.rms_norm(x, weight, 1e-6), expected)


@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    normed=st.booleans(),
)
def test_rotary(kernels: Kernels, rows: int, heads: int, kv_heads: int, half: int, normed: bool) -> None:
    size = 2 * half
    x = random(rows, heads + 2 * kv_heads, size)
    angles = random(rows, half, seed=1).repeat(1, 2)
    norms = [random(size, seed=2), random(size, seed=3)] if normed else [None, None]
    expected = x.double().clone()
    for norm, part in ((norms[0], slice(0, heads)), (norms[1], slice(heads, heads + kv_heads))):
        piece = expected[:, part]
        if norm is not None:
            piece = norm.double() * piece / (piece.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        turned = torch.cat((-piece[..., half:], piece[..., :half]), dim=-1)
        expected[:, part] = piece * angles.double().cos()[:, None] + turned * angles.double().sin()[:, None]
    kernels.rotary(
        x.view(rows, -1), num_heads=heads, num_kv_heads=kv_heads, head_dim=size, cosine=angles.cos(), sine=angles.sin(),
        query_norm=norms[0], key_norm=norms[1], eps=1e-6,
    )  # fmt: skip
    close(x, expected)


# --- attention


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(kernels: Kernels, case: Case, kv_dtype: torch.dtype) -> None:
    scene = make_scene(case, kv_dtype=kv_dtype)
    actual = scene.run(NativeAttention(kernels))
    torch.testing.assert_close(actual.double(), scene.expected_TNH, atol=3e-6, rtol=1e-5)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (6, 2), (7, 1), (8, 8)]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 90)),
    dtype=DTYPES,
)
def test_attention_of_any_shape(
    kernels: Kernels, lengths: list[tuple[int, int]], heads: tuple[int, int], block_size: int, window: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    case = Case("any", tuple((new, new + old) for new, old in lengths), heads, block_size, window)
    scene = make_scene(case, kv_dtype=dtype)
    actual = scene.run(NativeAttention(kernels))
    torch.testing.assert_close(actual.double(), scene.expected_TNH, atol=3e-6, rtol=1e-5)


def test_kv_is_rounded_as_torch_rounds(kernels: Kernels) -> None:
    values = torch.cat((random(4093) * 1e3, torch.tensor([float("inf"), float("-inf"), 3.4e38]))).view(4096 // 16, 2, 8)
    pool = torch.zeros((300, 2, 2, 8), dtype=torch.bfloat16)
    slots = torch.randperm(600, generator=torch.Generator().manual_seed(1))[: len(values)]
    kernels.write_kv(values, slots, pool)
    assert torch.equal(pool.flatten(0, 1)[slots], values.bfloat16())


# --- models


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe", "opt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_runs_on_the_kernels_under_its_own_names(family: str, dtype: str, kernels: Kernels) -> None:
    config = ModelConfig(model=str(tiny_model_path(family)), dtype="bfloat16" if dtype == "bfloat16" else "float32")
    plain = load_model(config, device=torch.device("cpu")).module
    fused = load_model(config, device=torch.device("cpu"), kernels=kernels).module
    assert list(fused.state_dict()) == list(plain.state_dict())
    kinds = {type(module) for module in fused.modules()}
    assert nn.Linear not in kinds
    assert NativeLinear in kinds
    if family != "opt":
        assert {FusedDecoderLayer, NativeRMSNorm} <= kinds


def test_weights_that_move_are_found_again(kernels: Kernels) -> None:
    linear = nn.Linear(40, 30)
    native = NativeLinear(linear, kernels)
    x = random(3, 40)
    with torch.inference_mode():
        close(native(x), linear(x))
        native.to(torch.bfloat16)
        native.bias.data = native.bias.float()
        close(native(x), F.linear(x, native.weight.float(), native.bias))


def test_experts(kernels: Kernels) -> None:
    config = ModelConfig(model=str(tiny_model_path("qwen3-moe")), dtype="bfloat16")
    plain = load_model(config, device=torch.device("cpu")).module.model.layers[0].mlp.experts
    fused = load_model(config, device=torch.device("cpu"), kernels=kernels).module.model.layers[0].mlp.experts
    assert isinstance(plain, UpcastExperts)
    assert isinstance(fused, NativeExperts)
    x = random(6, 64)
    index = torch.tensor([[0, 1], [7, 3], [1, 0], [2, 2], [5, 6], [0, 4]])
    weight = torch.rand(6, 2)
    torch.testing.assert_close(fused(x, index, weight), plain(x, index, weight), atol=1e-5, rtol=1e-5)


# --- the library


def test_a_level_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="this processor runs"):
        open_kernels("sse9")


def test_the_best_level_is_loaded() -> None:
    loaded = load_kernels()
    assert loaded is not None
    assert loaded.level == LEVELS[0]


def test_without_a_library_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    uncached_load.cache_clear()
    monkeypatch.setattr("reprise_engine.native.library.library_path", lambda: tmp_path / "kernels-none.so")
    try:
        with caplog.at_level(logging.WARNING):
            assert load_kernels() is None
            assert load_kernels() is None
    finally:
        uncached_load.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "python -m reprise_engine.native.build" in caplog.text


def test_build_names_the_library_by_its_sources_and_builds_once(tmp_path: Path) -> None:
    """A copy of the package's folder, built by its own script, with nothing else installed."""
    copy = tmp_path / "native"
    shutil.copytree(native_build.FOLDER, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for source in (copy / "src").glob("*.cpp"):
        if source.stem not in ("level", "elementwise"):
            source.unlink()  # the others take long to compile

    def build(**env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(copy / "build.py")]
        return subprocess.run(command, capture_output=True, text=True, env=env or None, check=False)

    without_compiler = build(PATH=str(tmp_path))
    assert without_compiler.returncode == 1
    assert "no C++ compiler" in without_compiler.stderr
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    first = Path(build().stdout.strip())
    built = first.stat().st_mtime_ns
    assert Path(build().stdout.strip()) == first
    assert first.stat().st_mtime_ns == built
    with (copy / "src" / "level.cpp").open("a") as file:
        file.write("// changed\n")
    second = Path(build().stdout.strip())
    assert second != first
    assert [path.name for path in copy.glob("*.so")] == [second.name], "the library of older sources is removed"
