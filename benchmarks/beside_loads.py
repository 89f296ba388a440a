"""How loads slow other requests down: the rows itl-beside-host-loads and itl-beside-disk-loads.

A stream decodes; beside it, one after the other, requests whose prefix the pool has lost come up from the tier, compute
their own tokens and generate one. The control is the same stream beside the same requests with their prefix in the
pool: the prefill of their own tokens is in both, and the loads alone are the difference.

`LOAD_PREFIXES` prefixes take turns beside the one kind of stream; the one that was used last, and so is in the pool, is
used alone beside the other kind (`load_pool_blocks`). Kinds change places every time, so that drift is in both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.measure import MeasureError, Sample, Tokens
from benchmarks.rows import BLOCK_SIZE, LOAD_PREFIXES, LoadRow, Scale
from benchmarks.servers import SERVED_NAME
from reprise_engine.bench.client import Answer, Client
from reprise_engine.bench.statistics import Distribution, distribution
from reprise_engine.bench.workloads import COMMON_TOKEN_IDS, reserved_id
from reprise_engine.errors import ConfigError

TierName = Literal["host", "disk"]
TIERS: tuple[TierName, ...] = get_args(TierName)
Kind = Literal["loads", "control"]

_LEAD = 8
"""Tokens of a stream before the first request beside it."""
_POLL_SECONDS = 0.01
_QUIET_SECONDS = 0.5
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One stream. `gaps` are seconds; `cached` has, for each request beside it, the tokens it reused; `loaded` has the
    tokens that came from each tier meanwhile; `beside` says whether the stream outlasted all requests."""

    gaps: tuple[float, ...]
    cached: tuple[int, ...]
    loaded: dict[TierName, int]
    beside: bool


def order(pairs: int) -> tuple[Kind, ...]:
    """Control first, then loads first, and so on."""
    kinds: list[Kind] = []
    for pair in range(pairs):
        kinds += ("loads", "control") if pair % 2 else ("control", "loads")
    return tuple(kinds)


