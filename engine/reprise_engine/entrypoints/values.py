"""Values of flags, from text. All raise ArgumentTypeError for what is none."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "": 1}


def number_with_suffix(text: str) -> int:
    """A whole number such as 4096, 32k (32,000), 32K (32,768), 1.5G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 32k (32,000) or 32K (32,768)")
    value = float(match[1]) * _SUFFIXES[match[2]]
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def size(text: str) -> int:
    """Bytes: 4GiB, 512MiB, 1.5TiB, or as number_with_suffix."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])iB", text.strip())
    if match is None:
        try:
            return number_with_suffix(text)
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4GiB, 512MiB or 4294967296") from None
    return int(float(match[1]) * 2 ** (10 * (1 + "KMGT".index(match[2]))))


def model_length(text: str) -> int | None:
    if text in ("auto", "-1"):
        return None
    length = number_with_suffix(text)
    if length < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1, or auto")
    return length


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number


def share_or_blocks(text: str) -> float | int:
    """0.25 and 25% are shares, 25 is a number of blocks. CacheConfig checks the range."""
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a share such as 0.25 or 25% nor a number") from None


def json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def folder(text: str) -> Path:
    if not text:  # Path would take it for the working directory: "$CACHE" where that is not set
        raise argparse.ArgumentTypeError("is empty; give a folder, or leave the flag out")
    return Path(text)
