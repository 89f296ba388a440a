"""docs/quantization.md shows flags that parse, and the types and tensors that the code reads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.models.npu_w8a8 import MOST_SIZE
from reprise_engine.models.quantization import KNOWN, NOT_SERVED

TEXT = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", TEXT, re.MULTILINE))


@pytest.mark.parametrize("command", re.findall(r"^\$ reprise (.+)$", TEXT, re.MULTILINE))
def test_every_command_parses(command: str) -> None:
    assert build_parser().parse_args(shlex.split(command)).quantization == "ascend"


def test_the_types_and_their_tensors() -> None:
    assert ROWS.keys() == {"FLOAT", *KNOWN}
    for kind in ("W8A8", "W8A8_DYNAMIC"):
        assert set(re.findall(r"`(\w+)`", ROWS[kind])) - {"bias"} <= KNOWN[kind]
    assert KNOWN["W8A8_MIX"] == KNOWN["W8A8"] | KNOWN["W8A8_DYNAMIC"]


def test_what_is_refused_and_the_operator_s_limit() -> None:
    assert {"kv_cache_type", "kv_quant_type", "metadata"} <= NOT_SERVED.keys()
    assert all(f"`{key}`" in TEXT for key in ("kv_cache_type", "kv_quant_type", "metadata"))
    assert f"{MOST_SIZE:,} inputs and outputs" in TEXT
