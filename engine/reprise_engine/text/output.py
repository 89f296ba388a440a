"""What a client sees of one sequence: the engine's tokens turned into text, ended by stop strings.

Used by the server and by the offline `LLM`, so both show the same text for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reprise_engine.request import FinishReason, RequestOutput, SamplingParams, TokenId, TokenLogprobs
from reprise_engine.text.detokenizer import Decoder, IncrementalDetokenizer
from reprise_engine.text.stop import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one output of the engine adds. `finish_reason` is set once, on the last one.

    `stop_reason` is the stop string or the stop token that ended it; None for the model's end-of-sequence token.
    """

    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputText:
    """Feed it every RequestOutput of one request. After `finish_reason` STOP by a stop string the caller aborts
    the request in the engine, which knows token ids only."""

    def __init__(self, decoder: Decoder, *, prompt_token_ids: Sequence[TokenId], sampling: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            decoder, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stop = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._sampling = sampling
        self._num_tokens = 0

    def push(self, output: RequestOutput) -> TextDelta:
        ended_by_token = output.finish_reason is FinishReason.STOP and output.stop_token_id is not None
        text = ""
        for index, token_id in enumerate(output.new_token_ids):
            self._num_tokens += 1
            hidden = (
                ended_by_token
                and index == len(output.new_token_ids) - 1
                and not self._sampling.include_stop_str_in_output
            )
            if hidden:
                break  # the token that ended the text is no part of it
            text += self._stop.push(
                self._detokenizer.push(token_id), check=self._num_tokens > self._sampling.min_tokens
            )
            if self._stop.matched is not None:
                taken = index + 1
                return TextDelta(
                    text=text,
                    token_ids=output.new_token_ids[:taken],
                    logprobs=output.new_logprobs[:taken],
                    finish_reason=FinishReason.STOP,
                    stop_reason=self._stop.matched,
                )
        stop_reason: str | int | None = None
        finish_reason = output.finish_reason
        if finish_reason is not None:
            text += self._stop.push(self._detokenizer.finish(), check=self._num_tokens > self._sampling.min_tokens)
            if self._stop.matched is not None:
                finish_reason, stop_reason = FinishReason.STOP, self._stop.matched
            else:
                text += self._stop.finish()
                if output.stop_token_id is not None and output.stop_token_id in self._sampling.stop_token_ids:
                    stop_reason = output.stop_token_id
        return TextDelta(
            text=text,
            token_ids=output.new_token_ids,
            logprobs=output.new_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
