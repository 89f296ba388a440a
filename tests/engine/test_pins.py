"""Pinned prefixes: what stays, how much may, that nobody is starved by them; warm-up and admin endpoints over HTTP."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise_engine.cache_report import PinnedPrefix
from reprise_engine.config import CacheConfig
from reprise_engine.errors import ConfigError
from reprise_engine.kv.pins import pin_budget_blocks
from tests.engine.paged_fake import World
from tests.support.engine_server import fake_options, running_server

PROMPT = list(range(1, 11))  # two blocks of four, and a half


def world(num_blocks: int = 8, budget: int = 4) -> World:
    return World(num_blocks=num_blocks, block_size=4, pin_budget=budget, max_model_len=20)


def pin(it: World, prompt: list[int], name: str = "p", *, salt: str | None = None) -> PinnedPrefix:
    request_id = it.add(prompt, pin=name, salt=salt)
    it.drain()
    pinned = it.outputs[request_id][-1].pinned
    assert pinned is not None
    return pinned


def flood(it: World) -> None:
    for i in range(6):
        it.run([40 - i] * 15)


def test_a_pinned_prefix_outlives_everything_that_is_not() -> None:
    it = world()
    assert pin(it, PROMPT) == PinnedPrefix(name="p", tokens=10, blocks=3)
    flood(it)
    assert it.cached(it.run(PROMPT)) == 9
    assert it.scheduler.stats().num_pinned_blocks == 3


def test_unpinned_it_is_cached_like_anything_else() -> None:
    it = world()
    pin(it, PROMPT)
    assert it.scheduler.unpin("p")
    assert not it.scheduler.unpin("p")
    it.scheduler.check_invariants()
    assert it.cached(it.run(PROMPT)) == 9
    flood(it)
    assert it.cached(it.run(PROMPT)) == 0


def test_what_the_budget_does_not_cover_is_only_cached() -> None:
    it = world(budget=2)
    assert pin(it, PROMPT) == PinnedPrefix(name="p", tokens=8, blocks=2)
    assert it.cached(it.run(PROMPT)) == 9
    flood(it)
    assert it.cached(it.run(PROMPT)) == 8
    assert pin(it, [30, 31], "q") == PinnedPrefix(name="q", tokens=0, blocks=0)
    assert [one.name for one in it.scheduler.inspect_prefix_cache().pins] == ["p"]


def test_pins_that_share_a_prefix_pay_for_it_once() -> None:
    it = world(budget=4)
    pin(it, PROMPT)
    assert pin(it, [*PROMPT[:8], 20, 21], "q").blocks == 3
    assert it.scheduler.stats().num_pinned_blocks == 4
    it.scheduler.unpin("p")
    flood(it)
    assert it.cached(it.run([*PROMPT[:8], 20, 21])) == 9


def test_a_name_pins_one_thing() -> None:
    it = world()
    pin(it, PROMPT)
    pin(it, [20, 21, 22])
    (only,) = it.scheduler.inspect_prefix_cache().pins
    assert (only.tokens, it.scheduler.stats().num_pinned_blocks) == (3, 1)


def test_a_pinned_tail_stays_though_a_longer_block_begins_like_it() -> None:
    it = world()
    pin(it, [1, 2])
    it.run([1, 2, 3, 4, 5])
    it.scheduler.check_invariants()
    assert it.scheduler.unpin("p")
    it.scheduler.check_invariants()


def test_a_pin_is_under_its_salt() -> None:
    it = world()
    pin(it, PROMPT, salt="a")
    assert it.cached(it.run(PROMPT)) == 0
    flood(it)
    assert it.cached(it.run(PROMPT, salt="a")) == 9


def test_an_aborted_request_pins_nothing() -> None:
    it = world()
    request_id = it.add(PROMPT, pin="p", max_tokens=5)
    it.step()
    it.scheduler.abort([request_id])
    assert it.scheduler.inspect_prefix_cache().pins == ()


def test_a_reset_leaves_pins_unless_they_are_included() -> None:
    it = world()
    pin(it, PROMPT)
    it.run([30] * 5)
    assert it.scheduler.reset_prefix_cache() == (True, 2)
    assert it.cached(it.run(PROMPT)) == 9
    assert it.scheduler.reset_prefix_cache(include_pins=True) == (True, 3)
    assert it.cached(it.run(PROMPT)) == 0


@pytest.mark.parametrize(
    ("budget", "num_blocks", "max_model_len", "expected"),
    [
        (0.25, 100, 160, 25),
        (10, 100, 160, 10),
        (0, 100, 160, 0),
        (1.0, 100, 160, 90),  # a sequence of max_model_len fits beside it
        (1.0, 100, 161, 89),
        (50, 100, 10_000, 0),  # one sequence may need the whole pool
    ],
)
def test_the_budget_leaves_room_for_the_longest_sequence(
    budget: float | int, num_blocks: int, max_model_len: int, expected: int
) -> None:
    assert pin_budget_blocks(budget, num_blocks=num_blocks, block_size=16, max_model_len=max_model_len) == expected


def test_the_longest_sequence_runs_beside_a_full_budget() -> None:
    budget = pin_budget_blocks(1.0, num_blocks=8, block_size=4, max_model_len=20)
    it = world(budget=budget)
    assert pin(it, [9] * 12).blocks == 3 == budget
    request_id = it.run(list(range(19)), max_tokens=1)
    it.check_finished(request_id)


@pytest.mark.parametrize("budget", [-1, 1.5, -0.1, float("nan")])
def test_a_budget_out_of_range_is_refused(budget: float | int) -> None:
    with pytest.raises(ConfigError, match="--prefix-cache-pin-budget"):
        CacheConfig(prefix_cache_pin_budget=budget)


# --- over HTTP

KEY = {"Authorization": "Bearer secret"}


def test_the_admin_endpoints(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server(fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret",))) as server:
        client = server.client
        client.headers.update(KEY)

        def admin(method: str, path: str = "", **body: Any) -> httpx.Response:
            return client.request(method, f"/v1/admin/prefix_cache{path}", json=body or None)

        def cached(prompt: str) -> int:
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        made = admin("POST", "/pins", name="system", prompt="abcdefghij")
        assert made.json() == {"name": "system", "tokens": 10, "blocks": 3, "prompt_tokens": 10, "cached_tokens": 0}
        again = admin("POST", "/pins", prompt=[97, 98, 99])
        assert (again.json()["tokens"], again.json()["cached_tokens"]) == (3, 2)
        chat = admin("POST", "/pins", name="chat", messages=[{"role": "system", "content": "be kind"}])
        assert chat.json()["prompt_tokens"] == len("s:be kind|")
        report = admin("GET").json()
        assert (report["pinned_blocks"], report["pin_budget_blocks"]) == (6, 14)
        assert [one["name"] for one in report["pins"]] == ["system", again.json()["name"], "chat"]
        assert "reprise:prefix_cache_pinned_blocks" in client.get("/metrics").text

        cached("zyx" * 5)
        assert admin("POST", "/reset").json()["success"] is True
        assert cached("abcdefghij") == 9
        assert admin("DELETE", "/pins/system").json() == {"name": "system", "unpinned": True}
        assert admin("DELETE", "/pins/system").status_code == 404
        assert admin("POST", "/reset", include_pins=True).json()["success"] is True
        assert admin("GET").json()["cached_blocks"] == 0
        assert cached("abcdefghij") == 0

        for body, complaint in (
            ({}, "body"),
            ({"name": "x"}, "either prompt or messages"),
            ({"prompt": "a", "messages": []}, "messages"),
            ({"prompt": "a" * 300}, "300 tokens"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [99_999]}, "99999"),
            ({"prompt": "a", "name": "no/slash"}, "name"),
            ({"prompt": "a", "name": ".."}, "name"),  # clients take it out of the path: never unpinned
            ({"prompt": "a", "cache_salt": "s" * 257}, "cache_salt"),
        ):
            response = admin("POST", "/pins", **body)
            assert response.status_code == 400, body
            assert complaint in response.json()["error"]["message"]


def test_without_the_cache_nothing_can_be_pinned(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret",), prefix_caching=False)
    with running_server(options) as server:
        response = server.client.post("/v1/admin/prefix_cache/pins", json={"prompt": "abc"}, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "prefix_caching_off"


def test_warm_up_prompts_are_pinned_before_readiness(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [
        {"prompt": "a prompt that everybody shares", "name": "shared"},
        {"messages": [{"role": "system", "content": "be kind"}], "cache_salt": "tenant"},
        {"prompt": "x" * 500},
        {"promt": "misspelt"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\nno json\n", encoding="utf-8")
    caplog.set_level(logging.INFO)
    options = fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret",), warmup_prompts=file)
    with running_server(options) as server:
        report = server.client.get("/v1/admin/prefix_cache", headers=KEY).json()
        body = {"prompt": "a prompt that everybody shares, and more", "max_tokens": 1}
        usage = server.client.post("/v1/completions", json=body, headers=KEY).json()["usage"]
    assert [(pin["name"], pin["tokens"]) for pin in report["pins"]] == [("shared", 30), ("warmup-3", 10)]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 30
    assert "line 5 of" in caplog.text
    assert "500 tokens" in caplog.text
    assert "line 7 of" in caplog.text
    assert "'promt'" in caplog.text
    assert "line 8 of" in caplog.text
    assert "It must be a JSON object. Invalid JSON: expected" in caplog.text
    assert "Content-Type" not in caplog.text
    assert "2 of 5 prompts" in caplog.text


def test_only_a_line_feed_ends_a_line_of_a_warm_up_file(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = ["a\u2028b", "c\u0085d", "ef"]  # JSON may hold these as they are
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    caplog.set_level(logging.INFO)
    options = fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret",), warmup_prompts=file)
    with running_server(options) as server:
        report = server.client.get("/v1/admin/prefix_cache", headers=KEY).json()
    assert [pin["name"] for pin in report["pins"]] == ["warmup-1", "warmup-2", "warmup-3"]
    assert "3 of 3 prompts" in caplog.text


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", "folder", "pipe"])
def test_a_warm_up_file_that_cannot_be_read_is_logged_and_no_more(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    content: bytes | str | None,
) -> None:
    file = tmp_path / "prompts.txt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    elif content == "pipe":
        os.mkfifo(file)
    with running_server(fake_options(tmp_path_factory.mktemp("model"), warmup_prompts=file)) as server:
        assert server.client.get("/health").status_code == 200
    assert f"warm-up: {file} " in caplog.text


def test_a_warm_up_that_takes_too_long_is_cut_off(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{i} prompt\n" for i in range(200)), encoding="utf-8")
    options = fake_options(
        tmp_path_factory.mktemp("model"), builder="build_slow", warmup_prompts=file, warmup_timeout=0.3
    )
    with running_server(options) as server:
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/load").json() == {"server_load": 0}
    assert "0.3 s are over after" in caplog.text


def test_a_plain_text_file_has_a_prompt_a_line(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(
        "first prompt\n\n  \nsecond one, which is too long for what is left of the budget\n", encoding="utf-8"
    )
    options = fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret",), warmup_prompts=file)
    with running_server(options) as server:
        report = server.client.get("/v1/admin/prefix_cache", headers=KEY).json()
    assert [(pin["name"], pin["tokens"]) for pin in report["pins"]] == [("warmup-1", 12), ("warmup-4", 44)]
    assert "44 of its 60 tokens are pinned" in caplog.text
