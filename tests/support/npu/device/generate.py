"""Generates with a tiny model on the device of its name, and prints tokens and cached tokens as JSON.

python -m tests.support.npu.device.generate DEVICE FOLDER DTYPE
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

from reprise_engine import LLM, SamplingParams
from reprise_engine.config import Device, DType

SHARED = "A prefix cache keeps the keys and values of tokens it has seen. " * 4
PROMPTS = (SHARED + "Paris", SHARED + "hello world", "The quick brown fox", SHARED + "Paris is the capital")


def generate(device: Device, folder: str, dtype: DType) -> list[tuple[list[int], int | None]]:
    """Twice, so that the second round finds the first one's blocks; chunks of 96 split prompts and blocks."""
    sized: dict[str, Any] = {"kv_cache_memory_bytes": 32 * 1024**2} if device == "cpu" else {}
    llm = LLM(
        model=folder,
        device=device,
        dtype=dtype,
        block_size=128,
        max_model_len=512,
        max_num_batched_tokens=96,
        max_num_seqs=4,
        **sized,
    )
    outputs = [llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=6)) for _ in range(2)]
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for round_ in outputs for output in round_]


if __name__ == "__main__":
    named_device, named_folder, named_dtype = sys.argv[1:4]
    chosen: Device = next(device for device in get_args(Device) if device == named_device)
    kind: DType = next(dtype for dtype in get_args(DType) if dtype == named_dtype)
    print(json.dumps(generate(chosen, named_folder, kind)))
