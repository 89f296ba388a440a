"""The parsers of tool calls and reasoning, as the flags name them. By itself, since flags are read before the
libraries of text are imported."""

from __future__ import annotations

from typing import Literal

ToolCallParser = Literal["auto", "hermes"]
ReasoningParser = Literal["auto", "none", "qwen3"]
