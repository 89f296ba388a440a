"""One connection: uvicorn's protocol over httptools, which parses, and here bounds on what a client may hold.

Without them a client that never ends its head, or never reads its answer, holds a connection and memory for ever. The
bounds on bodies are in `request_body.py`, where there is a request to answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from reprise_engine.server.errors import error_body

MAX_HEAD_SIZE = 64 * 1024
"""Bytes of request line and headers."""


class _OneProtocolParser(httptools.HttpRequestParser):
    """To this parser a request to change to another protocol is one without, as a server may see it (RFC 9110, 7.8):
    Java's client asks for HTTP/2 with every first request. httptools takes all behind such a head, the body included,
    for the other protocol's; so the head is read once more without the field that asks.

    The protocol leaves a head alone for which `should_upgrade` is true.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn feeds bytes
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserInvalidMethodError("this is no proxy") from None
                data = self._head() + data[upgrade.args[0] :]
            else:
                return

    def _head(self) -> bytes:
        fields = [(name, value) for name, value in self._protocol.headers if name != b"upgrade"]
        start = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._protocol.url, self.get_http_version().encode())
        return start + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n"


class Connection(HttpToolsProtocol):
    """The head of a request takes at most `receive_timeout` seconds and MAX_HEAD_SIZE bytes, 408 and 431 else.

    A client that leaves what it is sent unread for `send_timeout` seconds, though the transport's buffer is full, is
    cut off: that ends its request as any disconnect does. Made by `connection_class`, which sets both.
    """

    receive_timeout: ClassVar[float]
    send_timeout: ClassVar[float]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = _OneProtocolParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._head_size = 0
        self._in_body = False
        self._receive_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # --- what the client sends

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head_size += len(data)
            if self._receive_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._await_head()
        super().data_received(data)
        if self._head_size > MAX_HEAD_SIZE and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", f"The headers exceed {MAX_HEAD_SIZE} bytes.")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_receive_timer()
        self._head_size = 0
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_receive_timer()
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A request that was refused before all of it was read: the rest is thrown away.
        if self._in_body and not self.transport.is_closing():
            self._receive_timer = self.loop.call_later(self.receive_timeout, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receive_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._receive_timer = self.loop.call_later(self.receive_timeout, self._head_late)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _head_late(self) -> None:
        if self._head_size == 0:  # opened ahead by a load balancer or a browser, which expects no answer
            self.transport.close()
        elif not self.transport.is_closing():
            words = f"The head of the request did not come within {self.receive_timeout:g} s."
            self._refuse(b"408 Request Timeout", words)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answers in OpenAI's shape where there is no request yet that a route could answer, and closes."""
        self._stop_receive_timer()
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not answering:  # it would end up in the middle of another answer
            content = json.dumps(error_body(message)).encode()
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(content)) + content)
        self.transport.close()

    # --- what the client leaves unread

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def connection_class(*, receive_timeout: float, send_timeout: float) -> type[Connection]:
    """uvicorn makes its protocols itself, from a class: so the bounds are attributes of one."""

    class Bounded(Connection):
        pass

    Bounded.receive_timeout = receive_timeout
    Bounded.send_timeout = send_timeout
    return Bounded
