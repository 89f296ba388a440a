"""An engine that says what a script says: the real scheduler and prefix cache over a runner that reads it out.

A request's `seed` is the number of its line in the script. The tokenizer is a small byte-level BPE with Qwen's added
tokens, so that token boundaries matter as they do for a real model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig
from reprise_engine.loop import EngineCore
from reprise_engine.request import RequestId, TokenId, TokenLogprobs
from reprise_engine.server.options import ServerOptions
from reprise_engine.step import Step, StepResult
from tests.support.fake_engine import Progress
from tests.support.modelless_core import modelless_core

BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_MODEL_LEN = 2048
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_EOS = "<|im_end|>"
BREAKS = "<|endoftext|>"
"""In a script: here the engine breaks."""
_TRAINING_TEXT = (
    'What is the weather in Paris today? {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} '
    "user assistant system tool function arguments the quick brown fox; I should look it up first, then answer.\n\n"
)


def write_scripted_model(folder: Path, script: Sequence[str], *, template: str, special_marks: bool = False) -> Path:
    """A model folder as far as the API process reads one, and the script for the engine process.

    `special_marks` makes the marks of calls and reasoning special tokens, as some models have them.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TRAINING_TEXT] * 3, trainer)
    backend.add_tokens([AddedToken(mark, special=special_marks, normalized=False) for mark in _MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS, "chat_template": template}))
    (folder / "script.json").write_text(json.dumps(list(script)))
    return folder


def scripted_options(folder: Path, script: Sequence[str], *, template: str, **changes: object) -> ServerOptions:
    special_marks = bool(changes.pop("special_marks", False))
    write_scripted_model(folder, script, template=template, special_marks=special_marks)
    return ServerOptions(
        engine=EngineConfig(model=ModelConfig(model=str(folder)), cache=CacheConfig()),
        host="127.0.0.1",
        port=0,
        served_names=("scripted",),
        builder="tests.support.scripted_engine:build",
        **changes,  # type: ignore[arg-type]
    )


class ScriptedRunner:
    def __init__(self, lines: Sequence[Sequence[TokenId]], *, breaks: TokenId) -> None:
        self._lines = lines
        self._breaks = breaks

    def run(self, step: Step) -> StepResult:
        sampled: dict[RequestId, TokenId] = {}
        logprobs: dict[RequestId, TokenLogprobs] = {}
        for part in step.requests:
            if part.samples:
                token = self._lines[part.sampling.seed or 0][part.output_index]
                if token == self._breaks:
                    raise RuntimeError("device on fire")
                sampled[part.request_id] = token
                if part.sampling.logprobs is not None:
                    logprobs[part.request_id] = TokenLogprobs(token, -0.5, 1)
        return StepResult(step_id=step.step_id, sampled=sampled, logprobs=logprobs)


def build(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    folder = Path(config.model.model)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos, breaks = tokenizer.token_to_id(_EOS), tokenizer.token_to_id(BREAKS)
    assert eos is not None
    assert breaks is not None
    lines = [
        [*tokenizer.encode(line, add_special_tokens=False).ids, eos]
        for line in json.loads((folder / "script.json").read_text())
    ]
    return modelless_core(
        config,
        ScriptedRunner(lines, breaks=breaks),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        eos_token_ids=(eos,),
    )
