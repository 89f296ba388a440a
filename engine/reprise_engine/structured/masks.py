"""The state of every sequence that is generated under a grammar, and the tokens that may come next.

What is allowed depends on (grammar, tokens generated) only, so all that is kept here is a memory of work done: a
sequence that was preempted, or is asked for again, is replayed from its tokens. llguidance does the parsing; it gives
up the interpreter's lock meanwhile. Two threads: one compiles, one computes masks while the model computes logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import numpy as np
import numpy.typing as npt

from reprise_engine.errors import RequestError
from reprise_engine.request import RequestId, StructuredOutput, TokenId
from reprise_engine.step import ScheduledRequest
from reprise_engine.structured.grammar import grammar_of, refused

_STACK_BYTES = 512 * 1024**2
"""Of each thread, reserved and not taken: llguidance descends a level for every rule or reference that leads to the
next one, 10 KiB or so each, and a stack that overflows ends the process. MAX_STRUCTURE_LENGTH bounds the levels."""
_COMPILED = 64
"""Grammars kept compiled, those used last."""
_WORD_BITS = 32

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Row `rows[m]` of the sampled ones may choose token t where bit t of `words_MW[m]` is set, the lowest bit first.

    `errors`: requests whose grammar cannot be followed any further.
    """

    rows: tuple[int, ...]
    words_MW: Words
    errors: Mapping[RequestId, RequestError]


@dataclass(slots=True)
class _Sequence:
    matcher: llguidance.LLMatcher
    structured: StructuredOutput
    tokens: tuple[TokenId, ...]
    """Those that the matcher has taken in."""


class Grammars:
    """Thread-safe as far as its two owners need: the loop prepares, the runner asks for masks, one step at a time."""

    def __init__(
        self, load_tokenizer: Callable[[], llguidance.LLTokenizer], *, vocab_size: int, max_sequences: int
    ) -> None:
        """`load_tokenizer` is called once, by the first request that needs it; it may take seconds.

        `vocab_size` is the model's: the width of a row of logits. `max_sequences`: as many run at most.
        """
        self._load_tokenizer = load_tokenizer
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._words = -(-vocab_size // _WORD_BITS)
        self._max_sequences = max_sequences
        self._compiled: OrderedDict[StructuredOutput, llguidance.LLMatcher] = OrderedDict()
        self._sequences: OrderedDict[RequestId, _Sequence] = OrderedDict()
        self._compiling = threading.Lock()
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def prepare(self, structured: StructuredOutput) -> Future[None]:
        """Compiles it; ends with a RequestError where the grammar cannot be honoured."""
        return self._thread("grammar-compiler").submit(self._prepare, structured)

    def masks(self, requests: Sequence[ScheduledRequest]) -> Future[TokenMasks] | None:
        """Begins to compute the masks of those of the sampled `requests` that have a grammar; None where none has."""
        if not any(request.sampling.structured is not None for request in requests):
            return None
        return self._thread("grammar-masks").submit(self._masks, tuple(requests))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)

    def _thread(self, name: str) -> ThreadPoolExecutor:
        """Started by the first who needs it."""
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, name)
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._threads[name].submit(int).result()  # the executor starts its thread when it is given work
            finally:
                threading.stack_size(before)
        return self._threads[name]

    # --- the thread that compiles

    def _prepare(self, structured: StructuredOutput) -> None:
        self._matcher(structured)

    def _matcher(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        """A new one. Raises RequestError for a grammar that is not sound, or allows nothing."""
        with self._compiling:
            compiled = self._compiled.get(structured)
            if compiled is None:
                compiled = self._compile(structured)
                self._compiled[structured] = compiled
                if len(self._compiled) > _COMPILED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(structured)
            return compiled.deep_copy()

    def _compile(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        grammar = grammar_of(structured)
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        matcher = llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
        )
        # Some faults only show at the first mask: that no text fits, for one. It is computed for later, too.
        first = matcher.compute_bitmask()
        if matcher.is_error() or not any(first):
            raise refused(structured, matcher.get_error())
        return matcher

    # --- the thread that computes masks

    def _masks(self, requests: tuple[ScheduledRequest, ...]) -> TokenMasks:
        rows: list[int] = []
        masks: list[Words] = []
        errors: dict[RequestId, RequestError] = {}
        for row, request in enumerate(requests):
            structured = request.sampling.structured
            if structured is None:
                continue
            assert request.output is not None, f"the step has no output of {request.request_id}, which has a grammar"
            tokens = _under_grammar(structured, request.output)
            if tokens is None:
                continue
            try:
                masks.append(self._mask(request.request_id, structured, tokens))
                rows.append(row)
            except RequestError as error:
                errors[request.request_id] = error
        while len(self._sequences) > self._max_sequences:
            self._sequences.popitem(last=False)
        words_MW = np.stack(masks) if masks else np.empty((0, self._words), dtype=np.uint32)
        return TokenMasks(rows=tuple(rows), words_MW=words_MW, errors=errors)

    def _mask(self, request_id: RequestId, structured: StructuredOutput, tokens: tuple[TokenId, ...]) -> Words:
        known = self._sequences.pop(request_id, None)
        if known is None or known.structured != structured or known.tokens != tokens[: len(known.tokens)]:
            known = _Sequence(self._matcher(structured), structured, ())
        new = tokens[len(known.tokens) :]
        if new and not known.matcher.consume_tokens(list(new)):
            raise refused(structured, known.matcher.get_error())
        known.tokens = tokens
        mask_W = np.zeros(self._words, dtype=np.uint32)
        found = np.frombuffer(known.matcher.compute_bitmask(), dtype=np.uint32)[: self._words]
        mask_W[: len(found)] = found
        if known.matcher.is_error() or not mask_W.any():
            raise refused(structured, known.matcher.get_error() or "the text cannot go on")
        self._sequences[request_id] = known
        return mask_W


def _under_grammar(structured: StructuredOutput, output: tuple[TokenId, ...]) -> tuple[TokenId, ...] | None:
    """What of the output the grammar is about; None where it has not begun."""
    mark = structured.start_after
    if not mark:
        return output
    at = -1
    while mark[0] in output[at + 1 :]:
        at = output.index(mark[0], at + 1)
        if output[at : at + len(mark)] == mark:
            return output[at + len(mark) :]
    return None
