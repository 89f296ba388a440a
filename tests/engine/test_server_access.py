"""Around a request: its id, its line in the log without prompts or keys, browsers of other origins, spans."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise_engine.errors import ConfigError
from reprise_engine.server.access import logfmt
from reprise_engine.server.http_options import HttpOptions
from reprise_engine.server.tracing import otlp_tracer
from tests.support import raw_http
from tests.support.engine_server import RunningServer, fake_options, running_server

COMPLETIONS = "/v1/completions"
KEY = "sk-a-key-that-nobody-may-read"
PROMPT = "a-prompt-that-nobody-may-read"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    http = HttpOptions(allowed_origins=("https://friend.example",))
    with running_server(fake_options(tmp_path_factory.mktemp("model"), http=http, api_keys=(KEY,))) as running:
        yield running


def complete(client: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2} | body, headers=BEARER | (headers or {}))


def wait_for_lines(caplog: pytest.LogCaptureFixture, count: int) -> None:
    """A line is written when its answer has gone, and the client may be quicker."""
    deadline = time.monotonic() + 10
    while len(access_lines(caplog)) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    lines = [record.message for record in caplog.records if record.name == "reprise_engine.server.access"]
    return [dict(pair.split("=", 1) for pair in line.split(" ")) for line in lines]


# --- ids


@pytest.mark.parametrize("given", ["a", "trace-1:2/3.4_5@x+y=", "x" * 128])
def test_a_request_id_is_given_back(server: RunningServer, given: str) -> None:
    assert complete(server.client, {"X-Request-Id": given}).headers["x-request-id"] == given


def test_a_request_id_is_made_where_there_is_none_also_for_errors(server: RunningServer) -> None:
    answers = [
        complete(server.client),
        complete(server.client, stream=True),
        complete(server.client, temperature=-1),
        server.client.post(COMPLETIONS, json={}),  # no key
        server.client.get("/no/such/path", headers=BEARER),
        server.client.get("/health"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 404, 200]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(re.fullmatch(r"[0-9a-f]{32}", made) for made in ids)
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("given", ["x" * 129, "two words", 'a"b', "a;b", "<script>", "\u00e9"])
def test_an_id_that_is_none_is_refused_and_not_repeated(server: RunningServer, given: str) -> None:
    with raw_http.connect(server.url) as connection:
        connection.sendall(raw_http.head("/health", "Connection: close", f"X-Request-Id: {given}", method="GET"))
        status, headers, content = raw_http.answer_of(raw_http.read_all(connection))
    assert (status, content["error"]["param"]) == (400, "X-Request-Id")
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    assert given not in json.dumps(content)


# --- logs


def test_a_line_tells_who_asked_for_what_and_what_was_cached(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        complete(server.client)
        answer = complete(server.client, {"X-Request-Id": "mine"}).json()
        server.client.get("/health")
        server.client.get("/metrics")
        server.client.get("/v1/models?x=1", headers=BEARER)
        wait_for_lines(caplog, 3)
    _, second, models = access_lines(caplog)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", second.pop("client"))
    assert float(second.pop("seconds")) < 60
    assert second == {
        "request_id": "mine",
        "method": "POST",
        "path": COMPLETIONS,
        "status": "200",
        "id": answer["id"].removeprefix("cmpl-"),
        "prompt_tokens": str(len(PROMPT)),
        "cached_tokens": str(answer["usage"]["prompt_tokens_details"]["cached_tokens"]),
        "completion_tokens": "2",
    }
    assert int(second["cached_tokens"]) > 0
    assert (models["path"], models["status"]) == ("/v1/models", "200")


def test_a_response_has_its_figures_in_the_log(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        body = {"input": "a", "max_output_tokens": 2}
        answer = server.client.post("/v1/responses", json=body, headers=BEARER).json()
        wait_for_lines(caplog, 1)
    [line] = access_lines(caplog)
    assert (line["path"], line["status"]) == ("/v1/responses", "200")
    assert line["id"] == answer["id"].removeprefix("resp_")
    usage = answer["usage"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (str(usage["input_tokens"]), "2")


def test_an_answer_that_was_cut_off_is_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_server(fake_options(tmp_path, builder="build_slow")) as server, caplog.at_level(logging.INFO):
        with raw_http.connect(server.url) as connection:
            connection.sendall(raw_http.post(COMPLETIONS, {"prompt": "{", "max_tokens": 190, "stream": True}))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        server.signal()
        server.join()
    [line] = access_lines(caplog)
    assert (line["status"], line["cut"]) == ("200", "true")


@pytest.mark.parametrize("value", ["a b", "a\nb", 'a"b', "", "a=b", "\u2028", "\x1b[31m"])
def test_a_value_cannot_break_out_of_its_line(value: str) -> None:
    line = logfmt({"one": value, "two": 2})
    assert line.isprintable()
    quoted = line.removeprefix("one=").removesuffix(" two=2")
    assert json.loads(quoted) == value


def test_neither_prompts_nor_keys_are_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        complete(server.client)
        complete(server.client, stream=True)
        complete(server.client, temperature=PROMPT)
        complete(server.client, model=PROMPT)
        server.client.post("/tokenize", json={"prompt": PROMPT}, headers=BEARER)
        server.client.post(COMPLETIONS, json={"prompt": PROMPT}, headers={"Authorization": f"Bearer {KEY}x"})
        server.client.post(COMPLETIONS, content=PROMPT, headers=BEARER)
        wait_for_lines(caplog, 7)
    assert len(access_lines(caplog)) == 7
    assert PROMPT not in caplog.text
    assert KEY not in caplog.text


def test_prompts_are_logged_where_asked_for_up_to_a_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = fake_options(tmp_path, http=HttpOptions(log_requests=True, max_log_len=8, access_log=False))
    with running_server(options) as server, caplog.at_level(logging.INFO):
        asked = {"temperature": 0, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 7}
        answer = complete(server.client, {"X-Request-Id": "mine"}, repetition_penalty=1.5, stop="zz", **asked).json()
        server.signal()
        server.join()  # the line is written in a thread
    [line] = [record.message for record in caplog.records if record.name == "reprise_engine.server.request_log"]
    batch = answer["id"].removeprefix("cmpl-")
    assert line.startswith(f"received request_id=mine id={batch}-0 prompt_tokens={len(PROMPT)} sampling=")
    assert "'max_tokens': 2, 'temperature': 0.0, 'top_p': 0.5, 'repetition_penalty': 1.5" in line
    assert "'presence_penalty': 0.5, 'frequency_penalty': 0.25, 'seed': 7" in line, "what the engine was asked for"
    assert "'stop': ('zz',)" in line
    assert line.endswith(f"prompt={PROMPT[:8]}")
    assert access_lines(caplog) == []


# --- browsers


def test_other_origins_may_call_where_they_are_allowed(server: RunningServer) -> None:
    preflight = {
        "Origin": "https://friend.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = server.client.options(COMPLETIONS, headers=preflight)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://friend.example")
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    stranger = server.client.options(COMPLETIONS, headers=preflight | {"Origin": "https://stranger.example"})
    assert stranger.status_code == 400
    assert "access-control-allow-origin" not in stranger.headers
    answer = complete(server.client, {"Origin": "https://friend.example"})
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    refused = server.client.post(COMPLETIONS, json={}, headers={"Origin": "https://friend.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://friend.example")


def test_without_the_flag_no_other_origin_may_call(tmp_path: Path) -> None:
    with running_server(fake_options(tmp_path)) as server:
        answer = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"Origin": "https://any.example"})
        assert "access-control-allow-origin" not in answer.headers


# --- spans


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Takes spans by OTLP over HTTP; the list grows as they come."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = ExportTraceServiceRequest()
            message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for part in message.resource_spans for scope in part.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/v1/traces", spans
        finally:
            listening.shutdown()
            thread.join()


def test_a_request_is_a_span_below_its_callers(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collector() as (endpoint, spans):
        options = fake_options(tmp_path, http=HttpOptions(otlp_traces_endpoint=endpoint))
        with running_server(options) as server:
            complete(server.client, {"traceparent": caller, "X-Request-Id": "mine"}).raise_for_status()
            complete(server.client, temperature=-1)
            server.client.get("/v1/models").raise_for_status()
            server.signal()
            server.join()
    [span] = spans
    attributes = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
    assert span.name == "llm_request"
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert attributes["gen_ai.request.id"] == "mine"
    assert attributes["gen_ai.response.model"] == "counter"
    assert (attributes["gen_ai.usage.prompt_tokens"], attributes["gen_ai.usage.cached_tokens"]) == (len(PROMPT), 0)
    assert (attributes["gen_ai.usage.completion_tokens"], attributes["gen_ai.request.max_tokens"]) == (2, 2)
    assert attributes["http.response.status_code"] == 200
    latency = {name: attributes[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 <= latency["time_in_queue"] <= latency["time_to_first_token"] <= latency["e2e"]
    assert span.end_time_unix_nano - span.start_time_unix_nano >= latency["e2e"] * 1e9 * 0.99
    assert PROMPT not in str(span)


def test_without_the_packages_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"install the extra: pip install 'reprise-engine\[otel\]'"):
        otlp_tracer("http://127.0.0.1:1/v1/traces", model="m")
