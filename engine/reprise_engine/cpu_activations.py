"""Peak memory of one forward pass on a CPU, where activations are float32, counted from the shapes.

    phases, one at a time: the embedding, the layers, the final norm, the head (logits, then the sampler's rows)

What lives at once is all there is to count, since the allocator gives back what is freed (`allocator.py`).
`tests/engine/test_cpu_activations.py` runs the largest steps and compares, on the kernels and on plain torch.
Letters as in `attention/base.py`, and: D hidden size, I inner size of the MLP, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from reprise_engine.attention.shared_prefixes import MOST_NEW_TOKENS
from reprise_engine.config import SchedulerConfig
from reprise_engine.models.spec import ModelSpec
from reprise_engine.parallel.shard import Place

_FLOAT = 4
_MIB = 1024**2
# Of the kernels, for each thread: a block of activations and the tiles of the attention.
_KERNEL_BYTES_PER_THREAD = 1 * _MIB
# Keys gathered at once for a group of decoding requests, and rows of a tile of a prompt (attention/cpu.py).
_GATHERED_KEYS = 16384
_TILE_ROWS = 256
# Bytes of a tile's mask for each key: booleans twice, floats.
_MASK_BYTES = _TILE_ROWS * 6
# Widened weights (models/upcast.py), torch's own buffers, and those that MKL keeps for packed matrices, the head's on
# many rows among them (measured), each thread.
_PLAIN_BYTES_PER_THREAD = 8 * _MIB
# The same where layers are quantised and the head is the kernels': int8 weights are not widened, and MKL packs nothing.
# What is left is oneDNN's, of its products of int8 (measured: 1 to 4 MiB).
_QUANTIZED_BYTES_PER_THREAD = 4 * _MIB
# Rows sampled at once (sampler.py) and the bytes one of their scores takes: the score, the sorted ones with their
# tokens, probabilities and their sums, masks.
_SAMPLED_ROWS = 16
_BYTES_PER_SAMPLED_SCORE = 32
# Rows scored at once for a prompt's log-probabilities (runner/model_runner.py) and the bytes one of their scores takes:
# logits, their exponentials and what these are made of, a mask; and for each thread, of one row at a time, pairs of
# score and token.
# What is told of a token, with 20 alternatives, takes this much as Python's objects.
_SCORED_ROWS = 32
_BYTES_PER_SCORED_SCORE = 13
_BYTES_PER_PAIR = 16
_BYTES_PER_SCORED_TOKEN = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """What bounds a step: `tokens` new ones, `sampled` rows of logits, sequences of up to `max_model_len`."""

    tokens: int
    sampled: int
    max_model_len: int

    @classmethod
    def of(cls, scheduler: SchedulerConfig, *, max_model_len: int) -> LargestStep:
        tokens = scheduler.batched_tokens(max_model_len=max_model_len)
        return cls(tokens=tokens, sampled=min(scheduler.max_num_seqs, tokens), max_model_len=max_model_len)


def estimate_cpu_activations(
    spec: ModelSpec,
    step: LargestStep,
    *,
    native: bool,
    kv_element_bytes: int,
    threads: int,
    quantized: bool = False,
    place: Place | None = None,
) -> int:
    """Bytes at the peak of the largest step, on the kernels (`native`) or on plain torch; `quantized` where layers are
    of models/w8a8.py, which run in plain torch, but for their attention. With a `place` of one rank, whose part of the
    model is `spec`; the first alone has logits."""
    hidden = _FLOAT * step.tokens * spec.hidden_size
    told = step.tokens * _BYTES_PER_SCORED_TOKEN
    head = hidden + max(_head(spec, step), _scoring(spec, step, threads=threads))
    if place is not None and place.rank > 0:
        head = told = 0
    # The definition of OPT runs in plain torch, but for its linear layers and its attention; so do those of a rank.
    if native and not quantized and place is None and spec.architecture != "OPTForCausalLM":
        scratch = _native_scratch(spec, step)
        # The embedding's output, the residual stream, and what the final norm makes of it.
        layers = 3 * hidden + 2 * _FLOAT * step.tokens * spec.head_dim + _native_mlp(spec, step)
        return scratch + max(layers, head) + told + threads * _KERNEL_BYTES_PER_THREAD
    gathered = 0 if native else _gathered(spec, step, kv_element_bytes)
    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = 3 * _FLOAT * step.tokens * heads * spec.head_dim + gathered
    # Gate, up and what they make; an expert's gate and up are the halves of one tensor, of which copies are made.
    inner = max(3 * spec.intermediate_size, 4 * spec.expert_size * spec.experts_per_token)
    mlp = _FLOAT * step.tokens * inner
    layers = 4 * hidden + max(attention, mlp, _sum_of_ranks(spec, step, place))
    kept = _QUANTIZED_BYTES_PER_THREAD if native and quantized else _PLAIN_BYTES_PER_THREAD
    return max(layers, head) + threads * kept + told


def _sum_of_ranks(spec: ModelSpec, step: LargestStep, place: Place | None) -> int:
    """All ranks' parts, beside the one that was computed, and what that was computed from."""
    if place is None:
        return 0
    inner = 0 if spec.expert_size else spec.intermediate_size
    return _FLOAT * step.tokens * (place.size * spec.hidden_size + max(inner, spec.num_heads * spec.head_dim))


def _native_scratch(spec: ModelSpec, step: LargestStep) -> int:
    """What native/layer.py allocates for a step, and the states of shared prefixes (attention.cpp)."""
    query = spec.num_heads * spec.head_dim
    inner = 0 if spec.expert_size else spec.intermediate_size
    row = spec.hidden_size + max(inner, 2 * query + 2 * spec.num_kv_heads * spec.head_dim)
    grouped = min(step.tokens, MOST_NEW_TOKENS * step.sampled)
    return _FLOAT * (step.tokens * row + grouped * (query + 2 * spec.num_heads))


def _native_mlp(spec: ModelSpec, step: LargestStep) -> int:
    """Where it is a mixture: the normed input, the sum, and one expert's input, inner rows, output and its product."""
    return _FLOAT * step.tokens * (4 * spec.hidden_size + spec.expert_size) if spec.expert_size else 0


def _gathered(spec: ModelSpec, step: LargestStep, kv_element_bytes: int) -> int:
    """Keys and values of one layer copied for plain torch, and the mask over them."""
    keys = max(step.max_model_len, min(_GATHERED_KEYS, step.sampled * step.max_model_len))
    elements = keys * spec.num_kv_heads * spec.head_dim
    # Both in float32; before there is a mask, the values also in the pool's own dtype.
    narrow = elements * kv_element_bytes if kv_element_bytes != _FLOAT else 0
    mask = _MASK_BYTES * step.max_model_len if step.tokens > 1 else 0
    return 2 * _FLOAT * elements + max(narrow, mask)


def _head(spec: ModelSpec, step: LargestStep) -> int:
    """Logits, a copy with penalties, and the rows being drawn."""
    logits = _FLOAT * step.sampled * spec.vocab_size
    return 2 * logits + min(step.sampled, _SAMPLED_ROWS) * spec.vocab_size * _BYTES_PER_SAMPLED_SCORE


def _scoring(spec: ModelSpec, step: LargestStep, *, threads: int) -> int:
    """The log-probabilities of a prompt, some rows at a time: before the rows of `_head` are there."""
    rows = min(step.tokens, _SCORED_ROWS)
    return spec.vocab_size * (rows * _BYTES_PER_SCORED_SCORE + min(threads, rows) * _BYTES_PER_PAIR)
