"""A conversation through the OpenAI client, as an application holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

import openai
from openai.types.chat import ChatCompletionMessageParam

SYSTEM = "You are a careful assistant. " + "Answer in one short sentence and never invent a source. " * 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn cost, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Keeps the history; every turn sends all of it again."""

    client: openai.OpenAI
    model: str
    messages: list[ChatCompletionMessageParam] = field(
        default_factory=lambda: [{"role": "system", "content": SYSTEM}],
    )

    def say(self, text: str) -> Turn:
        self.messages.append({"role": "user", "content": text})
        answer = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=8, temperature=0
        )
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        return Turn(prompt_tokens=usage.prompt_tokens, cached_tokens=cached, completion_tokens=usage.completion_tokens)
