"""`reprise bench` against real servers: counts are exact, hits are what arithmetic says, failures are counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from reprise_engine.bench import ClientOptions, Load, Result, Workload, make_workload, run, summarize
from reprise_engine.bench.text import PromptText, word_ids
from reprise_engine.bench.workloads import Conversation, Turn, poisson_schedule
from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.entrypoints import cli
from reprise_engine.errors import ConfigError
from reprise_engine.server.options import ServerOptions
from reprise_engine.text import load_tokenizer
from tests.support.engine_server import RunningServer, fake_options, running_server
from tests.support.tiny_models import VOCAB_SIZE, tiny_model_path

TOKEN_IDS = range(3, VOCAB_SIZE)
ALONE = Load(concurrency=1, reset_prefix_cache=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(model=str(tiny_model_path("qwen3")), max_model_len=512),
            cache=CacheConfig(num_gpu_blocks_override=256),
        ),
        host="127.0.0.1",
        port=0,
        served_names=("tiny",),
    )
    with running_server(options) as running:
        yield running


def measure(server: RunningServer, workload: Workload, *, load: Load = ALONE) -> Result:
    return asyncio.run(run(workload, server.url, load=load, token_ids=TOKEN_IDS))


def test_of_a_shared_prefix_all_but_the_first_request_find_exactly_the_prefix(server: RunningServer) -> None:
    workload = make_workload(
        "shared-prefix", num_prompts=6, prefix_len=40, input_len=9, output_len=5, token_ids=TOKEN_IDS
    )
    load = Load(concurrency=1, reset_prefix_cache=True, num_warmups=2)
    result = measure(server, workload, load=load)
    summary = summarize(result)
    assert [record.cached_tokens for record in result.records] == [0, 40, 40, 40, 40, 40]
    assert (summary.completed, summary.errors) == (6, {})
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (6 * 49, 6 * 5, 5 * 40)
    assert summary.hit_rate == summary.hit_rate_counters == 200 / 294
    assert summary.counted_by == {"usage": 6}
    assert (result.server.model, result.server.prefix_caching) == ("tiny", True)
    for record in result.records:
        assert record.sent_at <= record.chunk_times[0] <= record.chunk_times[-1] <= record.finished_at
        assert record.finish_reason == "length"


def test_requests_that_run_together_share_too(server: RunningServer) -> None:
    workload = make_workload(
        "shared-prefix", num_prompts=6, prefix_len=48, input_len=5, output_len=3, token_ids=TOKEN_IDS
    )
    result = measure(server, workload, load=Load(concurrency=6, reset_prefix_cache=True))
    assert summarize(result).cached_tokens == 5 * 48, "whole blocks are shared while their first request runs"


def test_random_prompts_share_nothing(server: RunningServer) -> None:
    workload = make_workload("random", num_prompts=4, input_len=33, output_len=2, token_ids=TOKEN_IDS)
    assert [record.cached_tokens for record in measure(server, workload).records] == [0] * 4


def test_a_conversation_finds_all_of_its_past_but_the_last_token(server: RunningServer) -> None:
    workload = make_workload(
        "multi-turn", num_prompts=2, turns=3, input_len=11, output_len=6, prefix_len=20, token_ids=TOKEN_IDS
    )
    result = measure(server, workload)
    lengths = [31, 48, 65]
    assert [record.prompt_tokens for record in result.records] == lengths * 2
    assert [record.sent_prompt_tokens for record in result.records] == lengths * 2
    # The last token of an answer was generated, but never computed.
    assert [record.cached_tokens for record in result.records] == [0, 36, 53, 20, 36, 53]
    places = [(record.conversation, record.turn) for record in result.records]
    assert places == [(conversation, turn) for conversation in (0, 1) for turn in range(3)]


def test_with_a_rate_requests_are_due_by_the_schedule_and_measured_from_it(server: RunningServer) -> None:
    workload = make_workload("random", num_prompts=5, input_len=4, output_len=2, token_ids=TOKEN_IDS)
    result = measure(server, workload, load=Load(rate=40.0, seed=5, concurrency=1))
    assert [record.scheduled_at for record in result.records] == poisson_schedule(5, rate=40.0, seed=5)
    for record in result.records:
        assert record.sent_at >= record.scheduled_at
        assert record.ttft is not None
        assert record.ttft_from_schedule is not None
        assert record.ttft_from_schedule >= record.ttft
    assert summarize(result).completed == 5


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prompts_of_text_have_the_tokens_that_were_asked_for(server: RunningServer, api: str) -> None:
    tokenizer = load_tokenizer(tiny_model_path("qwen3"))
    options = ClientOptions(api="chat" if api == "chat" else "completions", text=PromptText(tokenizer))
    words = word_ids(tokenizer)
    workload = make_workload("multi-turn", num_prompts=1, turns=2, input_len=12, output_len=4, token_ids=words)
    result = asyncio.run(run(workload, server.url, load=ALONE, options=options, token_ids=words))
    first, second = result.records
    assert (first.ok, second.ok) == (True, True)
    extra = len(tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": ""}]))) if api == "chat" else 0
    assert first.prompt_tokens == 12 + extra
    assert (second.cached_tokens or 0) >= 12, "the first turn is found again"


async def test_a_server_whose_engine_dies_in_the_middle_is_counted_by_kind(tmp_path: Path) -> None:
    """The third user's second turn kills the engine, at 20 ms a token; by then the first two have theirs half."""
    long = Conversation((Turn(tuple(b"abcdefgh"), 150),))
    fatal = Conversation((Turn(tuple(b"abcdefgh"), 5), Turn(tuple(b"~"), 5)))
    workload = Workload(name="multi-turn", conversations=(long, long, fatal, long, long))
    with running_server(fake_options(tmp_path, builder="build_slow", shutdown_timeout=0.0)) as server:
        result = await run(workload, server.url, load=Load(concurrency=3), token_ids=range(97, 120))
    summary = summarize(result)
    assert [record.ok for record in result.records] == [False, False, True, False, False, False]
    assert (summary.requests, summary.completed, sum(summary.errors.values())) == (6, 1, 5)
    for record in result.records[:2]:
        assert record.error is not None
        # Told in the stream, or cut off.
        assert record.error.kind in {"error_event", "disconnected", "incomplete"}
        assert 0 < len(record.chunk_times) < 150
    for record in result.records[4:]:
        assert record.error is not None
        # Behind it, they find a server that is going, or gone.
        assert record.error.label in {"http 500", "http 503", "error_event", "disconnected", "connect"}
        assert record.chunk_times == ()


