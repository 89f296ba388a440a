"""The flags of the HTTP side: keys that never show, limits, CORS, logs, traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reprise_engine.entrypoints.arguments import build_parser, server_options
from reprise_engine.errors import ConfigError
from reprise_engine.server.http_options import HttpOptions
from reprise_engine.server.options import ServerOptions


def options(*arguments: str, environment: dict[str, str] | None = None) -> ServerOptions:
    return server_options(build_parser().parse_args(["serve", "m", *arguments]), environment or {})


def test_keys_come_from_a_file_and_the_environment_and_never_show(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \r\nthree\n")
    made = options("--api-key-file", str(file), environment={"VLLM_API_KEY": "b", "REPRISE_API_KEY": "c\nd\n"})
    assert set(made.api_keys) == {"one", "two", "three", "b", "c", "d"}
    assert "api_keys" not in repr(made)
    assert options(environment={"REPRISE_API_KEY": "one\n\n  two \r\nthree\n"}).api_keys == ("one", "two", "three")


def test_a_key_among_the_arguments_is_refused_without_repeating_it() -> None:
    for arguments in (("--api-key", "s3cret"), ("--api_key=s3cret",), ("--api-key", "")):
        with pytest.raises(ConfigError, match="set REPRISE_API_KEY, or write it into a file") as refused:
            options(*arguments)
        assert "s3cret" not in str(refused.value)


def test_keys_that_cannot_be_are_refused_by_their_source(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for arguments, environment, words in (
        (("--api-key-file", str(empty)), {}, "empty is set, but empty"),
        (("--api-key-file", str(tmp_path / "none")), {}, "none cannot be read: No such file or directory"),
        (("--api-key-file", str(binary)), {}, "binary cannot be read: it is not UTF-8"),
        ((), {"REPRISE_API_KEY": " "}, "REPRISE_API_KEY is set, but empty"),
        ((), {"VLLM_API_KEY": "a\0b"}, "VLLM_API_KEY holds a key with a character"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            options(*arguments, environment=environment)
        assert "a\0b" not in str(refused.value)


def test_the_defaults_bound_what_clients_may_hold_and_let_no_other_website_in() -> None:
    default = options().http
    assert default == HttpOptions()
    assert (default.max_request_body_size, default.max_queued_requests) == (8 * 2**20, 1024)
    assert (default.receive_timeout, default.send_timeout, default.request_timeout) == (60, 60, None)
    assert (default.allowed_origins, default.allow_credentials) == ((), False)
    assert (default.access_log, default.log_requests) == (True, False)


def test_every_flag_reaches_its_field() -> None:
    made = options(
        *("--max-request-body-size", "1MiB", "--max-queued-requests", "7", "--request-timeout", "9.5"),
        *("--receive-timeout", "3", "--send-timeout", "4", "--allow-credentials", "--enable-log-requests"),
        *("--allowed-origins", '["https://a.example"]', "--allowed-methods", '["POST"]', "--allowed-headers", '["x"]'),
        *("--max-log-len", "10", "--disable-uvicorn-access-log", "--enable-request-id-headers"),
        *("--otlp-traces-endpoint", "http://collector:4318/v1/traces"),
    ).http
    assert made == HttpOptions(
        max_request_body_size=2**20,
        max_queued_requests=7,
        request_timeout=9.5,
        receive_timeout=3.0,
        send_timeout=4.0,
        allowed_origins=("https://a.example",),
        allowed_methods=("POST",),
        allowed_headers=("x",),
        allow_credentials=True,
        access_log=False,
        log_requests=True,
        max_log_len=10,
        otlp_traces_endpoint="http://collector:4318/v1/traces",
    )
    assert options("--max-queued-requests", "none").http.max_queued_requests is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-enable-request-id-headers",), "every answer has its X-Request-Id"),
        (("--max-request-body-size", "0"), "--max-request-body-size is 0"),
        (("--allow-credentials", "--allowed-origins", '["*"]'), "would let every website act as its visitors"),
        (("--otlp-traces-endpoint", "grpc://h:4317"), "gRPC is not supported"),
        (("--otlp-traces-endpoint", "collector:4318"), "must be a URL such as"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--allowed-origins", "https://a"), "is not a JSON list of strings"),
        (("--allowed-origins", "[1]"), "is not a JSON list of strings"),
        (("--max-queued-requests", "-1"), "'-1' is not a whole number"),
        (("--max-log-len", "x"), "'x' is not a whole number"),
        (("--request-timeout", "0"), "0 seconds would refuse everything"),
        (("--receive-timeout", "soon"), "not a number of seconds"),
    ],
)
def test_wrong_values_exit_with_2(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*arguments)
    assert ended.value.code == 2
    errors: Any = capsys.readouterr().err
    assert words in errors
