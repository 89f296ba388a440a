"""What the server takes from the engine: tokens a second of 64 streams over HTTP, beside the bare engine's.

    python -m benchmarks.server_overhead [MODEL] [--streams 64] [--tokens 128] [--rounds 3]

Both sides run the same engine process with the same flags and prompts. The bare side (`engine`) reads its outputs by
`EngineClient` and does nothing with them; the server turns them into text and events for as many connections. Both
stay loaded, and rounds alternate; the first is thrown away. The default model is the tests' (`make models`): the
smaller a model, the more the server shows.

`api` and `engine` are the processor times of the server's two processes, in microseconds a token. They hardly depend on
what else the machine does: where it is not quiet, the API process's share of them is the figure to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import time
import uuid
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import psutil

from reprise_engine.bench.own_server import own_server
from reprise_engine.config import EngineConfig
from reprise_engine.engine import EngineClient
from reprise_engine.entrypoints.arguments import build_parser, server_options
from reprise_engine.request import EngineRequest, RequestId, SamplingParams
from tests.support.models import smollm2_path

GOAL = 0.05
PROMPT_TOKENS = 32
_LOOK_SECONDS = 0.05
_FLAGS = (
    *("--max-model-len", "1024", "--max-num-seqs", "256", "--num-gpu-blocks-override", "4096"),
    "--disable-uvicorn-access-log",
)


def prompt(stream: int) -> list[int]:
    return [100 + (7 * stream + 13 * position) % 5000 for position in range(PROMPT_TOKENS)]


async def bare_round(engine: EngineClient, streams: int, tokens: int) -> float:
    """Tokens a second."""

    async def read(stream: int) -> int:
        request = EngineRequest(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_token_ids=tuple(prompt(stream)),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            arrival_time=time.monotonic(),
        )
        return sum([len(output.new_token_ids) async for output in engine.generate(request)])

    begun = time.perf_counter()
    counts = await asyncio.gather(*(read(stream) for stream in range(streams)))
    return _rate(counts, streams * tokens, begun)


def http_round(url: str, streams: int, tokens: int) -> float:
    """Tokens a second. Looks at its sockets now and then only, as the client runs on the engine's processors."""
    address = urlsplit(url)
    assert address.hostname is not None
    ends: dict[socket.socket, bytes] = {}
    counts: list[int] = []
    begun = time.perf_counter()
    for stream in range(streams):
        connection = socket.create_connection((address.hostname, address.port or 80))
        connection.sendall(_request(stream, tokens))
        connection.setblocking(False)
        ends[connection] = b""
    while ends:
        time.sleep(_LOOK_SECONDS)
        for connection, end in list(ends.items()):
            try:
                part = connection.recv(1 << 20)
            except BlockingIOError:
                continue
            ends[connection] = (end + part)[-2048:]
            if not part:
                connection.close()
                usage = end[end.rindex(b'"usage":') :].partition(b'"completion_tokens":')[2]
                counts.append(int(usage.partition(b",")[0]))
                del ends[connection]
    return _rate(counts, streams * tokens, begun)


def _request(stream: int, tokens: int) -> bytes:
    body = {"prompt": prompt(stream), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    # The text of a token may be a part of a character, which has no event of its own: the usage counts.
    content = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + content


def _rate(counts: list[int], wanted: int, begun: float) -> float:
    seconds = time.perf_counter() - begun
    if sum(counts) != wanted:
        raise SystemExit(f"{sum(counts)} tokens came instead of {wanted}")
    return wanted / seconds


def engine_config(model: str) -> EngineConfig:
    return server_options(build_parser().parse_args(["serve", model, *_FLAGS]), {}).engine


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second of both sides, and the processor time of the server's processes a token, in microseconds."""

    engine: float
    server: float
    api_cpu: float
    engine_cpu: float


def _used(process: psutil.Process) -> float:
    """Seconds of processor time."""
    times = process.cpu_times()
    return times.user + times.system


async def measure(model: str, *, streams: int, tokens: int, rounds: int) -> list[Round]:
    engine = EngineClient(engine_config(model))
    measured = []
    try:
        await engine.start()
        async with own_server(model, _FLAGS, ready_seconds=600) as url, aiohttp.ClientSession(url) as session:
            [api] = [child for child in psutil.Process().children() if "serve" in child.cmdline()]
            [core] = api.children()
            for number in range(rounds + 1):
                await engine.reset_prefix_cache()
                bare = await bare_round(engine, streams, tokens)
                await session.post("/reset_prefix_cache")
                before = _used(api), _used(core)
                served = await asyncio.to_thread(http_round, url, streams, tokens)
                used = [
                    1e6 * (now - then) / (streams * tokens)
                    for now, then in zip((_used(api), _used(core)), before, strict=True)
                ]
                one = Round(engine=bare, server=served, api_cpu=used[0], engine_cpu=used[1])
                print(
                    f"{f'round {number}' if number else 'warm-up'}: engine {one.engine:.1f} tok/s, "
                    f"server {one.server:.1f} tok/s; api {one.api_cpu:.0f} µs, engine {one.engine_cpu:.0f} µs a token",
                    flush=True,
                )
                measured.append(one)
    finally:
        await engine.close()
    return measured[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder (the tests' small one)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = options.model or str(smollm2_path())

    measured = asyncio.run(measure(model, streams=options.streams, tokens=options.tokens, rounds=options.rounds))
    overhead = 1 - statistics.median(one.server / one.engine for one in measured)
    share = statistics.median(one.api_cpu / (one.api_cpu + one.engine_cpu) for one in measured)
    verdict = "met" if overhead < GOAL else "missed"
    print(
        f"{options.streams} streams: the server takes {overhead:.1%} of the bare engine's rate ({verdict}: {GOAL:.0%})"
    )
    print(f"the API process's share of the processor time is {share:.1%}")


if __name__ == "__main__":
    main()
