"""HTTP by hand, for clients that no library would be: slow, malformed, deaf."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit


def connect(url: str, *, receive_buffer: int | None = None, timeout: float = 30) -> socket.socket:
    """A connection to a server; reads fail after `timeout` seconds. A small `receive_buffer` fills at once."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(timeout)
    connection.connect((address.hostname, address.port))
    return connection


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def post(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return head(path, f"Content-Length: {len(content)}") + content


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def answer_of(received: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers in lower case, and the JSON of an answer with Content-Length."""
    top, _, content = received.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, json.loads(content)
