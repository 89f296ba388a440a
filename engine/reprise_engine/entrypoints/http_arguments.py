"""Flags of the HTTP side of a server: keys, limits, browsers, logs, traces. vLLM's names where it has one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from reprise_engine.entrypoints.values import seconds, size
from reprise_engine.errors import ConfigError
from reprise_engine.server.http_options import HttpOptions

API_KEY_VARIABLES = ("REPRISE_API_KEY", "VLLM_API_KEY")
"""A Kubernetes Secret goes into one of these, or into --api-key-file. A key a line."""

_DEFAULTS = HttpOptions()


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    variables = " or ".join(API_KEY_VARIABLES)
    keys = parser.add_argument_group("API keys")
    keys.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"keys that clients may use, one a line; or by {variables}"
    )
    keys.add_argument("--api-key", nargs="+", metavar="KEY", help="refused: listings of processes show arguments")

    limits = parser.add_argument_group("limits of requests")
    limits.add_argument(
        "--max-request-body-size", type=size, default=_DEFAULTS.max_request_body_size, metavar="SIZE", help="(8MiB)"
    )
    limits.add_argument(
        "--max-queued-requests",
        type=_limit,
        default=_DEFAULTS.max_queued_requests,
        metavar="REQUESTS",
        help=f"that wait besides those that run; more get 429 ({_DEFAULTS.max_queued_requests}; none: no limit)",
    )
    limits.add_argument(
        "--request-timeout", type=_positive_seconds, metavar="SECONDS", help="for a whole answer (none)"
    )
    limits.add_argument(
        "--receive-timeout",
        type=_positive_seconds,
        default=_DEFAULTS.receive_timeout,
        metavar="SECONDS",
        help=f"for a client to send a request's head, and its body ({_DEFAULTS.receive_timeout:g})",
    )
    limits.add_argument(
        "--send-timeout",
        type=_positive_seconds,
        default=_DEFAULTS.send_timeout,
        metavar="SECONDS",
        help=f"that a client may leave what it is sent unread ({_DEFAULTS.send_timeout:g})",
    )

    browsers = parser.add_argument_group("browsers (CORS); lists are JSON")
    browsers.add_argument("--allowed-origins", type=_names, default=(), metavar="LIST", help="(none; '[\"*\"]' is all)")
    browsers.add_argument("--allowed-methods", type=_names, default=_DEFAULTS.allowed_methods, metavar="LIST")
    browsers.add_argument("--allowed-headers", type=_names, default=_DEFAULTS.allowed_headers, metavar="LIST")
    browsers.add_argument("--allow-credentials", action=argparse.BooleanOptionalAction, default=False)

    logs = parser.add_argument_group("logs and traces")
    logs.add_argument(
        "--enable-log-requests", action=argparse.BooleanOptionalAction, default=False, help="log prompts (off)"
    )
    logs.add_argument("--max-log-len", type=_count, metavar="CHARACTERS", help="of a logged prompt (all)")
    logs.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    logs.add_argument(
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="X-Request-Id in every answer (always on)",
    )
    logs.add_argument("--otlp-traces-endpoint", metavar="URL", help="of an OpenTelemetry collector, by OTLP over HTTP")


def http_options(parsed: argparse.Namespace) -> HttpOptions:
    """Raises ConfigError for values that cannot be honoured."""
    if not parsed.enable_request_id_headers:
        raise ConfigError("--no-enable-request-id-headers is not supported: every answer has its X-Request-Id.")
    if parsed.max_request_body_size < 1:
        raise ConfigError(f"--max-request-body-size is {parsed.max_request_body_size}; it must be at least 1 byte.")
    if parsed.allow_credentials and "*" in parsed.allowed_origins:
        raise ConfigError(
            "--allow-credentials with the origin * would let every website act as its visitors; name the origins."
        )
    _check_endpoint(parsed.otlp_traces_endpoint)
    return HttpOptions(
        max_request_body_size=parsed.max_request_body_size,
        receive_timeout=parsed.receive_timeout,
        send_timeout=parsed.send_timeout,
        max_queued_requests=parsed.max_queued_requests,
        request_timeout=parsed.request_timeout,
        allowed_origins=parsed.allowed_origins,
        allowed_methods=parsed.allowed_methods,
        allowed_headers=parsed.allowed_headers,
        allow_credentials=parsed.allow_credentials,
        access_log=not parsed.disable_uvicorn_access_log,
        log_requests=parsed.enable_log_requests,
        max_log_len=parsed.max_log_len,
        otlp_traces_endpoint=parsed.otlp_traces_endpoint,
    )


def api_keys(parsed: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Of the file and of the environment. Raises ConfigError, never with a key in its words."""
    if parsed.api_key is not None:
        raise ConfigError(
            f"--api-key puts a key where every listing of processes shows it; set {API_KEY_VARIABLES[0]}, or write it "
            "into a file and give --api-key-file."
        )
    keys: list[str] = []
    if parsed.api_key_file is not None:
        try:
            content = parsed.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"--api-key-file {parsed.api_key_file} cannot be read: {reason}") from error
        keys += _keys(content, source=f"--api-key-file {parsed.api_key_file}")
    for variable in API_KEY_VARIABLES:
        if variable in environment:
            keys += _keys(environment[variable], source=variable)
    return tuple(dict.fromkeys(keys))


def _keys(content: str, *, source: str) -> list[str]:
    """A header holds no line break, so no key can: several keys are one a line."""
    found = [line.strip() for line in content.splitlines() if line.strip()]
    if not found:  # would let everybody in, or nobody
        raise ConfigError(f"{source} is set, but empty; give a key, or leave it out.")
    if not all(key.isprintable() for key in found):
        raise ConfigError(f"{source} holds a key with a character that no HTTP header can carry.")
    return found


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint!r}; it must be a URL such as http://collector:4318/v1/traces "
            "(OTLP over HTTP; gRPC is not supported)."
        )


def _limit(text: str) -> int | None:
    return None if text == "none" else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive_seconds(text: str) -> float:
    number = seconds(text)
    if number == 0:
        raise argparse.ArgumentTypeError("0 seconds would refuse everything")
    return number


def _names(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise argparse.ArgumentTypeError(
            f"""{text!r} is not a JSON list of strings such as '["https://example.org"]'"""
        )
    return tuple(value)
