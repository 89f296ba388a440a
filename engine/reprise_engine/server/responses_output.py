"""The output items of a response, put together from the parts of an answer, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from reprise_engine.server.chat_answer import new_call_id
from reprise_engine.text.answer_parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

Event = dict[str, Any]
"""With its `type`; the sequence number is put in where it is sent."""

_COMPLETED, _IN_PROGRESS, _INCOMPLETE = "completed", "in_progress", "incomplete"


class OutputItems:
    """`items` are whole up to the one that is open. Every change is an event, in the order of the API:
    item added, part added, deltas, text done, part done, item done."""

    def __init__(self) -> None:
        self.items: list[Event] = []
        self._open = False

    def add(self, part: Part, *, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """`logprobs` are of the tokens of a ContentText."""
        match part:
            case ReasoningText(text):
                yield from self._ensure("reasoning")
                self._current["content"][0]["text"] += text
                yield self._event("reasoning_text.delta", content_index=0, delta=text)
            case ContentText(text):
                yield from self._ensure("message")
                self._current["content"][0]["text"] += text
                self._current["content"][0]["logprobs"] += logprobs
                yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
            case ToolCallBegin(_, name):
                yield from self.close(_COMPLETED)
                yield from self._begin(
                    {"type": "function_call", "call_id": new_call_id(), "name": name, "arguments": ""}
                )
            case ToolCallArguments(_, text):
                self._current["arguments"] += text
                yield self._event("function_call_arguments.delta", delta=text)
            case ToolCallEnd():
                yield from self.close(_COMPLETED)

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """At the end of the sequence; one that said nothing has an empty message."""
        if not self.items:
            yield from self._ensure("message")
        yield from self.close(_COMPLETED if complete else _INCOMPLETE)

    @property
    def _current(self) -> Event:
        return self.items[-1]

    def _ensure(self, kind: str) -> Iterator[Event]:
        """An open item of this kind with its one part."""
        if self._open and self._current["type"] == kind:
            return
        yield from self.close(_COMPLETED)
        if kind == "reasoning":
            yield from self._begin({"type": kind, "summary": [], "content": [], "encrypted_content": None})
            part: Event = {"type": "reasoning_text", "text": ""}
        else:
            yield from self._begin({"type": kind, "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._current["content"].append(part)
        yield self._event("content_part.added", content_index=0, part=dict(part))

    def _begin(self, item: Event) -> Iterator[Event]:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[item["type"]]
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": _IN_PROGRESS})
        self._open = True
        yield self._item_event("output_item.added")

    def close(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item = self._current
        item["status"] = status
        match item["type"]:
            case "function_call":
                yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            case kind:
                [part] = item["content"]
                done: Event = {"content_index": 0, "text": part["text"]}
                if kind == "reasoning":
                    yield self._event("reasoning_text.done", **done)
                else:
                    yield self._event("output_text.done", **done, logprobs=part["logprobs"])
                yield self._event("content_part.done", content_index=0, part=part)
        yield self._item_event("output_item.done")

    def _event(self, kind: str, **fields: Any) -> Event:
        index = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self._current["id"], "output_index": index, **fields}

    def _item_event(self, kind: str) -> Event:
        item = self._current
        content = {"content": list(item["content"])} if "content" in item else {}
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, "item": item | content}
