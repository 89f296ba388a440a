"""docs/serving.md says what the server does: its flags, defaults, limits and codes are those of the code."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from reprise_engine.engine import MAX_UNREAD_OUTPUTS
from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.entrypoints.http_arguments import API_KEY_VARIABLES, add_http_arguments
from reprise_engine.server.connection import MAX_HEAD_SIZE
from reprise_engine.server.http_options import HttpOptions
from reprise_engine.server.open_paths import OPEN_PATHS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SERVER = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "engine/reprise_engine/server").rglob("*.py"))


def flags_of_the_code() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_http_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_every_flag_is_described_and_there_is_no_other() -> None:
    ours = {flag for flag in flags_of_the_code() if not flag.startswith("--no-")} - {"--enable-request-id-headers"}
    described = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert described - ours == {"--max-num-seqs", "--shutdown-timeout"}
    assert ours - described == set()


@pytest.mark.parametrize("command", re.findall(r"^\$ reprise (.+)$", TEXT, re.MULTILINE))
def test_its_commands_parse(command: str) -> None:
    build_parser().parse_args(shlex.split(command))


def test_the_defaults_are_those_of_the_code() -> None:
    options = HttpOptions()
    rows = dict(re.findall(r"^\| `(--[a-z-]+) [A-Z]+` \| (\w+) \|", TEXT, re.MULTILINE))
    assert rows == {
        "--max-request-body-size": f"{options.max_request_body_size // 2**20}MiB",
        "--max-queued-requests": str(options.max_queued_requests),
        "--request-timeout": "none",
        "--receive-timeout": f"{options.receive_timeout:g}",
        "--send-timeout": f"{options.send_timeout:g}",
        "--shutdown-timeout": f"{build_parser().parse_args(['serve', 'm']).shutdown_timeout:g}",
    }
    assert f"{MAX_HEAD_SIZE // 1024} KiB for the head" in TEXT
    assert f"{MAX_UNREAD_OUTPUTS:,} outputs" in TEXT


def test_names_are_those_of_the_code() -> None:
    assert all(f"`{variable}`" in TEXT for variable in API_KEY_VARIABLES)
    assert all(f"`{path}`" in TEXT for path in OPEN_PATHS)
    codes = re.findall(r"`(?:code: )?([a-z]+_[a-z_]+)`", TEXT)
    assert {"request_timeout", "slow_reader", "engine_dead", "context_length_exceeded"} <= set(codes)
    assert all(f'"{code}"' in SERVER for code in codes if code != "cached_tokens")


def test_the_picture_is_there_and_small() -> None:
    picture = ROOT / "docs" / "page.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000
