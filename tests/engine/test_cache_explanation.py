"""Where a match ended, and why: one story a reason, and what clients and scrapers see of it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.cache_report import CacheExplanation, MissReason
from reprise_engine.kv.hashing import ExtraKeys, encode_tokens
from reprise_engine.kv.misses import EvictedBlocks
from reprise_engine.kv.prefix_index import Node, common_tokens
from reprise_engine.request import EngineRequest, RequestId, SamplingParams
from reprise_engine.step import BlockId
from tests.engine.paged_fake import World
from tests.engine.test_metrics import scrape, value
from tests.support.engine_server import fake_options, running_server

BLOCK = 4


def world(num_blocks: int = 16, *, caching: bool = True) -> World:
    return World(num_blocks=num_blocks, block_size=BLOCK, enable_prefix_caching=caching)


def explain(
    world: World, prompt: list[int], *, salt: str | None = None, max_tokens: int = 1, isolated: bool = False
) -> CacheExplanation:
    request_id = world.run(prompt, max_tokens=max_tokens, salt=salt, isolated=isolated)
    found, explanation = world.scheduler.inspect_prefix_cache().recent[-1]
    assert found == request_id
    assert explanation.cached_tokens == world.cached(request_id)
    assert explanation.prompt_tokens == len(prompt)
    return explanation


def why(world: World, prompt: list[int], *, salt: str | None = None) -> tuple[MissReason | None, int]:
    explanation = explain(world, prompt, salt=salt)
    return explanation.reason, explanation.cached_tokens


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_all_that_can_be_reused_was() -> None:
    it = world()
    it.run(PROMPT)
    assert why(it, PROMPT) == (None, 9)
    assert why(it, PROMPT[:8]) == (None, 7)
    assert why(it, PROMPT[:6]) == (None, 5)
    assert why(it, PROMPT[:1]) == (None, 0)  # of one token none can be reused


def test_nothing_like_it_was_seen() -> None:
    it = world()
    assert why(it, PROMPT) == (MissReason.NOT_SEEN, 0)
    assert why(it, [9, *PROMPT]) == (MissReason.NOT_SEEN, 0)
    assert why(it, [8, 8]) == (MissReason.SHORTER_THAN_BLOCK, 0)


def test_a_conversation_goes_on_where_nobody_has_been() -> None:
    it = world()
    first = it.run(PROMPT, max_tokens=4)
    history = [*PROMPT, *it.tokens(first)]
    explanation = explain(it, [*history, 1, 2, 3])
    assert (explanation.reason, explanation.cached_tokens) == (MissReason.NOT_SEEN, len(history) - 1)
    assert explanation.message == "Nothing in the cache goes on at token 13: it is new."
    whole = world()
    whole.run(PROMPT[:8])
    assert why(whole, PROMPT) == (MissReason.NOT_SEEN, 8)  # and the same at the border of a block


@pytest.mark.parametrize("at", [1, 3, 4, 6, 8, 9])
def test_it_diverged(at: int) -> None:
    it = world()
    it.run([*PROMPT, 11, 12])
    explanation = explain(it, [*PROMPT[:at], 40, 41, 42, 43, 44])
    assert (explanation.reason, explanation.cached_tokens) == (MissReason.DIVERGED, at)
    assert explanation.message == f"What is cached goes another way from token {at} on."


def test_a_rewritten_history_is_told_by_the_token_where_it_was_rewritten() -> None:
    it = world()
    it.run([*PROMPT, 20, 21, 22, 30, 31, 32])
    assert why(it, [*PROMPT, 30, 31, 32, 1, 2]) == (MissReason.DIVERGED, len(PROMPT))


def test_it_was_evicted() -> None:
    it = world(num_blocks=4)
    it.run(PROMPT)
    it.run([30, 31, 32, 33, 34, 35])  # two blocks: one is free, and the tail of PROMPT goes
    assert why(it, PROMPT) == (MissReason.EVICTED, 8)
    it = world(num_blocks=4)
    it.run(PROMPT)
    it.run([30] * 15)
    assert why(it, [*PROMPT, 7]) == (MissReason.EVICTED, 0)
    assert it.scheduler.inspect_prefix_cache().evicted_blocks > 0


def test_a_prompt_that_ends_inside_a_block_that_was_evicted() -> None:
    it = world(num_blocks=4)
    it.run(PROMPT[:2], max_tokens=6)  # a whole block: what was answered fills it
    it.run([30] * 15)
    assert why(it, PROMPT[:2]) == (MissReason.EVICTED, 0)  # not: shorter than a block
    it = world(num_blocks=4)
    it.run(PROMPT[:6], max_tokens=6)
    it.run(list(range(30, 42)))  # one block was free; the tail goes, and the block before it
    assert why(it, PROMPT[:6]) == (MissReason.EVICTED, 4)  # not: never seen


def test_a_prompt_that_leaves_an_evicted_block_behind_its_half() -> None:
    it = world(num_blocks=4)
    it.run(PROMPT)
    it.run([30] * 15)
    assert why(it, [1, 2, 3, 50, 51]) == (MissReason.EVICTED, 0)
    it.run([30] * 15)
    # One word in common with something of long ago: with a larger pool it would be as new.
    assert why(it, [1, 60, 61, 62, 63]) == (MissReason.NOT_SEEN, 0)


def test_what_a_request_pushes_out_for_itself_is_still_what_it_left() -> None:
    it = world(num_blocks=4)
    it.run(PROMPT)
    assert why(it, [*PROMPT[:4], *range(40, 51)]) == (MissReason.DIVERGED, 4)
    assert it.scheduler.stats().num_evicted_blocks >= 2  # both of the blocks that went the other way


def test_what_was_reset_is_forgotten() -> None:
    it = world(num_blocks=4)
    it.run(PROMPT)
    it.run([30] * 15)
    it.scheduler.reset_prefix_cache()
    assert why(it, PROMPT) == (MissReason.NOT_SEEN, 0)


def test_it_is_under_another_salt() -> None:
    it = world()
    it.run(PROMPT, salt="a")
    assert why(it, PROMPT, salt="b") == (MissReason.OTHER_SALT, 0)
    assert why(it, [*PROMPT, 11, 12]) == (MissReason.OTHER_SALT, 0)
    assert why(it, PROMPT, salt="a") == (None, 9)
    assert why(it, [40, *PROMPT], salt="a") == (MissReason.NOT_SEEN, 0)


def test_another_salt_is_a_reason_for_a_beginning_only() -> None:
    it = world()
    it.run([1, 2, 3, 4, 9])
    it.run([5, 6, 7, 8], salt="a")
    assert why(it, [1, 2, 3, 4, 5, 6, 7, 8]) == (MissReason.DIVERGED, 4)


@pytest.mark.parametrize("own", [[], [1, 2, 77, 78, 79]], ids=["nothing", "another way"])
@pytest.mark.parametrize("guess", [PROMPT[:3], PROMPT[:6], PROMPT])
def test_a_tenant_is_told_the_same_whether_others_have_sent_its_prompt_or_not(own: list[int], guess: list[int]) -> None:
    told: list[tuple[CacheExplanation, tuple[int, ...]]] = []
    for others in ([], guess):
        it = world()
        for prompt, salt in ((others, "theirs"), (own, "own")):
            if prompt:
                it.run(prompt, salt=salt)
        before = it.scheduler.stats().prefix_cache_misses
        explanation = explain(it, guess, salt="own", isolated=True)
        after = it.scheduler.stats().prefix_cache_misses
        told.append((explanation, tuple(now - then for now, then in zip(after, before, strict=True))))
    assert told[0] == told[1]


def test_there_was_no_room_for_the_copy() -> None:
    it = world(num_blocks=2)
    it.run(PROMPT[:7])
    assert why(it, PROMPT[:6]) == (MissReason.NO_ROOM, 4)


def test_caching_is_off() -> None:
    assert why(world(caching=False), PROMPT) == (MissReason.CACHING_OFF, 0)
    it = world()
    it.run(PROMPT)
    it.add(PROMPT, sampling=SamplingParams(max_tokens=1, skip_reading_prefix_cache=True))
    it.drain()
    assert it.scheduler.inspect_prefix_cache().recent[-1][1].reason is MissReason.CACHING_OFF


def test_each_request_is_counted_once_by_its_reason() -> None:
    it = World(num_blocks=5, block_size=4, max_model_len=20)
    for tokens in ([1, 2, 3], [5, 6, 7]):
        it.add(tokens, max_tokens=12)
    it.drain()
    stats = it.scheduler.stats()
    assert stats.num_preemptions > 0
    assert sum(stats.prefix_cache_misses) == 2
    assert dict(it.scheduler.inspect_prefix_cache().misses)[MissReason.SHORTER_THAN_BLOCK] == 2


def test_only_who_asks_is_told() -> None:
    it = world()
    for asks in (True, False):
        request = EngineRequest(
            request_id=RequestId(f"asks-{asks}"),
            prompt_token_ids=tuple(PROMPT),
            sampling=SamplingParams(max_tokens=1),
            explain_cache=asks,
            arrival_time=0.0,
        )
        it.scheduler.add(request)
        step = it.scheduler.schedule(0.0)
        assert step is not None
        (output,) = it.scheduler.commit(step, it.runner.run(step), 0.0)
        assert (output.cache_explanation is not None) == asks


def test_the_memory_of_evicted_blocks_is_bounded() -> None:
    it = world(num_blocks=2)
    for i in range(40):
        it.run([10 + i] * 6)
    evicted = it.scheduler.kv._evicted
    assert len(evicted) == 8  # four times the pool
    assert it.scheduler.stats().num_evicted_blocks > 8


@given(st.lists(st.tuples(st.sampled_from([(), ("a",)]), st.lists(st.integers(0, 2), min_size=1, max_size=4))))
def test_evicted_blocks_are_found_by_how_they_began(entries: list[tuple[ExtraKeys, list[int]]]) -> None:
    evicted = EvictedBlocks(5)
    remembered: list[tuple[ExtraKeys, bytes]] = []
    for keys, tokens in entries:
        one = (keys, encode_tokens(tokens))
        evicted.add(Node(parent=None, extra_keys=keys, tokens=one[1], block=BlockId(0), block_hash=None))
        if one not in remembered:
            remembered = [*remembered, one][-5:]
        assert len(evicted) == len(remembered)
        for wanted in product(range(3), repeat=3):
            expected = max((common_tokens(t, encode_tokens(wanted)) for k, t in remembered if k == keys), default=0)
            assert evicted.most_in_common(keys, encode_tokens(wanted)) == expected
    evicted.clear()
    assert evicted.most_in_common((), encode_tokens([0])) == 0


# --- over HTTP


def test_clients_operators_and_scrapers_see_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret",))
    with running_server(options) as server:
        client = server.client
        key = {"Authorization": "Bearer secret"}

        def usage(**body: object) -> dict[str, object]:
            response = client.post("/v1/completions", json={"max_tokens": 2, **body}, headers=key)
            assert response.status_code == 200, response.text
            details: dict[str, object] = response.json()["usage"]["prompt_tokens_details"]
            return details

        assert usage(prompt="abcdefghij") == {"cached_tokens": 0}
        assert usage(prompt="abcdefghij", explain_cache=True) == {
            "cached_tokens": 9,
            "cache_explanation": {
                "reason": None,
                "ended_at_token": 9,
                "message": "All of the prompt was cached but its last token, which is always computed.",
            },
        }
        several = usage(prompt=["abcdefXY", "zzzzzz"], explain_cache=True, n=2)["cache_explanation"]
        assert isinstance(several, list)
        assert [(one["reason"], one["ended_at_token"]) for one in several] == [("diverged", 6), ("not_seen", 0)]

        body = {"prompt": "abcdefghij", "max_tokens": 1, "explain_cache": True, "stream": True}
        last = client.post("/v1/completions", json=body, headers=key).text.split("\n\n")[-3]
        assert '"cache_explanation":{"reason":null' in last

        answer = client.post("/v1/completions", json={"prompt": "abcq"}, headers=key).json()
        report = client.get("/v1/admin/prefix_cache", headers=key).json()
        assert report["recent"][-1] == {
            "request": answer["id"].removeprefix("cmpl-") + "-0",
            "prompt_tokens": 4,
            "cached_tokens": 3,
            "reason": None,
            "ended_at_token": 3,
            "message": "All of the prompt was cached but its last token, which is always computed.",
        }
        assert (report["block_size"], report["salts"]) == (4, 1)
        assert report["misses"]["not_seen"] >= 2

        samples = scrape(client)
        for reason in MissReason:
            counted = value(samples, "reprise:prefix_cache_misses_total", reason=reason.value)
            assert counted == report["misses"][reason.value]
        assert client.get("/v1/admin/prefix_cache").status_code == 401


def test_without_a_key_configured_nobody_looks_into_the_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server(fake_options(tmp_path_factory.mktemp("model"))) as server:
        response = server.client.get("/v1/admin/prefix_cache")
        assert response.status_code == 403
        assert "REPRISE_API_KEY" in response.json()["error"]["message"]
