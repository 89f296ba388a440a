"""Every rule of the emulated NPU refuses something, and says which rule it is; the calls around it go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import half
from tests.engine.npu_refusals import (
    A2,
    ADD_NORM,
    APPLY_ROTARY,
    DYNAMIC,
    FIA,
    GATHER,
    MATMUL,
    MHA,
    NORM,
    P310,
    PAGED,
    QUANTIZE,
    REFUSED,
    RESHAPE,
    ROTARY,
    SCATTER,
    SPLITFUSE,
    SPLITFUSE_V2,
    SWIGLU,
    UPDATE,
    Refused,
)
from tests.engine.npu_refused_atb import ATB_REFUSED, GOOD_ATB
from tests.engine.npu_refused_parts import GOOD_ON_A2, PARTS
from tests.support.npu import Atb, NotSupportedByNpu, all_rules, npu_operators

pytestmark = pytest.mark.usefixtures("npu_wheel")

GOOD: tuple[tuple[str, Callable[[], dict[str, Any]], str], ...] = (
    (FIA, calls.paged, A2),
    (FIA, calls.unpaged, A2),
    (FIA, lambda: calls.paged(**MHA), A2),
    *((FIA, lambda layout=layout: calls.rows(layout), A2) for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND")),
    (SCATTER, calls.scatter, A2),
    (SCATTER, calls.scatter_nz, A2),
    (GATHER, calls.gather, A2),
    (UPDATE, calls.update, A2),
    (RESHAPE, calls.reshape_and_cache, P310),
    (PAGED, calls.paged_attention, P310),
    (SPLITFUSE, calls.splitfuse, P310),
    (SPLITFUSE_V2, calls.splitfuse_v2, P310),
    *((NORM, calls.norm, chip) for chip in (A2, P310)),
    *((ADD_NORM, calls.add_norm, chip) for chip in (A2, P310)),
    *((SWIGLU, lambda: {"input": half(3, 64)}, chip) for chip in (A2, P310)),
    (ROTARY, calls.rotary, A2),
    *((APPLY_ROTARY, calls.apply_rotary, chip) for chip in (A2, P310)),
    *((QUANTIZE, calls.quantize, chip) for chip in (A2, P310)),
    (DYNAMIC, lambda: {"input": half(3, 32)}, A2),
    (MATMUL, calls.matmul, A2),
    (MATMUL, calls.matmul_310p, P310),
    *((operator, make, A2) for operator, make in GOOD_ON_A2),
    *((operator, make, P310) for operator, make in GOOD_ATB),
)


@pytest.fixture(scope="module")
def on_chip() -> Callable[..., Any]:
    def call(chip: str, operator: str, make: Callable[[], dict[str, Any]], atb: Atb = Atb.CANN_9_1) -> Any:
        with npu_operators(chip, atb=atb):
            namespace, name = operator.split(".")
            return getattr(getattr(torch.ops, namespace), name)(**make())

    return call


@pytest.mark.parametrize("refused", [*REFUSED, *PARTS, *ATB_REFUSED], ids=lambda refused: refused.rule.name)
def test_a_rule_refuses(refused: Refused, on_chip: Callable[..., Any]) -> None:
    with pytest.raises(NotSupportedByNpu) as caught:
        on_chip(refused.chip, refused.operator, refused.make, refused.atb)
    assert caught.value.rule is refused.rule, str(caught.value)


@pytest.mark.parametrize(("operator", "make", "chip"), GOOD)
def test_the_call_that_rules_are_shown_on_goes_through(
    operator: str, make: Callable[[], dict[str, Any]], chip: str, on_chip: Callable[..., Any]
) -> None:
    on_chip(chip, operator, make)


def test_every_rule_is_shown_to_refuse_and_cites_one_place() -> None:
    rules = all_rules()
    names = [rule.name for rule in rules]
    assert len(set(names)) == len(names)
    assert set(rules) == {refused.rule for refused in (*REFUSED, *ATB_REFUSED)}
    for rule in rules:
        assert rule.source.lines, rule.name
        assert f"{rule.source.path}:{rule.source.lines[0]}" in str(rule.source)


def test_a_refusal_names_rule_reason_and_source(on_chip: Callable[..., Any]) -> None:
    said = r"FIA-BLOCK-IDS: block ids are in the cache.*sequence 0: \[5\] of 5 .*fused_infer_attention_score\.md:128 @"
    with pytest.raises(NotSupportedByNpu, match=said):
        on_chip(A2, FIA, lambda: calls.paged(block_table=torch.tensor([[5, 0], [1, 4]], dtype=torch.int32)))
