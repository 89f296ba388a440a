"""The NPU backends on the emulated operators against the reference: every phase of a request, cascades, windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reprise_engine.attention.base import AttentionBackend, KVLayout
from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_310p import NPU310PAttention, _split_scale, split_into_calls
from reprise_engine.attention.npu_cascade import can_merge_by_operator
from reprise_engine.errors import ConfigError
from tests.engine.npu_scenes import Case, Scene, as_bskh, make_scene
from tests.support.npu import npu_operators

pytestmark = pytest.mark.usefixtures("npu_wheel")

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
IN_FLOAT16 = 1e-2
"""A 310P keeps scores in float16: from 8 to 16 on, as some are here, 1/128 apart."""

CASES = (
    Case("cold prefill", ((200, 200),)),
    Case("one token cold", ((1, 1),)),
    Case("a cache hit: few queries, many keys", ((5, 300),)),
    Case("chunks that split blocks", ((60, 188), (70, 130))),
    Case("decodes only", ((1, 128), (1, 129), (1, 700))),
    Case("all kinds at once", ((1, 300), (140, 140), (1, 1), (4, 260), (1, 128))),
    Case("more queries and keys than the mask has", ((2100, 2200), (1, 2100)), heads=(2, 1), head_dim=16),
    Case("eight query heads a key head", ((7, 200), (1, 9)), heads=(8, 1), head_dim=128),
    Case("as many key heads as query heads", ((7, 140), (1, 9)), heads=(3, 3)),
)
WINDOWS = (
    Case("window inside a block", ((150, 150), (1, 300), (6, 260)), sliding_window=7),
    Case("window over blocks, decodes only", ((1, 500), (1, 140)), sliding_window=200),
    Case("window wider than the sequences", ((5, 140), (1, 9)), sliding_window=4096),
)
CASCADES = (
    Case("one group of all rows", ((1, 300), (1, 257), (1, 400)), shared=(((0, 1, 2), 2),)),
    Case("group apart from others", ((1, 300), (90, 90), (3, 400), (1, 140)), shared=(((0, 2), 2),)),
    Case(
        "two groups, several new tokens",
        ((2, 130), (1, 260), (8, 200), (4, 400), (1, 5)),
        shared=(((0, 2), 1), ((1, 3), 2)),
    ),
)


@pytest.fixture
def ascend_910b() -> Iterator[None]:
    with npu_operators("910B"):
        yield


@pytest.fixture
def ascend_310p() -> Iterator[None]:
    with npu_operators("310P"):
        yield


def check(scene: Scene, backend: AttentionBackend) -> None:
    expected, pool = scene.reference()
    out = scene.run(backend)
    assert out.dtype == scene.q_TNH.dtype
    tolerance = IN_FLOAT16 if scene.kv.layout is KVLayout.NZ else TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    # The new KV is in its slots, and nothing else was touched.
    assert torch.equal(as_bskh(scene.kv.key_BSKH, scene).float(), pool.key_BSKH)
    assert torch.equal(as_bskh(scene.kv.value_BSKH, scene).float(), pool.value_BSKH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *WINDOWS], ids=lambda case: case.name)
@pytest.mark.usefixtures("ascend_910b")
def test_910b_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(make_scene(case, dtype=dtype), NPUAttention(CPU))


@pytest.mark.usefixtures("ascend_910b")
def test_910b_takes_larger_blocks() -> None:
    check(make_scene(replace(CASES[5], block_size=256)), NPUAttention(CPU))


@pytest.fixture
def fused_calls(ascend_910b: None, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The key lengths of each call of the fused operator."""
    calls: list[list[int]] = []
    attend = torch.ops.npu.npu_fused_infer_attention_score

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["actual_seq_lengths_kv"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.ops.npu, "npu_fused_infer_attention_score", counted)
    return calls


