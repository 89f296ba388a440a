"""Text in, token ids out, and back: tokenizer, chat template, incremental detokenizer, stop strings. Free of torch."""

from __future__ import annotations

from reprise_engine.text.chat_template import ChatTemplate, ChatTemplateError
from reprise_engine.text.detokenizer import IncrementalDetokenizer
from reprise_engine.text.output import OutputText, TextDelta
from reprise_engine.text.stop import StopStrings
from reprise_engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "OutputText",
    "StopStrings",
    "TextDelta",
    "Tokenizer",
    "load_tokenizer",
]
