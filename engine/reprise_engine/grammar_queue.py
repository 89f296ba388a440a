"""Requests whose grammar is being compiled: they are let in, or refused, when that has ended. Nobody else waits."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from reprise_engine.errors import RequestError
from reprise_engine.request import EngineRequest, FinishReason, RequestId, RequestOutput, StructuredOutput


class GrammarCompiler(Protocol):
    def prepare(self, structured: StructuredOutput) -> Future[None]:
        """Compiles in the background. Ends with a RequestError where the grammar cannot be honoured."""
        ...

    def close(self) -> None: ...


class GrammarQueue:
    """In the order of arrival, though one may overtake another."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a compiler every grammar is refused."""
        self._compiler = compiler
        self._waiting: dict[RequestId, tuple[EngineRequest, Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: EngineRequest, structured: StructuredOutput) -> None:
        """Raises RequestError where it cannot be compiled at all, or the id is in use."""
        if self._compiler is None:
            raise RequestError("Structured output is not supported by this engine.", param=structured.param)
        if request.request_id in self._waiting:
            raise RequestError(f"request_id {request.request_id!r} is in use; ids must be unique.", param="request_id")
        self._waiting[request.request_id] = request, self._compiler.prepare(structured)

    def take(self) -> tuple[list[EngineRequest], list[RequestOutput]]:
        """Those that may be let in by now, and the refusals of others."""
        ready: list[EngineRequest] = []
        refused: list[RequestOutput] = []
        for request_id, (request, compiling) in list(self._waiting.items()):
            if not compiling.done():
                continue
            del self._waiting[request_id]
            error = compiling.exception()
            if error is None:
                ready.append(request)
            elif isinstance(error, RequestError):
                refused.append(RequestOutput(request_id=request_id, error=error))
            else:
                raise error
        return ready, refused

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """Ends those that are here; others are ignored."""
        found = [entry for request_id in request_ids if (entry := self._waiting.pop(request_id, None)) is not None]
        for _, compiling in found:
            compiling.cancel()
        return [
            RequestOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.ABORT,
                prompt_tokens=len(request.prompt_token_ids),
            )
            for request, _ in found
        ]

    def abort_all(self) -> None:
        self.abort(tuple(self._waiting))

    def wait(self, seconds: float) -> None:
        """Until one is ready, at most so long."""
        wait([compiling for _, compiling in self._waiting.values()], timeout=seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