@pytest.mark.parametrize("by_operator", [True, False])
@pytest.mark.parametrize("case", CASCADES, ids=lambda case: case.name)
def test_a_prefix_read_once_gives_the_same(
    case: Case, by_operator: bool, fused_calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise_engine.attention.npu.can_merge_by_operator", lambda _device: by_operator)
    scene = make_scene(case)
    check(scene, NPUAttention(CPU, least_cascade_bytes=0))
    prefixes, rests = fused_calls
    assert prefixes == [prefix.num_tokens for prefix in scene.metadata.shared_prefixes]
    assert sum(rests) == sum(scene.metadata.kv_lens) - sum(
        prefix.num_tokens * len(prefix.requests) for prefix in scene.metadata.shared_prefixes
    )


@pytest.mark.usefixtures("ascend_910b")
def test_a_prefix_that_saves_little_is_read_by_each() -> None:
    """The cascade's tables are never made, so blocks that are not shared do no harm."""
    scene = make_scene(Case("told wrong", ((1, 300), (1, 290))))
    told_wrong = replace(scene.metadata, shared_prefixes=make_scene(CASCADES[0]).metadata.shared_prefixes[:1])
    check(replace(scene, metadata=told_wrong), NPUAttention(CPU))


def test_a_prefix_is_read_once_from_the_bytes_on_that_it_saves(fused_calls: list[list[int]]) -> None:
    """Of one layer, keys and values: two of three requests need not read 256 tokens of 2 heads of 64 in float16."""
    saved = 2 * 256 * 2 * (2 * 64 * 2)
    for least, halves in ((saved, 2), (saved + 1, 1)):
        fused_calls.clear()
        check(make_scene(CASCADES[0]), NPUAttention(CPU, least_cascade_bytes=least))
        assert len(fused_calls) == halves


@pytest.mark.usefixtures("ascend_910b")
def test_a_window_keeps_its_layer_from_sharing_a_prefix() -> None:
    window = replace(CASCADES[1], sliding_window=200)
    check(make_scene(window), NPUAttention(CPU, least_cascade_bytes=0))


def test_halves_are_merged_by_the_operator_where_cann_has_it(npu_wheel: None) -> None:
    assert not can_merge_by_operator(CPU), "no operator of that name"
    with npu_operators("310P"):
        assert not can_merge_by_operator(CPU), "one that says no"
    with npu_operators("910B"):
        assert can_merge_by_operator(CPU)


@pytest.mark.usefixtures("ascend_910b")
def test_the_plan_of_one_step_is_not_that_of_the_next() -> None:
    backend = NPUAttention(CPU, least_cascade_bytes=0)
    for case in (CASES[4], CASCADES[1], CASES[2], CASCADES[0]):
        check(make_scene(case), backend)


@pytest.mark.parametrize("case", [*CASES, *WINDOWS, *CASCADES], ids=lambda case: case.name)
@pytest.mark.usefixtures("ascend_310p")
def test_310p_equals_the_reference(case: Case) -> None:
    check(make_scene(case, layout=KVLayout.NZ), NPU310PAttention(CPU))


@pytest.mark.parametrize("masked", [False, True])
@given(lens=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=12))
@example(lens=[(2, 0)] * 300)
def test_310p_calls_attend_every_row_once(lens: list[tuple[int, int]], masked: bool) -> None:
    query_lens = tuple(queries for queries, _ in lens)
    kv_lens = tuple(queries + before for queries, before in lens)
    calls = split_into_calls(query_lens, kv_lens, masked=masked)
    attended: list[tuple[int, int]] = []  # (request, keys) of each row
    for call in calls:
        assert call.rows.start == len(attended)
        requests = range(call.requests.start, call.requests.stop)
        for request, queries, keys in zip(requests, call.query_lens, call.kv_lens, strict=True):
            attended += [(request, last + 1) for last in range(keys - queries, keys)]
        assert sum(call.query_lens) <= 1024
        assert len(call.query_lens) <= (511 if call.decodes else 255)
        assert call.decodes == (not masked and all(query_lens[request] == 1 for request in requests))
    assert attended == [
        (request, last + 1)
        for request, (q, kv) in enumerate(zip(query_lens, kv_lens, strict=True))
        for last in range(kv - q, kv)
    ]


def test_310p_makes_no_more_calls_than_it_must() -> None:
    """Decodes that follow each other are one call, whatever cuts the others."""
    query_lens = (1, 1, 1000, 30, 1, 2000, 1)
    calls = split_into_calls(query_lens, tuple(count + 500 for count in query_lens), masked=False)
    assert [(call.query_lens, call.kv_lens, call.decodes) for call in calls] == [
        ((1, 1), (501, 501), True),
        ((1000, 24), (1500, 524), False),
        ((6,), (530,), False),
        ((1,), (501,), True),
        ((1024,), (1524,), False),
        ((976,), (2500,), False),
        ((1,), (501,), True),
    ]
    for masked, sizes in ((False, [511, 89]), (True, [255, 255, 90])):
        calls = split_into_calls((1,) * 600, (9,) * 600, masked=masked)
        assert [len(call.query_lens) for call in calls] == sizes, "what a single core has room for"


@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=lambda case: case.name)
def test_310p_scales_before_float16_overflows(case: Case, ascend_310p: None) -> None:
    """64 products of 40 · 40 are 102,400, of which float16 can hold the scaled 30,720 only."""
    scene = make_scene(case, layout=KVLayout.NZ)
    scene.q_TNH.fill_(40.0)
    scene.k_TKH.fill_(40.0)
    check(scene, NPU310PAttention(CPU))


@pytest.mark.parametrize("scale", [1 / 8, 128**-0.5, 80**-0.5, 1.0, 1.7, 0.3])
def test_310p_splits_a_scale_without_loss(scale: float) -> None:
    power, rest = _split_scale(scale)
    assert power * rest == scale
    assert math.frexp(power)[0] == 0.5, "a power of two"
    assert power <= 1
    assert rest <= max(scale, 1.0)


@pytest.mark.parametrize("layout", KVLayout)
def test_whole_blocks_are_copied_in_order(layout: KVLayout) -> None:
    with npu_operators("310P" if layout is KVLayout.NZ else "910B"):
        scene = make_scene(CASES[5], layout=layout)
        backend = NPUAttention(CPU) if layout is KVLayout.BSKH else NPU310PAttention(CPU)
        before = [as_bskh(pool, scene) for pool in (scene.kv.key_BSKH, scene.kv.value_BSKH)]
        backend.copy_blocks(scene.kv, ((0, 1), (1, 2), (4, 3)))
        for pool, old in zip((scene.kv.key_BSKH, scene.kv.value_BSKH), before, strict=True):
            new = as_bskh(pool, scene)
            for target, source in ((0, 0), (1, 0), (2, 0), (3, 4), (4, 4), (5, 5)):
                assert torch.equal(new[target], old[source])


@pytest.mark.usefixtures("ascend_310p")
def test_310p_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise_engine.attention.npu_310p._OPERATORS", ("_npu_paged_attention", "_npu_gone"))
    with pytest.raises(ConfigError, match="An NPU 310P needs _npu_gone of CANN's NNAL package"):
        NPU310PAttention(CPU)
