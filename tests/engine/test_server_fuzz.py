"""Whatever is sent, the server never fails: bodies by its OpenAPI document, bodies of anything, bytes of anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from reprise_engine.server.errors import error_body
from reprise_engine.server.http_options import HttpOptions
from reprise_engine.server.protocol import CompletionBody
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.protocol_responses import ResponsesBody
from tests.support import raw_http
from tests.support.engine_server import RunningServer, fake_options, running_server

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

KEY = "k"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    http = HttpOptions(receive_timeout=2)
    folder = tmp_path_factory.mktemp("model")
    with running_server(fake_options(folder, builder="build_trapless", api_keys=(KEY,), http=http)) as running:
        yield running


def check(response: httpx.Response) -> None:
    """No failure, and an error is one in OpenAI's shape."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


# --- by the document


def test_bodies_by_the_openapi_document_meet_no_server_error(server: RunningServer) -> None:
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json", headers=HEADERS).json())
    schema.config.update(base_url=server.url)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {*PATHS, "/tokenize", "/health"} <= {operation.path for operation in operations}
    # schemathesis leaves sessions of its own to the garbage collector, and so their sockets.
    with requests.Session() as session:
        for operation in operations:

            @settings(FUZZ, max_examples=20)
            @given(case=operation.as_strategy())
            def meets_no_server_error(case: Any) -> None:
                response = case.call(session=session, headers=HEADERS, timeout=20)
                case.validate_response(response, checks=[schemathesis.checks.not_a_server_error])

            meets_no_server_error()


# --- by nobody's

TEXT = st.text(st.characters(codec=None), max_size=12)  # halves of surrogate pairs too, which JSON can spell
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
BODIES = (ChatCompletionBody, CompletionBody, ResponsesBody)
FIELDS = sorted({"user", *(name for body in BODIES for name in body.model_fields)} - {"n"})


@settings(FUZZ, max_examples=200)
@given(
    path=st.sampled_from(sorted(PATHS)),
    fields=st.dictionaries(st.sampled_from(FIELDS) | TEXT, ANYTHING, max_size=4),
)
def test_any_value_in_any_field_is_served_or_refused(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    content = json.dumps(PATHS[path] | fields)
    check(server.client.post(path, content=content, headers=HEADERS))


@settings(FUZZ, max_examples=100)
@given(path=st.sampled_from(["/tokenize", "/detokenize", "/v1/admin/prefix_cache/pins", *PATHS]), body=ANYTHING)
def test_any_json_is_served_or_refused(server: RunningServer, path: str, body: Any) -> None:
    check(server.client.post(path, content=json.dumps(body), headers=HEADERS))


@settings(FUZZ, max_examples=100)
@given(path=st.sampled_from(sorted(PATHS)), content=st.binary(max_size=200), cut=st.integers(0, 40))
def test_any_bytes_are_refused(server: RunningServer, path: str, content: bytes, cut: int) -> None:
    valid = json.dumps(PATHS[path]).encode()
    response = server.client.post(path, content=valid[:cut] + content, headers=HEADERS)
    check(response)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": "a", "stop": ["\\ud800"]}',
        b'{"prompt": "a", "prompt": 5}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "\\u0000"}',
    ],
    ids=["open", "deep", "digits", "infinite", "name", "value", "stop", "twice", "mark", "null"],
)
def test_what_parsers_stumble_over(server: RunningServer, content: bytes) -> None:
    check(server.client.post("/v1/completions", content=content, headers=HEADERS))


def test_an_error_that_repeats_half_a_character_can_be_sent() -> None:
    content = JSONResponse(error_body("half \ud800", param="\udfff")).body
    assert json.loads(bytes(content))["error"] | {"type": None} == {
        "message": "half \\ud800",
        "type": None,
        "param": "\\udfff",
        "code": None,
    }


@settings(FUZZ, max_examples=60)
@given(sent=st.binary(max_size=120), start=st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET / "]))
def test_any_bytes_on_a_connection_leave_the_server_alive(server: RunningServer, sent: bytes, start: bytes) -> None:
    with raw_http.connect(server.url, timeout=10) as connection:
        connection.sendall(start + sent)
        connection.shutdown(1)
        try:
            received = raw_http.read_all(connection)
        except ConnectionResetError:
            received = b""
    assert not received.startswith(b"HTTP/1.1 5")
    assert server.client.get("/health").status_code == 200
