"""In which message of a conversation the cached prefix ended, and who rewrote it: for `explain_cache`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from reprise_engine.cache_report import CacheExplanation, MissReason
from reprise_engine.server.chat_prompt import RenderedChat
from reprise_engine.server.protocol_chat import ChatPrompt
from reprise_engine.text import ChatTemplateError, Tokenizer

Rewriter = Literal["template", "client"]

_WORDS: dict[Rewriter | None, str] = {
    None: "",
    "template": " The chat template renders this turn otherwise than when it was new; Qwen3's drops the reasoning of "
    "turns before the last question.",
    "client": " The client sent this turn back otherwise than it was generated: edited, or without its reasoning.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedIn:
    """`message_index` counts from 0. `rewritten_by` is None where the message is no turn of the model."""

    message_index: int
    role: str
    rewritten_by: Rewriter | None

    def added_to(self, explanation: CacheExplanation) -> dict[str, object]:
        """The explanation's JSON with what is known here."""
        told = explanation.as_json()
        where = f"{told['message']} That is in messages[{self.message_index}] ({self.role})."
        return told | {
            "message": where + _WORDS[self.rewritten_by],
            "message_index": self.message_index,
            "rewritten_by": self.rewritten_by,
        }


async def ended_in(
    tokenizer: Tokenizer, body: ChatPrompt, chat: RenderedChat, explanation: CacheExplanation
) -> EndedIn | None:
    """None where the prompt did not leave what is cached, or left it behind the messages."""
    if explanation.reason is not MissReason.DIVERGED:
        return None
    return await asyncio.to_thread(_ended_in, tokenizer, body, chat, explanation.cached_tokens)


def _ended_in(tokenizer: Tokenizer, body: ChatPrompt, chat: RenderedChat, cached_tokens: int) -> EndedIn | None:
    cached = len(tokenizer.decode(chat.token_ids[:cached_tokens], skip_special_tokens=False))
    for index, message in enumerate(chat.messages):
        try:
            # As it was when this message was the last one.
            then = tokenizer.render_chat(
                chat.messages[: index + 1], add_generation_prompt=False, tools=chat.tools, variables=chat.variables
            )
        except ChatTemplateError:
            continue  # a template may refuse a conversation that ends here
        if len(then) <= cached:
            continue
        rewriter: Rewriter | None = None
        if message["role"] == "assistant" and not (body.continue_final_message and index == len(chat.messages) - 1):
            rewriter = "client" if chat.text.startswith(then) else "template"
        return EndedIn(message_index=index, role=body.messages[index].role, rewritten_by=rewriter)
    return None
