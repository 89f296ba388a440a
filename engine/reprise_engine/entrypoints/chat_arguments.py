"""Flags of how a conversation becomes a prompt, and how an answer is taken apart."""

from __future__ import annotations

import argparse
from typing import get_args

from reprise_engine.parser_names import ReasoningParser, ToolCallParser


def add_chat_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--chat-template", metavar="FILE", help="file, or the template itself")
    parser.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the model may call tools when a request does not say otherwise (on)",
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolCallParser),
        default="auto",
        help="(auto: hermes where the chat template writes tool calls so)",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningParser),
        default="auto",
        help="(auto: qwen3 where the chat template knows <think>)",
    )
