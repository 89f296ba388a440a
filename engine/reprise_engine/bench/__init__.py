"""Measures any OpenAI-compatible server: `reprise bench`, and the same from Python. Free of torch.

import asyncio
from reprise_engine.bench import Load, make_workload, run, summarize

workload = make_workload("shared-prefix", num_prompts=32, prefix_len=1024, input_len=32, output_len=64)
result = asyncio.run(run(workload, "http://127.0.0.1:8000", load=Load(concurrency=8)))
print(summarize(result).hit_rate)
"""

from __future__ import annotations

from reprise_engine.bench.client import ClientOptions
from reprise_engine.bench.result import RequestRecord, Result
from reprise_engine.bench.run import Load, run
from reprise_engine.bench.statistics import Summary, compare, summarize
from reprise_engine.bench.workloads import Workload, make_workload

__all__ = [
    "ClientOptions",
    "Load",
    "RequestRecord",
    "Result",
    "Summary",
    "Workload",
    "compare",
    "make_workload",
    "run",
    "summarize",
]
