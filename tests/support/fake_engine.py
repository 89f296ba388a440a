"""An engine without a model: the real scheduler and prefix cache over a runner that counts.

The next token is the last one plus one, so "a" goes on with "bcdef…"; after "z" comes the end of the sequence. What is
cached, preempted or aborted is decided by the real code, in a real engine process.
Builders are named `tests.support.fake_engine:build` and the like; they take what `core.build_core` takes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from reprise_engine.config import EngineConfig, ResolvedConfig
from reprise_engine.errors import ModelNotFound, UnsupportedModel
from reprise_engine.loop import EngineCore
from reprise_engine.messages import LoadProgress
from reprise_engine.out_of_memory import Phase, naming_phase
from reprise_engine.request import RequestId, TokenId, TokenLogprobs
from reprise_engine.step import Step, StepResult
from tests.support.modelless_core import modelless_core

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 200
EOS_ID = 257
NPU_OUT_OF_MEMORY = (
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 58.92 GiB already allocated; "
    "58.92 GiB current active; 1.66 GiB free; 58.95 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation."
)
"""In torch_npu's words."""
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content == 'refuse' %}"
    "{{ raise_exception('this conversation is refused') }}{% endif %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    "{% if suffix is defined %}{{ suffix }}{% endif %}{% if add_generation_prompt %}A{% endif %}"
)

Progress = Callable[[LoadProgress], None]


def write_model(folder: Path) -> Path:
    """A model folder as far as the API process reads one: one token a byte, 256 <s>, 257 </s>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class CountingRunner:
    """Steps take `seconds` each; a prompt that ends in "!" breaks it, one that ends in "~" kills the process,
    one that ends in "^" takes more memory than the device has.

    "{" goes on for 255 tokens, being the one behind "z". Without `traps` no prompt breaks it.
    """

    def __init__(self, seconds: float = 0.0, *, traps: bool = True) -> None:
        self._seconds = seconds
        self._traps = traps

    def run(self, step: Step) -> StepResult:
        time.sleep(self._seconds)
        sampled: dict[RequestId, TokenId] = {}
        logprobs: dict[RequestId, TokenLogprobs] = {}
        scores: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        for part in step.requests:
            if part.scored:
                shown = range(part.sampling.prompt_logprobs or 0)
                scores[part.request_id] = tuple(
                    TokenLogprobs(token, -0.25, 2, tuple((token + rank, -0.125 - rank) for rank in shown))
                    for token in part.scored
                )
            if not part.samples:
                continue
            last = part.token_ids[-1]
            if part.output_index == 0 and self._traps:
                _spring(last)
            token = EOS_ID if last == ord("z") else (last + 1) % 256
            if token in part.forbidden_token_ids:
                token = ord("a")
            sampled[part.request_id] = token
            if part.sampling.logprobs is not None:
                top = tuple((token + rank, -0.5 - rank) for rank in range(part.sampling.logprobs))
                logprobs[part.request_id] = TokenLogprobs(token, -0.5, 1, top)
        return StepResult(step_id=step.step_id, sampled=sampled, logprobs=logprobs, prompt_logprobs=scores)


def _spring(last: TokenId) -> None:
    if last == ord("!"):
        raise RuntimeError("device on fire")
    if last == ord("^"):
        raise RuntimeError(NPU_OUT_OF_MEMORY)
    if last == ord("~"):
        os.kill(os.getpid(), signal.SIGKILL)


def build(
    config: EngineConfig,
    *,
    progress: Progress,
    seconds: float = 0.0,
    num_blocks: int = NUM_BLOCKS,
    traps: bool = True,
) -> tuple[EngineCore, ResolvedConfig]:
    progress(LoadProgress("Counting", 0.5))
    return modelless_core(
        config,
        CountingRunner(seconds, traps=traps),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
    )


def build_slow(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    """20 ms a step."""
    return build(config, progress=progress, seconds=0.02)


def build_trapless(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    """For prompts that nobody has chosen."""
    return build(config, progress=progress, traps=False)


def build_crawling(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    """A quarter of a second a step."""
    return build(config, progress=progress, seconds=0.25)


def build_large(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    """A KV pool for hundreds of sequences of full length."""
    return build(config, progress=progress, num_blocks=30_000)


def build_small(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    """A KV pool smaller than the context."""
    return build(config, progress=progress, num_blocks=8)


def build_for_ever(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    progress(LoadProgress("Loading for ever"))
    time.sleep(3600)
    raise AssertionError


def build_missing(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    raise ModelNotFound(f"model {config.model.model!r} does not exist")


def build_unsupported(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    raise UnsupportedModel("the architecture\nis multimodal")


def build_buggy(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    raise ZeroDivisionError("a bug")


def build_killed(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def build_out_of_memory(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    with naming_phase(Phase.KV_CACHE):
        raise RuntimeError(NPU_OUT_OF_MEMORY)
