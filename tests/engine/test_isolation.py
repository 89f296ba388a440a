"""Tenants share a server, not a cache: salts per API key, and salts that clients send."""

from __future__ import annotations

import hashlib
import hmac
import json
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise_engine.entrypoints.arguments import build_parser, server_options
from reprise_engine.errors import ConfigError
from reprise_engine.server.isolation import Isolation
from reprise_engine.server.options import ServerOptions
from tests.support.engine_server import fake_options, running_server

PROMPT = "a prompt that both of them send"
SECRET = "sixteen letters or more"


def options(*arguments: str, **environment: str) -> ServerOptions:
    return server_options(build_parser().parse_args(["serve", "m", *arguments]), environment)


def ask(client: httpx.Client, key: str, **body: Any) -> dict[str, Any]:
    response = client.post(
        "/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 1, "explain_cache": True, **body},
        headers={"Authorization": f"Bearer {key}"},
    )
    assert response.status_code == 200, response.text
    details: dict[str, Any] = response.json()["usage"]["prompt_tokens_details"]
    return details


def test_the_salt_is_an_hmac_under_the_secret() -> None:
    isolation = Isolation("per-key", secret=SECRET)
    expected = hmac.new(SECRET.encode(), b"\0\0\0\1k\0\0\0\2ab", hashlib.sha256).hexdigest()
    assert isolation.salt("k", "ab") == expected
    assert Isolation("per-key", secret=SECRET).salt("k", "ab") == expected
    assert Isolation("per-key", secret=SECRET + "!").salt("k", "ab") != expected
    assert Isolation("per-key").salt("k", "ab") != Isolation("per-key").salt("k", "ab")  # drawn at each start


def test_no_two_pairs_of_key_and_salt_have_the_same() -> None:
    isolation = Isolation("per-key", secret=SECRET)
    pairs = list(product(["k", "ka", "kab", "\0\0\0\1a"], [None, "a", "ab", "b", "\0\0\0\1a"]))
    assert len({isolation.salt(key, salt) for key, salt in pairs}) == len(pairs)


def test_without_isolation_the_salt_is_the_clients() -> None:
    assert Isolation().salt("k", "ab") == "ab"
    assert Isolation().salt("k", None) is None


def test_keys_share_nothing_and_learn_nothing_of_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = fake_options(tmp_path_factory.mktemp("model"), api_keys=("one", "two"), prefix_cache_isolation="per-key")
    with running_server(made) as server:
        assert ask(server.client, "one")["cached_tokens"] == 0
        assert ask(server.client, "one")["cached_tokens"] == len(PROMPT) - 1
        foreign = ask(server.client, "two")
        assert foreign["cached_tokens"] == 0
        assert foreign["cache_explanation"]["reason"] == "not_seen"
        assert ask(server.client, "two")["cached_tokens"] == len(PROMPT) - 1
        assert ask(server.client, "one", cache_salt="mine")["cached_tokens"] == 0
        # Nor can a client send the salt that another one's key makes: it becomes part of its own.
        report = server.client.get("/v1/admin/prefix_cache", headers={"Authorization": "Bearer one"}).json()
        assert report["salts"] == 3
        # Every key may ask for this report, and everybody for the metrics.
        assert report["misses"]["other_salt"] == 0
        assert {one["reason"] for one in report["recent"]} == {None, "not_seen"}
        short = [ask(server.client, key, prompt="hey")["cache_explanation"]["reason"] for key in ("one", "two")]
        assert short == ["shorter_than_block", "shorter_than_block"]
        pinned = server.client.post(
            "/v1/admin/prefix_cache/pins", json={"prompt": "hey"}, headers={"Authorization": "Bearer two"}
        )
        assert pinned.json()["cached_tokens"] == 2, "its own"
        assert 'reason="other_salt"} 0.0' in server.client.get("/metrics").text


def test_without_isolation_keys_share_the_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server(fake_options(tmp_path_factory.mktemp("model"), api_keys=("one", "two"))) as server:
        ask(server.client, "one")
        assert ask(server.client, "two")["cached_tokens"] == len(PROMPT) - 1
        assert ask(server.client, "two", cache_salt="mine")["cache_explanation"]["reason"] == "other_salt"


def test_pins_and_warm_up_are_for_the_keys(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "warm", "name": "w"}), encoding="utf-8")
    made = fake_options(
        *(tmp_path_factory.mktemp("model"),),
        api_keys=("one", "two"),
        prefix_cache_isolation="per-key",
        prefix_cache_isolation_secret=SECRET,
        warmup_prompts=file,
    )
    with running_server(made) as server:
        client = server.client
        for key in ("one", "two"):
            assert ask(client, key, prompt="warm and more")["cached_tokens"] == 4
        headers = {"Authorization": "Bearer one"}
        client.post("/v1/admin/prefix_cache/pins", json={"prompt": PROMPT}, headers=headers).raise_for_status()
        names = [pin["name"] for pin in client.get("/v1/admin/prefix_cache", headers=headers).json()["pins"]]
        assert names[:2] == ["w-key-1", "w-key-2"]
        assert [ask(client, key)["cached_tokens"] for key in ("one", "two")] == [len(PROMPT) - 1, 0]


@pytest.mark.parametrize("salt", ["", "s" * 257, "\ud800", 5, ["a"], {"a": 1}, True])
def test_a_garbage_salt_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory, salt: Any) -> None:
    with running_server(fake_options(tmp_path_factory.mktemp("model"))) as server:
        content = json.dumps({"prompt": "a", "cache_salt": salt})
        headers = {"Content-Type": "application/json"}
        response = server.client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "cache_salt"
        assert "cache_salt" in error["message"]
        for odd in ("\0", "s" * 256, "é" * 256, "a\nb"):  # odd, but text: a salt like any other
            server.client.post("/v1/completions", json={"prompt": "a", "cache_salt": odd}).raise_for_status()


def test_the_secret_comes_from_the_environment_and_shows_nowhere() -> None:
    made = options(
        *("--prefix-cache-isolation", "per-key"),
        REPRISE_API_KEY="k",
        REPRISE_PREFIX_CACHE_ISOLATION_SECRET=SECRET,
    )
    assert (made.prefix_cache_isolation, made.prefix_cache_isolation_secret) == ("per-key", SECRET)
    assert SECRET not in repr(made)
    with pytest.raises(ConfigError, match="set REPRISE_PREFIX_CACHE_ISOLATION_SECRET") as refused:
        options("--prefix-cache-isolation-secret", SECRET)
    assert SECRET not in str(refused.value), "an argument: every listing of processes shows it"
    assert options().prefix_cache_isolation_secret is None
    with pytest.raises(ConfigError, match=r"SECRET has 5 characters; it needs at least 16"):
        options(REPRISE_PREFIX_CACHE_ISOLATION_SECRET="short")
    with pytest.raises(ConfigError, match="per-key, but there are no API keys"):
        options("--prefix-cache-isolation", "per-key")
