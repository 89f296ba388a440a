"""From what a request asks for to a grammar of llguidance, and its complaints in our words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import llguidance

from reprise_engine.errors import RequestError
from reprise_engine.request import StructuredOutput
from reprise_engine.structured.blanks import with_blanks

_ANY_OBJECT = json.dumps({"type": "object"})
_LONGEST_COMPLAINT = 300
_NO_MESSAGE = ("NoExtension", "NoExtensionBias")
"""llguidance's words for a grammar that nothing fits."""
_VERBOSE = re.compile(r"<(state|non-verbose)\b.*", re.DOTALL)
"""After its message, llguidance prints the parser's state, or that it does not."""
_EXCERPT = re.compile(r"^ *\d+ \| .*", re.DOTALL | re.MULTILINE)
"""And before that, lines of the grammar, which is not always the client's own."""


def grammar_of(structured: StructuredOutput) -> str:
    """llguidance's text of it. Raises RequestError for what cannot be read; that it is sound is not known yet."""
    try:
        match structured.kind:
            case "json":
                return _of_schema(structured.text)
            case "json_object":
                return _of_schema(_ANY_OBJECT)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(structured.text)
            case "choice":
                return _of_choices(json.loads(structured.text))
            case "grammar":
                return llguidance.grammar_from(structured.kind, structured.text)
    except RecursionError:
        raise refused(structured, "it is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise refused(structured, str(error)) from error


def _of_choices(choices: Sequence[str]) -> str:
    """One token of Lark's: as alternatives of a rule, more than some 2,000 are too many for the parser."""
    return f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}\n"


def _of_schema(schema: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(with_blanks(schema))


def refused(structured: StructuredOutput, complaint: str) -> RequestError:
    """The complaint about a grammar, naming the field it came from."""
    what = "The JSON schema" if structured.kind == "json" else f"The {structured.kind}"
    reason = " ".join(_EXCERPT.sub("", _VERBOSE.sub("", complaint)).split())
    if not reason or reason in _NO_MESSAGE:
        reason = "no text fits it"
    if len(reason) > _LONGEST_COMPLAINT:
        reason = reason[: _LONGEST_COMPLAINT - 1] + "…"
    param = structured.param
    return RequestError(
        f"{what}{f' in {param}' if param else ''} cannot be honoured: {reason.rstrip('.')}. Change it or leave it out.",
        param=param,
        code="invalid_structured_output",
    )
