"""Where a step's processor time goes: linear layers, attention, norms and KV, sampler, and the rest.

    OMP_NUM_THREADS=1 python -m benchmarks.step_profile [FOLDER]

Prints a Markdown table. Processor time of ONE thread, least of some runs, so that other work on the machine spoils it
little. `whole` is a step of the runner; each part is the same kernel calls by themselves, on the same weights, rows,
block tables and lengths; `rest` is what is left: Python, the definition's own loop, the embedding, the batch's tensors.
Beside it, from peaks.c: what one core can do at best.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks.model import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, NORM_EPS, VOCAB_SIZE, ensure_model
from reprise_engine.attention import create_attention_backend
from reprise_engine.attention.base import AttentionMetadata, LayerKV
from reprise_engine.config import ModelConfig
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.native import Kernels, LinearWeights, load_kernels
from reprise_engine.native.layer import SharedPrefixes
from reprise_engine.request import RequestId, SamplingParams, TokenId
from reprise_engine.runner.batch import build_batch
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.sampler import sample
from reprise_engine.step import BlockId, ScheduledRequest, Step

_BLOCK_SIZE, _NUM_BLOCKS = 16, 640
_FEW_ROWS = 256
"""From here on arithmetic is the bound, and some layers stand for all."""
_SAMPLED_LAYERS = 4
_CHAINS_TIMES_FLOATS = 12 * 16
"""As in peaks.c."""
_ROUNDS = 20_000_000
_READ_FLOATS = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`new` tokens of each of `streams` requests over `cached` ones, of which `shared` lie in the same blocks."""

    title: str
    streams: int = 1
    new: int
    cached: int
    shared: int = 0
    runs: int

    def step(self, start: int, new: int) -> Step:
        greedy = SamplingParams(temperature=0.0, max_tokens=1)
        return Step(
            step_id=0,
            requests=tuple(
                ScheduledRequest(
                    request_id=RequestId(str(stream)),
                    token_ids=tuple(TokenId(17 * i % VOCAB_SIZE) for i in range(new)),
                    start=start,
                    block_table=self._table(stream, start + new),
                    samples=start + new == self.cached + self.new,
                    sampling=greedy,
                )
                for stream in range(self.streams)
            ),
        )

    def _table(self, stream: int, num_tokens: int) -> tuple[BlockId, ...]:
        shared, own = self.shared // _BLOCK_SIZE, -(-(self.cached + self.new - self.shared) // _BLOCK_SIZE)
        count = -(-num_tokens // _BLOCK_SIZE)
        own_blocks = range(shared + stream * own, shared + (stream + 1) * own)
        return tuple(BlockId(block) for block in (*range(shared), *own_blocks)[:count])

    def steps(self, most: int = 2048) -> list[Step]:
        """As the scheduler cuts them."""
        end = self.cached + self.new
        return [self.step(start, min(most, end - start)) for start in range(self.cached, end, most)]


CASES = (
    Case(title="cold prefill, 2,112 tokens", new=2112, cached=0, runs=1),
    Case(title="warm prefill, 64 over 2,048", new=64, cached=2048, runs=5),
    Case(title="decode, one stream, 128 tokens of context", new=1, cached=127, runs=30),
    Case(title="decode, 8 streams, 1,024 shared + 64 own", streams=8, new=1, cached=1087, shared=1024, runs=30),
)


def least_seconds(function: Callable[[], object], runs: int) -> float:
    """Of this thread's processor time."""
    seconds = []
    for _ in range(runs):
        begun = time.thread_time()
        function()
        seconds.append(time.thread_time() - begun)
    return min(seconds)


class Parts:
    """The kernel calls of a step, part by part."""

    def __init__(self, model: LoadedModel, kernels: Kernels, kv: Sequence[LayerKV]) -> None:
        self._kernels, self._kv = kernels, kv
        self._norm = torch.ones(HIDDEN)
        self._head_norm = torch.ones(HEAD_DIM)
        named = dict(model.module.named_parameters(remove_duplicate=False))

        def weights(layer: int, *names: str) -> LinearWeights:
            return LinearWeights(*((named[f"model.layers.{layer}.{name}.weight"], None) for name in names))

        self._layers = [
            (
                weights(layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                weights(layer, "self_attn.o_proj"),
                weights(layer, "mlp.gate_proj", "mlp.up_proj"),
                weights(layer, "mlp.down_proj"),
            )
            for layer in range(LAYERS)
        ]
        self._head = LinearWeights((named["lm_head.weight"], None))

    def linear(self, rows: int, logits_rows: int, runs: int) -> float:
        x, hidden, inner = torch.ones(rows, HIDDEN), torch.ones(rows, HEADS * HEAD_DIM), torch.ones(rows, FFN)
        residual = torch.zeros(rows, HIDDEN)
        layers = self._layers if rows <= _FEW_ROWS else self._layers[:_SAMPLED_LAYERS]

        def all_layers() -> None:
            for qkv, output, gate_up, down in layers:
                self._kernels.linear(x, qkv)
                self._kernels.add_linear(hidden, output, residual)
                self._kernels.swiglu(x, gate_up)
                self._kernels.add_linear(inner, down, residual)

        seconds = least_seconds(all_layers, runs) * LAYERS / len(layers)
        if logits_rows:
            seconds += least_seconds(lambda: self._kernels.linear(x[:logits_rows], self._head), runs)
        return seconds

    def attention(self, metadata: AttentionMetadata, rows: int, runs: int) -> float:
        queries = torch.ones(rows, HEADS, HEAD_DIM)
        pools = self._kv if rows <= _FEW_ROWS else self._kv[:_SAMPLED_LAYERS]
        shared = SharedPrefixes(metadata.shared_prefixes) if metadata.shared_prefixes else None

        def all_layers() -> None:
            for kv in pools:
                self._kernels.attention(
                    queries,
                    kv.key_BSKH,
                    kv.value_BSKH,
                    block_table_RM=metadata.block_table_RM,
                    query_lens=metadata.query_lens,
                    kv_lens=metadata.kv_lens,
                    scale=HEAD_DIM**-0.5,
                    sliding_window=None,
                    shared=shared,
                )

        return least_seconds(all_layers, runs) * LAYERS / len(pools)

    def norms_and_kv(self, metadata: AttentionMetadata, rows: int, runs: int) -> float:
        x, turn = torch.ones(rows, HIDDEN), torch.ones(rows, HEAD_DIM)
        qkv = torch.ones(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        heads = qkv.view(rows, -1, HEAD_DIM)

        def all_layers() -> None:
            for kv in self._kv:
                self._kernels.rms_norm(x, self._norm, NORM_EPS)
                self._kernels.rotary(
                    qkv,
                    num_heads=HEADS,
                    num_kv_heads=KV_HEADS,
                    head_dim=HEAD_DIM,
                    cosine=turn,
                    sine=turn,
                    query_norm=self._head_norm,
                    key_norm=self._head_norm,
                    eps=NORM_EPS,
                )
                self._kernels.write_kv(heads[:, HEADS : HEADS + KV_HEADS], metadata.slot_mapping_T, kv.key_BSKH)
                self._kernels.write_kv(heads[:, HEADS + KV_HEADS :], metadata.slot_mapping_T, kv.value_BSKH)
                self._kernels.rms_norm(x, self._norm, NORM_EPS)

        return least_seconds(all_layers, runs)


@dataclass(slots=True)
class Profile:
    """Seconds, operations and bytes of one case, summed over its steps. Weights and shared keys count once a step."""

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("linear", "attention", "norms", "sampler"), 0.0)
    )
    whole: float = 0.0
    linear_flop: float = 0.0
    linear_bytes: float = 0.0
    attention_flop: float = 0.0
    attention_bytes: float = 0.0

    def row(self, title: str) -> str:
        shares = [self.seconds[part] / self.whole for part in ("linear", "attention", "norms", "sampler")]
        shares.append(1.0 - sum(shares))
        linear, attention = self.seconds["linear"], self.seconds["attention"]
        cells = [
            f"{1000 * self.whole:,.1f} ms",
            *(f"{round(100 * share)} %" for share in shares),
            *(f"{amount / linear / 1e9:.0f}" for amount in (self.linear_flop, self.linear_bytes)),
            *(f"{amount / attention / 1e9:.0f}" for amount in (self.attention_flop, self.attention_bytes)),
        ]
        return f"| {title} | " + " | ".join(cells) + " |"


def profile(case: Case, runner: ModelRunner, parts: Parts) -> Profile:
    found = Profile()
    for step in case.steps():
        batch = build_batch(step, block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS, device=torch.device("cpu"))
        metadata, rows, sampling = batch.metadata, step.num_tokens, batch.sampling
        if rows <= _FEW_ROWS:
            runner.run(step)  # descriptions are made, pages are there
        found.whole += least_seconds(partial(runner.run, step), case.runs)
        few = 2 if rows > _FEW_ROWS else case.runs
        found.seconds["linear"] += parts.linear(rows, len(sampling), few)
        found.seconds["attention"] += parts.attention(metadata, rows, few)
        found.seconds["norms"] += parts.norms_and_kv(metadata, rows, few)
        if sampling:
            logits = torch.rand(len(sampling), VOCAB_SIZE)
            sampler = partial(sample, logits, sampling, engine_seed=0)
            found.seconds["sampler"] += least_seconds(sampler, case.runs)
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        layers = LAYERS * (HIDDEN * (2 * q + 2 * kv) + 3 * HIDDEN * FFN)
        head = VOCAB_SIZE * HIDDEN
        found.linear_flop += 2.0 * (layers * rows + head * len(sampling))
        found.linear_bytes += 2.0 * (layers + (head if sampling else 0))
        pairs = sum(
            query * kv_len - query * (query - 1) / 2
            for query, kv_len in zip(metadata.query_lens, metadata.kv_lens, strict=True)
        )
        found.attention_flop += 4.0 * LAYERS * q * pairs
        repeated = sum((len(prefix.requests) - 1) * prefix.num_tokens for prefix in metadata.shared_prefixes)
        found.attention_bytes += 4.0 * LAYERS * kv * (sum(metadata.kv_lens) - repeated)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """GFLOP/s and GB/s."""

    float32: float
    bfloat16: float | None
    read: float
    read_by_two: float


def measure_peaks() -> Peaks:
    """Compiles and runs peaks.c. Raises CalledProcessError where it does not compile."""
    source = Path(__file__).with_name("peaks.c")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "peaks.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(built), str(source)],
            check=True,
        )
        library = ctypes.CDLL(str(built))
    for name in ("float32_rounds", "bfloat16_rounds"):
        getattr(library, name).argtypes = [ctypes.c_long, ctypes.c_float]
        getattr(library, name).restype = ctypes.c_float
    library.read_all.argtypes, library.read_all.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_float
    operations = _ROUNDS * _CHAINS_TIMES_FLOATS / 1e9
    float32 = 2 * operations / least_seconds(lambda: library.float32_rounds(_ROUNDS, 0.5), 5)
    bfloat16 = None
    if library.bfloat16_rounds(1, 0.5) >= 0:
        bfloat16 = 4 * operations / least_seconds(lambda: library.bfloat16_rounds(_ROUNDS, 0.5), 5)
    mapped = mmap.mmap(-1, 4 * _READ_FLOATS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)  # as the weights
    memory = torch.frombuffer(mapped, dtype=torch.float32).fill_(1.0)
    half = _READ_FLOATS // 2
    gigabytes = 4 * _READ_FLOATS / 1e9
    starts = (memory.data_ptr(), memory.data_ptr() + 4 * half)
    with ThreadPoolExecutor(2) as pool:

        def by_two() -> float:
            begun = time.perf_counter()
            list(pool.map(lambda start: library.read_all(start, half), starts))
            return time.perf_counter() - begun

        both = min(by_two() for _ in range(30))
    alone = least_seconds(lambda: library.read_all(starts[0], _READ_FLOATS), 15)
    return Peaks(float32=float32, bfloat16=bfloat16, read=gigabytes / alone, read_by_two=gigabytes / both)


