"""The engine process and its client: a real process, with a runner that counts (tests/support/fake_engine.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from reprise_engine.config import EngineConfig, ModelConfig
from reprise_engine.engine import MAX_UNREAD_OUTPUTS, EngineClient
from reprise_engine.engine_process import EngineProcess
from reprise_engine.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineStopped,
    ModelNotFound,
    RepriseError,
    SlowReader,
    UnsupportedModel,
)
from reprise_engine.messages import LoadProgress, Start
from reprise_engine.request import EngineRequest, FinishReason, RequestId, RequestOutput, SamplingParams

CONFIG = EngineConfig(model=ModelConfig(model="counting"))


@asynccontextmanager
async def client(builder: str = "build", *, max_unread: int = MAX_UNREAD_OUTPUTS) -> AsyncIterator[EngineClient]:
    engine = EngineClient(CONFIG, builder=f"tests.support.fake_engine:{builder}", max_unread_outputs=max_unread)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def request(text: str, *, name: str = "r", max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(text.encode()),
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=(257,),
        arrival_time=time.monotonic(),
    )


async def outputs_of(engine: EngineClient, asked: EngineRequest) -> list[RequestOutput]:
    return [output async for output in engine.generate(asked)]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


async def eventually(condition: Callable[[], bool], *, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (the condition has no event)
            await asyncio.sleep(0.01)


async def test_outputs_arrive_in_order_with_figures_and_times() -> None:
    async with client() as engine:
        outputs = await outputs_of(engine, request("xxxxxxxxx"))
        assert bytes(tokens_of(outputs)[:2]) == b"yz"
        assert tokens_of(outputs)[2:] == [257]
        assert outputs[-1].finish_reason is FinishReason.STOP
        times = outputs[-1].times
        assert times is not None
        assert times.first_scheduled is not None
        assert times.first_token is not None
        assert times.last_token is not None
        assert times.arrival <= times.first_scheduled <= times.first_token <= times.last_token
        again = await outputs_of(engine, request("xxxxxxxxx", name="again"))
        assert [(output.prompt_tokens, output.cached_tokens) for output in again] == [(9, 8)] * 3
        assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (18, 8)
        assert (engine.stats.num_running, engine.num_requests) == (0, 0)


async def test_many_requests_at_once_each_get_their_own() -> None:
    async with client() as engine:
        words = [chr(ord("a") + i) * (i + 1) for i in range(16)]
        results = await asyncio.gather(
            *(outputs_of(engine, request(word, name=word)) for word in words),
        )
        for word, outputs in zip(words, results, strict=True):
            assert tokens_of(outputs) == [ord(word[0]) + step for step in range(1, 5)]


async def test_progress_and_resolved_configuration() -> None:
    seen: list[LoadProgress] = []
    engine = EngineClient(CONFIG, builder="tests.support.fake_engine:build", on_progress=seen.append)
    alive = [engine.alive]
    try:
        with pytest.raises(EngineStopped, match="not ready"):
            await outputs_of(engine, request("a"))
        resolved = await engine.start()
        alive.append(engine.alive)
        assert (resolved.block_size, resolved.max_model_len) == (4, 200)
        assert seen == [LoadProgress("Counting", 0.5)]
    finally:
        await engine.close()
    assert [*alive, engine.alive] == [False, True, False]


async def test_leaving_a_request_aborts_it_within_a_step() -> None:
    async with client("build_slow") as engine:
        generator = engine.generate(request("{", max_tokens=150))
        await anext(generator)
        assert engine.stats.num_running == 1
        await generator.aclose()
        await eventually(lambda: engine.stats.num_running == 0, seconds=2.5)  # 150 steps of 20 ms are 3 s
        assert engine.stats.kv_cache_usage == 0.0


async def test_a_reader_that_lags_behind_loses_its_request_and_holds_nothing() -> None:
    async with client("build_slow", max_unread=8) as engine:
        outputs = engine.generate(request("{", max_tokens=150))
        await anext(outputs)
        await eventually(lambda: engine.num_requests == 0)
        with pytest.raises(SlowReader, match="left 8 outputs unread"):
            await anext(outputs)
        await eventually(lambda: engine.stats.num_running == 0)
        assert len(await outputs_of(engine, request("a", name="other", max_tokens=12))) == 12, "a reader that keeps up"


async def test_a_cancelled_task_aborts_its_request_and_leaves_others_alone() -> None:
    async with client("build_slow") as engine:
        other = asyncio.create_task(outputs_of(engine, request("a", name="other", max_tokens=20)))
        task = asyncio.create_task(outputs_of(engine, request("{", max_tokens=150)))
        await eventually(lambda: engine.stats.num_running == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: engine.stats.num_running <= 1, seconds=2.5)
        assert len(tokens_of(await other)) == 20


async def test_what_the_engine_refuses_is_raised_and_nothing_else_stops() -> None:
    async with client() as engine:
        with pytest.raises(ContextLengthExceeded) as caught:
            await outputs_of(engine, request("a" * 150, max_tokens=100))
        assert caught.value.code == "context_length_exceeded"
        assert tokens_of(await outputs_of(engine, request("a", name="next", max_tokens=1))) == [98]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "500"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
async def test_the_engines_threads_spin_briefly_unless_told_otherwise(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    async with client() as engine:
        assert psutil.Process(engine.pid).environ().get("GOMP_SPINCOUNT") == expected


async def test_the_prefix_cache_can_be_reset() -> None:
    async with client() as engine:
        await outputs_of(engine, request("abcdefgh"))
        reset = await engine.reset_prefix_cache()
        assert (reset.success, reset.freed_blocks) == (True, 3)  # two blocks, and an unfinished one
        assert (await outputs_of(engine, request("abcdefgh", name="again")))[-1].cached_tokens == 0


@pytest.mark.parametrize(
    ("builder", "error", "message"),
    [
        ("build_missing", ModelNotFound, "'counting' does not exist"),
        ("build_unsupported", UnsupportedModel, "multimodal"),
        ("build_buggy", RepriseError, "ZeroDivisionError: a bug"),
        ("build_killed", EngineDead, "killed by SIGKILL; SIGKILL is what the kernel sends when memory runs out"),
        ("no_such_builder", RepriseError, "no_such_builder"),
    ],
)
async def test_a_failed_start_is_raised_as_what_it_was(builder: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        async with client(builder):
            pass


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [("!", "The engine process died: RuntimeError: device on fire"), ("~", "was killed by SIGKILL")],
)
async def test_a_death_reaches_every_request_and_every_later_one(prompt: str, cause: str) -> None:
    async with client("build_slow") as engine:
        other = asyncio.create_task(outputs_of(engine, request("{", name="other", max_tokens=150)))
        await eventually(lambda: engine.stats.num_running == 1)
        with pytest.raises(EngineDead, match=cause):
            await outputs_of(engine, request(prompt))
        with pytest.raises(EngineDead, match=cause):
            await other
        assert cause in str(await engine.wait_ended())
        assert not engine.alive
        with pytest.raises(EngineDead, match=cause):
            await outputs_of(engine, request("a", name="late"))
        with pytest.raises(EngineDead, match=cause):
            await engine.reset_prefix_cache()


async def test_closing_while_loading_does_not_wait_for_the_load() -> None:
    engine = EngineClient(CONFIG, builder="tests.support.fake_engine:build_for_ever")
    starting = asyncio.create_task(engine.start())
    await eventually(lambda: engine.pid is not None)
    began = time.monotonic()
    await engine.close()
    assert time.monotonic() - began < 5
    with pytest.raises(EngineDead):
        await starting


async def test_a_start_that_is_given_up_does_not_make_closing_wait_for_the_load() -> None:
    engine = EngineClient(CONFIG, builder="tests.support.fake_engine:build_for_ever")
    starting = asyncio.create_task(engine.start())
    await eventually(lambda: engine.pid is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    began = time.monotonic()
    await engine.close()
    assert time.monotonic() - began < 5


async def test_a_process_that_was_started_before_its_client_serves() -> None:
    builder = "tests.support.fake_engine:build"
    process = EngineProcess(Start(CONFIG, builder))
    engine = EngineClient(CONFIG, builder=builder, process=process)
    try:
        await engine.start()
        assert engine.pid == process.process.pid
        assert tokens_of(await outputs_of(engine, request("a", max_tokens=1))) == [98]
    finally:
        await engine.close()
    assert process.process.returncode == 0


async def test_a_process_whose_client_never_starts_ends_with_it() -> None:
    process = EngineProcess(Start(CONFIG, "tests.support.fake_engine:build_for_ever"))
    await EngineClient(CONFIG, process=process).close()
    assert process.process.returncode == -signal.SIGKILL


async def test_the_engine_process_ignores_signals_that_are_the_servers() -> None:
    async with client() as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGINT)
        os.kill(engine.pid, signal.SIGTERM)
        assert tokens_of(await outputs_of(engine, request("a", max_tokens=1))) == [98]


PARENT = """
import asyncio, sys
from reprise_engine.config import EngineConfig, ModelConfig
from reprise_engine.engine import EngineClient

async def main():
    config = EngineConfig(model=ModelConfig(model="m"))
    engine = EngineClient(config, builder="tests.support.fake_engine:" + sys.argv[1])
    starting = asyncio.create_task(engine.start())
    while engine.pid is None:
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await starting
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("builder", ["build", "build_for_ever"])
def test_the_engine_process_dies_with_its_parent(builder: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, builder], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        engine = psutil.Process(int(output.readline()))
        time.sleep(1.0)
        assert engine.is_running()
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs([engine], timeout=10)
    assert not alive
