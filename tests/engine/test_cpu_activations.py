"""The computed peak of a step's memory against the measured one: the high-water mark of a process of its own.

Tolerance: the estimate is not below what was measured, less 6 MiB, and at most 1.25 times it, plus 6 MiB. (Memory comes
in pages, and libraries keep buffers.) The step runs six times: what the allocator kept would add up.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from reprise_engine.native.build import library_path
from tests.support.w8a8 import quantize_model

MIB = 1024**2
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and sets glibc's thresholds"),
]

# max_num_batched_tokens, max_num_seqs, max_model_len: a long prompt, one that ends a long context, many rows to sample.
CASES = [(2048, 1, 2048), (512, 1, 8192), (64, 48, 512)]
AT_MOST = 1.25
SLACK = 6 * MIB

_MEASURE = """
import ctypes, json, sys
import psutil, torch
from reprise_engine.allocator import return_freed_memory
from reprise_engine.attention import create_attention_backend
from reprise_engine.config import ModelConfig, SchedulerConfig
from reprise_engine.cpu_activations import LargestStep, estimate_cpu_activations
from reprise_engine.models.loader import load_model
from reprise_engine.native import load_kernels
from reprise_engine.parallel.layers import connect_ranks
from reprise_engine.parallel.shard import Place
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.step import BlockId, ScheduledRequest, Step

folder, native, cases = sys.argv[1], sys.argv[2] != "plain", json.loads(sys.argv[3])
quantization = "ascend" if sys.argv[2].startswith("quantised") else None
place = Place(rank=0, size=4) if sys.argv[2].endswith("rank") else None
cpu, libc = torch.device("cpu"), ctypes.CDLL(None)
assert return_freed_memory()
kernels = load_kernels() if native else None
model = load_model(ModelConfig(model=folder, quantization=quantization), device=cpu, kernels=kernels, place=place)

class Alone:
    # As GlooGroup, with nobody at the other end.
    place = place

    def sum(self, x):
        parts = [x.clone() for _ in range(place.size)]
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

if place is not None:
    connect_ranks(model.module, Alone())

def part(index, new, end, first_block):
    blocks = tuple(BlockId(first_block + i) for i in range(-(-end // 16)))
    return ScheduledRequest(
        request_id=RequestId(str(index)), token_ids=(7,) * new, start=end - new, block_table=blocks, samples=True,
        sampling=SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, prompt_logprobs=20),
        history=(7, 7), prompt_length=1, output_index=1, scored=(7,) * (new - 1),
    )

results = []
for tokens, seqs, length in cases:
    share = tokens // seqs
    step = Step(step_id=1, requests=tuple(part(i, share, length, i * -(-length // 16)) for i in range(seqs)))
    kv = allocate_kv_cache(
        num_layers=model.spec.num_layers, num_blocks=seqs * -(-length // 16), block_size=16,
        num_kv_heads=model.spec.num_kv_heads, head_dim=model.spec.head_dim, dtype=model.kv_dtype, device=cpu,
    )
    for layer in kv:
        layer.key_BSKH.fill_(0.5)
        layer.value_BSKH.fill_(0.5)
    runner = ModelRunner(model, create_attention_backend(cpu, kernels), kv, seed=0)
    runner.run(Step(step_id=0, requests=(part(0, 1, 1, 0),)))
    libc.malloc_trim(0)
    resting = psutil.Process().memory_info().rss
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark begins anew
    for _ in range(6):
        runner.run(step)
    with open("/proc/self/status") as file:
        [peak] = [int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")]
    estimate = estimate_cpu_activations(
        model.spec,
        LargestStep.of(SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs), max_model_len=length),
        native=native, quantized=quantization is not None, kv_element_bytes=model.kv_dtype.itemsize,
        threads=torch.get_num_threads(), place=place,
    )
    results.append((peak - resting, estimate))
print(json.dumps(results))
"""


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of a size at which activations are tens of MiB."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=20_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(request.param)
    model.save_pretrained(folder)
    return folder


needs_kernels = pytest.mark.skipif(not library_path().exists(), reason="the kernels are not built")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("native", marks=needs_kernels),
        "plain",
        pytest.param("quantised", marks=needs_kernels),
        pytest.param("quantised rank", marks=needs_kernels),
    ],
)
def test_the_computed_peak_is_the_measured_one(folder: Path, path: str, tmp_path: Path) -> None:
    if path.startswith("quantised"):
        folder = quantize_model(folder, tmp_path / "quantised", dynamic=["*"])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), path, json.dumps(CASES)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for case, (measured, estimate) in zip(CASES, json.loads(done.stdout), strict=True):
        told = f"{case}: measured {measured / MIB:.1f} MiB, computed {estimate / MIB:.1f} MiB"
        assert measured - SLACK <= estimate <= AT_MOST * measured + SLACK, told
