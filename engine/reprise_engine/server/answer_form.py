"""The form that a chat's answer must have: what tool_choice and strict tools ask for, around the body's own."""

from __future__ import annotations

from dataclasses import replace

from reprise_engine.errors import RequestError
from reprise_engine.request import StructuredOutput
from reprise_engine.server.state import Loaded
from reprise_engine.server.tool_use import ToolUse
from reprise_engine.text import reasoning
from reprise_engine.text.answer_grammar import AnswerGrammar, GrammarFunction
from reprise_engine.text.reasoning import ReasoningStart

_ANY_OBJECT = '{"type": "object"}'


def answer_form(
    model: Loaded, own: StructuredOutput | None, start: ReasoningStart, use: ToolUse
) -> StructuredOutput | None:
    """`own` is the form that the body asks for, of what is no call. None where the answer is free.

    Raises RequestError for a form that tools cannot stand beside.
    """
    tokenizer = model.tokenizer
    reasons = model.formats.reasoning is not None
    grammar = AnswerGrammar(token_id=tokenizer.token_id, start=start if reasons else None)
    if use.forced:  # there is no content, so its form does not matter
        forced = [GrammarFunction(name=tool.function.name, parameters=tool.function.parameters) for tool in use.allowed]
        return StructuredOutput(kind="grammar", text=grammar.forced(forced, single=use.single), param="tools")
    functions = [
        GrammarFunction(
            name=tool.function.name, parameters=tool.function.parameters, checked=bool(tool.function.strict)
        )
        for tool in use.allowed
    ]
    if own is None:
        if not use.limited and not any(function.checked for function in functions):
            return None
        return StructuredOutput(kind="grammar", text=grammar.free(functions), param="tools")
    thinks = reasons and start is not ReasoningStart.CLOSED
    if own.kind in ("json", "json_object") and (functions or thinks):
        schema = own.text or _ANY_OBJECT
        return StructuredOutput(kind="grammar", text=grammar.formed(schema, functions), param=own.param)
    if functions:
        raise RequestError(
            f"{own.param} of kind {own.kind!r} cannot be combined with tools, only JSON can; leave one of them out, or "
            'send tool_choice "none".',
            param=own.param,
        )
    if thinks and start is ReasoningStart.OPEN:
        return replace(own, start_after=tokenizer.encode(reasoning.END, add_special_tokens=False))
    return own
