"""What a client may hold, and for how long: heads, bodies, the queue, time, answers it does not read."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from reprise_engine.server.connection import MAX_HEAD_SIZE
from reprise_engine.server.http_options import HttpOptions
from tests.support import raw_http
from tests.support.engine_server import RunningServer, fake_options, running_server

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
LIMIT = 4096
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Patient for half a second, and with small bodies only."""
    http = HttpOptions(max_request_body_size=LIMIT, receive_timeout=0.5)
    with running_server(fake_options(tmp_path_factory.mktemp("model"), http=http)) as running:
        yield running


def eventually(client: httpx.Client, series: str, wanted: Callable[[float], bool], *, seconds: float = 20) -> float:
    """Waits for a value of /metrics; returns the seconds it took."""
    began = time.monotonic()
    while True:
        [line] = [line for line in client.get("/metrics").text.splitlines() if line.startswith(series)]
        if wanted(float(line.rpartition(" ")[2])):
            return time.monotonic() - began
        assert time.monotonic() - began < seconds, line
        time.sleep(0.02)


def refused(received: bytes, status: int) -> dict[str, Any]:
    found, headers, content = raw_http.answer_of(received)
    assert (found, headers["connection"]) == (status, "close"), received
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- heads


@pytest.mark.parametrize("sent", [b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: y\r\n"])
def test_a_head_that_does_not_end_is_cut_off(server: RunningServer, sent: bytes) -> None:
    with raw_http.connect(server.url) as connection:
        connection.sendall(sent)
        assert "did not come within 0.5 s" in refused(raw_http.read_all(connection), 408)["message"]


def test_a_connection_without_a_request_is_closed_without_a_word(server: RunningServer) -> None:
    with raw_http.connect(server.url) as connection:
        assert raw_http.read_all(connection) == b""


def test_dripping_byte_by_byte_buys_no_time(server: RunningServer) -> None:
    with raw_http.connect(server.url) as connection:
        began = time.monotonic()
        for byte in raw_http.head(COMPLETIONS, *(f"X-{i}: y" for i in range(50))):
            try:
                connection.sendall(bytes([byte]))
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.02)
        else:
            pytest.fail("the server took all of it")
        assert time.monotonic() - began < 5


def test_a_second_request_on_the_connection_has_its_own_time(server: RunningServer) -> None:
    with raw_http.connect(server.url) as connection:
        for _ in range(2):
            connection.sendall(raw_http.head("/health", method="GET"))
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            time.sleep(0.7)  # idle between requests is no slow head
        connection.sendall(b"GET /hea")
        refused(raw_http.read_all(connection), 408)


def test_a_huge_head_is_refused(server: RunningServer) -> None:
    with raw_http.connect(server.url) as connection:
        line = b"X-Filler: " + b"y" * 1012 + b"\r\n"
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + line * (MAX_HEAD_SIZE // len(line) - 1))
        time.sleep(0.2)
        connection.sendall(line)
        error = refused(raw_http.read_all(connection), 431)
        assert f"exceed {MAX_HEAD_SIZE} bytes" in error["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["tls", "nonsense", "version", "length"],
)
def test_what_is_no_http_gets_a_400_in_openais_shape(server: RunningServer, sent: bytes) -> None:
    with raw_http.connect(server.url) as connection:
        connection.sendall(sent)
        refused(raw_http.read_all(connection), 400)


def test_what_is_no_http_is_not_answered_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    with running_server(fake_options(tmp_path, builder="build_slow")) as server:
        with raw_http.connect(server.url) as connection:
            connection.sendall(raw_http.post(COMPLETIONS, {"prompt": "{", "max_tokens": 190, "stream": True}))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.sendall(b"NONSENSE\r\n\r\n")
            assert b"HTTP/1.1" not in raw_http.read_all(connection)
        eventually(server.client, "vllm:num_requests_running", lambda running: running == 0, seconds=2)


# --- bodies


def test_a_large_body_is_a_413(server: RunningServer) -> None:
    fits = json.dumps(BODY).encode()
    at_limit = fits[:-1] + b" " * (LIMIT - len(fits)) + b"}"
    headers = {"Content-Type": "application/json"}
    assert server.client.post(COMPLETIONS, content=at_limit, headers=headers).status_code == 200
    for content in (at_limit + b" ", iter([at_limit, b" "])):  # with a length, and in chunks
        response = server.client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert "--max-request-body-size" in response.json()["error"]["message"]


def test_the_answer_to_a_body_far_too_large_is_read_by_a_client_that_sends_all_of_it(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.post(COMPLETIONS, content=b"x" * 3_000_000).status_code == 413


def test_who_waits_for_100_continue_is_refused_before_sending(server: RunningServer) -> None:
    with raw_http.connect(server.url) as connection:
        connection.sendall(raw_http.head(COMPLETIONS, f"Content-Length: {LIMIT + 1}", "Expect: 100-continue"))
        refused(raw_http.read_all(connection), 413)


@pytest.mark.parametrize("sent", [b"", b'{"prompt": '])
def test_a_body_that_does_not_come_is_a_408(server: RunningServer, sent: bytes) -> None:
    with raw_http.connect(server.url) as connection:
        connection.sendall(raw_http.head(COMPLETIONS, "Content-Length: 100") + sent)
        assert refused(raw_http.read_all(connection), 408)["code"] == "request_timeout"


def test_a_hundred_slow_clients_do_not_keep_others_out(server: RunningServer) -> None:
    slow = [raw_http.connect(server.url) for _ in range(100)]
    try:
        for number, connection in enumerate(slow):
            whole = raw_http.head(COMPLETIONS, "Content-Length: 100")
            connection.sendall(whole if number % 2 else whole[:20])
        assert server.client.post(COMPLETIONS, json=BODY).status_code == 200
        assert all(raw_http.read_all(connection).startswith(b"HTTP/1.1 408") for connection in slow)
    finally:
        for connection in slow:
            connection.close()


def test_who_has_no_key_sends_its_body_to_nobody(tmp_path: Path) -> None:
    """It gets its 401, however large the body, and the connection goes on."""
    http = HttpOptions(max_request_body_size=LIMIT)
    with running_server(fake_options(tmp_path, api_keys=("k",), http=http)) as server:
        for _ in range(2):
            response = server.client.post(COMPLETIONS, content=b"x" * (3 * MAX_HEAD_SIZE))
            assert response.status_code == 401
        assert server.client.get("/health").status_code == 200


# --- the queue


def test_a_full_queue_is_a_429_that_says_when_to_come_back(tmp_path: Path) -> None:
    options = fake_options(tmp_path, builder="build_slow", max_num_seqs=2, http=HttpOptions(max_queued_requests=1))
    with running_server(options) as server, contextlib.ExitStack() as stack:
        body = {"prompt": "{", "max_tokens": 60, "stream": True}
        streams = [stack.enter_context(server.client.stream("POST", COMPLETIONS, json=body)) for _ in range(2)]
        waiting = stack.enter_context(raw_http.connect(server.url))
        waiting.sendall(raw_http.post(COMPLETIONS, {"prompt": "{", "max_tokens": 60}))
        eventually(server.client, "vllm:num_requests_waiting", lambda number: number == 1)
        response = server.client.post(COMPLETIONS, json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (429, "5")
        assert response.json()["error"]["code"] == "queue_full"
        assert server.client.post("/tokenize", json={"prompt": "a"}).status_code == 200, "needs no queue"
        sdk = stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0))
        with pytest.raises(openai.RateLimitError):
            sdk.completions.create(model="counter", prompt="a")
        with pytest.raises(openai.RateLimitError):
            sdk.responses.create(model="counter", input="a")
        eventually(server.client, "reprise:requests_refused_total", lambda number: number == 3)
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams), "what runs is left alone"
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")
        assert server.client.post(COMPLETIONS, json=BODY).status_code == 200


def test_a_request_of_many_sequences_is_served_where_nothing_waits(tmp_path: Path) -> None:
    with running_server(fake_options(tmp_path, max_num_seqs=2, http=HttpOptions(max_queued_requests=0))) as server:
        assert len(server.client.post(COMPLETIONS, json=BODY | {"n": 8}).json()["choices"]) == 8


# --- time


def test_an_answer_that_takes_too_long_is_cut_off_and_its_sequences_end(tmp_path: Path) -> None:
    http = HttpOptions(request_timeout=0.6)
    with running_server(fake_options(tmp_path, builder="build_slow", http=http)) as server:
        body = {"prompt": "{", "max_tokens": 190}
        response = server.client.post(COMPLETIONS, json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
        streamed = server.client.post(COMPLETIONS, json=body | {"stream": True, "n": 2})
        assert streamed.status_code == 200
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert json.loads(events[0])["choices"][0]["text"]
        assert json.loads(events[-2])["error"]["code"] == "request_timeout"
        assert events[-1] == "[DONE]"
        eventually(server.client, "vllm:num_requests_running", lambda running: running == 0, seconds=2)
        eventually(server.client, 'vllm:request_success_total{engine="0",finished_reason="abort"', lambda n: n == 3)
        assert server.client.post(COMPLETIONS, json=BODY).status_code == 200


def test_a_response_that_takes_too_long_is_cut_off_like_a_completion(tmp_path: Path) -> None:
    options = fake_options(
        tmp_path, builder="build_slow", chat_template="z{", http=HttpOptions(request_timeout=0.6)
    )  # the template writes "{" whatever is said: the fake model then goes on for 255 tokens
    with running_server(options) as server:
        body = {"input": "a", "max_output_tokens": 190}
        response = server.client.post(RESPONSES, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        streamed = server.client.post(RESPONSES, json=body | {"stream": True})
        assert streamed.status_code == 200
        *_, delta, last = streamed.text.removesuffix("\n\n").split("\n\n")
        assert delta.startswith("event: response.output_text.delta\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout", "no [DONE] in this API"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as sdk:
            stream = sdk.responses.create(model="counter", input="a", max_output_tokens=190, stream=True)
            with pytest.raises(openai.APIError, match=r"not complete within 0\.6 s"):
                list(stream)
        eventually(server.client, "vllm:num_requests_running", lambda running: running == 0, seconds=2)


# --- clients that go away, or do not read (fault 11)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_within_a_step(tmp_path: Path, stream: bool) -> None:
    """190 steps of a quarter of a second are 47 s."""
    with running_server(fake_options(tmp_path, builder="build_crawling")) as server:
        with raw_http.connect(server.url) as connection:
            connection.sendall(raw_http.post(COMPLETIONS, {"prompt": "{", "max_tokens": 190, "stream": stream}))
            eventually(server.client, "vllm:num_requests_running", lambda running: running == 1)
        took = eventually(server.client, "vllm:num_requests_running", lambda running: running == 0)
        assert took < 8 * 0.25


def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    """64 answers of 190 tokens with 20 logprobs each are some 20 MB, more than any socket's buffers."""
    http = HttpOptions(send_timeout=0.5)
    with running_server(fake_options(tmp_path, builder="build_large", http=http)) as server:
        body = {"prompt": "{", "max_tokens": 190, "stream": True, "n": 64, "logprobs": 20}
        with raw_http.connect(server.url, receive_buffer=4096) as connection:
            connection.sendall(raw_http.post(COMPLETIONS, body))
            aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
            eventually(server.client, aborted, lambda sequences: sequences > 0)
            assert server.client.get("/load").json() == {"server_load": 0}
            try:
                received = raw_http.read_all(connection)
            except ConnectionResetError:
                received = b""
            assert b"[DONE]" not in received
        assert server.client.post(COMPLETIONS, json=BODY).status_code == 200


def test_a_client_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    """Slower than the engine, but it goes on reading: nothing is lost."""
    http = HttpOptions(send_timeout=5)
    with running_server(fake_options(tmp_path, builder="build_large", http=http)) as server:
        body = {"prompt": "{", "max_tokens": 100, "stream": True, "n": 8, "logprobs": 20}
        with raw_http.connect(server.url, receive_buffer=16384) as connection:
            connection.sendall(raw_http.post(COMPLETIONS, body))
            received = b""
            while b"data: [DONE]\n\n" not in received[-100:]:
                received += connection.recv(16384)
                time.sleep(0.001)
        assert received.count(b'"finish_reason":"length"') == 8


def test_connections_are_given_back(server: RunningServer) -> None:
    """After all that, no socket of the server is left open but those of this test."""
    deadline = time.monotonic() + 5
    while (left := _connections(server)) > 1:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _connections(server: RunningServer) -> int:
    """Established on the server's port, one of which is the client's that keeps its connection alive."""
    port = int(server.url.rpartition(":")[2])
    return sum(
        one.status == psutil.CONN_ESTABLISHED and bool(one.laddr) and one.laddr.port == port
        for one in psutil.Process().net_connections("tcp")
    )
