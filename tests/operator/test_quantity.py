"""Quantities as Kubernetes writes them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_operator.quantity import amount, text_of_bytes, whole


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4),
        (4, 4),
        (7, 7),
        (0.5, Decimal("0.5")),
        ("0.5", Decimal("0.5")),
        ("1k", 1000),
        ("2M", 2_000_000),
        ("1e3", 1000),
        ("500m", Decimal("0.5")),
        ("16Gi", 16 * 1024**3),
        ("1.5Gi", 3 * 1024**3 // 2),
        ("16G", 16 * 10**9),
        ("1.5e3", 1500),
        ("1E", 10**18),
        ("1e-3", Decimal("0.001")),
        (".5Ki", 512),
        ("+3k", 3000),
        ("100n", Decimal("1e-7")),
    ],
)
def test_a_quantity_is_a_number(text: str | float, number: int | Decimal) -> None:
    assert amount(text) == number


@pytest.mark.parametrize("text", ["", "lots", "Gi", "16 Gi", "16GB", "0x10", "1e", "--1", "1e9999", "16gi"])
def test_what_is_none_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity such as") as refused:
        amount(text)
    assert repr(text) in str(refused.value)


def test_parts_of_a_byte_are_rounded_up() -> None:
    assert (whole("100m"), whole("1.2"), whole("2")) == (1, 2, 2)


@given(st.integers(0, 2**70))
def test_bytes_are_written_exactly(number: int) -> None:
    assert amount(text_of_bytes(number)) == number


def test_bytes_are_written_shortly() -> None:
    assert [text_of_bytes(number) for number in (0, 1, 1024, 17179869184, 10**9)] == [
        "0",
        "1",
        "1Ki",
        "16Gi",
        "1000000000",
    ]
