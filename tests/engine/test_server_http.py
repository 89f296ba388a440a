"""What HTTP lets clients do: ask for another protocol, for the head alone, send several requests at once."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from reprise_engine.server.start import bind
from tests.support import raw_http
from tests.support.engine_server import RunningServer

COMPLETIONS = "/v1/completions"
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
"""What Java's HTTP client adds to its first request to a server without TLS."""


def completion(prompt: str, *fields: str) -> bytes:
    content = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    return raw_http.head(COMPLETIONS, f"Content-Length: {len(content)}", *fields) + content


def responses(connection: socket.socket, number: int) -> list[tuple[int, Any]]:
    """The status and the JSON of so many answers, in order."""
    received = b""
    found: list[tuple[int, Any]] = []
    while len(found) < number:
        head, _, rest = received.partition(b"\r\n\r\n")
        length = next(
            (int(line.split()[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), None
        )
        if length is None or len(rest) < length:
            part = connection.recv(65536)
            assert part, "the server closed the connection"
            received += part
            continue
        found.append((int(head.split()[1]), json.loads(rest[:length])))
        received = rest[length:]
    return found


def answers(connection: socket.socket, number: int) -> list[str]:
    """The texts of so many completions, in order."""
    found = responses(connection, number)
    assert [status for status, _ in found] == [200] * number
    return [answer["choices"][0]["text"] for _, answer in found]


@pytest.mark.parametrize("size", [None, 1, 30], ids=["at once", "byte by byte", "in pieces"])
def test_a_client_that_offers_http2_is_served_with_http1(server: RunningServer, size: int | None) -> None:
    sent = completion("a", *UPGRADE) + completion("d") + completion("g", *UPGRADE)
    with raw_http.connect(server.url) as connection:
        for at in range(0, len(sent), size or len(sent)):
            connection.sendall(sent[at : at + (size or len(sent))])
        assert answers(connection, 3) == ["bc", "ef", "hi"]


def test_a_body_in_chunks_behind_such_an_offer_is_read_too(server: RunningServer) -> None:
    content = b'{"prompt": "a", "max_tokens": 2}'
    with raw_http.connect(server.url) as connection:
        connection.sendall(raw_http.head(COMPLETIONS, "Transfer-Encoding: chunked", *UPGRADE))
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content) + completion("d"))
        assert answers(connection, 2) == ["bc", "ef"]


def test_a_websocket_is_a_get_and_the_connection_goes_on(server: RunningServer) -> None:
    fields = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    with raw_http.connect(server.url) as connection:
        connection.sendall(raw_http.head(COMPLETIONS, *fields, method="GET"))
        [(status, _)] = responses(connection, 1)
        assert status == 405
        connection.sendall(completion("a"))
        assert answers(connection, 1) == ["bc"]


def test_it_is_no_proxy(server: RunningServer) -> None:
    with raw_http.connect(server.url) as connection:
        connection.sendall(b"CONNECT example:80 HTTP/1.1\r\nHost: example\r\n\r\n")
        assert raw_http.read_all(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["/health", "/ping", "/", "/v1/models", "/metrics", "/version"])
def test_head_is_get_without_the_body(client: httpx.Client, path: str) -> None:
    whole, head = client.get(path), client.head(path)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert client.head(path).status_code == 200  # nothing of a body is left on the connection


def test_head_of_what_has_no_get(client: httpx.Client) -> None:
    assert client.head(COMPLETIONS).status_code == 405
    assert client.head("/nothing").status_code == 404


def test_an_answer_does_not_wait_until_the_client_acknowledges_its_beginning() -> None:
    """Head and body are written one after the other, and clients take up to 40 ms to acknowledge the first."""
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
