"""Blanks between the tokens of JSON: llguidance's option for them, in a schema. Free of llguidance."""

from __future__ import annotations

import json

_BLANKS = {"whitespace_pattern": r"[ \t\n\r]{1,20}"}


def with_blanks(schema: str) -> str:
    """The text of a JSON schema with llguidance's word for the blanks between tokens, unless it says its own.

    They are as the model likes them, but have an end: after blanks more of them are likely, and where the grammar
    forbids what a model would rather say it writes them to its last token. Raises ValueError.
    """
    value = json.loads(schema)
    if not isinstance(value, dict):
        return schema
    own = value.get("x-guidance", {})
    if not isinstance(own, dict) or not own.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern")):
        return schema
    return json.dumps({**value, "x-guidance": {**own, **_BLANKS}}, ensure_ascii=False)
