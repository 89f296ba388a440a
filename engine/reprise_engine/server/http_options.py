"""What the HTTP side of a server is told: limits, browsers, logs, traces. Made by entrypoints/http_arguments.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Times in seconds. The limits are per server process."""

    max_request_body_size: int = 8 * 2**20
    """Bytes. A million token ids as JSON are about 7 MiB. All others wait while a body is parsed, up to 50 ms a MiB."""
    receive_timeout: float = 60.0
    """For the head of a request, and again for its body: a client that sends slower is cut off."""
    send_timeout: float = 60.0
    """How long a client may leave what it is sent unread, once 64 KiB wait for it."""
    max_queued_requests: int | None = 1024
    """Requests that may wait besides the --max-num-seqs that run; more are refused with 429. None: no limit."""
    request_timeout: float | None = None
    """For a whole answer, from the time its request is there. None: no limit."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser; "*" is all. None: only the server's own page."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    access_log: bool = True
    log_requests: bool = False
    """Whether prompts and sampling parameters are logged."""
    max_log_len: int | None = None
    """Characters of a prompt that a line of the log shows at most; None: all."""
    otlp_traces_endpoint: str | None = None
    """Where spans go, by OTLP over HTTP; None: nowhere."""
