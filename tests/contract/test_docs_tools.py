"""docs/tools-and-reasoning.md names what is there: flags with their defaults, fields, choices."""

from __future__ import annotations

import re
from pathlib import Path

from reprise_engine.entrypoints.arguments import build_parser, server_options
from reprise_engine.server.protocol_responses import ResponsesBody
from reprise_engine.server.responses_input import ITEM_TYPES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tools-and-reasoning.md").read_text(encoding="utf-8")


def test_the_flags_are_the_parsers_with_its_defaults() -> None:
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.+?) \|", TEXT, re.MULTILINE))
    options = server_options(build_parser().parse_args(["serve", "m"]), {})
    assert rows == {
        "--tool-call-parser": f"`{options.tool_call_parser}`",
        "--enable-auto-tool-choice": "on" if options.auto_tool_choice else "off",
        "--reasoning-parser": f"`{options.reasoning_parser}`",
    }
    build_parser().parse_args(["serve", "m", "--no-enable-auto-tool-choice", "--reasoning-parser", "none"])


def test_the_fields_of_responses_are_the_codes() -> None:
    section = TEXT[TEXT.index("## POST /v1/responses") :]
    named = set(re.findall(r"`([a-z_.]+)(?:: true)?`", section))
    honoured = {"input", "instructions", "text.format", "cache_salt", "explain_cache", "seed"}
    refused = {"store", "previous_response_id", "conversation", "background"}
    assert named == honoured | refused | (set(ITEM_TYPES) - {"message"})
    assert {name.partition(".")[0] for name in honoured} <= set(ResponsesBody.model_fields)
    assert refused <= set(ResponsesBody.not_supported)


def test_the_readme_leads_here() -> None:
    assert "docs/tools-and-reasoning.md" in (ROOT / "README.md").read_text(encoding="utf-8")