def main(arguments: Sequence[str]) -> int:
    torch.set_num_threads(1)
    peaks = measure_peaks()
    print(f"One core at best: {peaks.float32:.0f} GFLOP/s in float32,")
    print("no" if peaks.bfloat16 is None else f"{peaks.bfloat16:.0f}", "GFLOP/s by bfloat16 dot products;")
    print(f"it reads {peaks.read:.0f} GB/s, two {peaks.read_by_two:.0f} GB/s (by the clock, so on a quiet machine).\n")
    kernels = load_kernels()
    if kernels is None:
        print("The kernels are not built: python -m reprise_engine.native.build", file=sys.stderr)
        return 1
    device = torch.device("cpu")
    folder = ensure_model(*map(Path, arguments[:1]))
    model = load_model(ModelConfig(model=str(folder), dtype="bfloat16"), device=device, kernels=kernels)
    kv = allocate_kv_cache(
        num_layers=LAYERS,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=model.kv_dtype,
        device=device,
    )
    runner = ModelRunner(model, create_attention_backend(device, kernels), kv, seed=0)
    parts = Parts(model, kernels, kv)
    print("| one step, one thread | whole | linear | attention | norms, rotation, KV | sampler | rest ", end="")
    print("| linear GFLOP/s | GB/s | attention GFLOP/s | GB/s |")
    print("|---" * 11 + "|")
    for case in CASES:
        print(profile(case, runner, parts).row(case.title), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
