"""`runtime: vllm-ascend` with vLLM itself as the engine (its CPU build): what the operator reads of it is right.

vLLM takes minutes to start on a CPU, so this runs where $REPRISE_PEERS is set and holds it (benchmarks/install.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.vllm_parser import missing
from tests.e2e.site import Deployed, Site
from tests.support.kubectl import KubectlFailed, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

START_SECONDS = 600.0
SPEC: dict[str, Any] = {
    "model": {"maxModelLen": 1024, "servedName": "org/tiny", "dtype": "float32"},
    "runtime": {"name": "vllm-ascend", "extraArgs": ["--enforce-eager", "--max-num-seqs=8"]},
    "accelerator": {"profile": "ascend910", "driver": "runtime"},
    "memory": {"utilization": 0.72},
}


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Deployed]:
    if "REPRISE_PEERS" not in os.environ:
        pytest.skip("REPRISE_PEERS is not set: vLLM is not asked for")
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    if not site.model_uris:
        pytest.skip("vLLM's CPU build is an image of our own cluster only")
    with site.deployed("vllm", SPEC) as service:
        service.wait_ready(within=START_SECONDS)
        yield service


def test_the_life_of_a_vllm_service(served: Deployed) -> None:
    args = served.args()
    assert {"--enable-prefix-caching", "--no-enable-chunked-prefill"} <= set(args)

    prompt = "A prefix cache keeps the keys and values of tokens it has seen. " * 12
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["org/tiny"]
        for _ in range(6):
            answer = client.completions.create(model="org/tiny", prompt=prompt, max_tokens=2)
    usage = answer.usage
    assert usage is not None

    def figures() -> dict[str, Any] | None:
        cache: dict[str, Any] = served.status().get("prefixCache") or {}
        return cache if cache.get("queriedTokens") == 6 * usage.prompt_tokens else None

    cache = eventually(figures, "all six prompts in status.prefixCache", within=120)
    status = served.status()
    # By vLLM's rule five of six prompts were there as far as their whole blocks go.
    tokens, block = usage.prompt_tokens, status["engine"]["blockSize"]
    whole = (tokens - 1) // block * block
    assert whole > 0, "the prompt is shorter than a block"
    assert cache["enabled"] is True
    assert (cache["hitTokens"], cache["queriedTokens"]) == (5 * whole, 6 * tokens)
    assert cache["hitRatePercent"] == pytest.approx(100 * 5 * whole / (6 * tokens), abs=1)
    assert status["memory"]["effective"] == status["memory"]["requested"] == 0.72
    assert status["engine"]["kvBlocks"] > 0
    assert served.condition("PrefixCacheEffective")["reason"] == "Effective"

    # What it cannot do is refused, and the pod that serves is left alone.
    uids = served.pod_uids()
    for refused, words in (
        ({"chunkedPrefill": {"enabled": True}}, "cannot combine"),
        ({"model": {"maxModelLen": 100_000}}, "at most 65536"),
        ({"prefixCaching": {"hostMemory": "1Gi"}}, "caches on the device alone"),
    ):
        with pytest.raises(KubectlFailed, match=words):
            served.patch(refused)
    assert served.pod_uids() == uids

    # The flag reaches a new pod, and what is reported is what it does.
    served.patch({"prefixCaching": {"enabled": False}})
    served.wait_ready(within=START_SECONDS)
    assert "--no-enable-prefix-caching" in served.args()
    eventually(lambda: served.status()["prefixCache"].get("enabled") is False, "the cache is seen to be off", within=60)
    served.wait_condition("PrefixCacheEffective", "False", "Disabled", within=60)
