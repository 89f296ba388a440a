"""docs/prefix-cache.md names what is there: flags, endpoints, metrics, reasons, environment variables."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from fastapi.routing import APIRoute

from reprise_engine.cache_report import MissReason
from reprise_engine.config import DEFAULT_PIN_BUDGET, HashAlgorithm
from reprise_engine.entrypoints.arguments import ISOLATION_VARIABLE, MIN_SECRET_LENGTH, build_parser
from reprise_engine.entrypoints.http_arguments import API_KEY_VARIABLES
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.kv_events.wire import INT_HASHES_VARIABLE, _Cleared, _Removed, _Stored
from reprise_engine.server.metrics import Metrics
from reprise_engine.server.protocol import MAX_SALT_LENGTH
from reprise_engine.server.protocol_admin import PinBody
from reprise_engine.server.routes import admin, operations

TEXT = (Path(__file__).parents[2] / "docs" / "prefix-cache.md").read_text(encoding="utf-8")


def test_every_flag_is_one_and_none_of_the_cache_is_missing() -> None:
    parser = build_parser()
    serve = next(action for action in parser._actions if action.dest == "command").choices["serve"]  # type: ignore[index]
    flags = {flag for action in serve._actions for flag in action.option_strings}
    named = set(re.findall(r"--[a-z][a-z-]+", TEXT))
    assert len(named) > 6
    assert named <= flags
    assert {flag for flag in flags if flag.startswith(("--prefix-cach", "--warmup-", "--kv-events"))} <= named


def test_the_keys_of_kv_events_are_the_codes() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.+?) \| ", TEXT[TEXT.index("## KV events") :], re.MULTILINE))
    defaults = {field.name: field.default for field in fields(KVEventsConfig)}
    assert set(defaults) <= set(rows)
    for name, default in defaults.items():
        if default is not None:
            assert rows[name] == f"`{json.dumps(default)}`"
    assert INT_HASHES_VARIABLE in TEXT
    names = {struct.__struct_config__.tag: struct.__struct_fields__ for struct in (_Stored, _Removed, _Cleared)}
    for tag, names_of_fields in names.items():
        [row] = re.findall(rf"^\| `{tag}` \| (.+) \|$", TEXT, re.MULTILINE)
        assert set(re.findall(r"`([a-z_]+)`", row)) >= set(names_of_fields)


def test_every_endpoint_is_one_and_none_is_missing() -> None:
    routes = {
        (method, route.path)
        for route in [*admin.router.routes, *operations.router.routes]
        if isinstance(route, APIRoute) and "prefix_cache" in route.path
        for method in route.methods or ()
    }
    named = set(re.findall(r"`(GET|POST|DELETE) (/[^` ]+)`", TEXT))
    assert named == routes


def test_every_metric_is_one() -> None:
    rendered = Metrics("m").render().decode()
    named = set(re.findall(r"`((?:vllm|reprise):[a-z_]+)", TEXT))
    assert len(named) > 5
    assert all(f"# TYPE {name} " in rendered for name in named)


def test_every_reason_has_its_row() -> None:
    assert set(re.findall(r"^\| `([a-z_]+)` \|", TEXT, re.MULTILINE)) >= {reason.value for reason in MissReason}


def test_names_and_numbers_are_the_codes() -> None:
    pins = re.search(r"/pins` \| `\{(.+?)\}`: computes", TEXT)
    assert pins is not None
    assert set(re.findall(r'"([a-z_]+)"', pins[1])) == set(PinBody.model_fields)
    assert f"`{DEFAULT_PIN_BUDGET}`, the default" in TEXT
    assert f"up to {MAX_SALT_LENGTH} characters" in TEXT
    assert f"at least {MIN_SECRET_LENGTH} characters" in TEXT
    assert ISOLATION_VARIABLE in TEXT
    assert API_KEY_VARIABLES[0] in TEXT
    for algorithm in HashAlgorithm.__args__:  # type: ignore[attr-defined]
        assert f"`{algorithm}`" in TEXT
