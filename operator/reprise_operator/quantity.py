"""Kubernetes quantities ("16Gi", "500m", 4) as numbers, and back. Pure."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Annotated

from pydantic import AfterValidator

_QUANTITY = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,3}))?$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def amount(quantity: str | float) -> Decimal:
    """The number a quantity says. Raises ValueError, quoting it, where it is none."""
    match = _QUANTITY.match(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity such as 500m, 4 or 16Gi")
    number, suffix, exponent = Decimal(match[1]), match[2], match[3]
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    return number.scaleb(int(exponent)) if exponent else number


def whole(quantity: str | float) -> int:
    """A quantity of bytes (or of MiB, of devices) as a whole number, rounded up as Kubernetes does."""
    return int(amount(quantity).to_integral_value(ROUND_CEILING))


def text_of_bytes(number: int) -> str:
    """The shortest exact quantity: 17179869184 as "16Gi"."""
    for suffix, power in reversed(_BINARY.items()):
        unit: int = 1024**power
        if number and number % unit == 0:
            return f"{number // unit}{suffix}"
    return str(number)


def _is_amount(quantity: str | float) -> str | float:
    if amount(quantity) < 0:
        raise ValueError(f"{quantity!r} is negative")
    return quantity


Quantity = Annotated[str | int | float, AfterValidator(_is_amount)]
"""A quantity as it stands in a manifest, checked, and passed on as it is."""
