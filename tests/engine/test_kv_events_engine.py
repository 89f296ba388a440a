"""KV events of the whole engine: a real server's, and those of `LLM`."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from reprise_engine import LLM, SamplingParams
from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.errors import ConfigError
from reprise_engine.kv.hash_algorithms import block_hasher
from reprise_engine.kv.hashing import encode_blocks
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.server.options import ServerOptions
from reprise_engine.step import BlockHash
from tests.engine.kv_event_sockets import config, consuming, low_64_bits, publishing
from tests.engine.test_server_lifecycle import free_port
from tests.support.engine_server import running_server
from tests.support.kv_event_consumer import Consumer
from tests.support.tiny_models import tiny_model_path


def test_a_server_tells_exactly_what_it_has_cached() -> None:
    ports = (free_port(), free_port())
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": "kv-events",
    }
    options = ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(model=str(tiny_model_path("qwen3")), max_model_len=128),
            cache=CacheConfig(num_gpu_blocks_override=12, block_size=16, prefix_caching_hash_algo="sha256_cbor"),
            kv_events=KVEventsConfig.of(events),
        ),
        host="127.0.0.1",
        port=0,
    )
    with (
        running_server(options) as server,
        Consumer(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", topic="kv-events") as consumer,
    ):
        client = server.client
        hasher = block_hasher("sha256_cbor")

        def complete(prompt: list[int]) -> set[int]:
            body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            # The last token is sampled, never computed.
            tokens = [*prompt, *answer.json()["choices"][0]["token_ids"][:-1]]
            chain: list[BlockHash] = []
            for block in encode_blocks(tokens, 16):
                chain.append(hasher(chain[-1] if chain else None, block, ()))
            return {low_64_bits(one) for one in chain}

        expected = complete(list(range(10, 50))) | complete([*range(10, 30), *range(60, 80)])
        consumer.catch_up()  # events are queued before the answer is sent, and published before a replay
        assert consumer.cached.hashes == expected
        for start in range(5):  # evicts the first ones
            newest = complete(list(range(100 + start, 190 + start)))
        consumer.catch_up()
        assert newest <= consumer.cached.hashes
        assert not expected <= consumer.cached.hashes
        assert len(consumer.cached.hashes) <= 12
        with Consumer(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", topic="kv-events") as late:
            late.catch_up()
            assert late.cached.blocks == consumer.cached.blocks
        assert client.post("/reset_prefix_cache").status_code == 200
        consumer.catch_up()
        assert consumer.cached.hashes == set()
        figures = dict(re.findall(r"(?m)^reprise:kv_events_(\w+)_total\{.*\} (\S+)$", client.get("/metrics").text))
        assert float(figures["published"]) >= consumer.next
        assert float(figures["dropped"]) == 0


def test_an_endpoint_in_use_ends_the_server_with_2_before_the_model_is_loaded(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "reprise_engine.entrypoints.openai.api_server", "--port", str(free_port())),
                *("--model", str(tiny_model_path("qwen3")), "--kv-events-config", json.dumps(events)),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 2
    assert f"cannot listen on endpoint 'tcp://*:{port}': Address already in use" in ended.stderr
    assert "Loading" not in ended.stderr


def test_llm_publishes_too_and_ends_with_the_last_event_sent(tmp_path: Path) -> None:
    settings = config(tmp_path)
    prompt = list(range(10, 60))
    llm = LLM(
        model=str(tiny_model_path("qwen3")),
        num_gpu_blocks_override=16,
        block_size=8,
        kv_events_config={
            "enable_kv_cache_events": True,
            "endpoint": settings.endpoint,
            "replay_endpoint": settings.replay_endpoint,
        },
    )
    with consuming(settings) as consumer:
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        consumer.follow(0)
        assert len(consumer.cached.hashes) == 6
        assert llm.stats.num_kv_events_published >= 1
        del llm
        gc.collect()
    with publishing(settings):  # the endpoints were given back
        pass
    with pytest.raises(ConfigError, match="unknown key 'port'"):
        LLM(model="nowhere", kv_events_config={"port": 5})