@asynccontextmanager
async def plain_server(
    *, chunks: list[str], takes_ids: bool = True
) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """Knows the models and completions of OpenAI, and nothing else: no usage in streams, no extensions."""
    seen: list[dict[str, object]] = []

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "plain"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "return_token_ids" in body or "ignore_eos" in body or (isinstance(body["prompt"], list) and not takes_ids):
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        seen.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in chunks:
            choice = {"index": 0, "text": text, "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if "cut" not in chunks:
            await response.write(b"data: [DONE]\n\n")
        return response

    application = web.Application()
    application.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


RANDOM = make_workload("random", num_prompts=3, input_len=4, output_len=2)


async def test_a_server_without_any_extension_is_measured_by_its_chunks() -> None:
    async with plain_server(chunks=["one", "two"]) as (url, seen):
        result = await run(RANDOM, url, load=Load(concurrency=1), options=ClientOptions(ignore_eos=False))
    summary = summarize(result)
    assert (summary.completed, summary.output_tokens, summary.counted_by) == (3, 6, {"chunks": 3})
    assert (summary.cached_tokens, summary.hit_rate) == (None, None)
    assert len(seen) == 4, "the probe and the workload"
    assert seen[1]["prompt"] == list(RANDOM.conversations[0].turns[0].token_ids)


async def test_a_stream_that_just_ends_is_a_failure() -> None:
    async with plain_server(chunks=["one", "cut"]) as (url, _):
        with pytest.raises(ConfigError, match="incomplete"):
            await run(RANDOM, url, options=ClientOptions(ignore_eos=False))


async def test_a_server_that_takes_no_token_ids_is_told_before_the_run() -> None:
    async with plain_server(chunks=["one"], takes_ids=False) as (url, _):
        with pytest.raises(ConfigError, match=r"refuses a small request with token ids.*--tokenizer"):
            await run(RANDOM, url, options=ClientOptions(ignore_eos=False))


async def test_a_conversation_in_token_ids_needs_the_ids_of_the_answers() -> None:
    workload = make_workload("multi-turn", num_prompts=1, turns=2, input_len=4, output_len=2)
    async with plain_server(chunks=["one"]) as (url, _):
        with pytest.raises(ConfigError, match="does not return the ids of the tokens it generates"):
            await run(workload, url, options=ClientOptions(ignore_eos=False))


# --- the command


def test_the_command_writes_table_json_and_plot(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--base-url", f"{server.url}/v1", "--tokenizer", str(tiny_model_path("qwen3"))]
    arguments += ["--num-requests", "4", "--random-prefix-len", "30", "--random-input-len", "6", "--output-len", "4"]
    arguments += ["--max-concurrency", "1", "--reset-prefix-cache", "--metric-percentiles", "50,95"]
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    assert cli.main(["bench", *arguments, *files]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 completed" in shown
    assert "90 (62.5%)" in shown
    assert "p95" in shown
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["schema"], content["ratios"]) == ("reprise-bench/1", None)
    [written] = content["runs"]
    assert {"label", "server", "versions", "started", "duration", "client", "engine_flags", "counters"} <= {*written}
    assert written["settings"]["prefix_len"] == 30
    assert written["summary"]["hit_rate"] == 90 / 144
    assert [len(request["chunk_times"]) for request in written["requests"]] == [4] * 4
    assert written["versions"]["reprise"] == "0.1.0"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("out.json", "out.png")] == [0o600] * 2


def test_a_server_of_its_own_with_the_cache_on_and_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny_model_path("llama")), "--num-prompts", "3", "--prefix-len", "32"]
    arguments += ["--input-len", "4", "--output-len", "3", "--concurrency", "1", "--compare", "off"]
    engine = ["--max_model_len=256", "--num-gpu-blocks-override", "64"]
    assert cli.main(["bench", *arguments, "--json", str(tmp_path / "out.json"), "--", *engine]) == 0
    content = json.loads((tmp_path / "out.json").read_text())
    on, off = content["runs"]
    assert [run["label"] for run in (on, off)] == ["cache on", "cache off"]
    assert [run["server"]["prefix_caching"] for run in (on, off)] == [True, False]
    assert (on["summary"]["cached_tokens"], off["summary"]["cached_tokens"]) == (64, 0)
    assert off["engine_flags"][-1] == "--no-enable-prefix-caching"
    assert on["server"]["max_model_len"] == 256
    assert content["ratios"]["ttft mean"] > 0
    assert "cache on compared with cache off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--base-url", "http://127.0.0.1:1"], 2, "where no OpenAI-compatible server answers"),
        (["--base-url", "localhost:8000"], 2, "it must be a URL such as"),
        ([], 2, "there is nothing to measure"),
        (["--base-url", "http://h", "--compare", "off"], 2, "--compare off starts its servers itself"),
        (["--base-url", "http://h", "--", "--block-size", "8"], 2, "'--block-size' is a flag of a server to start"),
        (
            ["--model", "m", "--", "--api_key=s3cret"],
            2,
            "--api-key puts a key where every listing of processes shows it; set REPRISE_API_KEY",
        ),
        (["--model", "m", "--", "--port", "1"], 2, "--host and --port are chosen by the measurement"),
        (["--model", "m", "--compare", "off", "--", "--no-enable-prefix-caching"], 2, "sets the cache itself"),
        (["--model", "m", "--", "--gpu-memory-utilization", "7"], 2, "--gpu-memory-utilization is 7.0"),
        (["--base-url", "http://h", "--num-prompts", "0"], 2, "--num-prompts is 0"),
        (["--base-url", "http://h", "--rate", "0"], 2, "--rate is 0.0"),
        (["--base-url", "http://h", "--backend", "openai-chat"], 2, "needs --tokenizer FOLDER"),
        (["--base-url", "http://h", "--json", "/no/such/folder/x.json"], 2, "whose folder does not exist"),
        (["--model", "/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "s3cret" not in error
    assert error.startswith("reprise bench: error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request-rat", "1"], "unknown argument"),
        (["--dataset-name", "sharegpt"], "invalid choice: 'sharegpt'"),
        (["--metric-percentiles", "101"], "no list of percentiles"),
        (["--model", "m", "--", "--swap-space", "1"], "--swap-space is not supported"),
    ],
)
def test_a_wrong_flag_exits_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_failed_request_makes_the_command_fail(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", server.url, "--tokenizer", str(tiny_model_path("qwen3")), "--workload", "random"]
    arguments += ["--input-len", "600", "--output-len", "2", "--num-prompts", "2", "--warmup", "0"]
    assert cli.main(["bench", *arguments]) == 1, "longer than the context"
    assert "2 x http 400" in capsys.readouterr().out