def send_after(output_tokens: int, requests: int) -> tuple[int, ...]:
    """After how many tokens of the stream each request is sent: evenly spread, the end as free as the middle."""
    lead = min(_LEAD, output_tokens // (2 * requests))
    return tuple(lead + number * (output_tokens - lead) // requests for number in range(requests))


def tier_values(exposition: str, name: str) -> dict[TierName, int]:
    """The values of reprise:prefix_cache_tier_`name` in Prometheus' text format."""
    samples = {f"reprise:prefix_cache_tier_{name}", f"reprise:prefix_cache_tier_{name}_total"}
    values = dict.fromkeys(TIERS, 0)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            for tier in TIERS:
                if sample.name in samples and sample.labels.get("tier") == tier:
                    values[tier] += round(sample.value)
    return values


def judge(loads: Sequence[Pass], control: Sequence[Pass], *, tier: TierName, shared: int, from_tier: float) -> Sample:
    """`shared` are the tokens of a prefix, `from_tier` is the least share of them that `tier` itself must give.

    Raises MeasureError where the loads did not happen as they should, or the control had any.
    """
    for kind, passes in (("with loads", loads), ("of the control", control)):
        for one in passes:
            if not one.beside:
                raise MeasureError(f"a request beside a stream {kind} ended after the stream")
            if min(one.cached, default=0) < shared:
                raise MeasureError(f"a request beside a stream {kind} reused {min(one.cached, default=0)} of {shared}")
    for one in loads:
        expected = shared * len(one.cached)
        if sum(one.loaded.values()) < expected or one.loaded[tier] < from_tier * expected:
            raise MeasureError(
                f"beside a stream {one.loaded['host']} tokens came from host memory and {one.loaded['disk']} from the "
                f"disk, where {expected} should have come from the tier {tier}"
            )
    for one in control:
        if any(one.loaded.values()):
            raise MeasureError(f"beside a stream of the control {sum(one.loaded.values())} tokens were loaded")
    with_loads, without = _gaps(loads), _gaps(control)
    loaded = sum(sum(one.loaded.values()) for one in loads)
    from_here = sum(one.loaded[tier] for one in loads)
    requests = sum(len(one.cached) for one in loads)
    return Sample(
        with_loads.percentiles["p99"] / without.percentiles["p99"],
        cached=min(tokens for one in loads for tokens in one.cached),
        note=f"gaps with loads {_words(with_loads)}; without {_words(without)}; {requests} requests loaded "
        f"{loaded:,} tokens, {from_here:,} of them from the tier {tier}; those of the control none",
    )


def _gaps(passes: Sequence[Pass]) -> Distribution:
    found = distribution(gap for one in passes for gap in one.gaps)
    if found is None:
        raise MeasureError("the streams have no gaps that could be timed")
    return found


def _words(gaps: Distribution) -> str:
    p50, p99 = 1e3 * gaps.percentiles["p50"], 1e3 * gaps.percentiles["p99"]
    return f"p99 {p99:.1f} ms, median {p50:.1f} ms, greatest {1e3 * gaps.max:.1f} ms, n = {gaps.count:,}"


def measure_beside_loads(row: LoadRow, url: str, scale: Scale) -> Sample:
    """One sample, of `scale.stream_pairs` streams of each kind. The server has a pool of `load_pool_blocks`. Raises
    MeasureError."""
    tier: TierName = "host" if row == "itl-beside-host-loads" else "disk"
    try:
        return asyncio.run(_measure(row, url, scale, tier))
    except ConfigError as error:
        raise MeasureError(str(error)) from error


async def _measure(row: LoadRow, url: str, scale: Scale, tier: TierName) -> Sample:
    async with Client(url, SERVED_NAME) as client:
        await client.connect(probe_token_id=reserved_id(COMMON_TOKEN_IDS))
        driver = _Driver(client, scale, Tokens(row))
        await driver.prime(tier)
        passes: dict[Kind, list[Pass]] = {"loads": [], "control": []}
        for kind in order(scale.stream_pairs):
            passes[kind].append(await driver.stream(kind))
    return judge(passes["loads"], passes["control"], tier=tier, shared=scale.shared, from_tier=scale.load_from_tier)


class _Driver:
    def __init__(self, client: Client, scale: Scale, tokens: Tokens) -> None:
        self._client = client
        self._scale = scale
        self._tokens = tokens
        self._prefixes = [tokens(scale.shared) for _ in range(LOAD_PREFIXES)]

    async def prime(self, tier: TierName) -> None:
        """All prefixes are in the tier, the last one in the pool, too."""
        for number, prefix in enumerate(self._prefixes, start=1):
            await self._request(self._body(prefix))
            if tier == "disk":
                await self._on_disk(number * (self._scale.shared // BLOCK_SIZE))
                await self._quiet()
        # Once more: what pushes a prefix out of the pool from now on finds it in the tier already.
        for prefix in self._prefixes:
            await self._request(self._body(prefix))

    async def stream(self, kind: Kind) -> Pass:
        scale = self._scale
        prefixes = self._prefixes if kind == "loads" else [self._prefixes[-1]] * LOAD_PREFIXES
        bodies = [self._body(prefix) for prefix in prefixes]
        prompt = self._client.body(self._tokens(scale.decode_prompt), output_tokens=scale.stream_output)
        before = await self._quiet()
        answer = Answer(sent_at=0.0)
        streaming = asyncio.create_task(self._client.complete(prompt, answer))
        beside: list[Answer] = []
        for count, body in zip(send_after(scale.stream_output, len(bodies)), bodies, strict=True):
            # The client reads into `answer` as it goes and tells nobody; so we look.
            while len(answer.chunk_times) < count and not streaming.done():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
            beside.append(await self._request(body))
        _check(await streaming, scale.stream_output)
        after = await self._quiet()
        times = answer.chunk_times
        return Pass(
            gaps=tuple(later - earlier for earlier, later in pairwise(times)),
            cached=tuple(one.cached_tokens or 0 for one in beside),
            loaded={"host": after["host"] - before["host"], "disk": after["disk"] - before["disk"]},
            beside=all(one.finished_at < times[-1] for one in beside),
        )

    def _body(self, prefix: tuple[int, ...]) -> bytes:
        return self._client.body(prefix + self._tokens(self._scale.own), output_tokens=1)

    async def _request(self, body: bytes) -> Answer:
        answer = await self._client.complete(body)
        _check(answer, 1)
        return answer

    async def _quiet(self) -> dict[TierName, int]:
        """Waits until nothing goes down to a tier any more; the tokens that came up since the server's start."""
        seen, since = await self._metrics(), time.monotonic()
        begun = since
        while time.monotonic() - since < _QUIET_SECONDS:
            await asyncio.sleep(_QUIET_SECONDS / 4)
            now = await self._metrics()
            if any(tier_values(now, name) != tier_values(seen, name) for name in ("stores", "hits")):
                seen, since = now, time.monotonic()
            if time.monotonic() - begun > _PATIENCE:
                raise MeasureError(f"blocks still went to the tier after {_PATIENCE:.0f} s without requests")
        return tier_values(seen, "hits")

    async def _on_disk(self, wanted: int) -> None:
        """Waits until the disk has so many blocks; it is written behind."""
        begun = time.monotonic()
        while (blocks := tier_values(await self._metrics(), "blocks")["disk"]) < wanted:
            if time.monotonic() - begun > _PATIENCE:
                raise MeasureError(f"after {_PATIENCE:.0f} s {blocks} blocks are on the disk, where {wanted} should be")
            await asyncio.sleep(_QUIET_SECONDS / 4)

    async def _metrics(self) -> str:
        try:
            async with self._client.session.get(f"{self._client.base_url}/metrics") as response:
                if response.status != 200:
                    raise MeasureError(f"/metrics answers with HTTP {response.status}")
                return await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise MeasureError(f"/metrics does not answer: {error!r}") from error


def _check(answer: Answer, output_tokens: int) -> None:
    if answer.error is not None:
        raise MeasureError(f"a request failed: {answer.error.label}: {answer.error.message}")
    if answer.output_tokens != output_tokens:
        raise MeasureError(f"an answer has {answer.output_tokens} tokens instead of {output_tokens}")
