"""docs/openai.md lists the very fields that the bodies have, and those that they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reprise_engine.server.protocol import Body, CompletionBody
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.protocol_responses import ResponsesBody

TEXT = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
BODIES: tuple[type[Body], ...] = (ChatCompletionBody, CompletionBody, ResponsesBody)
PLACES = pytest.mark.parametrize(("place", "body"), list(enumerate(BODIES)), ids=["chat", "completions", "responses"])


def rows(heading: str) -> dict[str, list[str]]:
    """Field → its cells, of the table under a heading."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
    assert len(found) == len(dict(found)), "a field twice"
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


@PLACES
def test_the_honoured_fields_are_those_of_the_body(place: int, body: type[Body]) -> None:
    told = {name for name, cells in rows("Fields that are honoured").items() if cells[place]}
    assert told == set(body.model_fields)


@PLACES
def test_the_refused_fields_are_those_of_the_body(place: int, body: type[Body]) -> None:
    told = {name: cells[place] for name, cells in rows("Fields that are refused").items() if cells[place]}
    refused = {name: values for name, values in body.not_supported.items() if name not in body.model_fields}
    assert set(told) == set(refused)
    for name, values in refused.items():
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in values)
        assert told[name] == (neutral or "400"), name
